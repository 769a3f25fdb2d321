"""Start the ranks of one machine and watch them: the parent of `ptrain train`. Torch-free.

The store in which the ranks meet listens on the loopback only, on a socket that is bound here and
handed to rank 0, so that no port is guessed. The first rank to fail is named with its cause, the
others are ended at once, and none is left behind, whatever happens to this process.
"""

from __future__ import annotations

import math
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from ptrain.errors import PtrainError, RankFailed, TrainingStopped
from ptrain.output import standard_output
from ptrain.train import failure, interrupt
from ptrain.train.environment import Meeting
from ptrain.train.failure import Rank, end, start, wait
from ptrain.train.folder import RunFolder

_EVERY = 0.05  # seconds between two looks
_SETTLE = 2.0  # for a root cause to show after its first victim
_ORDERLY_GRACE = 30.0  # for the other ranks to end once one has in good order
_INTERRUPT_GRACE = 60.0  # for a step to finish and a checkpoint to be written


class LauncherSignals:
    """Signals that came since the start; the second one of any kind means at once."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))

    @contextmanager
    def caught(self) -> Iterator[LauncherSignals]:
        before = {number: signal.signal(number, self) for number in interrupt.caught_here()}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def launch(
    argv: Sequence[str],
    *,
    num_ranks: int,
    folder: RunFolder,
    parts: Sequence[str] = (),
    module: str = "ptrain.train",
    inherited: Sequence[int] = (),
) -> int:
    """Run `python -m MODULE ARGV` on every rank; the exit code of the job. `parts`: what of the
    model each rank has, for messages. `inherited`: descriptors that stay open in every rank. A
    module whose exit code is 1, a failed verdict, has written the folder's summary.

    Raises RankFailed, naming the rank, when one died, hung or raised.
    """
    with LauncherSignals().caught() as interrupts:
        try:
            return _live(
                [module, *argv],
                interrupts,
                num_ranks=num_ranks,
                folder=folder,
                parts=parts,
                inherited=inherited,
            )
        except RankFailed:
            if interrupts.received:  # while the others were ended: the job is to end, not to fail
                return _interrupted(interrupts)
            raise


def _live(
    words: Sequence[str],
    interrupts: LauncherSignals,
    *,
    num_ranks: int,
    folder: RunFolder,
    parts: Sequence[str],
    inherited: Sequence[int],
) -> int:
    """The ranks, from their start until none is left."""
    if sys.stderr.isatty() and "--json" not in words:
        print(f"starting {num_ranks} ranks; importing torch takes seconds", file=sys.stderr)
    with socket.socket() as listener, standard_output() as output:
        listener.bind(("127.0.0.1", 0))
        listener.listen(num_ranks + 16)
        address, port = listener.getsockname()
        meeting = Meeting(address=address, port=port, descriptor=listener.fileno())
        ranks: list[Rank] = []
        try:
            for rank in start(
                words,
                num_ranks=num_ranks,
                meeting=meeting,
                folder=folder,
                output=output,
                inherited=inherited,
            ):
                ranks.append(rank)
                rank.has = parts[rank.rank] if parts else ""
            listener.close()  # rank 0 has its own copy; clients must see it go
            return _watch(ranks, interrupts)
        finally:
            end(ranks)


def _watch(ranks: Sequence[Rank], interrupts: LauncherSignals) -> int:
    """Until all are gone, one failed, or the time for an orderly end is over; the exit code."""
    passed = 0
    deadline = math.inf
    while True:
        for rank in ranks:
            rank.poll()
        now = time.monotonic()
        if not interrupts.received and failure.failures(ranks, now):
            return _blame(ranks)
        if not any(rank.lives for rank in ranks):
            return _ended(ranks, interrupts)
        if any(not rank.lives for rank in ranks):
            deadline = min(deadline, now + _ORDERLY_GRACE)
        if len(interrupts.received) > passed:
            for rank in ranks:
                rank.send(*interrupts.received[passed:])
            passed = len(interrupts.received)
            deadline = min(deadline, now + (_INTERRUPT_GRACE if passed == 1 else 0.0))
        if now >= deadline:
            return _overdue(ranks, interrupts)
        time.sleep(_EVERY)


def _ended(ranks: Sequence[Rank], interrupts: LauncherSignals) -> int:
    """All ranks are gone in good order, or on our signal."""
    codes = [rank.code for rank in ranks if rank.code]
    if interrupts.received and (not codes or min(codes) < 0):
        return _interrupted(interrupts)
    _tell(ranks)
    return codes[0] if codes else 0


def _interrupted(interrupts: LauncherSignals) -> int:
    return 128 + (signal.SIGINT if signal.SIGINT in interrupts.received else signal.SIGTERM)


def _tell(ranks: Sequence[Rank]) -> None:
    """Raise what a rank refused or stopped for, in the words of the first that said so."""
    for rank in ranks:
        if rank.code == TrainingStopped.exit_code:
            raise TrainingStopped(failure.said(rank) or f"stopped; see {rank.log}")
        if rank.code == PtrainError.exit_code:
            if said := failure.said(rank):
                raise PtrainError(said)
            raise RankFailed(f"error: {rank} stopped without a message; see {rank.log}")


def _overdue(ranks: Sequence[Rank], interrupts: LauncherSignals) -> int:
    """Ranks outlived an interrupt or the orderly end of another."""
    if interrupts.received or any(rank.code for rank in ranks):
        return _ended([rank for rank in ranks if not rank.lives], interrupts)
    silent = next(rank for rank in ranks if rank.lives)
    cause = f"does not end; the other ranks ended {_ORDERLY_GRACE:g} s ago"
    raise RankFailed(failure.message(failure.Failure(rank=silent, cause=cause), 1))


def _blame(ranks: Sequence[Rank]) -> int:
    """Give the root cause a moment to show, then name it. A rank that ended in good order, with
    something to tell, explains the victims; its exit code is the job's."""
    deadline = time.monotonic() + _SETTLE
    while True:
        wait(ranks, 0.3)  # peers that lost a connection say so within this
        failures = failure.failures(ranks, time.monotonic())
        living = [rank for rank in ranks if rank.lives]
        orderly = [rank for rank in ranks if rank.code and rank.code in failure.ORDERLY]
        certain = not all(suspect.is_victim for suspect in failures) or orderly
        if certain or not living or time.monotonic() > deadline:
            break
    if not certain and living:
        _ask_for_stacks(living)
    if orderly and all(suspect.is_victim for suspect in failures):
        _tell(orderly)
        return orderly[0].code or 0
    raise RankFailed(failure.message(failure.root_cause(failures, living), len(failures)))


def _ask_for_stacks(living: Sequence[Rank]) -> None:
    """A rank that hangs writes where (faulthandler, SIGUSR2) before it is ended."""
    for rank in living:
        rank.send(signal.SIGUSR2)
    time.sleep(0.3)
