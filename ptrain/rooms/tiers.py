"""Device, host and file memory: where a tensor is put, and how it moves.

A move is one copy of equal dtypes between storages of different tiers, which the traffic meter
sees; a cast happens on one tier.

Note: a file's pages are read ahead and written behind by the kernel; `ahead` announces what is
needed next. The file has no name, so that nothing is left when the process ends in any way.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile

import torch

from ptrain.costs import State
from ptrain.internals.fakes import detect_fake_mode
from ptrain.models.tags import is_tagged, tag, tier_of
from ptrain.rooms.registry import Registry
from ptrain.spec.file_tier import unusable
from ptrain.spec.placement import Tier

_LIBC = ctypes.CDLL(None)


def alike(derived: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Tag `derived` as on the host where `source` is there or in a file; return `derived`."""
    storage = source.untyped_storage()
    if is_tagged(storage) and derived.untyped_storage()._cdata != storage._cdata:
        tag(derived, Tier.HOST)  # what is computed from a mapped file is in memory
    return derived


def cast(tensor: torch.Tensor, dtype: torch.dtype, *, copy: bool = False) -> torch.Tensor:
    """Return the tensor in `dtype`, on its tier; it is the tensor itself if it is that already,
    unless `copy`."""
    if tensor.dtype == dtype and not copy:
        return tensor
    converted = torch.empty_like(tensor, dtype=dtype)
    return alike(converted, tensor).copy_(tensor)


def same_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one size begin at the same byte of the same storage."""
    here, there = tensor.untyped_storage()._cdata, other.untyped_storage()._cdata
    return bool(here == there and tensor.storage_offset() == other.storage_offset())


class Tiers:
    """What one rank can put tensors on: its device, the host's memory, files in a folder (None:
    the system's temporary one)."""

    def __init__(self, device: torch.device, registry: Registry, path: str | None = None) -> None:
        self.device = device
        self.registry = registry
        self.path = path

    def empty(
        self, numel: int | None, dtype: torch.dtype, tier: Tier, state: State
    ) -> torch.Tensor:
        """Return room for `numel` elements (None: a scalar) of a state on a tier.

        Raises SpecError where the file tier's folder cannot hold it.
        """
        size = () if numel is None else (numel,)
        match tier:
            case Tier.DEVICE:
                return self.registry.tag(torch.empty(size, dtype=dtype, device=self.device), state)
            case Tier.HOST:
                pinned = self.device.type == "cuda"
                tensor = torch.empty(size, dtype=dtype, device="cpu", pin_memory=pinned)
            case Tier.FILE:
                tensor = self._mapped(1 if numel is None else numel, dtype)
        tag(tensor, tier)  # before anything is done with it
        tensor = tensor.view(size)
        return self.registry.tag(tensor, state)

    def move(self, tensor: torch.Tensor, tier: Tier, state: State) -> torch.Tensor:
        """Return a copy of `tensor` on another tier."""
        numel = None if tensor.dim() == 0 else tensor.numel()
        return self.empty(numel, tensor.dtype, tier, state).view(tensor.shape).copy_(tensor)

    def ahead(self, tensor: torch.Tensor) -> None:
        """This tensor is needed next: a file's pages are read from now on."""
        storage = tensor.untyped_storage()
        if tier_of(storage) is Tier.FILE and detect_fake_mode() is None and storage.nbytes():
            address, size = ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes())
            _LIBC.madvise(address, size, mmap.MADV_WILLNEED)  # an advice: nobody must take it

    def _mapped(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor over a file of its exact size. Fake tensors have no bytes to map."""
        if detect_fake_mode() is not None or numel == 0:
            return torch.empty(numel, dtype=dtype, device="cpu")
        nbytes = numel * dtype.itemsize
        try:
            descriptor, name = tempfile.mkstemp(prefix="ptrain-", dir=self.path)
        except OSError as error:
            raise unusable(self.path, error) from error
        try:
            if hasattr(os, "posix_fallocate"):  # a full disk is an error here, not a signal
                os.posix_fallocate(descriptor, 0, nbytes)
            else:  # macOS
                os.truncate(descriptor, nbytes)
            return torch.from_file(name, shared=True, size=numel, dtype=dtype)
        except (OSError, RuntimeError) as error:  # the latter is torch's, of a failed mapping
            raise unusable(self.path, error) from error
        finally:
            os.close(descriptor)  # the mapping needs none: thousands of tensors may be on files
            os.unlink(name)
