"""The training loop: batch, forward and backward, check, update. It names no mesh axis.

Also the inputs of the loop in addition to its program, its result, and the learning rate of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from signal import Signals

import torch

from ptrain.data.sampler import SampleSource, Split, read_batch
from ptrain.errors import TrainingStopped
from ptrain.interpreter.program import Program
from ptrain.meters.replicas import ReplicaMeter
from ptrain.models.modes import seed_device, seed_of_step
from ptrain.models.objective import StepBatch
from ptrain.report.routing import LayerRouting
from ptrain.runtime.queue import DeviceQueue, Milestone
from ptrain.spec.job import CheckpointSpec, OptimizerSpec
from ptrain.train.exchange import Exchange
from ptrain.train.finite import FiniteGuard, LaunchedStep, StepReports
from ptrain.train.journal import LOG, Journal
from ptrain.train.rank_start import Interrupts


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopInputs:
    """The objects that the training loop uses in addition to its program.

    Attributes:
        corpus: The source of samples.
        exchange: The exchange of the ranks.
        interrupts: The received signals.
        journal: The reports of this rank.
        watch: Returns the context of a step (from 0), with the meters and profilers that are due.
        routing: Returns the routing counts of a step (from 0); empty if it was not watched.
        check_step: Called with step, loss and gradient norm; may stop the training.
        consistency: The comparison of replicas; may stop the training when it is due.
        save: Writes a checkpoint after this number of steps.
    """

    corpus: SampleSource
    exchange: Exchange
    interrupts: Interrupts
    journal: Journal
    watch: Callable[[int], AbstractContextManager[object]]
    routing: Callable[[int], Sequence[LayerRouting]]
    check_step: Callable[[int, float, float | None], None]
    consistency: Consistency
    save: Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a training.

    Attributes:
        steps: The number of finished steps, including those before a resume.
        loss: The loss of the last step. None: no step was done.
        held_out_loss: The last held-out loss. None: no evaluation was done.
        interrupt: The signal that ended the training early. None: it is complete.
    """

    steps: int
    loss: float | None = None
    held_out_loss: float | None = None
    interrupt: Signals | None = None


class Consistency:
    """The comparison of values that must be equal on several ranks.

    Args:
        program: The program.
        exchange: The exchange of the ranks.
        resume: Returns the command that continues from the last checkpoint, "" without one.
    """

    def __init__(self, program: Program, exchange: Exchange, resume: Callable[[], str]) -> None:
        self.every = program.spec.consistency_every
        self._replicas = ReplicaMeter(program, exchange)
        self._resume = resume
        self._checked = 0  # the number of steps at the last comparison

    def step_context(
        self, step: int, watch: AbstractContextManager[object]
    ) -> AbstractContextManager[object]:
        """Return the context of a step (from 0).

        It records the gradients of the step if `require_agreement` is due after it.
        """
        return self._record_gradients(watch) if self.is_due(step + 1) else watch

    def is_due(self, steps: int) -> bool:
        """Return True if the ranks are compared after this number of steps.

        The caller settles the reports of all steps first: a value that is not finite is another
        finding, with another fix.
        """
        return self.every > 0 and steps % self.every == 0

    def require_agreement(self, steps: int) -> None:
        """Require that the ranks agree after this number of steps.

        It does nothing if they were compared after this step already, or if the check is off.

        Raises:
            TrainingStopped: Values differ. Raised on all ranks.
        """
        if not self.every or steps == self._checked:
            return
        self._checked = steps  # before the check, which raises on all ranks if it fails
        if (root_cause := self._replicas.root_cause(self._replicas.check(steps))) is None:
            LOG.debug("step %d  the ranks agree", steps)
            return
        command = self._resume()
        remedy = (
            f"Continue from the last checkpoint, where the ranks agreed: `{command}`"
            if command
            else "Train again with `checkpoint.every=N`; no checkpoint was saved."
        )
        raise TrainingStopped(
            f"step {steps}: values that must be identical on the ranks differ\n  {root_cause}\n "
            f" remedy: {remedy}"
        )

    @contextmanager
    def _record_gradients(self, watch: AbstractContextManager[object]) -> Iterator[None]:
        """Temporarily record gradients, inside the context `watch`."""
        with watch, self._replicas.record_gradients():
            yield


