"""Update targets: local tensors that represent named parameters, with gradient and optimizer state.

If another axis shards a parameter, a data axis stores, reduces and updates the rank's part like any
other tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ptrain.internals.dtensor import compute_local_shape_and_global_offset
from ptrain.models.ledger import local_tensor
from ptrain.models.window import Window, full_window, narrow_to_window
from ptrain.optimizers.update import ResidentSlot, Slot, Target
from ptrain.runtime.torch import is_same_memory
from ptrain.spec.placement import EXPERT_AXES, Axis

Named = dict[str, torch.Tensor]
OPERATOR_AXES = (*EXPERT_AXES, Axis.TP)  # axes whose ranks may have different parts of an operator
# axes that shard the operator, and a view of its elements
CutView = tuple[tuple[Axis, ...], torch.Tensor]


class NamedTarget(Target[torch.Tensor], Protocol):
    """A local tensor that the optimizer updates, and its relation to named parameters."""

    @property
    def gradient(self) -> torch.Tensor | None:
        """The stored, reduced gradient, which is clipped and checked."""
        ...

    def views(self) -> Iterable[CutView]:
        """Return views that make up `gradient`, each with the axes that shard its operator."""
        ...

    def named_tensors(self, part: torch.Tensor) -> Named:
        """Return a tensor shaped like `value`, on any tier, as full tensors by canonical name.

        Sharded tensors are DTensors.
        """
        ...

    def split(self, part: torch.Tensor) -> Named:
        """Return a tensor of optimizer state as full tensors (or DTensors) by canonical name."""
        ...

    def join(self, named: Named) -> torch.Tensor:
        """Return the stored tensor that `split` splits into `named`."""
        ...

    def export(self) -> Named:
        """Return the parameters by canonical name."""
        ...

    def load(self, named: Named) -> None:
        """Write tensors with the names of `export` to the parameters."""


def gradients_of(groups: Iterable[Iterable[NamedTarget]]) -> list[torch.Tensor]:
    """Return the gradients of the targets that have one."""
    gradients = [target.gradient for group in groups for target in group]
    return [gradient for gradient in gradients if gradient is not None]


class ParameterTarget:
    """A parameter as a target: itself, or the local part of a DTensor."""

    is_in_place = True

    def __init__(self, name: str, parameter: nn.Parameter, *, owns_master: bool = False) -> None:
        self.name = name
        self.parameter = parameter
        self.owns_master = owns_master

    @property
    def is_frozen(self) -> bool:
        return not self.parameter.requires_grad

    @property
    def gradient(self) -> torch.Tensor | None:
        gradient = self.parameter.grad
        return None if gradient is None else local_tensor(gradient)

    def views(self) -> Iterable[CutView]:
        gradient = self.gradient
        return [] if gradient is None else [(cutting_axes(self.parameter), gradient)]

    def persistent_parameter(self) -> torch.Tensor | None:
        """Return the parameter, or None if the optimizer gets the local part of a DTensor."""
        return None if isinstance(self.parameter, DTensor) else self.parameter

    def working_gradient(self) -> torch.Tensor | None:
        return self.gradient

    def create_slot(self, initial: torch.Tensor) -> Slot[torch.Tensor]:
        return ResidentSlot(initial)

    def value(self) -> torch.Tensor:
        return local_tensor(self.parameter.detach())

    def store(self, value: torch.Tensor) -> torch.Tensor | None:
        held = self.value()
        return None if is_same_memory(held, value) else held

    def local_numels(self) -> list[int]:
        return [self.value().numel()]

    def split(self, part: torch.Tensor) -> Named:
        return self.named_tensors(part)

    def named_tensors(self, part: torch.Tensor) -> Named:
        whole = self.parameter
        # scalars, such as step counters, are not sharded
        if not isinstance(whole, DTensor) or part.dim() == 0 != whole.dim():
            return {self.name: part}
        return {self.name: _with_layout_of(part, whole)}

    def join(self, named: Named) -> torch.Tensor:
        return rows_of(named[self.name], self.parameter)

    def export(self) -> Named:
        return {self.name: self.parameter.detach()}

    def load(self, named: Named) -> None:
        self.value().copy_(rows_of(named[self.name], self.parameter))


def _with_layout_of(part: torch.Tensor, like: DTensor) -> DTensor:
    """Return a rank's part as a DTensor with the layout of `like`."""
    return DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def cutting_axes(parameter: torch.Tensor) -> tuple[Axis, ...]:
    """Return the axes along which ranks have different parts of the parameter's operator.

    Args:
        parameter: The parameter. One that is not a DTensor has no such axes.

    Returns:
        The axes that shard features or experts. Axes that shard data only do not count.
    """
    if not isinstance(parameter, DTensor):
        return ()
    names = parameter.device_mesh.mesh_dim_names or ()
    cut = zip(names, parameter.placements, strict=True)
    sharded = [name for name, placement in cut if placement.is_shard()]
    return tuple(axis for axis in OPERATOR_AXES if axis in sharded)


