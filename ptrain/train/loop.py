"""The training loop: batch, forward and backward, agreement, update. It names no axis."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from signal import Signals

import torch

from ptrain.data.sampler import batch
from ptrain.data.source import SampleSource, Split
from ptrain.interpreter.program import Program
from ptrain.models.batch import StepBatch
from ptrain.models.generators import seed_of_step
from ptrain.report.routing import LayerRouting
from ptrain.spec.job import CheckpointSpec
from ptrain.train.exchange import Exchange
from ptrain.train.finite import Guard
from ptrain.train.interrupt import Interrupts
from ptrain.train.journal import Journal, StepReport
from ptrain.train.schedule import learning_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the loop uses beside the program. `watch(step)` surrounds a step with the meters and
    profilers that are due, `routing(step)` gives what its routers chose, where they were watched;
    `judge(step, loss, norm)` may stop the training; `save(steps_done)` writes a checkpoint."""

    corpus: SampleSource
    exchange: Exchange
    interrupts: Interrupts
    journal: Journal
    watch: Callable[[int], AbstractContextManager[object]]
    routing: Callable[[int], Sequence[LayerRouting]]
    judge: Callable[[int, float, torch.Tensor | None], None]
    save: Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`steps` done altogether, `loss` of the last one; `interrupt` is what ended it early."""

    steps: int
    loss: float | None = None
    held_out_loss: float | None = None
    interrupt: Signals | None = None


def train(program: Program, parts: Parts, *, first: int = 0) -> Outcome:
    """Steps `first` to the spec's last. Raises TrainingStopped, on all ranks, at the first loss or
    gradient that is not finite, before its update."""
    spec = program.spec
    guard = Guard(program, parts.exchange, parts.interrupts)
    outcome = Outcome(steps=first)
    held_out = None
    for step in range(first, spec.train.steps):
        local = local_batch(program, parts.corpus, step)
        rate = learning_rate(spec.optimizer, step)
        seed_dropout(program, step)
        began = time.perf_counter()
        with parts.watch(step):
            share = program.forward_backward(local, rate)
            norm = program.reduce()
            loss, interrupt = guard.agree(step, share, norm)
            program.apply(rate)
        seconds = time.perf_counter() - began
        routing, scaling = parts.routing(step), program.scaling
        parts.journal.step(StepReport(step + 1, loss, norm, rate, seconds, scaling, routing))
        parts.judge(step, loss, norm)
        if _is_due(step + 1, spec.eval.every):
            held_out = _evaluate(program, parts)
            parts.journal.held_out(step + 1, held_out)
        outcome = Outcome(steps=step + 1, loss=loss, held_out_loss=held_out, interrupt=interrupt)
        if _is_save_due(spec.checkpoint, step + 1, bool(interrupt) or step + 1 == spec.train.steps):
            parts.save(step + 1)
        if interrupt:
            break
    return outcome


def local_batch(
    program: Program, source: SampleSource, step: int, split: Split = Split.TRAIN
) -> StepBatch:
    """Return this rank's share of the global batch of `step` (from 0), on its device."""
    local = batch(
        source,
        spec=program.spec,
        step=step,
        data_index=program.data_index,
        data_degree=program.spec.data_degree,
        split=split,
    )
    return program.own_tokens(local).to(program.world.device)


def seed_dropout(program: Program, step: int) -> None:
    """Dropout is a function of (seed, step, rank): a resumed run draws what it would have."""
    torch.manual_seed(seed_of_step(program.spec.train.seed, step, program.random_index))


def _evaluate(program: Program, parts: Parts) -> float:
    """The mean loss of the held-out batches, the same ones every time."""
    count, split = program.spec.eval.batches, Split.HELD_OUT
    batches = (local_batch(program, parts.corpus, index, split) for index in range(count))
    share = sum(float(program.evaluate(local)) for local in batches)
    return parts.exchange.add([share])[0] / count


def _is_due(steps: int, every: int) -> bool:
    return every > 0 and steps % every == 0


def _is_save_due(checkpoint: CheckpointSpec, steps: int, is_last: bool) -> bool:
    return _is_due(steps, checkpoint.every) or (
        is_last and (checkpoint.at_end or checkpoint.every > 0)
    )
