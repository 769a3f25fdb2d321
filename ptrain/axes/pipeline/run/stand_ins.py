"""What stands in a stage's part of a model for the modules of other stages, so that the model's own
forward runs in every part.

A stage behind the first enters that forward at its first layer, which is given hidden states in
place of what came there; one before the last leaves it at the first layer behind its own, with what
that is given. What the model computes around its layers (masks, rotations, views
of the tokens) it computes on every stage; what its embeddings give has no memory on later ones; and
what is behind its layers runs on the last one alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ptrain.internals.dispatch import without_modes
from ptrain.models.arguments import first_real, is_real
from ptrain.models.meta import as_meta, on_meta


class Crossing:
    """The hidden states that the micro-batch in its forward pass was given by the stage before.
    `is_written`: the model writes into what stands in for its modules in front."""

    def __init__(self, *, is_written: bool) -> None:
        self._is_written = is_written
        self._hidden: Tensor | None = None
        self._number: Tensor | None = None  # of the hidden states, whose memory others have
        self._before: Tensor | None = None

    @property
    def hidden(self) -> Tensor:
        """[samples, ...]; a stage behind the first has them while it runs."""
        assert self._hidden is not None, "only a stage behind the first is given hidden states"
        return self._hidden

    def enter(self, hidden: Tensor | None) -> None:
        """Begin a forward pass with what the stage was given, or end one."""
        self._hidden, self._before, self._number = hidden, None, None

    @property
    def before(self) -> Tensor:
        """What each layer of a stage before gives: as there may be a hundred, the same one, unless
        it is written into."""
        if self._before is None or self._is_written:
            self._before = self.shaped(self.hidden.shape)
        return self._before

    def swapped(self, _: nn.Module, given: Any, named: Any) -> Any:
        """A hook of the stage's first layer: the first tensor that this is given becomes the hidden
        states."""
        first = given[0] if given and is_real(given[0]) else _first_real((given, named))
        return _replaced((given, named), first, self.hidden)

    def shaped(self, shape: Iterable[int]) -> Tensor:
        """Return a tensor of numbers that nobody needs. Unless they are written into it has no
        memory of its own."""
        if self._is_written:
            return self.hidden.detach().new_zeros(*shape)
        if self._number is None:
            self._number = self.hidden.detach()[(0,) * self.hidden.dim()]
        return self._number.expand(*shape)


class Left(Exception):
    """A forward pass has come to a layer of the next stage, which waits for `hidden`."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class LayerBefore(nn.Identity):
    """A layer of a stage before: it gives what has the shape of hidden states. `returns`: in a
    tuple of so many, whose others are None; 0 for that alone."""

    def __init__(self, crossing: Crossing, returns: int) -> None:
        super().__init__()
        self._crossing, self._returns = crossing, returns

    def forward(self, *_: Any, **__: Any) -> Any:
        hidden = self._crossing.before
        return (hidden, *(None,) * (self._returns - 1)) if self._returns else hidden


class LayerBehind(nn.Identity):
    """A layer of a stage behind: here the stage's forward pass ends."""

    def forward(self, *given: Any, **named: Any) -> Any:
        raise Left(_first_real((given, named)))


class InFront(nn.Identity):
    """A module in front of the layers, on a stage behind the first: what it gives has the shape of
    what the module would give, and no memory. The module itself runs on the meta device, once for
    each shape and dtype of what it is given."""

    def __init__(self, module: nn.Module, crossing: Crossing) -> None:
        super().__init__()
        self._crossing = crossing
        self._module = (on_meta(module),)  # in a tuple it is no child
        self._outputs: dict[Hashable, Tensor] = {}  # on the meta device

    def forward(self, *given: Any, **named: Any) -> Any:
        key = self.training, _kinds(given, named)
        if key in self._outputs:
            return self._like(self._outputs[key])
        output = self._run(given, named)
        if key[1] is not None and isinstance(output, Tensor) and len(self._outputs) < _MOST:
            self._outputs[key] = output
        return tree_map(self._like, output)

    def _run(self, given: Any, named: Any) -> Any:
        (module,) = self._module
        with torch.no_grad(), without_modes():  # no meter counts what has no memory
            return module(*tree_map(as_meta, given), **tree_map(as_meta, named))

    def _like(self, output: object) -> object:
        if not isinstance(output, Tensor):
            return output
        if not output.is_floating_point():
            kind = str(output.dtype).removeprefix("torch.")
            raise TypeError(f"a module before the layers returns {kind} {list(output.shape)}")
        return self._crossing.shaped(output.shape)


