"""The training loop: batch, forward and backward, check, update. It names no mesh axis."""

from __future__ import annotations

from functools import partial

import torch

from ptrain.data.sampler import SampleSource, Split, read_batch
from ptrain.interpreter.program import Program
from ptrain.models.modes import seed_device, seed_of_step
from ptrain.models.objective import StepBatch
from ptrain.runtime.queue import DeviceQueue, Milestone
from ptrain.spec.job import CheckpointSpec
from ptrain.train.finite import FiniteGuard, LaunchedStep, StepReports
from ptrain.train.loop_inputs import LoopInputs, Outcome, learning_rate


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
