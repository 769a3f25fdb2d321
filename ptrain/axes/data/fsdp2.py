"""The behavior of FSDP2 that affects bytes: differences between torch versions, and sharding.

torch 2.15 moved three parts of torch/distributed/fsdp/_fully_shard into separate functions. A
reference ends sooner in two of them (`release_all_gather_state_for_comm_reuse`,
`_take_unsharded_grads_to_reduce`), and autograd does the work of the third
(`_set_unsharded_grad_dtypes`). `tests/unit/test_fsdp2_behavior.py` checks the table against the
installed torch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ptrain.installed import counted_torch
from ptrain.spec.dials import Reshard, SyncPolicy


class FSDP2Behavior(NamedTuple):
    """The lifetimes of FSDP2's temporaries, and the code that casts gradients.

    Attributes:
        holds_buffer: In forward, the all-gather buffer lives until the next unit's parameters are
            complete; otherwise until their all-gather begins.
        names_last_gradient: The last gradient of a unit outlives the others by its reduction.
        casts_on_arrival: Autograd casts gradients that wait for a reduction in another dtype one by
            one, and accumulates later ones. Otherwise they are cast together after the unit's
            backward.
        waits_without_gradients: A unit without gradients, because it is frozen, also waits for the
            previous reduction, whose input is then freed.
        keeps_bytes: A cast to the dtype of the parameters leaves out quantized weights.
    """

    holds_buffer: bool
    names_last_gradient: bool
    casts_on_arrival: bool
    waits_without_gradients: bool
    keeps_bytes: bool


_FIRST = FSDP2Behavior(
    holds_buffer=True,
    names_last_gradient=True,
    casts_on_arrival=False,
    waits_without_gradients=False,
    keeps_bytes=False,
)
_SINCE_2_12 = _FIRST._replace(waits_without_gradients=True)
_SINCE_2_13 = _SINCE_2_12._replace(keeps_bytes=True)  # 2.12 is not known to
_SINCE_2_15 = _SINCE_2_13._replace(
    holds_buffer=False, names_last_gradient=False, casts_on_arrival=True
)

BEHAVIORS = {
    "2.11": _FIRST,
    "2.12": _SINCE_2_12,
    "2.13": _SINCE_2_13,
    "2.14": _SINCE_2_13,
    "2.15": _SINCE_2_15,
}


def fsdp2_behavior() -> FSDP2Behavior:
    """Return the behavior of the torch version whose bytes are counted."""
    return BEHAVIORS[counted_torch()]


def shard_dim(shape: tuple[int, ...], ranks: int, sync: SyncPolicy) -> int:
    """Return the dimension along which FSDP2 shards a tensor.

    This is dim 0 or, for a tensor with fewer rows than ranks (experts), the first later dimension
    that the ranks divide. Smaller groups shard dim 0: torch keeps a flat shard there, and cannot
    all-gather it along another dimension.

    Args:
        shape: Shape of the local tensor.
        ranks: Ranks that shard it.
        sync: The policy, which may have smaller groups after forward.
    """
    is_by_group = not isinstance(sync.reshard_after_forward, bool | Reshard)
    if is_by_group or not shape or shape[0] >= ranks:
        return 0
    return next((dim for dim in range(1, len(shape)) if shape[dim] % ranks == 0), 0)


@lru_cache(maxsize=2**10)
def fully_shard_order(names: tuple[str, ...], start: int = 0) -> tuple[str, ...]:
    """Return a unit's parameters in the order of `fully_shard` (`_fsdp_init._get_managed_modules`).

    There, a module's direct parameters come after its submodules' parameters; in
    `named_parameters`, and in `names`, they come first. The first `start` letters of the names are
    the enclosing modules.
    """
    own: list[str] = []
    within: dict[str, list[str]] = {}
    for name in names:
        end = name.find(".", start)
        if end < 0:
            own.append(name)
        else:
            within.setdefault(name[:end], []).append(name)
    inner = (fully_shard_order(tuple(some), len(module) + 1) for module, some in within.items())
    return (*(name for part in inner for name in part), *own)