def _kinds(given: tuple[Any, ...], named: dict[str, Any]) -> Hashable | None:
    """Shapes and dtypes of tensors, and plain values as they are; None where there is anything
    else, of which nobody knows whether it is the same."""
    values = (*given, *named.values())
    if not all(isinstance(value, (Tensor, *_PLAIN)) for value in values):
        return None
    kinds = ((v.shape, v.dtype) if isinstance(v, Tensor) else (type(v), v) for v in values)
    return (tuple(named), *kinds)


_MOST = 64  # kinds of what is given that are kept: a step's number may be among it
_PLAIN = (bool, int, float, str, type(None))


class StagePart(nn.Module):
    """A stage's part of a model, as a class over the model's own, which takes what the model takes,
    and behind the first stage hidden states before that. It returns the hidden states for the next
    stage, or on the last one what the model returns."""

    _crossing: Crossing
    _first: str  # of the stage's layers; none on the first stage, which enters nowhere
    _front: dict[
        str, torch.Size
    ]  # parameters in front of the layers that belong to no module there

    def forward(self, *given: Any, **named: Any) -> Any:
        try:
            if not self._first:
                return super().forward(*given, **named)
            with self._entered(given[0]):
                return super().forward(*given[1:], **named)
        except Left as left:
            return left.hidden

    @contextmanager
    def _entered(self, hidden: Tensor) -> Iterator[None]:
        self._crossing.enter(hidden)
        for name, shape in self._front.items():
            owner, attribute = _owner(self, name)
            owner.__dict__[attribute] = self._crossing.shaped(shape)
        # a data axis gathers, and watches gradients, by hooks on the layer that were there before:
        # they must be given the hidden states
        handle = self.get_submodule(self._first).register_forward_pre_hook(
            self._crossing.swapped, prepend=True, with_kwargs=True
        )
        try:
            yield
        finally:
            handle.remove()
            self._crossing.enter(None)
            for name in self._front:
                owner, attribute = _owner(self, name)
                del owner.__dict__[attribute]


class CalledOnce:
    """A stage as the model that whoever computes a loss calls: it is given the hidden states by the
    way, and one before the last goes no further than the call."""

    def __init__(self, module: nn.Module, hidden: Tensor | None, *, is_last: bool) -> None:
        self._module, self._is_last = module, is_last
        self._given = () if hidden is None else (hidden,)
        self._was_called = False

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if self._was_called:
            raise RuntimeError("the model is called twice, and a stage is given one micro-batch")
        self._was_called = True
        output = self._module(*self._given, *inputs, **named)
        if self._is_last:
            return output
        raise Left(output)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def run_stage(model: CalledOnce, forward: Callable[[Any], Any]) -> Any:
    """Return what a stage hands on, or on the last stage what `forward` makes of the model."""
    try:
        return forward(model)
    except Left as left:
        return left.hidden


def as_part(model: nn.Module, crossing: Crossing, *, first: str, front: Iterable[str]) -> None:
    """Make `model`, whose other stages' modules are replaced, a StagePart in place, without the
    parameters that `front` names. `first` is the layer where it is entered, if it is."""
    shapes = {}
    for name in front:
        shapes[name] = model.get_parameter(name).shape
        owner, attribute = _owner(model, name)
        delattr(owner, attribute)
    kind = type(model)
    model.__class__ = type(kind.__name__, (StagePart, kind), {"__module__": kind.__module__})
    vars(model).update(_crossing=crossing, _first=first, _front=shapes)


def _first_real(values: Any) -> Tensor:
    """The hidden states that a layer is given: its first tensor of real numbers."""
    first = first_real(values)
    assert first is not None, "a layer is given hidden states"
    return first


def _replaced(value: Any, before: Tensor, behind: Tensor) -> Any:
    """Return the same with one tensor for another. It is asked for in every pass: plain containers
    do without torch's tree_map."""
    if value is before:
        return behind
    match value:
        case Tensor() | bool() | int() | float() | str() | None:
            return value
        case tuple() if type(value) is tuple:
            return tuple([_replaced(item, before, behind) for item in value])
        case dict() if type(value) is dict:
            return {key: _replaced(item, before, behind) for key, item in value.items()}
    return tree_map(lambda x: behind if x is before else x, value)


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute
