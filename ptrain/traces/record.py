"""Run one micro-batch of a model, or of one of its stages, and record what happens.

The passes of a stage run one by one, as a pipeline runs them: forward, then backward whole or in
two halves. Inputs (hidden states, the output's gradient) are alive before a pass and outputs after
it; for how long is up to the schedule. Hooks record where units begin and end, and which values of
a tensor are read by Python or NumPy without an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ptrain.axes.pipeline.run.cut import apart
from ptrain.axes.pipeline.run.passes import backward, backward_input, backward_weight
from ptrain.axes.pipeline.run.stand_ins import CalledOnce, run_stage
from ptrain.models.leaving import has_gradient, when_left
from ptrain.models.ledger import local
from ptrain.models.objective import SampleBatch
from ptrain.models.recomputing import runs_again
from ptrain.models.recorder import Recorder
from ptrain.models.selection import Extent
from ptrain.models.trace import Recording
from ptrain.timeline import Boundary, Mark

_METHODS = ("tolist", "numpy")  # which `numpy.asarray` calls too


@contextmanager
def seeing_reads(note: Callable[[Tensor], None]) -> Iterator[None]:
    """While entered, `note` is called with each tensor whose values are read so."""
    inherited = [name for name in _METHODS if name not in vars(Tensor)]
    methods = {name: getattr(Tensor, name) for name in _METHODS}
    for name, method in methods.items():
        setattr(Tensor, name, _noted(method, note))
    try:
        yield
    finally:
        for name, method in methods.items():
            if name in inherited:
                delattr(Tensor, name)
            else:
                setattr(Tensor, name, method)


def _noted(method: Callable[..., Any], note: Callable[[Tensor], None]) -> Callable[..., Any]:
    @wraps(method)
    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        note(tensor)
        return method(tensor, *args, **kwargs)

    return noted


class Notes(Protocol):
    """What boundaries and gradients are written into, as a recorder is."""

    events: list[Any]

    def complete(self, name: str, gradient: Tensor) -> None:
        """A gradient is in place."""


class Marker:
    """Hooks that write a unit's boundaries into a recorder, where FSDP2's hooks would run. What
    runs again in backward has none."""

    def __init__(self, recorder: Notes, model: nn.Module, units: Sequence[tuple[str, ...]]) -> None:
        self._recorder = recorder
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        places = {
            name: place
            for place, (name, _) in enumerate(model.named_modules(remove_duplicate=False))
        }
        self._outer_first = sorted(range(len(units)), key=lambda index: places[units[index][0]])
        self._handles: list[Any] = []
        for index, modules in enumerate(units):
            first, last = model.get_submodule(modules[0]), model.get_submodule(modules[-1])
            self._handles += [
                first.register_forward_pre_hook(self._enter(index), with_kwargs=True),
                last.register_forward_hook(self._leave(index)),
            ]
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            hook = parameter.register_post_accumulate_grad_hook(self._complete(name))
            self._handles.append(hook)

    def remove(self) -> None:
        """Takes the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def _mark(self, mark: Mark, unit: int) -> None:
        self._recorder.events.append(Boundary(mark, unit))

    def _enter(self, unit: int) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if runs_again():
                return None
            self._mark(Mark.ENTER, unit)
            return when_left((args, kwargs), lambda: self._end(unit))

        return hook

    def _leave(self, unit: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not runs_again():
                self._mark(Mark.LEAVE, unit)
                tree_map(lambda x: self._watch_output(unit, x), output)

        return hook

    def _watch_output(self, unit: int, output: Any) -> None:
        if has_gradient(output):
            output.register_hook(lambda _: self._begin(unit))

    def _begin(self, unit: int) -> None:
        if not self._begun:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if unit not in self._begun:
            self._begun.add(unit)
            self._mark(Mark.PRE_BACKWARD, unit)

    def _end(self, unit: int) -> None:
        if unit not in self._ended:
            self._ended.add(unit)
            self._mark(Mark.POST_BACKWARD, unit)

    def _finish(self) -> None:
        """Units whose inputs need no gradient end with the backward pass, outer before inner."""
        for index in self._outer_first:
            self._end(index)

    def _complete(self, name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self._recorder.complete(name, parameter.grad)

        return hook


Units = Sequence[tuple[str, ...]]


@contextmanager
def _watching(
    module: nn.Module, units: Units, inputs: Sequence[Tensor], extent: Extent
) -> Iterator[Recorder]:
    """A recorder of a module whose gradients are left empty."""
    recorder = Recorder(module, inputs, extent)
    marker = Marker(recorder, module, units)
    try:
        with seeing_reads(lambda tensor: recorder.selection.read(local(tensor))):
            yield recorder
    finally:
        marker.remove()
        module.zero_grad(set_to_none=True)


def record(
    model: nn.Module,
    units: Units,
    run_forward: Callable[[], Tensor],
    *inputs: Tensor,
    extent: Extent = Extent.GIVEN,
) -> Recording:
    """Run `run_forward() -> loss` and the backward pass of a whole model and return what they
    allocated. The model's own tensors and `inputs` lived before and do not appear; its gradients
    are left empty. `extent`: how much its operators select by data."""
    with _watching(model, units, inputs, extent) as recorder:
        with recorder:
            loss = run_forward()
            recorder.end("forward")
            loss.backward()
            del loss
        recorder.end("backward")
    return recorder.recording()


class _Unread:
    """Notes that nobody reads."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def complete(self, name: str, gradient: Tensor) -> None:
        """A gradient is in place."""


def run_unrecorded(model: nn.Module, units: Units, run_forward: Callable[[], Tensor]) -> None:
    """Run the operators that `record` records; the model's gradients are left empty."""
    marker = Marker(_Unread(), model, units)
    try:
        run_forward().backward()
    finally:
        marker.remove()
        model.zero_grad(set_to_none=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStage:
    """What is traced: a stage's module, with what it takes and gets. `hidden` is what goes over a
    boundary, which the first stage is not given; `samples` are the micro-batch's; `forward` runs
    the stage, given the model to call; `loss` is the last stage's, whose forward pass runs in
    `around`; `extent` how much operators select by data."""

    module: nn.Module
    units: Units
    hidden: Tensor
    samples: SampleBatch
    is_first: bool
    forward: Callable[[Any], Tensor]
    loss: Callable[[Tensor], Tensor] | None = None
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    extent: Extent = Extent.GIVEN


def record_stage(stage: TracedStage, *, in_halves: bool = False) -> Recording:
    """Run one micro-batch through the stage and return what each pass allocated; its gradients are
    left empty. The first stage has no halves: nobody waits for a gradient of tokens."""
    gradient = stage.hidden.detach().clone()
    hidden = stage.hidden.detach().requires_grad_()
    given = (hidden, gradient, *stage.samples.tensors)
    with _watching(stage.module, stage.units, given, stage.extent) as recorder:
        micro_batch = _MicroBatch(stage, recorder, hidden, gradient)
        if in_halves:
            micro_batch.fill_gradients()
        with recorder:
            micro_batch.forward()
            micro_batch.in_halves() if in_halves else micro_batch.backward()
        return recorder.recording(micro_batch.output)


class _MicroBatch:
    """A micro-batch on a stage. What the schedule keeps is kept here too, until the last pass is
    over."""

    def __init__(
        self, stage: TracedStage, recorder: Recorder, hidden: Tensor, gradient: Tensor
    ) -> None:
        self.stage, self.recorder, self.gradient = stage, recorder, gradient
        self.hidden = None if stage.is_first else hidden
        self.x = stage.samples.tensors[0] if stage.is_first else hidden
        self.kept: list[Any] = []
        self.output: Tensor
        self.loss: Tensor | None = None

    def fill_gradients(self) -> None:
        """Give every parameter a gradient, to which that of the micro-batch is added."""
        for name, parameter in self.stage.module.named_parameters():
            parameter.grad = torch.zeros_like(parameter)
            self.recorder.accumulates(name, parameter.grad)

    def forward(self) -> None:
        with self.stage.around():
            is_last = self.stage.loss is not None
            model = CalledOnce(self.stage.module, self.hidden, is_last=is_last)
            self.output = apart(run_stage(model, self.stage.forward))
        if self.stage.loss is not None:
            self.loss = self.stage.loss(self.output)
        self.recorder.end("forward")

    def backward(self) -> None:
        root, gradient = self._root()
        self.kept.append(backward(root, gradient, self.x))
        del root
        self._hand_on()
        self.recorder.end("backward")

    def in_halves(self) -> None:
        root, gradient = self._root()
        parameters = list(self.stage.module.parameters())
        given, groups = backward_input(root, gradient, self.x, parameters)
        self.kept.append(given)
        del root
        self._hand_on()
        self.recorder.end("input")
        backward_weight(parameters, groups)
        del groups
        self.recorder.end("weight")

    def _root(self) -> tuple[Tensor, Tensor | None]:
        if self.loss is not None:
            return self.loss, None
        return self.output, self.gradient

    def _hand_on(self) -> None:
        """What is left of the output is its bytes."""
        self.output = self.output.detach()
