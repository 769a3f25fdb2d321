"""A parameter of which this rank stores a part, because another axis cut it: what a data axis
keeps, reduces and updates is that part, like any other tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ptrain.axes.data.run.target import cutting_axes, rows_of
from ptrain.spec.axis import Axis


class LocalPart:
    """What a flat unit asks of a parameter, asked of a DTensor's local tensor."""

    def __init__(self, parameter: DTensor) -> None:
        self.parameter = parameter

    @property
    def _held(self) -> torch.Tensor:
        held: torch.Tensor = self.parameter._local_tensor
        return held

    @property
    def shape(self) -> torch.Size:
        return self._held.shape

    @property
    def device(self) -> torch.device:
        return self._held.device

    def numel(self) -> int:
        return int(self._held.numel())

    def detach(self) -> torch.Tensor:
        return self._held.detach()

    @property
    def data(self) -> torch.Tensor:
        return self._held.data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self._held.data = value

    @property
    def grad(self) -> torch.Tensor | None:
        gradient = self.parameter.grad
        return None if gradient is None else gradient._local_tensor

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.parameter.grad = None if value is None else self._alike(value)

    def register_post_accumulate_grad_hook(self, hook: Callable[[object], None]) -> None:
        self.parameter.register_post_accumulate_grad_hook(hook)

    @property
    def cutting_axes(self) -> tuple[Axis, ...]:
        """The axes that cut its operator: no other cuts it."""
        return cutting_axes(self.parameter)

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """A tensor that is cut like the parameter, made whole on every rank."""
        return self._alike(part).full_tensor() if part.dim() else part

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor that is whole."""
        return rows_of(whole, self.parameter)

    def _alike(self, part: torch.Tensor) -> DTensor:
        like = self.parameter
        return DTensor.from_local(
            part,
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )


Parameter: TypeAlias = "nn.Parameter | LocalPart"


def stored_part(parameter: nn.Parameter) -> Parameter:
    """The parameter itself, or the part of it that this rank stores."""
    return LocalPart(parameter) if isinstance(parameter, DTensor) else parameter


def whole_parameter(stored: Parameter) -> nn.Parameter:
    """Return the parameter that it is, or is a part of."""
    return stored.parameter if isinstance(stored, LocalPart) else stored


def axes_of(parameter: Parameter) -> tuple[Axis, ...]:
    """Return the axes that cut the parameter's operator over ranks."""
    return parameter.cutting_axes if isinstance(parameter, LocalPart) else ()


def whole_of(parameter: Parameter, part: torch.Tensor) -> torch.Tensor:
    return parameter.whole(part) if isinstance(parameter, LocalPart) else part


def part_of(parameter: Parameter, whole: torch.Tensor) -> torch.Tensor:
    return parameter.part(whole) if isinstance(parameter, LocalPart) else whole
