"""Cut a stage's part from a model: the model itself, with stand-ins for the layers of other stages
and for the missing ends.

The first stage takes tokens, the others hidden states and tokens; the last one returns the model's
output, the others hidden states. All remaining modules keep their names.

The model's own forward runs in every part. Every stage after the first enters it at its first
layer, which is given the received hidden states instead of its input. Every stage before the last
leaves it at the layer after its own, with the input of that layer. The model's computation around
its layers (masks, rotations, views of the tokens) runs on every stage. The output of its embeddings
has no memory on later stages, and the modules after its layers run on the last one alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ptrain.errors import Fault, SpecError, refused
from ptrain.facts.stages import Chain, Stage
from ptrain.internals.dispatch import without_modes
from ptrain.models.boundary import boundary, said
from ptrain.models.chain import probe
from ptrain.models.meta import as_meta, on_meta
from ptrain.models.modes import copied_buffers, drawn_state, forked, in_mode, without_dropout
from ptrain.models.objective import SampleBatch, TokenPair, objective_of
from ptrain.models.transformer import Transformer
from ptrain.models.watch import first_real, is_real
from ptrain.spec.spec import Spec


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


@torch.no_grad()
def part_of(model: nn.Module, stages: Sequence[Stage], index: int, chain: Chain) -> nn.Module:
    """Return the part of stage `index`. It shares its parameters with `model`, but for what another
    stage has too, and has buffers of its own."""
    stage, crossing = stages[index], Crossing(is_written=chain.is_written)
    known, parameters = dict(model.named_modules()), dict(model.named_parameters())
    front, behind = chain.absent_ends(stage)
    gone: dict[int, nn.Module] = {
        id(known[name]): _stand_in(known[name], name, stage, chain, crossing)
        for name in chain.lacking(stage)
        if name in known  # a tied head may be no module
    }
    part = copy.deepcopy(model, {**{id(own): own for own in parameters.values()}, **gone})
    for name in behind:
        if name in parameters:
            owner, _, attribute = name.rpartition(".")
            setattr(part.get_submodule(owner), attribute, None)
    bare = [name for name in front if name in parameters]
    as_part(part, crossing, first=stage.layers[0] if index else "", front=bare)
    for name, copied in stage.copied:
        _copy(part, copied, model.get_parameter(name))
    return part


def _stand_in(
    module: nn.Module, name: str, stage: Stage, chain: Chain, crossing: Crossing
) -> nn.Module:
    if name in chain.ends.front:
        return InFront(module, crossing)
    if name in chain.ends.behind:
        return nn.Identity()  # no forward pass gets there
    is_before = chain.layers.index(name) < chain.layers.index(stage.layers[0])
    return LayerBefore(crossing, chain.returns) if is_before else LayerBehind()


def apart(output: torch.Tensor) -> torch.Tensor:
    """Return what a stage hands on: in one piece, as it is sent, and not as a view of what it was
    made of, since torch detaches it in place. If it was in one piece it has the same memory."""
    output = output.contiguous()
    return _Apart.apply(output) if output._is_view() else output


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _copy(part: nn.Module, name: str, source: nn.Parameter) -> None:
    """Put the stage's own copy of a tensor in the module that it belongs to; a built-in model,
    whose tied head is none, makes a new one."""
    path, _, attribute = name.rpartition(".")
    if path == "head" and isinstance(part, Transformer):
        part.head = part.new_head(device="meta", dtype=source.dtype)
    own = nn.Parameter(source.detach().clone(), source.requires_grad)
    setattr(part.get_submodule(path), attribute, own)


# Whether a model's stages, one after the other, compute what the model computes.
#
# A stage may need more of the ones before than their hidden states: a number that no gradient
# flows through, or that is written into a buffer. Every stage runs the model's own forward, with
# numbers that nobody needs in place of what is in front of its layers.


Forward = Callable[[Any], Any]

_ROUNDINGS = 4  # of the largest logit: the operators are the same, on tensors of the same sizes


def require_alike(model: nn.Module, stages: Sequence[Stage], chain: Chain, spec: Spec) -> None:
    """Raises SpecError where they do not: in training mode without dropout, or in evaluation mode
    where the model still draws random numbers. Costs three forward passes of a few tokens, or of a
    micro-batch of the user's."""
    samples = probe(model, spec)
    forward = partial(objective_of(spec).forward, samples=samples)
    with torch.no_grad(), forked(), without_dropout(model):
        draws = _draws(model, forward)
        with in_mode(model, training=not draws):
            with copied_buffers(model):
                whole = forward(model)
                written = {name: buffer.clone() for name, buffer in model.named_buffers()}
            hidden = _through(model, stages, chain, samples, forward, written)
    if not _is_alike(hidden, whole):
        more = "layers pass more than hidden states to each other (tensors without gradients)"
        raise _unlike(f"{more}: the stages compute different outputs than the model")


def _draws(model: nn.Module, forward: Forward) -> bool:
    """Whether a forward pass in training mode draws random numbers."""
    before = drawn_state()
    with in_mode(model, training=True), copied_buffers(model):
        forward(model)
    return bool(drawn_state() != before)


def _through(
    model: nn.Module,
    stages: Sequence[Stage],
    chain: Chain,
    samples: SampleBatch,
    forward: Forward,
    written: Mapping[str, Tensor],
) -> Tensor:
    """Return what the last stage gives, each given what the one before does. Raises SpecError for
    other numbers than `written` in a buffer."""
    hidden, last = None, len(stages) - 1
    for index in range(len(stages)):
        part = part_of(model, stages, index, chain)
        hidden = _output(CalledOnce(part, hidden, is_last=index == last), index, forward)
        _require_written_alike(part, index, written)
        if index < last:
            _require_shape(hidden, index, chain, samples)
    assert hidden is not None, "there is a stage"
    return hidden


def _output(called: CalledOnce, index: int, forward: Forward) -> Tensor:
    def fault(error: BaseException) -> Fault:
        return _unlike(f"stage {index} does not run on its own inputs: {said(error)}").faults[0]

    with boundary(fault):
        output = run_stage(called, forward)
    if not isinstance(output, Tensor):
        raise _unlike(f"stage {index} returns a {type(output).__name__} instead of one tensor")
    return output


def _require_shape(hidden: Tensor, index: int, chain: Chain, samples: SampleBatch) -> None:
    tokens = samples.inputs.shape[1] if isinstance(samples.data, TokenPair) else 0
    wanted = [samples.rows, *chain.sample_shape(tokens)]
    if list(hidden.shape) != wanted:
        raise _unlike(f"stage {index} returns {list(hidden.shape)}, but hidden states are {wanted}")


def _require_written_alike(part: nn.Module, index: int, buffers: Mapping[str, Tensor]) -> None:
    for name, buffer in part.named_buffers():
        if name in buffers and not _is_alike(buffer, buffers[name]):
            raise _unlike(
                f"the forward pass modifies {name}, and stage {index} writes different values"
            )


def _is_alike(own: Tensor, whole: Tensor) -> bool:
    if own.dtype != whole.dtype or own.shape != whole.shape:
        return False
    if not own.is_floating_point():
        return torch.equal(own, whole)
    bound = _ROUNDINGS * torch.finfo(whole.dtype).eps * whole.abs().nan_to_num().max().item()
    return torch.allclose(own, whole, rtol=0.0, atol=bound, equal_nan=True)


def _unlike(finding: str) -> SpecError:
    return refused(
        "mesh.pp",
        f"the model cannot be split into stages by its modules: {finding}",
        "Use a model whose layers pass only hidden states to each other, or remove `mesh.pp`.",
    )
