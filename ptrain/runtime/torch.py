"""The torch runtime of a rank: tensors on its device, host and files, moves, and process groups.

A move is one copy of equal dtypes between storages on different tiers, which the traffic meter
counts. A cast stays on one tier.

The kernel reads a file's pages ahead and writes them back later; `prefetch` announces the tensor
that is needed next. Files are unlinked once mapped, so none is left when the process ends in any
way.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence

import torch

from ptrain.cost import State
from ptrain.internals.fakes import detect_fake_mode
from ptrain.models.ledger import has_tier, set_tier, tier_of
from ptrain.models.numerics import DTYPE_NAMES, TORCH_DTYPES
from ptrain.runtime.comm import Mesh, TagRegistry, all_gather, all_reduce, reduce_scatter
from ptrain.runtime.interface import Axes, PendingResult, Shape, Work
from ptrain.spec.dials import ReduceScatterVia
from ptrain.spec.placement import Axis, Tier
from ptrain.spec.precision import DType
from ptrain.spec.spec import unusable_folder_error

_LIBC = ctypes.CDLL(None)


def tag_like(derived: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Tag `derived` as a host tensor if `source` is on the host or in a file; return `derived`."""
    storage = source.untyped_storage()
    if has_tier(storage) and derived.untyped_storage()._cdata != storage._cdata:
        set_tier(derived, Tier.HOST)  # also for a mapped source: results are in memory
    return derived


def cast(tensor: torch.Tensor, dtype: torch.dtype, *, copy: bool = False) -> torch.Tensor:
    """Return the tensor in `dtype`, on its tier.

    A tensor that already has the dtype is returned itself, unless `copy`.

    Args:
        tensor: A tensor of any shape.
        dtype: The dtype of the result.
        copy: Copy even if the dtype is equal.

    Returns:
        The tensor. It is in host memory if `tensor` is in a mapped file and is copied.
    """
    if tensor.dtype == dtype and not copy:
        return tensor
    # not `tensor.to`: the result is tagged before an operator writes to it
    converted = torch.empty_like(tensor, dtype=dtype)
    return tag_like(converted, tensor).copy_(tensor)


def is_same_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors of equal size begin at the same byte of the same storage."""
    here, there = tensor.untyped_storage()._cdata, other.untyped_storage()._cdata
    return bool(here == there and tensor.storage_offset() == other.storage_offset())


class Tiers:
    """The memory tiers of one rank: its device, the host's memory, and files in a folder."""

    def __init__(
        self, device: torch.device, registry: TagRegistry, path: str | None = None
    ) -> None:
        """Use these tiers.

        Args:
            device: The rank's device.
            registry: Receives the tags of new tensors.
            path: The folder of the file tier, None for the system's temporary folder.
        """
        self.device = device
        self.registry = registry
        self.path = path

    def empty(
        self, numel: int | None, dtype: torch.dtype, tier: Tier, state: State
    ) -> torch.Tensor:
        """Return an uninitialized tensor of a state on a tier.

        Args:
            numel: Number of elements, None for a 0-d tensor.
            dtype: Its dtype.
            tier: Its tier. Host tensors are pinned if the device is a GPU.
            state: The state that it counts as.

        Raises:
            SpecError: The folder of the file tier cannot hold it.
        """
        size = () if numel is None else (numel,)
        match tier:
            case Tier.DEVICE:
                return self.registry.tag(torch.empty(size, dtype=dtype, device=self.device), state)
            case Tier.HOST:
                pinned = self.device.type == "cuda"
                tensor = torch.empty(size, dtype=dtype, device="cpu", pin_memory=pinned)
            case Tier.FILE:
                tensor = self._map_file(1 if numel is None else numel, dtype)
        set_tier(tensor, tier)  # before any operator runs on it: meters read the tier there
        tensor = tensor.view(size)
        return self.registry.tag(tensor, state)

    def copy_to_tier(self, tensor: torch.Tensor, tier: Tier, state: State) -> torch.Tensor:
        """Return a copy of `tensor` on another tier.

        Args:
            tensor: A tensor of any shape; it stays on its tier.
            tier: The tier of the copy.
            state: The state that the copy counts as.

        Raises:
            SpecError: The folder of the file tier cannot hold it.
        """
        numel = None if tensor.dim() == 0 else tensor.numel()
        return self.empty(numel, tensor.dtype, tier, state).view(tensor.shape).copy_(tensor)

    def prefetch(self, tensor: torch.Tensor) -> None:
        """Make the kernel start to read a tensor's file. Does nothing for other tiers."""
        storage = tensor.untyped_storage()
        if tier_of(storage) is Tier.FILE and detect_fake_mode() is None and storage.nbytes():
            address, size = ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes())
            _LIBC.madvise(address, size, mmap.MADV_WILLNEED)  # advice only: an error has no effect

    def _map_file(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor that maps an unlinked file of its exact size.

        Fake tensors, and empty ones, are not mapped.
        """
        if detect_fake_mode() is not None or numel == 0:
            return torch.empty(numel, dtype=dtype, device="cpu")
        nbytes = numel * dtype.itemsize
        try:
            descriptor, name = tempfile.mkstemp(prefix="ptrain-", dir=self.path)
            opened = f"/proc/self/fd/{descriptor}"
            if has_proc := os.path.exists(opened):
                os.unlink(name)  # before it has a size: a killed process leaves nothing
        except OSError as error:
            raise unusable_folder_error(self.path, error) from error
        try:
            # reserve the blocks: a full disk raises here, instead of SIGBUS on a later write
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, nbytes)
            else:  # macOS
                os.truncate(descriptor, nbytes)
            place = opened if has_proc else name
            return torch.from_file(place, shared=True, size=numel, dtype=dtype)
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError if mapping fails
            raise unusable_folder_error(self.path, error) from error
        finally:
            # the mapping stays valid; thousands of open files would exceed the limit
            os.close(descriptor)
            if not has_proc:  # macOS
                os.unlink(name)


class TorchRuntime:
    """The runtime of a rank on torch tensors.

    `path` is the folder of the file tier, None for the system's temporary folder.
    """

    def __init__(self, mesh: Mesh, registry: TagRegistry, path: str | None = None) -> None:
        self.mesh, self.registry = mesh, registry
        self.device = mesh.world.device
        self.tiers = Tiers(self.device, registry, path)

    def degree(self, axis: Axis) -> int:
        return self.mesh.degrees[axis]

    def coordinate(self, axis: Axis) -> int:
        return self.mesh.coordinate(axis)

    def sort_axes(self, axes: Axes) -> tuple[Axis, ...]:
        return self.mesh.sort_axes(axes)

    def new_empty(
        self, numel: int | None, dtype: DType, tier: Tier, state: State, name: str = ""
    ) -> torch.Tensor:
        """Return an uninitialized tensor; see `TensorRuntime.new_empty`.

        Args:
            numel: Number of elements of a 1-d tensor, None for a 0-d tensor.
            dtype: Its dtype.
            tier: Its tier. Host tensors are pinned if the device is a GPU.
            state: The state that it counts as.
            name: The unit that it belongs to; "" sets no unit.

        Raises:
            SpecError: The folder of the file tier cannot hold it.
        """
        tensor = self.tiers.empty(numel, TORCH_DTYPES[dtype], tier, state)
        return self.registry.tag(tensor, state, name=name) if name else tensor

    def zeros(
        self, numel: int, dtype: DType, tier: Tier, state: State, name: str = ""
    ) -> torch.Tensor:
        return self.new_empty(numel, dtype, tier, state, name).zero_()

    def empty_like(self, tensor: torch.Tensor, numel: int) -> torch.Tensor:
        return self._copy_tag(tag_like(tensor.new_empty(numel), tensor), tensor)

    def _copy_tag(self, tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Give a tensor the state and name of another, if that has a tag."""
        tag = self.registry.tag_of(other)
        return tensor if tag is None else self.registry.tag(tensor, tag.state, name=tag.name)

    def zeros_like(
        self, tensor: torch.Tensor, dtype: DType, shape: Shape | None = None
    ) -> torch.Tensor:
        # `zeros_like` keeps the strides and the placements of a DTensor, `new_zeros` does not
        if shape is None or shape == self.shape(tensor):
            return tag_like(torch.zeros_like(tensor, dtype=TORCH_DTYPES[dtype]), tensor)
        return tag_like(tensor.new_zeros(shape, dtype=TORCH_DTYPES[dtype]), tensor)

    def scalar_like(self, tensor: torch.Tensor, dtype: DType, initial: float = 0.0) -> torch.Tensor:
        return tag_like(tensor.new_full((), initial, dtype=TORCH_DTYPES[dtype]), tensor)

    def numel(self, tensor: torch.Tensor) -> int:
        return int(tensor.numel())

    def dtype(self, tensor: torch.Tensor) -> DType:
        return DTYPE_NAMES[tensor.dtype]

    def shape(self, tensor: torch.Tensor) -> Shape:
        return tuple(tensor.shape)

    def cast(
        self,
        tensor: torch.Tensor,
        dtype: DType,
        state: State | None = None,
        name: str = "",
        *,
        copy: bool = False,
    ) -> torch.Tensor:
        tensor = cast(tensor, TORCH_DTYPES[dtype], copy=copy)
        return tensor if state is None else self.registry.tag(tensor, state, name=name)

    def cast_all(self, tensors: Sequence[torch.Tensor], dtype: DType) -> Sequence[torch.Tensor]:
        to = TORCH_DTYPES[dtype]
        if all(tensor.dtype == to for tensor in tensors):
            return tensors
        converted = [tag_like(torch.empty_like(tensor, dtype=to), tensor) for tensor in tensors]
        # One call for all tensors: a GPU launches a few kernels instead of one per tensor.
        torch._foreach_copy_(converted, tensors)
        return converted

    def copy_to_tier(self, tensor: torch.Tensor, tier: Tier, state: State) -> torch.Tensor:
        return self.tiers.copy_to_tier(tensor, tier, state)

    def copy(self, source: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(source.view(into.shape) if source.shape != into.shape else source)

    def copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        torch._foreach_copy_([place for _, place in pairs], [source for source, _ in pairs])

    def add(self, tensor: torch.Tensor, part: torch.Tensor) -> None:
        tensor.add_(part)

    def fill_zeros(self, tensor: torch.Tensor) -> None:
        tensor.zero_()

    def view_range(self, tensor: torch.Tensor, start: int, shape: Shape) -> torch.Tensor:
        return tensor.view(-1)[start : start + math.prod(shape)].view(shape)

    def view_window(
        self, tensor: torch.Tensor, shape: Shape, places: Mapping[int, int]
    ) -> torch.Tensor:
        view = tensor.view(shape)
        for dim, place in places.items():
            view = view.narrow(dim, place, 1)
        return view

    def flatten(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(-1)

    def permute(self, tensor: torch.Tensor, shape: Shape, order: Sequence[int]) -> torch.Tensor:
        seen = tensor.view(shape).permute(tuple(order))
        # `clone` alone would preserve the permuted strides.
        lying = tag_like(seen.clone(memory_format=torch.contiguous_format), tensor)
        return self._copy_tag(lying.view(-1), tensor)

    def unpermute(
        self, tensor: torch.Tensor, shape: Shape, order: Sequence[int], into: torch.Tensor
    ) -> None:
        moved = tensor.view([shape[dim] for dim in order])
        inverse = [order.index(dim) for dim in range(len(order))]
        into.view(shape).copy_(moved.permute(inverse))

    def is_same_memory(self, tensor: torch.Tensor, other: torch.Tensor) -> bool:
        return is_same_memory(tensor, other)

    def free_storage(self, tensor: torch.Tensor) -> None:
        # The tensor and all its views stay valid objects, so that parameters, hooks and the
        # optimizer keep referring to them.
        tensor.untyped_storage().resize_(0)

    def allocate_storage(self, tensor: torch.Tensor) -> None:
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())

    def prefetch(self, tensor: torch.Tensor) -> None:
        self.tiers.prefetch(tensor)

    def all_gather(
        self, shard: torch.Tensor, into: torch.Tensor, axes: Axes, *, is_awaited: bool
    ) -> Work | None:
        group = self.mesh.group(axes)
        return all_gather(into, shard, group, self.registry, is_awaited=is_awaited)

    def reduce_scatter(
        self,
        whole: torch.Tensor,
        into: torch.Tensor,
        axes: Axes,
        via: ReduceScatterVia,
        *,
        is_awaited: bool,
    ) -> PendingResult[torch.Tensor]:
        group = self.mesh.group(axes)
        return reduce_scatter(into, whole, group, via, self.registry, is_awaited=is_awaited)

    def all_reduce(
        self, tensor: torch.Tensor, axes: Axes, *, is_awaited: bool
    ) -> PendingResult[torch.Tensor]:
        return all_reduce(tensor, self.mesh.group(axes), is_awaited=is_awaited)