def train(program: Program, parts: LoopInputs, *, first: int = 0) -> Outcome:
    """Train from step `first` to the spec's last step and return the result.

    If the host runs ahead of its device, nothing is read from the device between two steps. A step
    is then reported when the next one was launched, or before an evaluation, a checkpoint or the
    end.

    Raises TrainingStopped, on all ranks, if a loss or gradient is not finite; its update is
    skipped.
    """
    spec, queue = program.spec, DeviceQueue(program.world.device)
    repeat = partial(_repeat_step, program, parts)
    guard = FiniteGuard(program, queue, parts.exchange, parts.interrupts, repeat)
    steps, held_out = first, None
    before: Milestone | None = None  # the end of the previous step, if no other work came after it
    most = 1 if queue.runs_ahead and not spec.verify_every else 0  # one keeps the device busy
    with StepReports(guard, parts.journal, parts.check_step, most=most) as reports:
        while steps < spec.train.steps and not reports.interrupt:
            step, steps = steps, steps + 1
            local = local_batch(program, parts.corpus, step)
            rate = learning_rate(spec.optimizer, step)
            seed_dropout(program, step)
            began = before or queue.mark()
            with parts.watch(step):
                share = program.forward_backward(local, rate)
                look = guard.start_check(step, share, program.reduce())
                program.apply(rate, look.halted)
                look.start_copy()
            ended, routing = queue.mark(), parts.routing(step)
            before = ended if queue.runs_ahead else None
            seen = parts.journal.launch_figures(steps)
            reports.add(LaunchedStep(step, rate, look, (began, ended), routing, seen))
            if parts.consistency.is_due(steps):
                reports.finish()
                parts.consistency.require_agreement(steps)
                before = None
            if _is_due(steps, spec.eval.every):
                reports.finish()
                held_out, before = _held_out_loss(program, parts), None
                parts.journal.write_held_out_loss(steps, held_out)
            is_last = steps == spec.train.steps
            if is_last or reports.interrupt or _is_due(steps, spec.checkpoint.every):
                reports.finish()
                if _is_save_due(spec.checkpoint, steps, is_last or bool(reports.interrupt)):
                    parts.save(steps)
                before = None
    return Outcome(
        steps=steps, loss=reports.loss, held_out_loss=held_out, interrupt=reports.interrupt
    )


def _repeat_step(program: Program, parts: LoopInputs, step: int) -> torch.Tensor | None:
    """Recompute the gradients of a step and return their norm."""
    rate = learning_rate(program.spec.optimizer, step)
    local = local_batch(program, parts.corpus, step)
    seed_dropout(program, step)
    program.forward_backward(local, rate)
    return program.reduce()


def local_batch(
    program: Program, source: SampleSource, step: int, split: Split = Split.TRAIN
) -> StepBatch:
    """Return this rank's share of the global batch of `step` (from 0), on its device."""
    local = read_batch(
        source,
        spec=program.spec,
        step=step,
        data_index=program.data_index,
        data_degree=program.spec.data_degree,
        split=split,
        offset=program.sample_offset,
    )
    return program.own_tokens(local).to(program.world.device)


def seed_dropout(program: Program, step: int) -> None:
    """Seed dropout by (seed, step, rank), so that a resumed run draws the same masks."""
    seed = seed_of_step(program.spec.train.seed, step, program.random_index)
    seed_device(seed, program.world.device)


def _held_out_loss(program: Program, parts: LoopInputs) -> float:
    """Return the mean loss of the held-out batches, which are the same in each evaluation."""
    count, split = program.spec.eval.batches, Split.HELD_OUT
    share = torch.zeros((), dtype=torch.float64, device=program.world.device)
    for index in range(count):
        share.add_(program.evaluate(local_batch(program, parts.corpus, index, split)))
    return parts.exchange.sum_over_ranks([float(share)])[0] / count


def _is_due(steps: int, every: int) -> bool:
    """Return True after each `every` steps; never if `every` is 0."""
    return every > 0 and steps % every == 0


def _is_save_due(checkpoint: CheckpointSpec, steps: int, is_last: bool) -> bool:
    """Return True if a checkpoint is due after these steps."""
    return _is_due(steps, checkpoint.every) or (
        is_last and (checkpoint.at_end or checkpoint.every > 0)
    )


def learning_rate(optimizer: OptimizerSpec, step: int) -> float:
    """Return the learning rate of a step.

    Args:
        optimizer: The optimizer section of the spec.
        step: The step, from 0. The first of w warm-up steps uses lr / w.
    """
    schedule = optimizer.schedule
    if step < schedule.warmup:
        return optimizer.lr * (step + 1) / schedule.warmup
    if not schedule.decay_steps:
        return optimizer.lr
    done = min(1.0, (step - schedule.warmup) / schedule.decay_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * done))
    return optimizer.lr * (schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * cosine)
