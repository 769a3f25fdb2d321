"""What a placement on pp does: the rank's stages under one of torch's schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from ptrain.axes.pipeline.form import stages_text
from ptrain.axes.pipeline.run.stage import Boundary, Enter, Place, Stage
from ptrain.axes.pipeline.run.staged import Staged
from ptrain.axes.pipeline.run.waits import Waits, named
from ptrain.costs import Phase
from ptrain.data.sampler import LocalBatch
from ptrain.errors import RankFailed
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.rooms.mesh import Mesh
from ptrain.spec.pipeline import ScheduleName
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_OF_ONE_STAGE: dict[ScheduleName, Any] = {
    ScheduleName.NAIVE: ScheduleGPipe,
    ScheduleName.GPIPE: ScheduleGPipe,
    ScheduleName.ONE_F_ONE_B: Schedule1F1B,
}
_OF_SEVERAL: dict[ScheduleName, Any] = {
    ScheduleName.BFS: ScheduleLoopedBFS,
    ScheduleName.INTERLEAVED: ScheduleInterleaved1F1B,
    ScheduleName.ZERO_BUBBLE: ScheduleInterleavedZeroBubble,
    ScheduleName.ZBV: ScheduleZBVZeroBubble,
    ScheduleName.DUALPIPEV: ScheduleDualPipeV,
}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a program wants of passes: the last stage's forward pass runs in `given(targets)`, then
    `loss` is called with what it returned and the targets; `enter` is told of every pass."""

    given: Callable[[torch.Tensor], AbstractContextManager[None]]
    loss: Loss
    enter: Enter


