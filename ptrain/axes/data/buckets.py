"""Which flat units are one: as in DistributedDataParallel a bucket takes gradients as they come.
It has no more than so many bytes, but for a unit that alone has more: DistributedDataParallel's,
which is full once it has them, exceeds them by a tensor, where ours would by a block. On gloo that
is dear: beyond 32 MiB, which a stock bucket stays below, its collectives' own copy of a buffer is
memory that the kernel hands out anew, and clears, in every call.

Units go into it whole: the last block first, the root at the end, whose embedding's gradient is the
last of all. A bucket of many blocks is one collective where they were many; of blocks that fill one
each, as those of large models do, nothing changes. The first is no smaller than the others, as
DistributedDataParallel's is: what would begin a little earlier is one collective more.
"""

from __future__ import annotations

from collections.abc import Sequence

from ptrain.steps.step import Plan
from ptrain.steps.wraps import FlatUnits

Modules = tuple[str, ...]
_ROOT = ("",)


def buckets_of(plan: Plan, units: Sequence[tuple[Modules, int]]) -> tuple[tuple[int, ...], ...]:
    """Return the places of the units that are one, in the order of wrapping; `units` are modules
    and trained elements of each on this rank. What is frozen altogether stays alone, and so does
    what two stages share: its gradient is summed over the two by itself."""
    step = plan.wrap
    assert isinstance(step, FlatUnits), "whose units have flat buffers"
    pairs = plan.pipeline.shared if plan.pipeline else ()
    shared = {_modules_of(name) for pair in pairs for name in pair}
    itemsize = plan.update.layout.reduced.itemsize
    buckets: list[list[int]] = []
    bucket: list[int] = []
    filled = 0
    for place in sorted(range(len(units)), key=lambda place: (units[place][0] == _ROOT, -place)):
        modules, numel = units[place]
        if not numel or modules in shared:
            buckets.append([place])
            continue
        if bucket and filled + numel * itemsize > step.bucket_bytes:
            buckets.append(bucket)
            bucket, filled = [], 0
        bucket.append(place)
        filled += numel * itemsize
    if bucket:
        buckets.append(bucket)
    return tuple(sorted((tuple(sorted(own)) for own in buckets), key=max))


def _modules_of(name: str) -> Modules:
    return (name.rpartition(".")[0],)
