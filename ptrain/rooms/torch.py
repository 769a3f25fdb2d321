"""The room of a running rank: tensors on its device, its host and its files, and process groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from ptrain.costs import State
from ptrain.models.numerics import DTYPE_NAMES, TORCH_DTYPES
from ptrain.rooms.comm import all_gather, all_reduce, reduce_scatter
from ptrain.rooms.mesh import Mesh
from ptrain.rooms.registry import Registry
from ptrain.rooms.room import Axes, Move, Shape, Work
from ptrain.rooms.tiers import Tiers, alike, cast, same_memory
from ptrain.spec.dials import ReduceScatterVia
from ptrain.spec.placement import Axis, Tier
from ptrain.spec.precision import DType


class TorchRoom:
    """`path` is the folder of the file tier (None: the system's temporary one)."""

    def __init__(self, mesh: Mesh, registry: Registry, path: str | None = None) -> None:
        self.mesh, self.registry = mesh, registry
        self.device = mesh.world.device
        self.tiers = Tiers(self.device, registry, path)

    def degree(self, axis: Axis) -> int:
        return self.mesh.degrees[axis]

    def coordinate(self, axis: Axis) -> int:
        return self.mesh.coordinate(axis)

    def ordered(self, axes: Axes) -> tuple[Axis, ...]:
        return self.mesh.ordered(axes)

    def new(
        self, numel: int | None, dtype: DType, tier: Tier, state: State, name: str = ""
    ) -> torch.Tensor:
        """Raises SpecError where the file tier's folder cannot hold it."""
        tensor = self.tiers.empty(numel, TORCH_DTYPES[dtype], tier, state)
        return self.registry.tag(tensor, state, name=name) if name else tensor

    def zeros(
        self, numel: int, dtype: DType, tier: Tier, state: State, name: str = ""
    ) -> torch.Tensor:
        return self.new(numel, dtype, tier, state, name).zero_()

    def like(self, tensor: torch.Tensor, numel: int) -> torch.Tensor:
        return self._tagged_as(alike(tensor.new_empty(numel), tensor), tensor)

    def _tagged_as(self, tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        tag = self.registry.of(other)
        return tensor if tag is None else self.registry.tag(tensor, tag.state, name=tag.name)

    def zeros_like(self, tensor: torch.Tensor, dtype: DType) -> torch.Tensor:
        return alike(torch.zeros_like(tensor, dtype=TORCH_DTYPES[dtype]), tensor)

    def scalar_like(self, tensor: torch.Tensor, dtype: DType, initial: float = 0.0) -> torch.Tensor:
        return alike(tensor.new_full((), initial, dtype=TORCH_DTYPES[dtype]), tensor)

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

    def move(self, tensor: torch.Tensor, tier: Tier, state: State) -> torch.Tensor:
        return self.tiers.move(tensor, tier, state)

    def copy(self, source: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(source.view(into.shape) if source.shape != into.shape else source)

    def add(self, tensor: torch.Tensor, part: torch.Tensor) -> None:
        tensor.add_(part)

    def clear(self, tensor: torch.Tensor) -> None:
        tensor.zero_()

    def piece(self, tensor: torch.Tensor, start: int, shape: Shape) -> torch.Tensor:
        return tensor.view(-1)[start : start + math.prod(shape)].view(shape)

    def window(self, tensor: torch.Tensor, shape: Shape, places: Mapping[int, int]) -> torch.Tensor:
        view = tensor.view(shape)
        for dim, place in places.items():
            view = view.narrow(dim, place, 1)
        return view

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(-1)

    def permuted(self, tensor: torch.Tensor, shape: Shape, order: Sequence[int]) -> torch.Tensor:
        seen = tensor.view(shape).permute(tuple(order))
        lying = alike(seen.clone(memory_format=torch.contiguous_format), tensor)
        return self._tagged_as(lying.view(-1), tensor)

    def unpermute(
        self, tensor: torch.Tensor, shape: Shape, order: Sequence[int], into: torch.Tensor
    ) -> None:
        moved = tensor.view([shape[dim] for dim in order])
        inverse = [order.index(dim) for dim in range(len(order))]
        into.view(shape).copy_(moved.permute(inverse))

    def same(self, tensor: torch.Tensor, other: torch.Tensor) -> bool:
        return same_memory(tensor, other)

    def empty(self, tensor: torch.Tensor) -> None:
        tensor.untyped_storage().resize_(0)

    def refill(self, tensor: torch.Tensor) -> None:
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())

    def ahead(self, tensor: torch.Tensor) -> None:
        self.tiers.ahead(tensor)

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
    ) -> Move[torch.Tensor]:
        group = self.mesh.group(axes)
        return reduce_scatter(into, whole, group, via, self.registry, is_awaited=is_awaited)

    def all_reduce(
        self, tensor: torch.Tensor, axes: Axes, *, is_awaited: bool
    ) -> Move[torch.Tensor]:
        return all_reduce(tensor, self.mesh.group(axes), is_awaited=is_awaited)
