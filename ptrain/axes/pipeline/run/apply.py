"""Apply a placement on pp: build the rank's stages and run its instructions one after the other.

Neighbouring stages of one rank pass the tensor itself. A received tensor lives until the pass that
takes it releases it, a sent one until its `Release`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

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
from ptrain.axes.pipeline.run.stage import BoundaryTensor, PassCallbacks, Staged, StageRunner, Waits
from ptrain.axes.pipeline.schedule import Action
from ptrain.costs import State
from ptrain.errors import RankFailed
from ptrain.facts.stages import Chain
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.models.objective import StepBatch
from ptrain.rooms.mesh import Mesh
from ptrain.rooms.registry import Registry
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan

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
        self.waits.clear()
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
            self.waits.receives(message)
            _wait(self._coming.pop(message))
            self.waits.clear()
        return self._here.pop(message)

    def _receive(self, message: Message) -> None:
        self._here[message] = buffer = self.boundary.empty()
        self.registry.tag(buffer, State.ACTIVATIONS, phase=message.phase)
        self.waits.receives(message)
        source = self.rank_of[message.source]
        self._coming[message] = dist.irecv(buffer, group=self.group, group_src=source)
        self.waits.clear()

    def _send(self, message: Message) -> None:
        tensor = self._here.pop(message).contiguous()
        self.registry.tag(tensor, State.ACTIVATIONS, phase=message.phase)
        self.waits.sends(message)
        target = self.rank_of[message.target]
        self._sent[message] = tensor, dist.isend(tensor, group=self.group, group_dst=target)
        self.waits.clear()

    def _release(self, message: Message) -> None:
        self.waits.sends(message)
        _, work = self._sent.pop(message)
        _wait(work)
        self.waits.clear()


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
            stage = self._stage_of[action.stage]
            return stage.compute(action, given, micro_batches[action.microbatch])

        with self.runtime.waits.watched(self._own_stages()):
            self.runtime.run(self.instructions, compute)

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
