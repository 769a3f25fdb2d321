"""What stands in a stage's part of a model for the modules of other stages, so that the model's own
forward runs in every part.

A stage behind the first enters that forward at its first layer, one before the last leaves it at
the first layer behind its own. What the model computes around its layers (masks, rotations, views
of the tokens) it computes on every stage; what its embeddings give has no memory on later ones; and
what is behind its layers runs on the last one alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map


class Crossing:
    """The hidden states that the micro-batch in its forward pass was given by the stage before."""

    def __init__(self) -> None:
        self._hidden: Tensor | None = None

    @property
    def hidden(self) -> Tensor:
        """[samples, ...]; a stage behind the first has them while it runs."""
        assert self._hidden is not None, "only a stage behind the first is given hidden states"
        return self._hidden

    def enter(self, hidden: Tensor | None) -> None:
        """Begin a forward pass with what the stage was given, or end one."""
        self._hidden = hidden

    def shaped(self, shape: Iterable[int]) -> Tensor:
        """Return a tensor of numbers that nobody needs. It has no memory of its own."""
        hidden = self.hidden.detach()
        return hidden[(0,) * hidden.dim()].expand(*shape)


class Left(Exception):
    """A forward pass has come to a layer of the next stage, which waits for `hidden`."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class LayerBefore(nn.Identity):
    """A layer of a stage before: it gives what the stage was given. `returns`: in a tuple of so
    many, whose others are None; 0 for hidden states alone."""

    def __init__(self, crossing: Crossing, returns: int) -> None:
        super().__init__()
        self._crossing, self._returns = crossing, returns

    def forward(self, *_: Any, **__: Any) -> Any:
        hidden = self._crossing.hidden
        return (hidden, *(None,) * (self._returns - 1)) if self._returns else hidden


class LayerBehind(nn.Identity):
    """A layer of a stage behind: here the stage's forward pass ends."""

    def forward(self, *given: Any, **named: Any) -> Any:
        raise Left(next(tensor for tensor in tree_iter((given, named)) if is_real(tensor)))


class InFront(nn.Identity):
    """A module in front of the layers, on a stage behind the first: what it gives has the shape of
    what the module would give, and no memory. The module itself runs on the meta device."""

    def __init__(self, module: nn.Module, crossing: Crossing) -> None:
        super().__init__()
        self._crossing = crossing
        self._module = (on_meta(module),)  # in a tuple it is no child

    @torch.no_grad()
    def forward(self, *given: Any, **named: Any) -> Any:
        (module,) = self._module
        with _disable_current_modes():  # no meter counts what has no memory
            outputs = module(*tree_map(_as_meta, given), **tree_map(_as_meta, named))
        return tree_map(self._like, outputs)

    def _like(self, output: object) -> object:
        if not isinstance(output, Tensor):
            return output
        if not output.is_floating_point():
            kind = str(output.dtype).removeprefix("torch.")
            raise TypeError(f"a module in front of the layers gives {kind} {list(output.shape)}")
        return self._crossing.shaped(output.shape)


class StagePart(nn.Module):
    """A stage's part of a model, as a class over the model's own: `forward(*inputs)` on the first
    stage, `forward(hidden, *inputs)` behind it. It returns the hidden states for the next stage,
    or on the last one what the model returns. `front`: names of parameters in front of the layers
    that belong to no module there."""

    _crossing: Crossing
    _is_first: bool
    _front: dict[str, torch.Size]

    def forward(self, *given: Any) -> Any:
        hidden, inputs = (None, given) if self._is_first else (given[0], given[1:])
        self._crossing.enter(hidden)
        for name, shape in self._front.items():
            owner, attribute = _owner(self, name)
            owner.__dict__[attribute] = self._crossing.shaped(shape)
        try:
            return super().forward(*inputs)
        except Left as left:
            return left.hidden
        finally:
            self._crossing.enter(None)
            for name in self._front:
                owner, attribute = _owner(self, name)
                del owner.__dict__[attribute]


def as_part(model: nn.Module, crossing: Crossing, *, is_first: bool, front: Iterable[str]) -> None:
    """Make `model`, whose other stages' modules are replaced, a StagePart in place, without the
    parameters that `front` names."""
    shapes = {}
    for name in front:
        shapes[name] = model.get_parameter(name).shape
        owner, attribute = _owner(model, name)
        delattr(owner, attribute)
    kind = type(model)
    model.__class__ = type(kind.__name__, (StagePart, kind), {"__module__": kind.__module__})
    vars(model).update(_crossing=crossing, _is_first=is_first, _front=shapes)


@torch.no_grad()
def on_meta(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose tensors have no values."""
    with _disable_current_modes():
        tensors: dict[int, Any] = {id(buffer): _as_meta(buffer) for buffer in module.buffers()}
        for parameter in module.parameters():
            tensors[id(parameter)] = nn.Parameter(_as_meta(parameter), parameter.requires_grad)
        return copy.deepcopy(module, tensors)


def is_real(value: object) -> bool:
    """Return whether it may be hidden states: a tensor of real numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()


def _as_meta(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute
