"""Shared parts of scripts that time steps: ptrain's step, its samples, and the comparison of two
times. Imported in the ranks too; torch only there."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from math import comb
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ptrain.runtime.world import World
    from ptrain.spec.spec import Spec

SAME = 1e-4  # losses of the same work, relative: sums are taken in another order
RANKS = 2
STOCK_BUCKET_MB = 25  # of DistributedDataParallel, torch 2.11 to 2.15


def program_steps(
    spec: Spec, world: World | None = None, read: Callable[[Tensor], Any] = float
) -> Callable[[], Any]:
    """Return ptrain's next step: its sampler, its program, its counter; on the ranks that are
    there, or of a world of fake ones, which count nothing. `read` makes a result of the loss: with
    `float` the host waits for every step, as the hand-written loop does."""
    from ptrain.data.corpus import open_corpus
    from ptrain.interpreter.program import interpret
    from ptrain.meters.traffic import CollectiveCounter
    from ptrain.runtime.world import World
    from ptrain.train.loop import learning_rate, local_batch

    program = interpret(spec, world=world or World.join(spec.timeout))
    source, steps = open_corpus(spec.data), iter(range(10**9))
    counter = None if world else CollectiveCounter()

    def step() -> Any:
        number = next(steps)
        share = program.forward_backward(local_batch(program, source, number))
        program.step(learning_rate(spec.optimizer, number))
        if counter and number % spec.log_every == 0:
            counter.read()
        return read(share)  # as late as the hand-written loop reads its own

    return step


def own_samples(spec: Spec) -> Callable[[int], Tensor]:
    """Return the rows of a step on this rank, if each rank has different samples."""
    from torch.distributed import get_rank

    return samples(spec, index=get_rank(), groups=RANKS)


def samples(spec: Spec, *, index: int, groups: int) -> Callable[[int], Tensor]:
    """Return a step's rows for one of several groups of ranks with different samples: ptrain's
    samples, drawn beforehand. One group with all samples gets all micro-batches."""
    import torch

    from ptrain.data.corpus import open_corpus, stream_sample

    source = open_corpus(spec.data)
    tokens = torch.from_numpy(source.train.astype("int64"))
    windows, length = source.num_samples(spec.batch.sequence), spec.batch.sequence
    drawn = [stream_sample(i, windows=windows, seed=spec.train.seed) % windows for i in range(4096)]
    own = spec.batch.micro * spec.batch.accumulate
    assert groups == 1 or spec.batch.accumulate == 1, "else its samples are no stretch"

    def rows(number: int) -> Tensor:
        first = (number * groups + index) * own
        starts = drawn[first : first + own]
        return torch.stack([tokens[length * at : length * (at + 1) + 1] for at in starts])

    return rows


def replicated(model: nn.Module, spec: Spec) -> nn.Module:
    """Wrap a model in DistributedDataParallel with the spec's options."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(
        model,
        bucket_cap_mb=bucket_cap_mb(spec),
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
        init_sync=False,
    )


def bucket_cap_mb(spec: Spec) -> float | None:
    """Return the bucket size for DistributedDataParallel, or None for torch's default: an explicit
    size would make its first bucket as large as the others."""
    cap = spec.bucket_bytes / 2**20
    return None if cap == STOCK_BUCKET_MB else cap


def legal(strategy: str, overrides: Sequence[str]) -> Spec:
    """Return a legal spec."""
    from ptrain.algebra.legality import require_runnable
    from ptrain.spec.load import load

    return require_runnable(load(strategy, overrides))


def paired(times: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Return the median ratio of two contenders' times, round by round, and its bounds."""
    ratios = [a / b for a, b in zip(times, base, strict=True)]
    return statistics.median(ratios), *bound(ratios)


def bound(ratios: list[float]) -> tuple[float, float]:
    """Return the two-sided 95 % interval of the median, by order statistics (binomial, no
    assumption)."""
    ordered, count = sorted(ratios), len(ratios)
    tail, below = 0.0, 0
    while (tail := tail + comb(count, below) / 2**count) <= 0.025:
        below += 1
    return ordered[max(0, below - 1)], ordered[min(count - 1, count - below)]


def different(name: str, apart: float) -> list[str]:
    """Yield losses that show that the contenders did different work."""
    if apart < SAME:  # which no NaN is
        return []
    return [f"{name}: losses {apart:.1e} apart, not less than {SAME:g}"]


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the correlation of ranks; of equal values the mean of theirs."""
    return statistics.correlation(_ranks(left), _ranks(right))


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or values[order[end]] != values[order[start]]:
            for index in order[start:end]:
                ranks[index] = (start + end - 1) / 2
            start = end
    return ranks
