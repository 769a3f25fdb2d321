"""FSDP2, of what counts in bytes: what it does otherwise from one version of torch to another, the
dimension along which it shards a tensor, and the order of a unit's parameters.

torch 2.15 moved three things of torch/distributed/fsdp/_fully_shard into functions of their own, in
which a name ends sooner (`release_all_gather_state_for_comm_reuse`,
`_take_unsharded_grads_to_reduce`) or autograd does the work (`_set_unsharded_grad_dtypes`).
`tests/unit/test_fsdp2_habits.py` holds the table to the torch that is installed.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ptrain.installed import counted_torch
from ptrain.spec.dials import Reshard, SyncPolicy


class Habits(NamedTuple):
    """How long FSDP2 names what it needs no more, and who casts gradients.

    `holds_buffer`: in forward the buffer of the gather before lives until the parameters of the
    next one are there; otherwise until they are begun. `names_last_gradient`: the last gradient of
    a unit outlives the others by its reduction. `casts_on_arrival`: gradients that wait for their
    reduction in its dtype are cast by autograd, one by one as they come, and later ones are added
    to them; otherwise together, when the unit's backward is over. `waits_without_gradients`: a unit
    of which nothing has a gradient, because it is frozen, awaits the reduction before it all the
    same, whose input then goes.
    """

    holds_buffer: bool
    names_last_gradient: bool
    casts_on_arrival: bool
    waits_without_gradients: bool


_FIRST = Habits(
    holds_buffer=True,
    names_last_gradient=True,
    casts_on_arrival=False,
    waits_without_gradients=False,
)
_SINCE_2_12 = _FIRST._replace(waits_without_gradients=True)
_SINCE_2_15 = _SINCE_2_12._replace(
    holds_buffer=False, names_last_gradient=False, casts_on_arrival=True
)

HABITS = {
    "2.11": _FIRST,
    "2.12": _SINCE_2_12,
    "2.13": _SINCE_2_12,
    "2.14": _SINCE_2_12,
    "2.15": _SINCE_2_15,
}


def habits() -> Habits:
    """Return what FSDP2 does in the torch whose bytes are counted."""
    return HABITS[counted_torch()]


def shard_dim(shape: tuple[int, ...], ranks: int, sync: SyncPolicy) -> int:
    """Return the dimension along which a tensor is sharded: its rows, or if it has fewer rows than
    ranks (experts), the first later dimension that the ranks divide. Smaller groups shard rows:
    torch keeps a flat part there, and cannot gather that along another dimension."""
    is_by_group = not isinstance(sync.reshard_after_forward, bool | Reshard)
    if is_by_group or not shape or shape[0] >= ranks:
        return 0
    return next((dim for dim in range(1, len(shape)) if shape[dim] % ranks == 0), 0)


@lru_cache(maxsize=2**10)
def listed(names: tuple[str, ...], start: int = 0) -> tuple[str, ...]:
    """Return a unit's parameters as `fully_shard` lists them (`_fsdp_init._get_managed_modules`):
    a module's own behind those of the modules within it. In `names` they stand in front, as in
    torch's `named_parameters`; the modules around are named in the first `start` letters."""
    own: list[str] = []
    within: dict[str, list[str]] = {}
    for name in names:
        end = name.find(".", start)
        if end < 0:
            own.append(name)
        else:
            within.setdefault(name[:end], []).append(name)
    inner = (listed(tuple(some), len(module) + 1) for module, some in within.items())
    return (*(name for part in inner for name in part), *own)
