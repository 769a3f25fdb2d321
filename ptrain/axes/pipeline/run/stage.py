"""Build a rank's pipeline stages, each with its own wrap, and run its instructions one after the
other.

The stages act as one wrapped model: their passes, the code around them, their memory for
micro-batches in flight, and the sum of gradients of tensors that the first and the last stage
share.

For a micro-batch a stage holds the input, the output and, on the last stage, the loss until its
backward pass is over; for a backward pass in halves the gradient of the output too. So a schedule's
memory follows from its instructions (`derivation.in_flight`).

Neighbouring stages of one rank pass the tensor itself. A received tensor lives until the pass that
takes it releases it, a sent one until its `Release`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ptrain.axes.data.run.flat import WrappedModel
from ptrain.axes.data.run.target import Named, NamedTarget, gradients_of
from ptrain.axes.pipeline.catalogue import schedule_of, stages_text
from ptrain.axes.pipeline.instructions import (
    Instruction,
    Message,
    Receive,
    Release,
    Send,
    evaluation,
    given,
    taken,
    training,
)
from ptrain.axes.pipeline.run.cut import CalledOnce, apart, run_stage
from ptrain.axes.pipeline.run.passes import Groups, backward, backward_input, backward_weight
from ptrain.axes.pipeline.schedule import Action
from ptrain.cost import Phase, State
from ptrain.errors import PtrainError, RankFailed
from ptrain.facts.stages import Chain
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.models.objective import SampleBatch, StepBatch
from ptrain.rooms.comm import Mesh, Registry
from ptrain.spec.spec import Spec
from ptrain.steps.step import Pipeline, Plan
from ptrain.timeline import Kind


@dataclass(frozen=True, slots=True)
class LocalStage:
    """One stage: its number, its module and what wraps it."""

    index: int
    module: nn.Module
    wrapped: WrappedModel


class Staged(WrappedModel):
    """What the program needs of a rank's stages. The passes are the schedule's."""

    def __init__(
        self, parts: Sequence[LocalStage], step: Pipeline, mesh: Mesh, chain: Chain
    ) -> None:
        self.parts = parts
        self.chain = chain
        self.module = nn.ModuleList(part.module for part in parts)
        self.step = step
        self.mesh = mesh
        self._copies_of = {part.index: list(self._copied(part)) for part in parts}
        self._shared = [target for part in parts for target in self._of_ends(part)]
        self._twins = self._both_ends() if step.shared else None

    def end_evaluation(self) -> None:
        for part in self.parts:
            part.wrapped.end_evaluation()

    def consume_with(self, update: Callable[[int], None]) -> None:
        groups = 0
        for part in self.parts:
            part.wrapped.consume_with(_from(update, groups))
            groups += len(part.wrapped.targets())

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        for part in self.parts:
            part.wrapped.reduce_gradients()
        if self.step.shared:
            self._sum_shared()

    def finish_update(self) -> None:
        for part in self.parts:
            part.wrapped.finish_update()

    def clear_gradients(self) -> None:
        for part in self.parts:
            part.wrapped.clear_gradients()

    def targets(self) -> Sequence[Sequence[NamedTarget]]:
        return [group for part in self.parts for group in part.wrapped.targets()]

    def gradients(self) -> list[torch.Tensor]:
        """Of a stage that has copies, by target: those are not counted here."""
        return [
            gradient
            for part in self.parts
            for gradient in (
                gradients_of(part.wrapped.targets())
                if self._copies_of[part.index]
                else part.wrapped.gradients()
            )
        ]

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        for part in self.parts:
            yield from part.wrapped.storages()

    def copies(self) -> Sequence[NamedTarget]:
        """Return the targets of what the first stage has itself, where it is counted."""
        return [target for copies in self._copies_of.values() for target in copies]

    def canonical_name(self, name: str) -> str:
        for original, copied in self.step.shared:
            if name == copied or name.startswith(f"{copied}."):
                return original + name.removeprefix(copied)
        return name

    def own(self, named: Mapping[str, torch.Tensor]) -> Named:
        """Return the tensors by the model's names, and those of copies by the stages' names too."""
        copies = {copied: named[name] for name, copied in self.step.shared if name in named}
        return {**named, **copies}

    def _copied(self, part: LocalStage) -> Iterator[NamedTarget]:
        """Of a stage the targets of copies, each a unit of its own, that have gradients."""
        if part.index:
            targets = self._shared_targets(part, [copied for _, copied in self.step.shared])
            yield from (target for target in targets if not target.is_frozen)

    def _of_ends(self, part: LocalStage) -> Iterator[NamedTarget]:
        """Of the first stage the targets that the last one has a copy of, of the last one these."""
        names = {0: [name for name, _ in self.step.shared]}
        names[self.step.stages - 1] = [copied for _, copied in self.step.shared]
        yield from self._shared_targets(part, names.get(part.index, ()))

    def _shared_targets(self, part: LocalStage, names: Sequence[str]) -> Iterator[NamedTarget]:
        """To ask for a target's names may gather it over tp: before the first step only."""
        for group in part.wrapped.targets():
            yield from (
                target for target in group if any(name in target.export() for name in names)
            )

    def _both_ends(self) -> dist.ProcessGroup | None:
        """The group of the first and the last stage's ranks, where they are two and this is one."""
        axis, ends = self.step.axis, (self.step.rank_of[0], self.step.rank_of[-1])
        if ends[0] == ends[1]:
            return None
        if self.mesh.degrees[axis] == 2:
            return self.mesh.group((axis,))
        return self.mesh.group_at(axis, ends)

    def _sum_shared(self) -> None:
        held = [g for target in self._shared if (g := target.gradient) is not None]
        if self._twins is not None:
            for gradient in held:
                self.mesh.registry.tag(gradient, State.GRADIENTS)
                dist.all_reduce(gradient, group=self._twins)
        elif held:
            first, last = held[: len(held) // 2], held[len(held) // 2 :]
            for one, other in zip(first, last, strict=True):
                other.copy_(one.add_(other))


def _from(update: Callable[[int], None], groups: int) -> Callable[[int], None]:
    return lambda index: update(groups + index)


# What a rank says when its pipeline fails: at which stage and micro-batch, or whom it waited for.
#
# torch puts a message of its own around what a backward pass raises; a reader wants the cause.


# What a module's code raises: mistakes of Python, and torch's own errors.
_RAISED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@contextmanager
def named(stage: int, micro_batch: int) -> Iterator[None]:
    """Raises RankFailed with the place of what is raised inside, and its cause."""
    try:
        yield
    except _RAISED as error:
        cause = error.__cause__ or error
        if isinstance(cause, PtrainError):
            raise cause from error
        place = f"stage {stage}, micro-batch {micro_batch}"
        raise RankFailed(f"{place}: {type(cause).__name__}: {cause}") from cause


class Waits:
    """The message that a rank posts or waits for, and whether it receives it: whom the rank names
    where that fails."""

    def __init__(self, rank_of: tuple[int, ...], group: dist.ProcessGroup) -> None:
        self._rank_of, self._group = rank_of, group
        self._message: Message | None = None
        self._is_received = False

    @contextmanager
    def on(self, message: Message, *, is_received: bool = False) -> Iterator[None]:
        """Name the other rank if what runs inside fails; what fails after it is the rank's own."""
        self._message, self._is_received = message, is_received
        yield
        self._message = None

    @contextmanager
    def watched(self, stages: str) -> Iterator[None]:
        """Raises RankFailed where a neighbour is gone or silent; it names that rank. `stages` are
        those of this rank."""
        self._message = None  # that of a step before, which failed
        try:
            yield
        except RuntimeError as error:
            raise RankFailed(f"{stages}: {self._waiting()}{error}") from error

    def _waiting(self) -> str:
        if self._message is None:
            return ""
        phase, source, micro_batch = self._message
        stage, verb = (source, "send") if self._is_received else (self._message.target, "take")
        rank = dist.get_global_rank(self._group, self._rank_of[stage])
        what = f"{'gradients of ' * (phase is Phase.BACKWARD)}micro-batch {micro_batch}"
        return f"waiting for rank {rank} (stage {stage}) to {verb} {what}: "


Enter = Callable[[Phase, int], None]
Loss = Callable[[Any, SampleBatch], Tensor]
Seed = Callable[[Tensor], Tensor | None]


@dataclass(frozen=True, slots=True)
class BoundaryTensor:
    """What goes from stage to stage: hidden states of one micro-batch, [micro, tokens, hidden] (of
    this rank's slice of the tokens)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def require(self, output: Tensor, stage: int, micro_batch: int) -> None:
        """Raises RankFailed for anything else than the next stage waits for: it would take the
        bytes for what they are not."""
        if (tuple(output.shape), output.dtype) != (self.shape, self.dtype):
            raise RankFailed(
                f"stage {stage}, micro-batch {micro_batch}: hidden states are "
                f"{list(output.shape)} in {output.dtype}, but the next stage expects "
                f"{list(self.shape)} in {self.dtype}"
            )


@dataclass(frozen=True, slots=True)
class PassCallbacks:
    """What a program wants of passes: `forward` runs a stage, given the model to call and the
    samples; the last stage's forward pass runs in `given(samples)`, then `loss` is called with
    what it returned and the samples, `evaluated` where nothing is trained; backward begins with
    `seed` of the loss, None for 1; `enter` is told of every pass."""

    forward: Callable[[Any, SampleBatch], Tensor]
    given: Callable[[SampleBatch], AbstractContextManager[None]]
    loss: Loss
    evaluated: Loss
    seed: Seed
    enter: Enter


@dataclass(slots=True)
class _InFlight:
    """A micro-batch between its forward and the end of its backward pass."""

    given: Tensor
    output: Tensor | None
    loss: Tensor | None
    gradient: Tensor | None = None
    groups: Groups | None = None

    @property
    def root(self) -> Tensor:
        """Where its backward pass begins."""
        root = self.output if self.loss is None else self.loss
        assert root is not None, "dropped after the half that begins there alone"
        return root


class StageRunner:
    """The passes of one stage, the last of `stages` or not. Raises RankFailed where the module
    fails or gives something else than the next stage waits for."""

    def __init__(
        self, part: LocalStage, stages: int, boundary: BoundaryTensor, callbacks: PassCallbacks
    ) -> None:
        self.index, self.module, self.wrapped = part.index, part.module, part.wrapped
        self.is_first, self.is_last = part.index == 0, part.index == stages - 1
        self.boundary, self.asked = boundary, callbacks
        self._in_flight: dict[int, _InFlight] = {}
        self._left = 0  # backward passes of the step

    def begin(self, micro_batches: int) -> None:
        """A step of so many begins."""
        self._in_flight.clear()
        self._left = micro_batches
        self.asked.enter(Phase.FORWARD, 0)
        self.wrapped.begin_passes()

    def evaluate(
        self,
        given: Tensor | None,
        samples: SampleBatch,
        number: int,
        add: Callable[[Tensor], object],
    ) -> Tensor | None:
        """The forward pass of micro-batch `number` alone: hidden states for the next stage, or None
        of the last one, where `add` is called with the loss. `given` as of `compute`."""
        with named(self.index, number):
            output = self._run(self.module, given, samples)
            if not self.is_last:
                self.boundary.require(output, self.index, number)
                return output
            add(self.asked.evaluated(output, samples))
        return None

    def compute(self, action: Action, given: Tensor | None, samples: SampleBatch) -> Tensor | None:
        """One pass of a micro-batch. `given` is what another stage made for it. Returns what it
        makes for another stage."""
        number = action.microbatch
        match action.kind:
            case Kind.FORWARD:
                given = None if given is None else given.requires_grad_()
                return self._forward(number, given, samples)
            case Kind.INPUT if self.is_first:
                # nobody waits for gradients of tokens: the weights' half is the whole
                self._in_flight[number].gradient = given
                return None
            case Kind.WEIGHT if self.is_first:
                return self._backward(number, self._in_flight[number].gradient)
            case Kind.BACKWARD:
                return self._backward(number, given)
            case Kind.INPUT:
                return self._backward_input(number, given)
            case Kind.WEIGHT:
                self._backward_weight(number)
                return None

    def _run(self, module: nn.Module, given: Tensor | None, samples: SampleBatch) -> Tensor:
        model = CalledOnce(module, given, is_last=self.is_last)
        with self.asked.given(samples) if self.is_last else nullcontext():
            output: Tensor = run_stage(model, lambda called: self.asked.forward(called, samples))
        return output

    def _forward(self, number: int, given: Tensor | None, samples: SampleBatch) -> Tensor | None:
        self.asked.enter(Phase.FORWARD, number)
        with named(self.index, number):
            with self.wrapped.forward_pass():
                output = apart(self._run(self.wrapped.module, given, samples))
            given = samples.tensors[0] if given is None else given
            if not self.is_last:
                self.boundary.require(output, self.index, number)
                self._in_flight[number] = _InFlight(given, output, None)
                return output.detach()
            loss = self.asked.loss(output, samples)
        self._in_flight[number] = _InFlight(given, output, loss)
        return None

    def _backward(self, number: int, gradient: Tensor | None) -> Tensor | None:
        flight = self._in_flight.pop(number)
        with self._pass(Kind.BACKWARD, number):
            return backward(flight.root, self._seed(flight, gradient), flight.given)

    def _backward_input(self, number: int, gradient: Tensor | None) -> Tensor | None:
        flight = self._in_flight[number]
        flight.gradient = gradient
        with self._pass(Kind.INPUT, number):
            of_given, flight.groups = backward_input(
                flight.root,
                self._seed(flight, gradient),
                flight.given,
                self.wrapped.module.parameters(),
            )
        if self.is_last:
            flight.output = None
        return of_given

    def _backward_weight(self, number: int) -> None:
        flight = self._in_flight.pop(number)
        assert flight.groups is not None, "the other half comes first"
        with self._pass(Kind.WEIGHT, number):
            backward_weight(list(self.wrapped.module.parameters()), flight.groups)

    def _seed(self, flight: _InFlight, gradient: Tensor | None) -> Tensor | None:
        """What a backward pass begins with: the gradient of the output, or the loss's seed."""
        return gradient if flight.loss is None else self.asked.seed(flight.loss)

    @contextmanager
    def _pass(self, kind: Kind, number: int) -> Iterator[None]:
        is_last = kind is not Kind.INPUT and self._left == 1
        self._left -= kind is not Kind.INPUT
        self.asked.enter(Phase.BACKWARD, number)
        with named(self.index, number), self.wrapped.backward_pass(kind, is_last):
            yield


# The runtime of a pipeline: a rank's instructions, one after the other, and nothing else.
#
# Passes of neighbouring stages on one rank hand each other the tensor itself. What is received
# lives until the pass that takes it lets go of it, what is sent until its `Release`.


# A pass, and what another stage made for it -> what it makes for another stage.
Compute = Callable[[Action, Tensor | None], Tensor | None]


class Runtime:
    """Of the rank that has some of the stages; `rank_of` are the ranks of all stages in `group`.
    Raises RankFailed where a pass does, RuntimeError where a neighbour is gone or silent; what
    it waited for stands in `waits`."""

    def __init__(
        self,
        rank_of: tuple[int, ...],
        group: dist.ProcessGroup,
        boundary: BoundaryTensor,
        registry: Registry,
    ) -> None:
        self.rank_of, self.group = rank_of, group
        self.boundary, self.registry = boundary, registry
        self.waits = Waits(rank_of, group)
        self._here: dict[Message, Tensor] = {}  # received, or made by a pass, and not taken
        self._coming: dict[Message, dist.Work | None] = {}
        self._sent: dict[Message, tuple[Tensor, dist.Work | None]] = {}

    def run(self, instructions: Iterable[Instruction], compute: Compute) -> None:
        """All of them, with `compute` for the passes."""
        for held in (self._here, self._coming, self._sent):
            held.clear()  # a step before may have failed
        for instruction in instructions:
            match instruction:
                case Action():
                    self._compute(instruction, compute)
                case Receive(message):
                    self._receive(message)
                case Send(message):
                    self._send(message)
                case Release(message):
                    self._release(message)

    def _compute(self, action: Action, compute: Compute) -> None:
        needed, produced = taken(action, len(self.rank_of)), given(action, len(self.rank_of))
        result = compute(action, None if needed is None else self._take(needed))
        if produced is not None:
            # of an input that nothing depends on there is no gradient
            self._here[produced] = self.boundary.empty().zero_() if result is None else result

    def _take(self, message: Message) -> Tensor:
        if message in self._coming:
            with self.waits.on(message, is_received=True):
                _wait(self._coming.pop(message))
        return self._here.pop(message)

    def _receive(self, message: Message) -> None:
        self._here[message] = buffer = self.boundary.empty()
        self.registry.tag(buffer, State.ACTIVATIONS, phase=message.phase)
        with self.waits.on(message, is_received=True):
            source = self.rank_of[message.source]
            self._coming[message] = dist.irecv(buffer, group=self.group, group_src=source)

    def _send(self, message: Message) -> None:
        tensor = self._here.pop(message).contiguous()
        self.registry.tag(tensor, State.ACTIVATIONS, phase=message.phase)
        with self.waits.on(message):
            target = self.rank_of[message.target]
            self._sent[message] = tensor, dist.isend(tensor, group=self.group, group_dst=target)

    def _release(self, message: Message) -> None:
        with self.waits.on(message):
            _wait(self._sent.pop(message)[1])


def _wait(work: dist.Work | None) -> None:
    """None is what torch returns to a rank that is not in the group."""
    if work is not None:
        work.wait()


class Pipelined:
    """The passes of a step: all micro-batches through the rank's stages, in the order of the
    schedule. Gradients are sums over tokens, divided by the global number in the loss: nothing is
    scaled by the number of micro-batches."""

    def __init__(
        self, spec: Spec, plan: Plan, mesh: Mesh, staged: Staged, callbacks: PassCallbacks
    ) -> None:
        step = plan.pipeline
        assert step is not None
        self.step = step
        self.micro, self.sequence = spec.batch.micro, plan.tokens
        self.count = spec.batch.accumulate
        self.rank = mesh.coordinate(step.axis)
        boundary = _boundary(spec, plan, mesh, staged.chain)
        self.stages = [StageRunner(part, step.stages, boundary, callbacks) for part in staged.parts]
        self.runtime = Runtime(step.rank_of, mesh.group((step.axis,)), boundary, mesh.registry)
        self.instructions = training(schedule_of(spec))[self.rank]
        self._stage_of = {stage.index: stage for stage in self.stages}

    def train(self, batch: StepBatch) -> None:
        """Forward and backward of every micro-batch. Raises RankFailed, with the stage, for a batch
        of another shape, and where a pass fails or a neighbour does not answer."""
        self._require_shape(batch, self.count)
        for stage in self.stages:
            stage.begin(self.count)
        micro_batches = list(batch.micro_batches(self.micro))

        def compute(action: Action, given: torch.Tensor | None) -> torch.Tensor | None:
            for other in self.stages:  # what a pass made has been sent
                other.wrapped.settle()
            stage = self._stage_of[action.stage]
            return stage.compute(action, given, micro_batches[action.microbatch])

        with self.runtime.waits.watched(self._own_stages()):
            self.runtime.run(self.instructions, compute)
            for stage in self.stages:
                stage.wrapped.end_passes()

    def evaluate(self, batch: StepBatch, add: Callable[[torch.Tensor], object]) -> None:
        """Forward of every micro-batch, one after the other. `add` is called with the loss of what
        the last stage returned. Raises RankFailed as `train` does."""
        micro_batches = list(batch.micro_batches(self.micro))
        count = max(1, len(batch.tensors[0]) // self.micro)
        self._require_shape(batch, count)

        def compute(action: Action, given: torch.Tensor | None) -> torch.Tensor | None:
            stage, samples = self._stage_of[action.stage], micro_batches[action.microbatch]
            return stage.evaluate(given, samples, action.microbatch, add)

        instructions = evaluation(self.step.rank_of, count)[self.rank]
        with self.runtime.waits.watched(self._own_stages()):
            self.runtime.run(instructions, compute)

    def _own_stages(self) -> str:
        return stages_text([stage.index for stage in self.stages])

    def _require_shape(self, batch: StepBatch, count: int) -> None:
        wanted = batch.shape_for(count * self.micro, self.sequence)
        shape = list(batch.tensors[0].shape)
        if shape != wanted:
            raise RankFailed(
                f"{self._own_stages()}: the batch has {shape} tokens, but the stages expect "
                f"{count} micro-batches of {self.micro}: {wanted}\n  remedy: Pass the batch "
                "of the spec to every rank of pp."
            )


def _boundary(spec: Spec, plan: Plan, mesh: Mesh, chain: Chain) -> BoundaryTensor:
    return BoundaryTensor(
        shape=(spec.batch.micro, *chain.sample_shape(spec.batch.sequence, plan.boundary_slices)),
        dtype=TORCH_DTYPES[plan.update.layout.parameters],
        device=mesh.world.device,
    )
