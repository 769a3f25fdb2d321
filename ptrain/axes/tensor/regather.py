"""A = S*: what the column operators save of their common input is the slice of the tokens that this
rank had, gathered again for the backward pass (Korthikanti et al. 2022, section 4.2.2)."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard


class _Slice:
    """A saved view of a gathered tensor, as the slice that it was gathered from."""

    def __init__(self, source: _Source, view: torch.Size) -> None:
        self.source = source
        self.view = view


class _Source:
    """A slice, and what it is gathered to from the first use of a saved view to the last."""

    def __init__(self, part: torch.Tensor, device_mesh: DeviceMesh, dim: int) -> None:
        self.part = part.detach()
        self.device_mesh = device_mesh
        self.dim = dim
        self.num_saved = 0
        self._whole: DTensor | None = None

    def whole(self) -> DTensor:
        """For one of the saved views; the last one takes it away."""
        if self._whole is None:
            part = DTensor.from_local(
                self.part, self.device_mesh, [Shard(self.dim)], run_check=False
            )
            self._whole = part.redistribute(placements=[Replicate()])
        whole = self._whole
        self.num_saved -= 1
        if self.num_saved <= 0:  # a graph that is kept is gone through again
            self._whole = None
        return whole


class Regather:
    """Hooks on what autograd saves while one sub-block runs."""

    def __init__(self, device_mesh: DeviceMesh, dim: int) -> None:
        self.device_mesh = device_mesh
        self.dim = dim
        self._hooks: saved_tensors_hooks | None = None
        self._source: _Source | None = None
        self._key = 0

    def enter(self) -> None:
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()

    def keeps(self, part: torch.Tensor, made: DTensor) -> None:
        """`made` was gathered of `part`."""
        self._source = _Source(part, self.device_mesh, self.dim)
        self._key = made.to_local().untyped_storage()._cdata

    def leave(self) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
        self._hooks = self._source = None
        self._key = 0

    def _pack(self, saved: torch.Tensor) -> Any:
        if not isinstance(saved, DTensor) or self._source is None:
            return saved
        if saved._local_tensor.untyped_storage()._cdata != self._key:
            return saved
        self._source.num_saved += 1
        return _Slice(self._source, saved.shape)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _Slice):
            return packed
        return packed.source.whole().view(packed.view)