class Pipelined:
    """The passes of a step: all micro-batches through the rank's stages, in the order of the
    schedule."""

    def __init__(self, spec: Spec, plan: Plan, mesh: Mesh, staged: Staged, asked: Asked) -> None:
        step = plan.pipeline
        assert step is not None
        self.staged, self.step = staged, step
        self.micro, self.sequence = spec.batch.micro, spec.batch.sequence
        self.count = spec.batch.accumulate
        self.group = mesh.group((step.axis,))
        self.rank = mesh.coordinate(step.axis)
        self.waits = Waits(step, self.group)
        self.boundary = _boundary(spec, plan, mesh, staged.hidden)
        tokens = torch.zeros(self.micro, self.sequence, dtype=torch.int64, device=mesh.world.device)
        self.stages = [
            Stage(
                part.wrapped,
                Place(index=part.index, stages=step.stages, group=self.group, waits=self.waits),
                self.boundary,
                tokens,
                mesh.registry,
                asked.enter,
            )
            for part in staged.parts
        ]
        self.asked = asked
        self._targets: tuple[torch.Tensor, ...] = ()  # of a step, by micro-batch
        self.stages[-1].around = self._around
        self.each_time = 1 if step.schedule is ScheduleName.NAIVE else self.count
        self.schedule = _schedule(
            step.schedule, self.stages, self.each_time, self._named(asked.loss)
        )

    def train(self, batch: LocalBatch) -> None:
        """Forward and backward of every micro-batch. Raises RankFailed, with the stage, for a batch
        of another shape, and where a pass fails or a neighbour does not answer."""
        self._require_shape(batch, is_whole=True)
        self.waits.clear()
        for stage in self.stages:
            stage.left, stage.done = self.count, 0
        self._targets = batch.tokens[:, 1:].split(self.micro)
        with self.waits.watched(self._own_stages()):
            self._train(batch)
        self._targets = ()

    def _around(self, micro_batch: int) -> AbstractContextManager[None]:
        """What the forward pass of the rank's last stage runs in."""
        if not self.stages[-1].is_last:
            return nullcontext()
        return self.asked.given(self._targets[micro_batch])

    def _train(self, batch: LocalBatch) -> None:
        for tokens in batch.tokens.split(self.each_time * self.micro):
            given: tuple[torch.Tensor, ...] = ()
            expected: dict[str, torch.Tensor] = {}
            if any(stage.is_first for stage in self.stages):
                given = (tokens[:, :-1],)
            if any(stage.is_last for stage in self.stages):
                expected = {"target": tokens[:, 1:]}
            self.schedule.step(*given, **expected, losses=[], return_outputs=False)
            for stage in self.stages:
                stage.done += self.each_time

    def evaluate(
        self, batch: LocalBatch, loss: Callable[[torch.Tensor, torch.Tensor], None]
    ) -> None:
        """Forward of every micro-batch, one after the other: torch's own evaluation fails where two
        neighbouring stages are on one rank. `loss` is called with what the last stage returned and
        the targets. Raises RankFailed as `train` does."""
        self._require_shape(batch, is_whole=False)
        self.waits.clear()
        with self.waits.watched(self._own_stages()):
            for number, micro_batch in enumerate(batch.micro_batches(self.micro)):
                self._evaluate(number, micro_batch, loss)

    def _evaluate(
        self,
        number: int,
        micro_batch: tuple[torch.Tensor, torch.Tensor],
        loss: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        (inputs, targets), passed = micro_batch, None
        for part, stage in zip(self.staged.parts, self.stages, strict=True):
            given = self._received(part.index, number, passed) if part.index else inputs
            inside = self.asked.given(targets) if stage.is_last else nullcontext()
            with named(part.index, number), inside:
                passed = part.module(given)
                stage.require_boundary(passed, number)
                if stage.is_last:
                    loss(passed, targets)
            if not stage.is_last and self.step.rank_of[part.index + 1] != self.rank:
                following = self.step.rank_of[part.index + 1]
                self.waits.sends(part.index + 1, number, Phase.FORWARD)
                dist.send(passed.contiguous(), group=self.group, group_dst=following)

    def _received(self, index: int, number: int, passed: torch.Tensor | None) -> torch.Tensor:
        source = self.step.rank_of[index - 1]
        if source == self.rank:
            assert passed is not None, "the stage before is the rank's own"
            return passed
        hidden = self.boundary.empty().detach()
        self.waits.receives(index - 1, number, Phase.FORWARD)
        dist.recv(hidden, group=self.group, group_src=source)
        self.waits.has(index - 1, number, Phase.FORWARD)
        return hidden

    def _named(self, loss: Loss) -> Loss:
        """A failure names the stage and the micro-batch."""

        def named_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            last = self.stages[-1]
            with named(last.stage_index, last.newest):
                return loss(logits, targets)

        return named_loss

    def _own_stages(self) -> str:
        return stages_text([stage.stage_index for stage in self.stages])

    def _require_shape(self, batch: LocalBatch, *, is_whole: bool) -> None:
        """`is_whole`: all micro-batches of a step, else any number of them."""
        rows, tokens = batch.tokens.shape
        count = self.count if is_whole else max(1, rows // self.micro)
        wanted = [count * self.micro, self.sequence + 1]
        if [rows, tokens] != wanted:
            raise RankFailed(
                f"{self._own_stages()}: the batch has {[rows, tokens]} tokens, and the stages wait "
                f"for {count} micro-batches of {self.micro}: {wanted}\n"
                "  remedy: give every rank of pp the batch of the spec"
            )


def _boundary(spec: Spec, plan: Plan, mesh: Mesh, hidden: int) -> Boundary:
    tokens = spec.batch.sequence
    if plan.tensor is not None and plan.tensor.is_sequence:
        tokens //= mesh.degrees[plan.tensor.axis]
    return Boundary(
        shape=(spec.batch.micro, tokens, hidden),
        dtype=TORCH_DTYPES[plan.update.layout.parameters],
        device=mesh.world.device,
    )


def _schedule(name: ScheduleName, stages: Sequence[Stage], microbatches: int, loss: Loss) -> Any:
    """Gradients are sums over tokens, divided by the global number in the loss: nothing is to be
    scaled by the number of micro-batches."""
    if name in _OF_ONE_STAGE:
        (stage,) = stages
        return _OF_ONE_STAGE[name](stage, microbatches, loss_fn=loss, scale_grads=False)
    return _OF_SEVERAL[name](list(stages), microbatches, loss_fn=loss, scale_grads=False)
