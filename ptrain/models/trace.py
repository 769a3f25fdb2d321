"""The tracer: one micro-batch of a plain model on one device, as a timeline of allocations.

Between two boundaries (a unit is entered or left, in forward and in backward) the timeline holds
what is allocated and freed, and where each parameter's gradient is complete. A wrapper's own
allocations happen at those boundaries, so replaying a plan means to interleave the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ptrain import timeline
from ptrain.models.ledger import Ledger, storage_of
from ptrain.models.recomputing import runs_again
from ptrain.models.tags import tier_of
from ptrain.spec.placement import Tier
from ptrain.timeline import Boundary, Item, Mark, Timeline


@dataclass(frozen=True, slots=True)
class Born:
    """A storage is allocated by an operator."""

    id: int
    size: int
    operator: str


@dataclass(frozen=True, slots=True)
class Died:
    """The storage of an earlier `Born` is freed."""

    id: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A parameter's gradient is complete and lies in storage `id`; `cloned` where autograd had to
    copy it there because it could not keep the tensor that arrived."""

    parameter: str
    id: int
    cloned: bool


Event = Born | Died | Completion | Boundary


@dataclass(frozen=True, slots=True)
class Recording:
    """The events of one micro-batch by phase; `sizes` of all storages by id. `moved` are those off
    the device, each with its tier: no event speaks of them. `draws`: random numbers were drawn.
    `statistics` are the storages that fused attention keeps beside its output."""

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    sizes: dict[int, int]
    moved: tuple[tuple[int, str], ...] = ()
    draws: bool = False
    statistics: frozenset[int] = frozenset()

    @property
    def saved(self) -> tuple[Born, ...]:
        """What forward allocated and left alive for the backward pass, in order."""
        dead = {event.id for event in self.forward if isinstance(event, Died)}
        return tuple(
            event for event in self.forward if isinstance(event, Born) and event.id not in dead
        )


class Recorder(Ledger):
    """A ledger that writes down what it sees; storages get running numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.born_sizes: dict[int, int] = {}
        self.moved: list[tuple[int, str]] = []
        self.draws = False
        self.statistics: set[int] = set()
        self._of_call = 0  # storages that the present operator gave birth to
        self._ids: dict[int, int] = {}
        self._newborn: int | None = None

    def __torch_dispatch__(
        self,
        function: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self._settle()
        self.draws |= draws(function)
        self._of_call = 0
        return super().__torch_dispatch__(function, types, args, kwargs)

    def _settle(self) -> None:
        """A storage is tagged after its birth, before anything is done with it."""
        key, self._newborn = self._newborn, None
        storage = self._references[key]() if key in self._references else None
        if key is None or storage is None or (tier := tier_of(storage)) is Tier.DEVICE:
            return
        number = self._ids.pop(key)
        birth = next(e for e in reversed(self.events) if isinstance(e, Born) and e.id == number)
        self.events.remove(birth)
        self.moved.append((number, tier.value))

    def born(self, key: int, storage: torch.UntypedStorage, operator: str) -> None:
        number = len(self.born_sizes)
        self._ids[key], self.born_sizes[number] = number, storage.nbytes()
        self.events.append(Born(number, storage.nbytes(), operator))
        self._newborn = key
        self._of_call += 1
        if self._of_call > 1 and _is_attention(operator):
            self.statistics.add(number)

    def resized(self, key: int, storage: torch.UntypedStorage, before: int) -> None:
        raise RuntimeError("a plain model resized a storage; it cannot be traced")

    def died(self, key: int, size: int) -> None:
        if key in self._ids:
            self.events.append(Died(self._ids.pop(key)))

    def complete(self, name: str, gradient: Tensor) -> None:
        """Called when `name`'s gradient is in place."""
        number = self._ids[storage_of(gradient)._cdata]
        last = next(e for e in reversed(self.events) if isinstance(e, Born))
        cloned = last.id == number and last.operator.split("::")[-1].startswith(_COPIES)
        if cloned:
            self.events.remove(last)  # whether there is a copy depends on who keeps gradients
        self.events.append(Completion(name, number, cloned))


def draws(function: torch._ops.OpOverload) -> bool:
    """Return whether an operator says that it draws random numbers. torch's fused attention could,
    and where it drops something out on a processor it is not fused."""
    is_fused = function._schema.name.startswith(_ATTENTION)
    return torch.Tag.nondeterministic_seeded in function.tags and not is_fused