def rows_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor in the layout of another one.

    Args:
        tensor: The full tensor, or a DTensor in any layout.
        like: The tensor whose layout counts. If it is not a DTensor, the full tensor is returned.
    """
    if not isinstance(like, DTensor) or tensor.dim() == 0 != like.dim():
        return full_tensor(tensor)
    if (
        isinstance(tensor, DTensor)
        and tensor.placements == like.placements
        and tensor.device_mesh == like.device_mesh
    ):
        return tensor.to_local()
    return narrow_to_window(full_tensor(tensor), window_of(like))


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of one that may be sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def window_of(like: torch.Tensor) -> Window:
    """Return the window of elements that this rank holds of a tensor with the layout of `like`."""
    if not isinstance(like, DTensor):
        return full_window(like.shape)
    sizes, offsets = compute_local_shape_and_global_offset(
        like.shape, like.device_mesh, like.placements
    )
    dims = zip(offsets, sizes, like.shape, strict=True)
    # The offset of a rank without elements may lie after the end.
    return tuple((min(offset, length), size) for offset, size, length in dims)


class LocalPart:
    """The local tensor of a DTensor, with the parameter interface that flat units use."""

    def __init__(self, parameter: DTensor) -> None:
        self.parameter = parameter

    @property
    def _local_part(self) -> torch.Tensor:
        # With gradients enabled, `to_local` returns a new view. Flat units set `.data` of the
        # tensor that the DTensor itself holds.
        held: torch.Tensor = self.parameter._local_tensor
        return held

    @property
    def shape(self) -> torch.Size:
        return self._local_part.shape

    @property
    def device(self) -> torch.device:
        return self._local_part.device

    def numel(self) -> int:
        return int(self._local_part.numel())

    def detach(self) -> torch.Tensor:
        return self._local_part.detach()

    @property
    def data(self) -> torch.Tensor:
        return self._local_part.data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self._local_part.data = value

    @property
    def grad(self) -> torch.Tensor | None:
        gradient = self.parameter.grad
        return None if gradient is None else gradient._local_tensor

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.parameter.grad = None if value is None else _with_layout_of(value, self.parameter)

    def register_post_accumulate_grad_hook(self, hook: Callable[[object], None]) -> None:
        self.parameter.register_post_accumulate_grad_hook(hook)


Parameter: TypeAlias = "nn.Parameter | LocalPart"


def stored_part(parameter: nn.Parameter) -> Parameter:
    """Return the parameter, or its local part if it is a DTensor."""
    return LocalPart(parameter) if isinstance(parameter, DTensor) else parameter


def whole_parameter(stored: Parameter) -> nn.Parameter:
    """Return the parameter of a stored part."""
    return stored.parameter if isinstance(stored, LocalPart) else stored


def axes_of(parameter: Parameter) -> tuple[Axis, ...]:
    """Return the axes that shard the parameter's operator."""
    return cutting_axes(whole_parameter(parameter))


def whole_of(parameter: Parameter, part: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of one that is sharded like the parameter, on every rank."""
    is_cut = isinstance(parameter, LocalPart) and part.dim()
    return _with_layout_of(part, parameter.parameter).full_tensor() if is_cut else part


def part_of(parameter: Parameter, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a full tensor."""
    return rows_of(whole, whole_parameter(parameter))
