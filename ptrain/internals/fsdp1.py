"""FSDP1 (torch/distributed/fsdp/_flat_param.py), which a user's own job may be wrapped in: where
the original parameters are in a flat one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParameter, FlatParamHandle, _ShardParamInfo

from ptrain.internals.part import PrivatePart

FLAT_NAME = "_flat_param"  # a flat parameter's own

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
    """What this rank has of an original parameter: `size` elements from `first` on, which begin at
    `start` of its shard of the flat one."""

    name: str
    first: int
    size: int
    start: int


@dataclass(frozen=True, slots=True)
class FlatShard:
    """This rank's shard of a module's flat parameter. `keeps_originals`: they are parameters of the
    module, views of it; `is_cut`: it is a shard, and not the whole."""

    flat: Tensor
    keeps_originals: bool
    is_cut: bool

    def segments(self) -> Iterator[Segment]:
        """Yield what the rank has of each original parameter, in the flat one's order."""
        for name, info in zip(self.flat._fqns, self.flat._shard_param_infos, strict=True):
            size = (info.numel_in_shard or 0) if info.in_shard else 0
            yield Segment(name, info.intra_param_start_idx or 0, size, info.offset_in_shard or 0)


def flat_shard(module: nn.Module) -> FlatShard | None:
    """Return the flat parameter of a module that FSDP1 wraps and that has parameters of its own."""
    if not isinstance(module, FullyShardedDataParallel) or module._handle is None:
        return None
    handle = module._handle
    return FlatShard(handle.flat_param, handle._use_orig_params, handle.uses_sharded_strategy)
