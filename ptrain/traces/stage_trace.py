"""The tracer of a stage: what its passes allocate, each by itself, as the runtime of a pipeline
runs them: forward, then backward whole or as its two halves.

What comes from outside (the hidden states, the gradient of the output) lived before, and what goes
outside (the output, the gradient of the input) lives on: how long depends on the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ptrain.axes.pipeline.run.cut import apart
from ptrain.axes.pipeline.run.passes import backward, backward_input, backward_weight
from ptrain.models.ledger import storage_of
from ptrain.models.trace import Born, Completion, Died, Event, Marker, Recording
from ptrain.models.work import WorkRecorder, repeated

Loss = Callable[[Tensor], Tensor]
Units = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class PassEvents:
    """The events of each pass of one micro-batch: forward and backward, or forward, input and
    weight; `sizes` of all storages by id, `output` the id of what the stage hands on. `moved`,
    `statistics` and `repeated` as a recording and a timeline have them."""

    events: dict[str, tuple[Event, ...]]
    sizes: dict[int, int]
    output: int
    moved: tuple[tuple[int, str], ...] = ()
    repeated: tuple[tuple[str, int], ...] = ()
    statistics: frozenset[int] = frozenset()

    def recording(self) -> Recording:
        """Return the recording as of a whole model: all that is not forward is one backward."""
        forward, *others = self.events.values()
        backward = tuple(event for events in others for event in events)
        return Recording(forward, backward, self.sizes, self.moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStage:
    """What is traced: a stage's module, with what it takes and gets. `hidden` is what goes over a
    boundary; `given` the first stage's tokens, `loss` the last stage's, whose forward pass runs in
    `around`."""

    module: nn.Module
    units: Units
    hidden: Tensor
    given: Tensor | None = None
    loss: Loss | None = None
    around: Callable[[], AbstractContextManager[None]] = nullcontext


class _Recorder(WorkRecorder):
    """Sees which gradients are added to those of the micro-batch before."""

    def __init__(self) -> None:
        super().__init__()
        self.added: dict[int, str] = {}
        self._names: dict[int, str] = {}

    def add_to(self, name: str, gradient: Tensor) -> None:
        """Whatever is added to this tensor is the gradient of `name`."""
        self.watch(gradient)
        self._names[storage_of(gradient)._cdata] = name

    def __torch_dispatch__(
        self,
        function: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function is torch.ops.aten.add_.Tensor:
            added = args[1]  # a number where nothing is a gradient
            name = self._names.get(storage_of(args[0])._cdata)
            if name is not None and isinstance(added, Tensor):
                number = self._ids.get(storage_of(added)._cdata)
                if number is not None:
                    self.added[number] = name
        return super().__torch_dispatch__(function, types, args, kwargs)


def record_passes(traced: TracedStage, *, in_halves: bool = False) -> PassEvents:
    """Runs one micro-batch through the stage; its gradients are left empty. The first stage has no
    halves: nobody waits for a gradient of tokens."""
    recorder = _Recorder()
    recorder.follow(traced.module)
    inner, gradient = traced.hidden, traced.hidden.detach().clone()
    x = inner.detach().requires_grad_() if traced.given is None else traced.given
    for tensor in (*traced.module.parameters(), *traced.module.buffers(), x, gradient):
        recorder.watch(tensor)
    marker = Marker(recorder, traced.module, traced.units)
    run = _Run(traced, recorder, x, gradient)
    try:
        if in_halves:
            run.fill_gradients()
        with recorder:
            run.forward()
            run.in_halves() if in_halves else run.backward()
    finally:
        marker.remove()
        traced.module.zero_grad(set_to_none=True)
    events = {name: tuple(pass_events) for name, pass_events in run.passes.items()}
    if in_halves:
        events["weight"] = _completed(events["weight"], recorder.added)
    output = recorder._ids[storage_of(run.output)._cdata]
    moved = tuple(recorder.moved)
    return PassEvents(
        events=events,
        sizes=recorder.born_sizes,
        output=output,
        moved=moved,
        repeated=repeated(recorder),
        statistics=frozenset(recorder.statistics),
    )


class _Run:
    """One micro-batch. What the schedule keeps is kept here too, until after the last pass."""

    def __init__(
        self, traced: TracedStage, recorder: _Recorder, x: Tensor, gradient: Tensor
    ) -> None:
        self.traced, self.recorder = traced, recorder
        self.x, self.gradient = x, gradient
        self.passes: dict[str, list[Event]] = {}
        self.kept: list[Any] = []
        self.output: Tensor
        self.loss: Tensor | None = None

    def fill_gradients(self) -> None:
        for name, parameter in self.traced.module.named_parameters():
            parameter.grad = torch.zeros_like(parameter)
            self.recorder.add_to(name, parameter.grad)

    def forward(self) -> None:
        with self.traced.around():
            self.output = apart(self.traced.module(self.x))
        if self.traced.loss is not None:
            self.loss = self.traced.loss(self.output)
        self._end("forward")

    def backward(self) -> None:
        root, gradient = self._root()
        self.kept.append(backward(root, gradient, self.x))
        del root
        self._hand_on()
        self._end("backward")

    def in_halves(self) -> None:
        root, gradient = self._root()
        parameters = list(self.traced.module.parameters())
        given, groups = backward_input(root, gradient, self.x, parameters)
        self.kept.append(given)
        del root
        self._hand_on()
        self._end("input")
        backward_weight(parameters, groups)
        del groups
        self._end("weight")

    def _root(self) -> tuple[Tensor, Tensor | None]:
        if self.loss is not None:
            return self.loss, None
        return self.output, self.gradient

    def _hand_on(self) -> None:
        """What is left of the output is its bytes."""
        self.output = self.output.detach()

    def _end(self, name: str) -> None:
        done = sum(map(len, self.passes.values()))
        self.passes[name] = self.recorder.events[done:]


def _completed(events: Sequence[Event], added: dict[int, str]) -> tuple[Event, ...]:
    """Gradients of weights that would go where they are added stand alive instead. What is left of
    the graph goes in the end, whatever the layer: behind the last allocation only gradients are
    listed."""
    last = max(place for place, event in enumerate(events) if isinstance(event, Born))
    completed: list[Event] = []
    for place, event in enumerate(events):
        if isinstance(event, Died) and event.id in added:
            completed.append(Completion(added[event.id], event.id, False))
        elif place <= last:
            completed.append(event)
    return tuple(completed)
