"""Cut a stage's part from a model, with placeholders for all modules that it lacks.

The first stage takes tokens, the others hidden states and tokens. The last one returns the model's
output, the others hidden states. All remaining modules keep their names.

The model's forward runs in every part. A later stage enters it at its first layer, which gets the
received hidden states instead of its input. An earlier stage leaves it at the layer after its last
one, with the input of that layer. The model's computation around its layers (masks, rotations,
views of the tokens) runs on every stage. The output of its embeddings has no memory on later
stages, and the modules after its layers run on the last stage only.
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

from ptrain.errors import Fault, SpecError, input_error
from ptrain.facts.stages import Chain, Stage
from ptrain.internals.dispatch import disable_modes
from ptrain.models.boundary import convert_exceptions, describe_error
from ptrain.models.chain import probe_batch
from ptrain.models.ledger import first_real, is_real
from ptrain.models.meta import as_meta, on_meta
from ptrain.models.modes import (
    copied_buffers,
    drawn_state,
    fork_generators,
    in_mode,
    without_dropout,
)
from ptrain.models.objective import SampleBatch, TokenPair, objective_of
from ptrain.models.transformer import Transformer
from ptrain.spec.spec import Spec


class StageInput:
    """The hidden states that a stage received for the micro-batch in its forward pass.

    `is_written`: the model writes into the outputs of the placeholders for modules before its
    layers.
    """

    def __init__(self, *, is_written: bool) -> None:
        self._is_written = is_written
        self._hidden: Tensor | None = None
        # one element of the hidden states, whose memory placeholders share
        self._number: Tensor | None = None
        self._before: Tensor | None = None

    @property
    def hidden_states(self) -> Tensor:
        """The received hidden states [samples, ...], during the forward pass of a later stage."""
        assert self._hidden is not None, "only a stage behind the first is given hidden states"
        return self._hidden

    def enter(self, hidden: Tensor | None) -> None:
        """Begin a forward pass with the received hidden states, or end it with None."""
        self._hidden, self._before, self._number = hidden, None, None

    @property
    def earlier_output(self) -> Tensor:
        """The output of each earlier layer.

        There may be a hundred, so they share one tensor, unless it is written into.
        """
        # A tensor that the model writes into cannot be shared between layers.
        if self._before is None or self._is_written:
            self._before = self.make_placeholder(self.hidden_states.shape)
        return self._before

    def replace_input(self, _: nn.Module, given: Any, named: Any) -> Any:
        """Replace the first layer's input by the hidden states (forward pre-hook).

        The input is the first floating-point tensor among the arguments.

        Args:
            _: The layer, which is not used.
            given: Its positional arguments.
            named: Its keyword arguments.

        Returns:
            Both kinds of arguments, with the input replaced.
        """
        first = given[0] if given and is_real(given[0]) else _hidden_among((given, named))
        return _replace_tensor((given, named), first, self.hidden_states)

    def make_placeholder(self, shape: Iterable[int]) -> Tensor:
        """Return a tensor with arbitrary values, in dtype and device like the hidden states.

        Args:
            shape: The size of each dimension.

        Returns:
            The tensor. It has no memory, unless the model writes into it.
        """
        if self._is_written:
            return self.hidden_states.detach().new_zeros(*shape)
        if self._number is None:
            # A view of one element needs no memory.
            self._number = self.hidden_states.detach()[(0,) * self.hidden_states.dim()]
        return self._number.expand(*shape)


class StageExit(Exception):
    """The end of a forward pass at a layer of the next stage, with the `hidden` states for it."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class EarlierLayer(nn.Identity):
    """The placeholder for a layer of an earlier stage, which returns a tensor like hidden states.

    `returns` is the length of the tuple that the layer returns, whose other items are None; 0 for a
    tensor.
    """

    def __init__(self, crossing: StageInput, returns: int) -> None:
        super().__init__()
        self._crossing, self._returns = crossing, returns

    def forward(self, *_: Any, **__: Any) -> Any:
        hidden = self._crossing.earlier_output
        return (hidden, *(None,) * (self._returns - 1)) if self._returns else hidden


class LaterLayer(nn.Identity):
    """The placeholder for a layer of a later stage, at which the forward pass ends."""

    def forward(self, *given: Any, **named: Any) -> Any:
        # An exception leaves the model's forward in the middle without a change of its code.
        raise StageExit(_hidden_among((given, named)))


