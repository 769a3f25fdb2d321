"""FSDP1 (torch/distributed/fsdp/_flat_param.py): the original parameters within a flat parameter.

A user's job may be wrapped in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParameter, FlatParamHandle, _ShardParamInfo

from ptrain.internals.part import PrivatePart

FLAT_NAME = "_flat_param"  # name of the flat parameter

PARTS = (
    PrivatePart(owner=FlatParamHandle, members=("uses_sharded_strategy",)),
    PrivatePart(owner=FlatParamHandle.__init__, arguments=("use_orig_params",)),
    PrivatePart(owner=FlatParameter, members=("_init_metadata",)),
    PrivatePart(
        owner=_ShardParamInfo,
        members=(
            "in_shard", "intra_param_start_idx", "numel_in_shard", "offset_in_shard",
        ),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Segment:
    """This rank's part of an original parameter.

    Attributes:
        name: The parameter's fully qualified name.
        first: Its first element in the original parameter.
        size: Number of elements, 0 if this rank has none.
        start: Its first element in this rank's shard of the flat parameter.
    """

    name: str
    first: int
    size: int
    start: int


@dataclass(frozen=True, slots=True)
class FlatShard:
    """This rank's shard of a module's flat parameter.

    Attributes:
        flat: The flat parameter.
        keeps_originals: The originals are parameters of the module, as views of the flat one.
        is_cut: The flat parameter is sharded, not replicated.
    """

    flat: Tensor
    keeps_originals: bool
    is_cut: bool

    def segments(self) -> Iterator[Segment]:
        """Yield this rank's part of each original parameter, in the flat parameter's order."""
        for name, info in zip(self.flat._fqns, self.flat._shard_param_infos, strict=True):
            # The numbers are None for a parameter that has no element in this rank's shard.
            size = (info.numel_in_shard or 0) if info.in_shard else 0
            yield Segment(name, info.intra_param_start_idx or 0, size, info.offset_in_shard or 0)


def flat_shard(module: nn.Module) -> FlatShard | None:
    """Return the flat parameter of an FSDP1 module.

    Returns None for other modules, and for a module without parameters outside its FSDP1 children.
    """
    if not isinstance(module, FullyShardedDataParallel) or module._handle is None:
        return None
    handle = module._handle
    return FlatShard(handle.flat_param, handle._use_orig_params, handle.uses_sharded_strategy)
