"""A = S*: what the column operators save of their common input is the slice of the tokens that this
rank had, gathered again for the backward pass (Korthikanti et al. 2022, section 4.2.2)."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ptrain.internals.autograd import Hooks, saving_hooks


class _Slice:
    """A saved view of a gathered tensor, as the slice that it was gathered from."""

    def __init__(self, source: _Source, part: _Saved, saved: torch.Tensor) -> None:
        self.source = source
        self.part = part
        self.view, self.is_local = saved.shape, not isinstance(saved, DTensor)

    def tensor(self) -> torch.Tensor:
        whole = self.source.whole(self.part)
        return (whole.to_local() if self.is_local else whole).view(self.view)


class _Saved:
    """A tensor as the hooks around this sub-block's save it: of a block that is computed again, or
    kept off the device."""

    def __init__(self, saved: torch.Tensor, outer: Hooks) -> None:
        pack, self._unpack = outer
        self._packed = pack(saved)

    def tensor(self) -> torch.Tensor:
        unpacked: torch.Tensor = self._unpack(self._packed)
        return unpacked


class _Source:
    """What a slice is gathered to, from the first use of a saved view to the last."""

    def __init__(self, device_mesh: DeviceMesh, dim: int) -> None:
        self.device_mesh = device_mesh
        self.dim = dim
        self.num_saved = 0
        self._whole: DTensor | None = None

    def whole(self, saved: _Saved) -> DTensor:
        """Return the whole tensor for one of the saved views; the last one lets it go."""
        if self._whole is None:
            part = DTensor.from_local(
                saved.tensor(), self.device_mesh, [Shard(self.dim)], run_check=False
            )
            self._whole = part.redistribute(placements=[Replicate()])
        whole = self._whole
        self.num_saved -= 1
        if self.num_saved <= 0:  # a graph that is kept is gone through again
            self._whole = None
        return whole


class Regather:
    """Hooks on what autograd saves while one sub-block runs, within those that there are."""

    def __init__(self, device_mesh: DeviceMesh, dim: int) -> None:
        self.device_mesh = device_mesh
        self.dim = dim
        self._hooks: saved_tensors_hooks | None = None
        self._outer: Hooks = _NONE
        self._source: _Source | None = None
        self._part: torch.Tensor | None = None
        self._key = 0

    def enter(self) -> None:
        self._outer = saving_hooks() or _NONE
        self._hooks = saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()

    def keeps(self, part: torch.Tensor, gathered: DTensor) -> None:
        """Notes that `gathered` was gathered of `part`."""
        self._source = _Source(self.device_mesh, self.dim)
        self._part = part.detach()
        self._key = gathered.to_local().untyped_storage()._cdata

    def leave(self) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
        self._hooks = self._source = self._part = None
        self._outer = _NONE
        self._key = 0

    def _pack(self, saved: torch.Tensor) -> _Slice | _Saved:
        source, part = self._source, self._part
        local = saved._local_tensor if isinstance(saved, DTensor) else saved
        is_whole = local.untyped_storage()._cdata == self._key
        if source is None or part is None or not is_whole:
            return _Saved(saved, self._outer)
        source.num_saved += 1
        return _Slice(source, _Saved(part, self._outer), saved)


def _unpack(packed: _Slice | _Saved) -> torch.Tensor:
    return packed.tensor()


def _as_is(saved: Any) -> Any:
    return saved


_NONE: Hooks = (_as_is, _as_is)