class InputPlaceholder(nn.Identity):
    """The placeholder for a module before the layers, on a later stage.

    Its output has the shape of the module's output, but no memory. The module runs on the meta
    device, once for each shape and dtype of its inputs.
    """

    def __init__(self, module: nn.Module, crossing: StageInput) -> None:
        super().__init__()
        self._crossing = crossing
        self._module = (on_meta(module),)  # in a tuple, so that it is not registered as a child
        self._outputs: dict[Hashable, Tensor] = {}  # on the meta device

    def forward(self, *given: Any, **named: Any) -> Any:
        # Training and evaluation may take other branches.
        key = self.training, _input_key(given, named)
        if key in self._outputs:
            return self._placeholder_like(self._outputs[key])
        output = self._run_on_meta(given, named)
        if key[1] is not None and isinstance(output, Tensor) and len(self._outputs) < _MAX_CACHED:
            self._outputs[key] = output
        return tree_map(self._placeholder_like, output)

    def _run_on_meta(self, given: Any, named: Any) -> Any:
        """Run the module on meta, outside all modes, since meters must not count its tensors."""
        (module,) = self._module
        with torch.no_grad(), disable_modes():  # meters must not count meta tensors
            return module(*tree_map(as_meta, given), **tree_map(as_meta, named))

    def _placeholder_like(self, output: object) -> object:
        """Return a placeholder for an output tensor."""
        if not isinstance(output, Tensor):
            return output
        if not output.is_floating_point():
            kind = str(output.dtype).removeprefix("torch.")
            raise TypeError(f"a module before the layers returns {kind} {list(output.shape)}")
        return self._crossing.make_placeholder(output.shape)


def _input_key(given: tuple[Any, ...], named: dict[str, Any]) -> Hashable | None:
    """Return a key of shapes, dtypes and plain values, None if there are other arguments.

    Other arguments cannot be compared, so their outputs are not cached.
    """
    values = (*given, *named.values())
    if not all(isinstance(value, (Tensor, *_PLAIN)) for value in values):
        return None
    kinds = ((v.shape, v.dtype) if isinstance(v, Tensor) else (type(v), v) for v in values)
    return (tuple(named), *kinds)


_MAX_CACHED = 64  # most cached outputs: inputs may include a step number
_PLAIN = (bool, int, float, str, type(None))


class StagePart(nn.Module):
    """A stage's part of a model, as a class derived from the model's.

    It takes the model's inputs and, on later stages, hidden states before them. It returns the
    hidden states for the next stage, or on the last stage the model's output.
    """

    _crossing: StageInput
    _first: str  # the stage's first layer; "" on the first stage
    _front: dict[
        str, torch.Size
    ]  # shapes of parameters before the layers that belong to no module there

    def forward(self, *given: Any, **named: Any) -> Any:
        try:
            if not self._first:
                return super().forward(*given, **named)
            with self._with_hidden(given[0]):
                return super().forward(*given[1:], **named)
        except StageExit as left:
            return left.hidden

    @contextmanager
    def _with_hidden(self, hidden: Tensor) -> Iterator[None]:
        """Temporarily install the received hidden states."""
        self._crossing.enter(hidden)
        for name, shape in self._front.items():
            owner, attribute = _owner_and_attribute(self, name)
            owner.__dict__[attribute] = self._crossing.make_placeholder(shape)
        # Hooks of data axes on this layer were registered earlier, so this one is prepended: they
        # must see the hidden states.
        handle = self.get_submodule(self._first).register_forward_pre_hook(
            self._crossing.replace_input, prepend=True, with_kwargs=True
        )
        try:
            yield
        finally:
            handle.remove()
            self._crossing.enter(None)
            for name in self._front:
                owner, attribute = _owner_and_attribute(self, name)
                del owner.__dict__[attribute]


class CalledOnce:
    """A stage as the model that the loss's code calls.

    It passes the hidden states to the stage. Before the last stage, the call ends the loss's code.
    """

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
        raise StageExit(output)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def run_stage(model: CalledOnce, forward: Callable[[Any], Any]) -> Any:
    """Return a stage's output, or on the last stage the result of `forward` for the model."""
    try:
        return forward(model)
    except StageExit as left:
        return left.hidden


def as_part(model: nn.Module, crossing: StageInput, *, first: str, front: Iterable[str]) -> None:
    """Make a model a StagePart in place.

    Args:
        model: The model, with placeholders for other stages' modules.
        crossing: The received hidden states.
        first: Name of the layer at which forward is entered; "" on the first stage.
        front: Names of parameters before the layers, which are removed.
    """
    # The shapes are kept for placeholders, since the model's code may still read these parameters.
    shapes = {}
    for name in front:
        shapes[name] = model.get_parameter(name).shape
        owner, attribute = _owner_and_attribute(model, name)
        delattr(owner, attribute)
    # a subclass of the model's class: its forward and its methods stay available
    kind = type(model)
    model.__class__ = type(kind.__name__, (StagePart, kind), {"__module__": kind.__module__})
    vars(model).update(_crossing=crossing, _first=first, _front=shapes)


