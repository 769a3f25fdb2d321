"""A program's steps as the training loop takes them, without its journal, checkpoints and signals:
what verification runs on every rank."""

from __future__ import annotations

from ptrain.data.corpus import Corpus, Split
from ptrain.data.sampler import LocalBatch, batch
from ptrain.interpreter.program import Program
from ptrain.train.exchange import Exchange
from ptrain.train.loop import seed_dropout
from ptrain.train.schedule import learning_rate


def local_batch(program: Program, source: Corpus, step: int) -> LocalBatch:
    """This rank's share of the global batch of `step` (from 0), on its device."""
    spec = program.spec
    return batch(
        source,
        spec=spec,
        step=step,
        data_index=program.data_index,
        data_degree=spec.data_degree,
        split=Split.TRAIN,
    ).to(program.world.device)


def drive(program: Program, source: Corpus, step: int) -> tuple[float, float | None]:
    """One update. Returns this rank's share of the loss, and the norm of the gradients (None where
    the spec does not clip)."""
    rate = learning_rate(program.spec.optimizer, step)
    seed_dropout(program, step)
    share = program.forward_backward(local_batch(program, source, step), rate)
    loss = float(share)
    norm = program.step(rate)
    return loss, None if norm is None else float(norm)


def drive_and_add(
    program: Program, source: Corpus, step: int, exchange: Exchange
) -> tuple[float, float | None]:
    """The same, with the global mean loss, on all ranks alike."""
    share, norm = drive(program, source, step)
    return exchange.add([share])[0], norm
