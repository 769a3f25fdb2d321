"""A rank's pipeline stages: wraps, passes, and the executor of its instructions.

The stages act as one wrapped model. For a micro-batch, a stage holds the input, the output and, on
the last stage, the loss until its backward pass is over; for a backward pass in halves, also the
gradient of the output. A schedule's memory therefore follows from its instructions
(`derivation.in_flight`).

Neighbouring stages of one rank pass the tensor itself. A received tensor lives until the pass that
takes it drops it, a sent one until its `Release`.
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
from ptrain.axes.pipeline.run.cut import CalledOnce, contiguous_output, run_stage
from ptrain.axes.pipeline.run.passes import Groups, backward, backward_input, backward_weight
from ptrain.axes.pipeline.schedule import Action
from ptrain.axes.pipeline.stage_facts import (
    Instruction,
    Message,
    Receive,
    Release,
    Send,
    evaluation_instructions,
    input_message,
    output_message,
    training_instructions,
)
from ptrain.cost import Phase, State
from ptrain.errors import PtrainError, RankFailed
from ptrain.facts.stages import Chain
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.models.objective import SampleBatch, StepBatch
from ptrain.runtime.comm import Mesh, TagRegistry
from ptrain.spec.spec import Spec
from ptrain.steps.step import Pipeline, Plan
from ptrain.timeline import Kind


@dataclass(frozen=True, slots=True)
class LocalStage:
    """A stage of this rank: its number, its module and its wrap."""

    index: int
    module: nn.Module
    wrap: WrappedModel


class StagedModel(WrappedModel):
    """A rank's stages as one wrapped model; the schedule runs their passes."""

    def __init__(
        self, parts: Sequence[LocalStage], step: Pipeline, mesh: Mesh, chain: Chain
    ) -> None:
        self.parts = parts
        self.chain = chain
        self.module = nn.ModuleList(part.module for part in parts)
        self.step = step
        self.mesh = mesh
        self._copies_of = {part.index: list(self._copies_on(part)) for part in parts}
        self._shared = [target for part in parts for target in self._shared_at_ends(part)]
        self._ends_group = self._group_of_ends() if step.shared else None

    def end_evaluation(self) -> None:
        for part in self.parts:
            part.wrap.end_evaluation()

    def consume_with(self, update: Callable[[int], None]) -> None:
        groups = 0
        for part in self.parts:
            part.wrap.consume_with(_offset_update(update, groups))
            groups += len(part.wrap.targets())

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        for part in self.parts:
            part.wrap.reduce_gradients()
        if self.step.shared:
            self._sum_shared()

    def finish_update(self) -> None:
        for part in self.parts:
            part.wrap.finish_update()

    def clear_gradients(self) -> None:
        for part in self.parts:
            part.wrap.clear_gradients()

    def targets(self) -> Sequence[Sequence[NamedTarget]]:
        return [group for part in self.parts for group in part.wrap.targets()]

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of all stages, without copies."""
        return [
            gradient
            for part in self.parts
            for gradient in (
                gradients_of(part.wrap.targets())
                if self._copies_of[part.index]
                else part.wrap.gradients()
            )
        ]

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        for part in self.parts:
            yield from part.wrap.storages()

    def copied_targets(self) -> Sequence[NamedTarget]:
        """Return the targets of tensors that the first stage owns, and counts."""
        return [target for copies in self._copies_of.values() for target in copies]

    def canonical_name(self, name: str) -> str:
        for original, copied in self.step.shared:
            if name == copied or name.startswith(f"{copied}."):
                return original + name.removeprefix(copied)
        return name

    def with_wrap_names(self, named: Mapping[str, torch.Tensor]) -> Named:
        """Return tensors by the model's names, with copies also by the stages' names."""
        copies = {copied: named[name] for name, copied in self.step.shared if name in named}
        return {**named, **copies}

    def _copies_on(self, part: LocalStage) -> Iterator[NamedTarget]:
        """Yield the trained targets of copies on a stage; each is a separate unit."""
        if part.index:
            targets = self._shared_targets(part, [copied for _, copied in self.step.shared])
            yield from (target for target in targets if not target.is_frozen)

    def _shared_at_ends(self, part: LocalStage) -> Iterator[NamedTarget]:
        """Yield the shared targets on the first stage, and their copies on the last."""
        names = {0: [name for name, _ in self.step.shared]}
        names[self.step.stages - 1] = [copied for _, copied in self.step.shared]
        yield from self._shared_targets(part, names.get(part.index, ()))

    def _shared_targets(self, part: LocalStage, names: Sequence[str]) -> Iterator[NamedTarget]:
        """Yield the targets with these names, before the first step: `export` may all-gather."""
        for group in part.wrap.targets():
            yield from (
                target for target in group if any(name in target.export() for name in names)
            )

    def _group_of_ends(self) -> dist.ProcessGroup | None:
        """Return the first and last stage's group; None elsewhere, or if they share a rank."""
        axis, ends = self.step.axis, (self.step.rank_of[0], self.step.rank_of[-1])
        if ends[0] == ends[1]:
            return None
        if self.mesh.degrees[axis] == 2:
            return self.mesh.group((axis,))
        return self.mesh.create_group_at(axis, ends)

    def _sum_shared(self) -> None:
        """Sum the gradients of shared tensors over the first and the last stage."""
        held = [g for target in self._shared if (g := target.gradient) is not None]
        if self._ends_group is not None:
            for gradient in held:
                self.mesh.registry.tag(gradient, State.GRADIENTS)
                dist.all_reduce(gradient, group=self._ends_group)
        elif held:
            first, last = held[: len(held) // 2], held[len(held) // 2 :]
            for one, other in zip(first, last, strict=True):
                # Both copies get the sum, because each stage updates its own copy and they must
                # stay equal.
                other.copy_(one.add_(other))


def _offset_update(update: Callable[[int], None], groups: int) -> Callable[[int], None]:
    """Shift the index of an update function by the groups of earlier stages."""
    return lambda index: update(groups + index)


# Errors of a pipeline name the stage and micro-batch, or the rank that was waited for. torch wraps
# errors of a backward pass; the cause is reported instead.


# errors of a module's code: Python's, and torch's
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
def name_stage_errors(stage: int, micro_batch: int) -> Iterator[None]:
    """Temporarily raise errors of a stage's code as RankFailed with place and cause."""
    try:
        yield
    except _RAISED as error:
        cause = error.__cause__ or error
        if isinstance(cause, PtrainError):
            raise cause from error
        place = f"stage {stage}, micro-batch {micro_batch}"
        raise RankFailed(f"{place}: {type(cause).__name__}: {cause}") from cause


class PendingMessage:
    """The message that a rank is posting or waiting for, to name the other rank in an error."""

    def __init__(self, rank_of: tuple[int, ...], group: dist.ProcessGroup) -> None:
        self._rank_of, self._group = rank_of, group
        self._message: Message | None = None
        self._is_received = False

    @contextmanager
    def track(self, message: Message, *, is_received: bool = False) -> Iterator[None]:
        """Temporarily name the other rank of a message in errors."""
        self._message, self._is_received = message, is_received
        yield
        self._message = None

    @contextmanager
    def raise_rank_failed(self, stages: str) -> Iterator[None]:
        """Temporarily raise errors as RankFailed with this rank's `stages` and the neighbour."""
        self._message = None  # left from an earlier step that failed
        try:
            yield
        # torch raises RuntimeError for a timeout and for a closed connection.
        except RuntimeError as error:
            raise RankFailed(f"{stages}: {self._describe_message()}{error}") from error

    def _describe_message(self) -> str:
        """Describe the current message, "" if there is none."""
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
    """The hidden states of one micro-batch between stages: [micro, local tokens, hidden]."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        """Return an uninitialized buffer."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def require_match(self, output: Tensor, stage: int, micro_batch: int) -> None:
        """Raise RankFailed unless an output is as expected (its bytes would be misread)."""
        if (tuple(output.shape), output.dtype) != (self.shape, self.dtype):
            raise RankFailed(
                f"stage {stage}, micro-batch {micro_batch}: hidden states are "
                f"{list(output.shape)} in {output.dtype}, but the next stage expects "
                f"{list(self.shape)} in {self.dtype}"
            )


@dataclass(frozen=True, slots=True)
class PassCallbacks:
    """The functions that a program supplies for passes.

    Attributes:
        forward: Runs a stage, given the model to call and the samples.
        batch_context: Returns the context of the last stage's forward pass.
        loss: Returns the loss of the last stage's output; `evaluation_loss` is for evaluations.
        seed: Returns the gradient of the loss, None for 1.
        enter: Called with the phase and micro-batch of every pass.
    """

    forward: Callable[[Any, SampleBatch], Tensor]
    batch_context: Callable[[SampleBatch], AbstractContextManager[None]]
    loss: Loss
    evaluation_loss: Loss
    seed: Seed
    enter: Enter


@dataclass(slots=True)
class _InFlight:
    """A micro-batch between its forward and the end of its backward pass."""

    input: Tensor
    output: Tensor | None
    loss: Tensor | None
    gradient: Tensor | None = None
    groups: Groups | None = None

    @property
    def root(self) -> Tensor:
        """The tensor at which its backward pass begins."""
        root = self.output if self.loss is None else self.loss
        assert root is not None, "dropped after the half that begins there alone"
        return root


class StageRunner:
    """The runner of one stage's passes.

    They raise RankFailed if the module fails or returns another tensor than expected.
    """

    def __init__(
        self, part: LocalStage, stages: int, boundary: BoundaryTensor, callbacks: PassCallbacks
    ) -> None:
        self.index, self.module, self.wrapped = part.index, part.module, part.wrap
        self.is_first, self.is_last = part.index == 0, part.index == stages - 1
        self.boundary, self.asked = boundary, callbacks
        self._in_flight: dict[int, _InFlight] = {}
        self._passes_left = 0  # backward passes left in the step

    def begin(self, micro_batches: int) -> None:
        """Begin a step of `micro_batches` micro-batches."""
        self._in_flight.clear()
        self._passes_left = micro_batches
        self.asked.enter(Phase.FORWARD, 0)
        self.wrapped.begin_passes()

    def evaluate(
        self,
        given: Tensor | None,
        samples: SampleBatch,
        number: int,
        add: Callable[[Tensor], object],
    ) -> Tensor | None:
        """Run only forward of micro-batch `number`; on the last stage, call `add` with the loss.

        `given` are the received hidden states. Returns the ones for the next stage, if any.
        """
        with name_stage_errors(self.index, number):
            output = self._run_module(self.module, given, samples)
            if not self.is_last:
                self.boundary.require_match(output, self.index, number)
                return output
            add(self.asked.evaluation_loss(output, samples))
        return None

    def compute(self, action: Action, given: Tensor | None, samples: SampleBatch) -> Tensor | None:
        """Run one pass; take the received tensor, and return the one for another stage."""
        number = action.microbatch
        match action.kind:
            case Kind.FORWARD:
                # The received buffer becomes a leaf of this stage's graph. Its gradient goes to the
                # previous stage.
                given = None if given is None else given.requires_grad_()
                return self._run_forward(number, given, samples)
            case Kind.INPUT if self.is_first:
                # tokens have no gradient that another stage waits for: the weight half does the
                # full backward
                self._in_flight[number].gradient = given
                return None
            case Kind.WEIGHT if self.is_first:
                return self._run_backward(number, self._in_flight[number].gradient)
            case Kind.BACKWARD:
                return self._run_backward(number, given)
            case Kind.INPUT:
                return self._backward_input(number, given)
            case Kind.WEIGHT:
                self._backward_weight(number)
                return None

    def _run_module(self, module: nn.Module, given: Tensor | None, samples: SampleBatch) -> Tensor:
        model = CalledOnce(module, given, is_last=self.is_last)
        with self.asked.batch_context(samples) if self.is_last else nullcontext():
            output: Tensor = run_stage(model, lambda called: self.asked.forward(called, samples))
        return output

    def _run_forward(
        self, number: int, given: Tensor | None, samples: SampleBatch
    ) -> Tensor | None:
        self.asked.enter(Phase.FORWARD, number)
        with name_stage_errors(self.index, number):
            with self.wrapped.forward_pass():
                output = contiguous_output(self._run_module(self.wrapped.module, given, samples))
            given = samples.tensors[0] if given is None else given
            if not self.is_last:
                self.boundary.require_match(output, self.index, number)
                self._in_flight[number] = _InFlight(given, output, None)
                # The message shares the output's memory but not its graph, which stays until this
                # stage's backward.
                return output.detach()
            loss = self.asked.loss(output, samples)
        self._in_flight[number] = _InFlight(given, output, loss)
        return None

    def _run_backward(self, number: int, gradient: Tensor | None) -> Tensor | None:
        # Taken out before the pass, so that nothing but the local variable keeps the graph alive.
        flight = self._in_flight.pop(number)
        with self._backward_pass(Kind.BACKWARD, number):
            return backward(flight.root, self._backward_seed(flight, gradient), flight.input)

    def _backward_input(self, number: int, gradient: Tensor | None) -> Tensor | None:
        flight = self._in_flight[number]
        flight.gradient = gradient
        with self._backward_pass(Kind.INPUT, number):
            of_given, flight.groups = backward_input(
                flight.root,
                self._backward_seed(flight, gradient),
                flight.input,
                self.wrapped.module.parameters(),
            )
        if self.is_last:
            # The logits: the weight half continues from the groups and does not need them.
            flight.output = None
        return of_given

    def _backward_weight(self, number: int) -> None:
        flight = self._in_flight.pop(number)
        assert flight.groups is not None, "the other half comes first"
        with self._backward_pass(Kind.WEIGHT, number):
            backward_weight(list(self.wrapped.module.parameters()), flight.groups)

    def _backward_seed(self, flight: _InFlight, gradient: Tensor | None) -> Tensor | None:
        """Return the gradient with which backward begins: of the output, or the loss's seed."""
        return gradient if flight.loss is None else self.asked.seed(flight.loss)

    @contextmanager
    def _backward_pass(self, kind: Kind, number: int) -> Iterator[None]:
        # A micro-batch counts once: an input half completes no gradients.
        is_last = kind is not Kind.INPUT and self._passes_left == 1
        self._passes_left -= kind is not Kind.INPUT
        self.asked.enter(Phase.BACKWARD, number)
        with name_stage_errors(self.index, number), self.wrapped.backward_pass(kind, is_last):
            yield


# A pass and the tensor that it takes from another stage -> the tensor for another stage.
Compute = Callable[[Action, Tensor | None], Tensor | None]


class Runtime:
    """The executor of one rank's instructions; `rank_of` has the rank of each stage in `group`."""

    def __init__(
        self,
        rank_of: tuple[int, ...],
        group: dist.ProcessGroup,
        boundary: BoundaryTensor,
        registry: TagRegistry,
    ) -> None:
        self.rank_of, self.group = rank_of, group
        self.boundary, self.registry = boundary, registry
        self.waits = PendingMessage(rank_of, group)
        self._here: dict[Message, Tensor] = {}  # received or made by a pass, and not taken yet
        self._receiving: dict[Message, dist.Work | None] = {}
        self._sent: dict[Message, tuple[Tensor, dist.Work | None]] = {}

    def run(self, instructions: Iterable[Instruction], compute: Compute) -> None:
        """Execute the instructions, with `compute` for passes.

        It raises RankFailed if a pass fails, and RuntimeError if a neighbour is gone or silent.
        """
        for held in (self._here, self._receiving, self._sent):
            held.clear()  # an earlier step may have failed
        for instruction in instructions:
            match instruction:
                case Action():
                    self._run_pass(instruction, compute)
                case Receive(message):
                    self._post_receive(message)
                case Send(message):
                    self._post_send(message)
                case Release(message):
                    self._finish_send(message)

    def _run_pass(self, action: Action, compute: Compute) -> None:
        """Run a pass with the message that it takes, and keep the message that it makes."""
        needed, produced = (
            input_message(action, len(self.rank_of)),
            output_message(action, len(self.rank_of)),
        )
        result = compute(action, None if needed is None else self._take_message(needed))
        if produced is not None:
            # an input without effect on the output has no gradient
            self._here[produced] = self.boundary.empty().zero_() if result is None else result

    def _take_message(self, message: Message) -> Tensor:
        """Return a message's tensor, received by then or made on this rank."""
        if message in self._receiving:
            with self.waits.track(message, is_received=True):
                _wait_for(self._receiving.pop(message))
        return self._here.pop(message)

    def _post_receive(self, message: Message) -> None:
        self._here[message] = buffer = self.boundary.empty()
        self.registry.tag(buffer, State.ACTIVATIONS, phase=message.phase)
        with self.waits.track(message, is_received=True):
            source = self.rank_of[message.source]
            self._receiving[message] = dist.irecv(buffer, group=self.group, group_src=source)

    def _post_send(self, message: Message) -> None:
        tensor = self._here.pop(message).contiguous()
        self.registry.tag(tensor, State.ACTIVATIONS, phase=message.phase)
        with self.waits.track(message):
            target = self.rank_of[message.target]
            self._sent[message] = tensor, dist.isend(tensor, group=self.group, group_dst=target)

    def _finish_send(self, message: Message) -> None:
        """Wait for a send, and drop its tensor."""
        with self.waits.track(message):
            _wait_for(self._sent.pop(message)[1])


def _wait_for(work: dist.Work | None) -> None:
    """Wait for a work; torch returns None to a rank outside the group."""
    if work is not None:
        work.wait()


class PipelinedPasses:
    """The runner of a step's passes in the order of the schedule.

    The loss is divided by the global number of tokens, so gradients need no further scale.
    """

    def __init__(
        self, spec: Spec, plan: Plan, mesh: Mesh, staged: StagedModel, callbacks: PassCallbacks
    ) -> None:
        step = plan.pipeline
        assert step is not None
        self.step = step
        self.micro, self.sequence = spec.batch.micro, plan.tokens
        self.count = spec.batch.accumulate
        self.rank = mesh.coordinate(step.axis)
        boundary = _boundary_tensor(spec, plan, mesh, staged.chain)
        self.stages = [StageRunner(part, step.stages, boundary, callbacks) for part in staged.parts]
        self.runtime = Runtime(step.rank_of, mesh.group((step.axis,)), boundary, mesh.registry)
        self.instructions = training_instructions(schedule_of(spec))[self.rank]
        self._stage_of = {stage.index: stage for stage in self.stages}

    def train(self, batch: StepBatch) -> None:
        """Run forward and backward of every micro-batch.

        It raises RankFailed if the batch has another shape, a pass fails, or a neighbour is silent.
        """
        self._require_shape(batch, self.count)
        for stage in self.stages:
            stage.begin(self.count)
        micro_batches = list(batch.micro_batches(self.micro))

        def compute(action: Action, given: torch.Tensor | None) -> torch.Tensor | None:
            for other in self.stages:  # the last pass's outputs have been sent by now
                other.wrapped.finish_collectives()
            stage = self._stage_of[action.stage]
            return stage.compute(action, given, micro_batches[action.microbatch])

        with self.runtime.waits.raise_rank_failed(self._own_stages()):
            self.runtime.run(self.instructions, compute)
            for stage in self.stages:
                stage.wrapped.end_passes()

    def evaluate(self, batch: StepBatch, add: Callable[[torch.Tensor], object]) -> None:
        """Run forward of every micro-batch, and call `add` with each loss on the last stage."""
        micro_batches = list(batch.micro_batches(self.micro))
        count = max(1, len(batch.tensors[0]) // self.micro)
        self._require_shape(batch, count)

        def compute(action: Action, given: torch.Tensor | None) -> torch.Tensor | None:
            stage, samples = self._stage_of[action.stage], micro_batches[action.microbatch]
            return stage.evaluate(given, samples, action.microbatch, add)

        instructions = evaluation_instructions(self.step.rank_of, count)[self.rank]
        with self.runtime.waits.raise_rank_failed(self._own_stages()):
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


def _boundary_tensor(spec: Spec, plan: Plan, mesh: Mesh, chain: Chain) -> BoundaryTensor:
    return BoundaryTensor(
        shape=(spec.batch.micro, *chain.sample_shape(spec.batch.sequence, plan.boundary_slices)),
        dtype=TORCH_DTYPES[plan.update.layout.parameters],
        device=mesh.world.device,
    )
