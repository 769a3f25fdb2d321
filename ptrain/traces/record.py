"""Runs one micro-batch of a model, or of a stage of one, and writes down what happens.

A stage's passes run each by itself, as the runtime of a pipeline runs them: forward, then backward
whole or as its two halves. What comes from outside (the hidden states, the gradient of the output)
lived before, and what goes outside (the output, the gradient of the input) lives on: how long
depends on the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ptrain.axes.pipeline.run.cut import apart
from ptrain.axes.pipeline.run.passes import backward, backward_input, backward_weight
from ptrain.axes.pipeline.run.stand_ins import CalledOnce, run_stage
from ptrain.models.batch import SampleBatch
from ptrain.models.ledger import local
from ptrain.models.marker import Marker
from ptrain.models.reads import seeing_reads
from ptrain.models.recorder import Recorder
from ptrain.models.selection import Extent
from ptrain.models.trace import Recording

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
