"""Run one micro-batch of a model or stage, and record all allocations and frees of operators, and
their computation and communication.

The passes of a stage run one by one, as in a pipeline: forward, then backward in full or in two
halves. Inputs (hidden states, the output's gradient) are alive before a pass, and outputs after it;
their lifetime is up to the schedule. Hooks record where units start and end, and reads of tensor
values by Python or NumPy without an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ptrain.axes.pipeline.run.cut import CalledOnce, contiguous_output, run_stage
from ptrain.axes.pipeline.run.passes import backward, backward_input, backward_weight
from ptrain.cost import Collective
from ptrain.internals.compiled import ProgramKernel, is_buffer, observe_kernels
from ptrain.models.ledger import (
    Ledger,
    is_recomputing,
    local_tensor,
    storage_of,
    tensors_of,
    tier_of,
    watch_modules,
)
from ptrain.models.objective import SampleBatch
from ptrain.models.parting import has_gradient, when_left
from ptrain.models.trace import (
    Event,
    Extent,
    GradientComplete,
    Recording,
    Selection,
    StorageAllocated,
    StorageFreed,
    Works,
)
from ptrain.models.work import (
    VIEW,
    OperatorWork,
    PassKind,
    RecordedCollective,
    find_collective,
    is_opaque,
    is_wait,
    kernel_sizes,
    sizes_of,
)
from ptrain.spec.placement import Tier
from ptrain.timeline import Boundary, Mark

_ATTENTION = "aten::_scaled_dot_product"
_COPIES = ("clone", "new_empty_strided", "empty_strided")


class Recorder(Ledger):
    """The ledger that records the events of `model`, with storages numbered in order.

    The model's tensors and `inputs` exist before the recording and have no events. `extent` sets
    the number of elements that data-dependent operators select.
    """

    def __init__(
        self, model: nn.Module, inputs: Sequence[Tensor], extent: Extent = Extent.GIVEN
    ) -> None:
        super().__init__()
        self.selection = Selection(extent)
        self.events: list[Event] = []
        self._passes: dict[str, tuple[Event, ...]] = {}
        self._sizes: dict[int, int] = {}
        self._moved: list[tuple[int, str]] = []
        self._works: list[tuple[int, OperatorWork]] = []  # of the current pass
        self._works_of: dict[str, Works] = {}
        self._draws = self._is_opaque = False
        self._under_way: dict[
            int, int
        ] = {}  # index in `_works` of collectives in flight, by storage of the result
        self._statistics: set[int] = set()
        self._of_call = 0  # storages allocated by the current operator
        self._ids: dict[int, int] = {}
        self._newborn: int | None = None
        self._accumulated: dict[int, str] = {}  # parameter name by storage of its gradient
        self._added: dict[int, str] = {}
        self._hooks = ExitStack()
        watch = watch_modules(model.named_modules(), is_first=True)
        self._running = self._hooks.enter_context(watch)  # forward, outermost first
        self._hooks.enter_context(observe_kernels(self._note_kernel))
        for tensor in (*model.parameters(), *model.buffers(), *inputs):
            self.watch(tensor)
        for tensor in (*model.parameters(), *inputs):
            self.selection.depends_on(local_tensor(tensor))

    def accumulates(self, name: str, gradient: Tensor) -> None:
        """Register the tensor to which gradients of the parameter `name` are added."""
        self.watch(gradient)
        self._accumulated[storage_of(gradient)._cdata] = name

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._hooks.close()

    def run_operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator and record its allocations and its computation."""
        is_kept = function is torch.ops.aten.add_.Tensor and self._note_addition(*args)
        self._settle()
        self._draws |= draws(function)
        self._of_call = 0
        self.selection.before_operator(function, args, self._running[-1] if self._running else "")
        result = super().run_operator(function, args, kwargs)
        self.selection.after_operator(function, (args, kwargs), result)
        if not is_kept:  # gradient accumulation depends on the wrapper
            self._note_work(function, args, kwargs, result)
        return result

    def _note_addition(self, to: Tensor, added: object, *_: Any) -> bool:
        """Record an addition to a registered gradient; return False for any other sum."""
        name = self._accumulated.get(storage_of(to)._cdata)
        if name is not None and isinstance(
            added, Tensor
        ):  # a plain number is added if there is no gradient
            number = self._ids.get(storage_of(added)._cdata)
            if number is not None:
                self._added[number] = name
        return name is not None

    def run_higher_order(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a higher-order operator of a program, and record the operator that it runs."""
        result = super().run_higher_order(function, args, kwargs)
        # run_and_save_rng_state takes (operator, *arguments) and returns the state and the result;
        # run_with_rng_state takes (state, operator, *arguments) (torch/_prims/rng_prims.py, 2.13).
        places = (n for n, given in enumerate(args) if isinstance(given, torch._ops.OpOverload))
        if (place := next(places, None)) is None:
            self._is_opaque = True
        else:
            own = result if place else result[1]
            self._note_work(args[place], args[place + 1 :], kwargs, own)
        return result

    def _note_kernel(self, kernel: ProgramKernel | None) -> None:
        """Record the computation of a fused kernel."""
        if kernel is None:
            self._is_opaque = True
            return
        place = len(self.events) - self._done()
        self._works.append((place, OperatorWork(self._when(), kernel_sizes(kernel))))

    def _note_work(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record the computation or collective of an operator."""
        if is_buffer():  # a program allocates without an operator
            return
        if any(tier_of(storage_of(x)) is not Tier.DEVICE for x in tensors_of(args)):
            return  # a copy between tiers, recorded as moved
        self._is_opaque |= is_opaque(function)
        exchange = find_collective(function, args, result)
        computed = [exchange] if exchange else sizes_of(function, args, kwargs, result)
        place, when = len(self.events) - self._done(), self._when()
        if is_wait(function) or computed not in ([], [VIEW]):
            self._see_arrivals((args, kwargs), result, is_awaited=is_wait(function))
        self._works += [(place, OperatorWork(when, what)) for what in computed]
        if exchange and exchange.collective is Collective.ALL_TO_ALL:
            self._under_way[storage_of(result)._cdata] = len(self._works) - 1

    def _see_arrivals(self, given: Any, result: Any, *, is_awaited: bool) -> None:
        """Record the overlap of collectives that an operator reads or awaits.

        Under fake tensors a message is awaited immediately, not where a run awaits it. For such a
        message the first operator that reads it counts as the wait.
        """
        for key in [storage_of(tensor)._cdata for tensor in tensors_of(given)]:
            if (number := self._under_way.get(key)) is None:
                continue
            beside = len(self._works) - 1 - number
            place, work = self._works[number]
            assert isinstance(work.record, RecordedCollective), "a message"
            if is_awaited and not beside and work.record.is_hop:
                self._under_way |= {storage_of(own)._cdata: number for own in tensors_of(result)}
                continue
            self._works[number] = place, replace(work, record=replace(work.record, beside=beside))
            self._under_way = {own: n for own, n in self._under_way.items() if n != number}

    def _when(self) -> PassKind:
        """Return the pass of an operator."""
        # A module that runs within backward is recomputed. Grad mode would not show this, because
        # collectives inside autograd functions run without gradients.
        if self._running and is_recomputing():
            return PassKind.AGAIN
        return PassKind.BACKWARD if is_recomputing() else PassKind.FORWARD

    def _settle(self) -> None:
        """Replace the birth of a storage off the device by a record in `_moved`.

        A storage gets its tier after it is allocated, but before the next operator.
        """
        key, self._newborn = self._newborn, None
        storage = self._references[key]() if key in self._references else None
        if key is None or storage is None or (tier := tier_of(storage)) is Tier.DEVICE:
            return
        number = self._ids.pop(key)
        birth = next(
            e for e in reversed(self.events) if isinstance(e, StorageAllocated) and e.id == number
        )
        self.events.remove(birth)
        self._moved.append((number, tier.value))

    def on_allocation(self, key: int, storage: torch.UntypedStorage, operator: str) -> None:
        number = len(self._sizes)
        self._ids[key], self._sizes[number] = number, storage.nbytes()
        self.events.append(StorageAllocated(number, storage.nbytes(), operator))
        self._newborn = key
        self._of_call += 1
        # The first output of fused attention is its result. The further ones (logsumexp, random
        # state) are the statistics, whose size depends on the kernel and not only on the
        # dimensions.
        is_forward = not operator.endswith("_backward")
        if self._of_call > 1 and is_forward and operator.startswith(_ATTENTION):
            self._statistics.add(number)

    def on_resize(self, key: int, storage: torch.UntypedStorage, before: int) -> None:
        raise RuntimeError("the model resized a storage, so it cannot be traced")

    def on_free(self, key: int, size: int) -> None:
        """Record the free of a storage."""
        self.selection.forget(key)
        self._under_way.pop(key, None)  # it was never read
        if key in self._ids:
            self.events.append(StorageFreed(self._ids.pop(key)))

    def complete(self, name: str, gradient: Tensor) -> None:
        """Record that the gradient of `name` is complete; called by a hook."""
        number = self._ids[storage_of(gradient)._cdata]
        places = reversed(range(len(self.events)))
        place, last = next(
            (p, e) for p in places if isinstance(e := self.events[p], StorageAllocated)
        )
        # AccumulateGrad copies by `new_empty_strided` and `copy_`, or by `clone` for a parameter
        # that is not dense (torch/csrc/autograd/utils/grad_layout_contract.h, torch 2.13).
        cloned = last.id == number and last.operator.split("::")[-1].startswith(_COPIES)
        freed: tuple[int, ...] = ()
        if cloned:
            freed = tuple(
                event.id for event in self.events[place:] if isinstance(event, StorageFreed)
            )
            del self.events[place]  # if a copy is made depends on other references to the gradient
        self.events.append(GradientComplete(name, number, cloned, freed))

    def end(self, name: str) -> None:
        """Assign the events since the last pass to this pass."""
        self._passes[name] = tuple(self.events[self._done() :])
        self._works_of[name], self._works, self._under_way = tuple(self._works), [], {}

    def _done(self) -> int:
        """Return the number of events of completed passes."""
        return sum(map(len, self._passes.values()))

    def recording(self, output: Tensor | None = None) -> Recording:
        """Return the recording.

        Args:
            output: The tensor that a stage sends to the next one. None for a full model.
        """
        passes = dict(self._passes)
        if "weight" in passes:
            passes["weight"] = _with_completions(passes["weight"], self._added)
        return Recording(
            passes=passes,
            sizes=self._sizes,
            moved=tuple(self._moved),
            works=self._works_of,
            draws=self._draws,
            is_opaque=self._is_opaque,
            statistics=frozenset(self._statistics),
            selected=self.selection.result,
            output=None if output is None else self._ids[storage_of(output)._cdata],
        )


def draws(function: torch._ops.OpOverload) -> bool:
    """Return True if an operator draws random numbers.

    torch's fused attention is tagged as random, but on a CPU attention with dropout is not fused.
    """
    is_fused = function._schema.name.startswith(_ATTENTION)
    return torch.Tag.nondeterministic_seeded in function.tags and not is_fused


def _with_completions(events: tuple[Event, ...], added: dict[int, str]) -> tuple[Event, ...]:
    """Return the events of the weight half with completed gradients instead of frees.

    There gradients are freed as they are added to existing ones. The rest of the graph is freed at
    the end, whatever the layer, so frees after the last allocation are left out.
    """
    last = max(place for place, event in enumerate(events) if isinstance(event, StorageAllocated))
    completed: list[Event] = []
    for place, event in enumerate(events):
        if isinstance(event, StorageFreed) and event.id in added:
            completed.append(GradientComplete(added[event.id], event.id, False))
        elif place <= last:
            completed.append(event)
    return tuple(completed)


_METHODS = ("tolist", "numpy")  # `numpy.asarray` calls them too


@contextmanager
def seeing_reads(note: Callable[[Tensor], None]) -> Iterator[None]:
    """Temporarily call `note` with each tensor whose values Python reads by `_METHODS`."""
    inherited = [name for name in _METHODS if name not in vars(Tensor)]
    methods = {name: getattr(Tensor, name) for name in _METHODS}
    for name, method in methods.items():
        setattr(Tensor, name, _call_first(method, note))
    try:
        yield
    finally:
        for name, method in methods.items():
            if name in inherited:
                delattr(Tensor, name)
            else:
                setattr(Tensor, name, method)


def _call_first(method: Callable[..., Any], note: Callable[[Tensor], None]) -> Callable[..., Any]:
    """Return a method that calls `note` first."""

    @wraps(method)
    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        note(tensor)
        return method(tensor, *args, **kwargs)

    return noted


class Marker:
    """The hooks that record the boundaries of units, where FSDP2's hooks would run.

    Modules that are recomputed in backward have no boundaries.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[tuple[str, ...]],
        events: list[Any],
        complete: Callable[[str, Tensor], None],
    ) -> None:
        """Register the hooks.

        Args:
            model: The model.
            units: Module names of the wrap units.
            events: Receives the boundaries.
            complete: Called with the name and the gradient of a parameter when it is complete.
        """
        self._events, self._note_complete = events, complete
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        places = {
            name: place
            for place, (name, _) in enumerate(model.named_modules(remove_duplicate=False))
        }
        self._outer_first = sorted(range(len(units)), key=lambda index: places[units[index][0]])
        self._hooks = ExitStack()
        for index, modules in enumerate(units):
            first, last = model.get_submodule(modules[0]), model.get_submodule(modules[-1])
            enter, leave = partial(self._enter, index), partial(self._leave, index)
            self._hooks.enter_context(watch_modules([(modules[0], first)], before=enter))
            self._hooks.enter_context(watch_modules([(modules[-1], last)], after=leave))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                completed = parameter.register_post_accumulate_grad_hook(self._complete(name))
                self._hooks.callback(completed.remove)

    def remove(self) -> None:
        """Remove the hooks from the model."""
        self._hooks.close()

    def _mark(self, mark: Mark, unit: int) -> None:
        self._events.append(Boundary(mark, unit))

    def _enter(self, unit: int, _: str, __: nn.Module, args: Any, kwargs: Any) -> Any:
        if is_recomputing():
            return None
        self._mark(Mark.ENTER, unit)
        return when_left((args, kwargs), lambda: self._end(unit))

    def _leave(self, unit: int, _: str, __: nn.Module, ___: Any, output: Any) -> None:
        if not is_recomputing():
            self._mark(Mark.LEAVE, unit)
            tree_map(lambda x: self._watch_output(unit, x), output)

    def _watch_output(self, unit: int, output: Any) -> None:
        if has_gradient(output):
            output.register_hook(lambda _: self._begin(unit))

    def _begin(self, unit: int) -> None:
        if not self._begun:
            # Runs when all of backward has finished, like the final callback of FSDP2
            # (_fsdp_state.py, `_register_root_post_backward_final_callback`).
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if unit not in self._begun:
            self._begun.add(unit)
            self._mark(Mark.PRE_BACKWARD, unit)

    def _end(self, unit: int) -> None:
        if unit not in self._ended:
            self._ended.add(unit)
            self._mark(Mark.POST_BACKWARD, unit)

    def _finish(self) -> None:
        """Mark the end of units whose inputs need no gradient, outer before inner, after
        backward."""
        for index in self._outer_first:
            self._end(index)

    def _complete(self, name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self._note_complete(name, parameter.grad)

        return hook


Units = Sequence[tuple[str, ...]]


@contextmanager
def _watching(
    module: nn.Module, units: Units, inputs: Sequence[Tensor], extent: Extent
) -> Iterator[Recorder]:
    """Temporarily record a module; its gradients are cleared afterwards."""
    recorder = Recorder(module, inputs, extent)
    marker = Marker(module, units, recorder.events, recorder.complete)
    try:
        with seeing_reads(lambda tensor: recorder.selection.mark_read(local_tensor(tensor))):
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
    """Run forward and backward of a full model, and return the recording.

    Args:
        model: The model; its gradients are cleared afterwards.
        units: Module names of the wrap units.
        run_forward: Runs forward and returns the loss.
        inputs: Tensors that exist before the recording, as the model's tensors do.
        extent: Number of elements that data-dependent operators select.
    """
    with _watching(model, units, inputs, extent) as recorder:
        with recorder:
            loss = run_forward()
            recorder.end("forward")
            loss.backward()
            del loss
        recorder.end("backward")
    return recorder.recording()


def run_unrecorded(model: nn.Module, units: Units, run_forward: Callable[[], Tensor]) -> None:
    """Run the operators that `record` records; the model's gradients are cleared afterwards.

    Args:
        model: The model, whose hooks are removed afterwards.
        units: Module names of the wrap units.
        run_forward: Runs forward and returns the scalar loss.
    """
    marker = Marker(model, units, [], lambda *_: None)
    try:
        run_forward().backward()
    finally:
        marker.remove()
        model.zero_grad(set_to_none=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStage:
    """A pipeline stage to trace.

    Attributes:
        module: The stage's module.
        units: Module names of its wrap units.
        hidden: Hidden states as sent between stages; not passed to the first stage.
        samples: The micro-batch.
        is_first: True for the first stage.
        forward: Runs the stage, given the model to call.
        loss: Loss of the output; None except on the last stage.
        around: Context in which forward runs.
        extent: Number of elements that data-dependent operators select.
    """

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
    """Run one micro-batch through a stage, and return the recording; gradients are cleared.

    `in_halves` splits backward. The first stage has no halves, because tokens need no gradient.
    """
    # The output's gradient is received before the pass, in a buffer with the shape of the hidden
    # states.
    gradient = stage.hidden.detach().clone()
    hidden = stage.hidden.detach().requires_grad_()
    given = (hidden, gradient, *stage.samples.tensors)
    with _watching(stage.module, stage.units, given, stage.extent) as recorder:
        micro_batch = _MicroBatch(stage, recorder, hidden, gradient)
        # The half of the weights adds to existing gradients, as in a schedule where an earlier
        # micro-batch made them. New gradients would be stolen and count as allocations of the half.
        if in_halves:
            micro_batch.fill_gradients()
        with recorder:
            micro_batch.forward()
            micro_batch.in_halves() if in_halves else micro_batch.backward()
        return recorder.recording(micro_batch.output)


class _MicroBatch:
    """A micro-batch on a stage, which keeps tensors until the last pass ends, as the schedule
    does."""

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
        """Give every parameter a zero gradient, to which the micro-batch's gradient is added."""
        for name, parameter in self.stage.module.named_parameters():
            parameter.grad = torch.zeros_like(parameter)
            self.recorder.accumulates(name, parameter.grad)

    def forward(self) -> None:
        with self.stage.around():
            model = CalledOnce(self.stage.module, self.hidden, is_last=self.stage.loss is not None)
            self.output = contiguous_output(run_stage(model, self.stage.forward))
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
        """Return the tensor that backward starts from, and its gradient."""
        return (self.output, self.gradient) if self.loss is None else (self.loss, None)

    def _hand_on(self) -> None:
        """Release the graph of the output, but not its storage."""
        self.output = self.output.detach()