def _hidden_among(values: Any) -> Tensor:
    """Return the hidden states among a layer's inputs: the first floating-point tensor."""
    first = first_real(values)
    assert first is not None, "a layer is given hidden states"
    return first


def _replace_tensor(value: Any, before: Tensor, behind: Tensor) -> Any:
    """Return a nested value with one tensor replaced by another.

    It runs in every pass, so plain containers are handled without torch's slower tree_map.
    """
    if value is before:
        return behind
    match value:
        case Tensor() | bool() | int() | float() | str() | None:
            return value
        case tuple() if type(value) is tuple:
            return tuple([_replace_tensor(item, before, behind) for item in value])
        case dict() if type(value) is dict:
            return {key: _replace_tensor(item, before, behind) for key, item in value.items()}
    return tree_map(lambda x: behind if x is before else x, value)


def _owner_and_attribute(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that owns a parameter, and its attribute name there."""
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


@torch.no_grad()
def part_of(model: nn.Module, stages: Sequence[Stage], index: int, chain: Chain) -> nn.Module:
    """Return one stage's part of a model.

    It shares its parameters with `model`, except tensors that another stage has too, and has
    separate buffers.

    Args:
        model: The full model.
        stages: All stages.
        index: The stage.
        chain: The modules that stages are cut from.
    """
    stage, crossing = stages[index], StageInput(is_written=chain.is_written)
    known, parameters = dict(model.named_modules()), dict(model.named_parameters())
    front, behind = chain.absent_ends(stage)
    gone: dict[int, nn.Module] = {
        id(known[name]): _stand_in(known[name], name, stage, chain, crossing)
        for name in chain.absent_names(stage)
        if name in known  # a tied head may not be a module
    }
    # the memo shares the parameters with the model, and puts placeholders in place of modules
    part = copy.deepcopy(model, {**{id(own): own for own in parameters.values()}, **gone})
    for name in behind:
        if name in parameters:
            owner, _, attribute = name.rpartition(".")
            setattr(part.get_submodule(owner), attribute, None)
    bare = [name for name in front if name in parameters]
    as_part(part, crossing, first=stage.layers[0] if index else "", front=bare)
    for name, copied in stage.copied:
        _add_copy(part, copied, model.get_parameter(name))
    return part


def _stand_in(
    module: nn.Module, name: str, stage: Stage, chain: Chain, crossing: StageInput
) -> nn.Module:
    """Return the placeholder for a module that the stage lacks."""
    if name in chain.ends.front:
        return InputPlaceholder(module, crossing)
    if name in chain.ends.behind:
        return nn.Identity()  # never reached in forward
    is_before = chain.layers.index(name) < chain.layers.index(stage.layers[0])
    return EarlierLayer(crossing, chain.returns) if is_before else LaterLayer()


def contiguous_output(output: torch.Tensor) -> torch.Tensor:
    """Return a stage's output as a contiguous tensor that is not a view.

    torch detaches it in place, which views do not support.

    A contiguous output is not copied.
    """
    output = output.contiguous()
    # `stage_backward_input` (torch/distributed/pipelining/_backward.py) ends with `t.detach_()`.
    return _WithoutView.apply(output) if output._is_view() else output


class _WithoutView(torch.autograd.Function):
    """The identity, whose output is no view of its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _add_copy(part: nn.Module, name: str, source: nn.Parameter) -> None:
    """Put the stage's copy of a tensor into its module.

    A built-in model's tied head is no module, so a new one is created.
    """
    path, _, attribute = name.rpartition(".")
    if path == "head" and isinstance(part, Transformer):
        part.head = part.new_head(device="meta", dtype=source.dtype)
    own = nn.Parameter(source.detach().clone(), source.requires_grad)
    setattr(part.get_submodule(path), attribute, own)


# Check that a model's stages give the model's output. A stage may need more of the earlier
# ones than hidden states: a number without gradient, or a value in a buffer. Every stage runs the
# model's forward with arbitrary numbers in place of the modules before its layers.


Forward = Callable[[Any], Any]

# of the largest logit; operators and sizes are identical, so only a few roundings can differ
_ROUNDINGS = 4


def require_alike(model: nn.Module, stages: Sequence[Stage], chain: Chain, spec: Spec) -> None:
    """Require that a model's stages, one after the other, give the model's output.

    They are compared in training mode without dropout, or in evaluation mode if the model still
    draws random numbers. This takes three forward passes of a few tokens, or of one of the user's
    micro-batches.

    Args:
        model: The model, with weights.
        stages: All stages.
        chain: The modules that stages are cut from.
        spec: The spec, for the loss and the samples.

    Raises:
        SpecError: They differ.
    """
    samples = probe_batch(model, spec)
    forward = partial(objective_of(spec).forward, samples=samples)
    with torch.no_grad(), fork_generators(), without_dropout(model):
        draws = _draws_random_numbers(model, forward)
        with in_mode(model, training=not draws):
            with copied_buffers(model):
                # In copied buffers: a forward pass may write into them, and the stages must start
                # from the same values.
                whole = forward(model)
                written = {name: buffer.clone() for name, buffer in model.named_buffers()}
            hidden = _run_stages(model, stages, chain, samples, forward, written)
    if not _is_close(hidden, whole):
        more = "layers pass more than hidden states to each other (tensors without gradients)"
        raise _not_splittable(f"{more}: the stages compute different outputs than the model")


def _draws_random_numbers(model: nn.Module, forward: Forward) -> bool:
    """Return True if a forward pass in training mode draws random numbers."""
    before = drawn_state()
    with in_mode(model, training=True), copied_buffers(model):
        forward(model)
    return bool(drawn_state() != before)


def _run_stages(
    model: nn.Module,
    stages: Sequence[Stage],
    chain: Chain,
    samples: SampleBatch,
    forward: Forward,
    written: Mapping[str, Tensor],
) -> Tensor:
    """Return the last stage's output, with each stage run on the previous one's output.

    Raises:
        SpecError: A stage fails, or writes other values than `written` into a buffer.
    """
    hidden, last = None, len(stages) - 1
    for index in range(len(stages)):
        part = part_of(model, stages, index, chain)
        hidden = _run_checked(CalledOnce(part, hidden, is_last=index == last), index, forward)
        _require_equal_buffers(part, index, written)
        if index < last:
            _require_shape(hidden, index, chain, samples)
    assert hidden is not None, "there is a stage"
    return hidden


def _run_checked(called: CalledOnce, index: int, forward: Forward) -> Tensor:
    """Return a stage's output."""

    def fault(error: BaseException) -> Fault:
        return _not_splittable(
            f"stage {index} does not run on its own inputs: {describe_error(error)}"
        ).faults[0]

    with convert_exceptions(fault):
        output = run_stage(called, forward)
    if not isinstance(output, Tensor):
        raise _not_splittable(
            f"stage {index} returns a {type(output).__name__} instead of one tensor"
        )
    return output


def _require_shape(hidden: Tensor, index: int, chain: Chain, samples: SampleBatch) -> None:
    """Require that a stage's output has the shape of hidden states."""
    tokens = samples.inputs.shape[1] if isinstance(samples.data, TokenPair) else 0
    wanted = [samples.rows, *chain.sample_shape(tokens)]
    if list(hidden.shape) != wanted:
        raise _not_splittable(
            f"stage {index} returns {list(hidden.shape)}, but hidden states are {wanted}"
        )


def _require_equal_buffers(part: nn.Module, index: int, buffers: Mapping[str, Tensor]) -> None:
    """Require that a stage writes the model's values into its buffers."""
    for name, buffer in part.named_buffers():
        if name in buffers and not _is_close(buffer, buffers[name]):
            raise _not_splittable(
                f"the forward pass modifies {name}, and stage {index} writes different values"
            )


def _is_close(own: Tensor, whole: Tensor) -> bool:
    """Return True if two tensors are equal up to `_ROUNDINGS` roundings of the largest value."""
    if own.dtype != whole.dtype or own.shape != whole.shape:
        return False
    if not own.is_floating_point():
        return torch.equal(own, whole)
    bound = _ROUNDINGS * torch.finfo(whole.dtype).eps * whole.abs().nan_to_num().max().item()
    return torch.allclose(own, whole, rtol=0.0, atol=bound, equal_nan=True)


def _not_splittable(finding: str) -> SpecError:
    """Return the error for a model that cannot be split."""
    return input_error(
        "mesh.pp",
        f"the model cannot be split into stages by its modules: {finding}",
        "Use a model whose layers pass only hidden states to each other, or remove `mesh.pp`.",
    )
