"""A program's steps as the training loop takes them, without its journal, checkpoints and signals:
what verification runs on every rank."""

from __future__ import annotations

from ptrain.data.source import SampleSource
from ptrain.interpreter.program import Program
from ptrain.train.exchange import Exchange
from ptrain.train.loop import local_batch, seed_dropout
from ptrain.train.schedule import learning_rate


def drive(program: Program, source: SampleSource, step: int) -> tuple[float, float | None]:
    """One update. Returns this rank's share of the loss, and the norm of the gradients (None where
    the spec does not clip)."""
    rate = learning_rate(program.spec.optimizer, step)
    seed_dropout(program, step)
    share = program.forward_backward(local_batch(program, source, step), rate)
    loss = float(share)
    norm = program.step(rate)
    return loss, None if norm is None else float(norm)


def drive_and_add(
    program: Program, source: SampleSource, step: int, exchange: Exchange
) -> tuple[float, float | None]:
    """The same, with the global mean loss, on all ranks alike."""
    share, norm = drive(program, source, step)
    return exchange.add([share])[0], norm