def _is_attention(operator: str) -> bool:
    """Fused attention's forward, by an operator's name; its backward returns gradients."""
    return operator.startswith(_ATTENTION) and not operator.endswith("_backward")


_ATTENTION = "aten::_scaled_dot_product"
_COPIES = ("clone", "new_empty_strided", "empty_strided")


class _LeaveBackward(torch.autograd.Function):
    """The identity; its backward runs when the gradients of a unit's inputs are complete. FSDP2
    places its own hook in the same way."""

    @staticmethod
    def forward(ctx: Any, notify: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.notify = notify
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.notify()
        return (None, *gradients)


class Marker:
    """Hooks that write a unit's boundaries into a recorder, where FSDP2's hooks would run. What
    runs again in backward has none."""

    def __init__(
        self, recorder: Recorder, model: nn.Module, units: Sequence[tuple[str, ...]]
    ) -> None:
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
            return self._watch_inputs(unit, (args, kwargs))

        return hook

    def _watch_inputs(self, unit: int, inputs: Any) -> Any:
        tensors: list[Tensor] = []
        tree_map(lambda x: tensors.append(x) if _differentiable(x) else None, inputs)
        if not tensors:
            return inputs
        marked = iter(_LeaveBackward.apply(lambda: self._end(unit), *tensors))
        return tree_map(lambda x: next(marked) if _differentiable(x) else x, inputs)

    def _leave(self, unit: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not runs_again():
                self._mark(Mark.LEAVE, unit)
                tree_map(lambda x: self._watch_output(unit, x), output)

        return hook

    def _watch_output(self, unit: int, output: Any) -> None:
        if _differentiable(output):
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


def _differentiable(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def record(
    model: nn.Module,
    units: Sequence[tuple[str, ...]],
    run_forward: Callable[[], Tensor],
    *inputs: Tensor,
    recorder: Recorder | None = None,
) -> Recording:
    """Runs `run_forward() -> loss` and the backward pass and says what they allocated. The model's
    own tensors and `inputs` lived before and do not appear; its gradients are left empty. A
    `recorder` may write down more."""
    recorder = recorder or Recorder()
    for tensor in (*model.parameters(), *model.buffers(), *inputs):
        recorder.watch(tensor)
    marker = Marker(recorder, model, units)
    try:
        with recorder:
            loss = run_forward()
            split = len(recorder.events)
            loss.backward()
            del loss
    finally:
        marker.remove()
        model.zero_grad(set_to_none=True)
    events = tuple(recorder.events)
    return Recording(
        forward=events[:split],
        backward=events[split:],
        sizes=recorder.born_sizes,
        moved=tuple(recorder.moved),
        draws=recorder.draws,
        statistics=frozenset(recorder.statistics),
    )


def to_timeline(recording: Recording) -> Timeline:
    """The recording in bytes, with what happens between two boundaries as one run."""
    return Timeline(
        forward=tuple(_items(recording.forward, recording.sizes)),
        backward=tuple(_items(recording.backward, recording.sizes)),
        saved=tuple((event.operator, event.size) for event in recording.saved),
        moved=tuple((tier, recording.sizes[number]) for number, tier in recording.moved),
    )


def _items(events: Sequence[Event], sizes: dict[int, int]) -> Iterator[Item]:
    last_view = {event.id: event for event in events if isinstance(event, Completion)}
    deltas: list[int] = []
    for event in events:
        match event:
            case Born(number):
                deltas.append(sizes[number])
            case Died(number):
                deltas.append(-sizes[number])
            case _:
                yield from _flush(deltas)
                deltas = []
                yield event if isinstance(event, Boundary) else _completion(event, last_view, sizes)
    yield from _flush(deltas)


def _flush(deltas: list[int]) -> Iterator[Item]:
    merged = timeline.run(deltas)
    if merged:
        yield merged


def _completion(
    event: Completion, last_view: dict[int, Completion], sizes: dict[int, int]
) -> timeline.Complete:
    """Gradients that are views of one storage keep it until the last of them goes."""
    size = sizes[event.id] if last_view[event.id] is event else 0
    return timeline.Complete(event.parameter, size, event.cloned)
