"""What a placement on pp does: the rank's stages, run by its instructions."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ptrain.axes.pipeline.catalogue import schedule_of
from ptrain.axes.pipeline.form import stages_text
from ptrain.axes.pipeline.instructions import evaluation, training
from ptrain.axes.pipeline.run.runtime import Runtime
from ptrain.axes.pipeline.run.stage import BoundaryTensor, PassCallbacks, StageRunner
from ptrain.axes.pipeline.run.staged import Staged
from ptrain.axes.pipeline.schedule import Action
from ptrain.errors import RankFailed
from ptrain.facts.stages import Chain
from ptrain.models.batch import StepBatch
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.rooms.mesh import Mesh
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan


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
                f"{self._own_stages()}: the batch has {shape} tokens, and the "
                f"stages wait for {count} micro-batches of {self.micro}: {wanted}\n"
                "  remedy: give every rank of pp the batch of the spec"
            )


def _boundary(spec: Spec, plan: Plan, mesh: Mesh, chain: Chain) -> BoundaryTensor:
    return BoundaryTensor(
        shape=(spec.batch.micro, *chain.sample_shape(spec.batch.sequence, plan.boundary_slices)),
        dtype=TORCH_DTYPES[plan.update.layout.parameters],
        device=mesh.world.device,
    )
