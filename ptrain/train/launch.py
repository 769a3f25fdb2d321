"""The parent of `ptrain train` on one machine: it starts the ranks and watches them.

The store for the rendezvous only listens on the loopback interface, on a socket that is bound here
and inherited by rank 0, so no port is guessed. The first rank to fail is reported with its cause,
and the others are ended at once. No rank outlives this process. This module imports no torch.
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
from ptrain.train.environment import Rendezvous
from ptrain.train.failure import Rank, end_ranks, start_ranks, wait_for_ranks
from ptrain.train.folder import RunFolder

_EVERY = 0.05  # seconds between two polls
_SETTLE = 2.0  # seconds in which a root cause shows after its first victim
_ORDERLY_GRACE = 30.0  # seconds for the other ranks to end after the first orderly end
_INTERRUPT_GRACE = 60.0  # seconds to finish a step and write a checkpoint


class LauncherSignals:
    """The signals that this process received. A second one of any kind ends the ranks at once."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))

    @contextmanager
    def record_signals(self) -> Iterator[LauncherSignals]:
        """Temporarily record signals instead of being ended by them."""
        before = {number: signal.signal(number, self) for number in interrupt.handled_signals()}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def launch_ranks(
    argv: Sequence[str],
    *,
    num_ranks: int,
    folder: RunFolder,
    parts: Sequence[str] = (),
    module: str = "ptrain.train",
    inherited: Sequence[int] = (),
) -> int:
    """Run `python -m MODULE ARGV` on every rank and return the exit code of the job.

    Args:
        argv: The arguments of each rank.
        num_ranks: The number of ranks.
        folder: The run folder.
        parts: The part of the model on each rank, for messages.
        module: The module of a rank. If its exit code is 1 (a failed verdict), it has written the
            summary of the folder.
        inherited: Descriptors that stay open in every rank.

    Raises:
        RankFailed: A rank died, hung or raised. The message names it.
        TrainingStopped: A check stopped the training.
        PtrainError: A rank rejected the user's input.
    """
    with LauncherSignals().record_signals() as interrupts:
        try:
            return _run_ranks(
                [module, *argv],
                interrupts,
                num_ranks=num_ranks,
                folder=folder,
                parts=parts,
                inherited=inherited,
            )
        except RankFailed:
            if interrupts.received:  # an interrupt, also one while ranks are ended, is no failure
                return _interrupted_code(interrupts)
            raise


def _run_ranks(
    words: Sequence[str],
    interrupts: LauncherSignals,
    *,
    num_ranks: int,
    folder: RunFolder,
    parts: Sequence[str],
    inherited: Sequence[int],
) -> int:
    """Start the ranks and watch them until none is left."""
    if sys.stderr.isatty() and "--json" not in words:
        print(f"starting {num_ranks} ranks; importing torch takes seconds", file=sys.stderr)
    with socket.socket() as listener, standard_output() as output:
        listener.bind(("127.0.0.1", 0))  # port 0: the kernel selects a free one
        # The queue must hold the other ranks until rank 0 has imported torch and accepts them.
        listener.listen(num_ranks + 16)
        address, port = listener.getsockname()
        meeting = Rendezvous(address=address, port=port, descriptor=listener.fileno())
        ranks: list[Rank] = []
        try:
            for rank in start_ranks(
                words,
                num_ranks=num_ranks,
                meeting=meeting,
                folder=folder,
                output=output,
                inherited=inherited,
            ):
                ranks.append(rank)
                rank.has = parts[rank.rank] if parts else ""
            # Rank 0 has inherited the socket. A copy here would keep it open after rank 0 ended,
            # and clients would not notice the end of the store.
            listener.close()
            return _watch(ranks, interrupts)
        finally:
            end_ranks(ranks)


def _watch(ranks: Sequence[Rank], interrupts: LauncherSignals) -> int:
    """Watch the ranks until all have ended, one failed, or the time for an orderly end is over.

    Returns:
        The exit code of the job.
    """
    passed = 0
    deadline = math.inf
    while True:
        for rank in ranks:
            rank.poll()
        now = time.monotonic()
        # After a signal, failures of ranks are its consequences.
        if not interrupts.received and failure.find_failures(ranks, now):
            return _raise_root_cause(ranks)
        if not any(rank.is_running for rank in ranks):
            return _exit_code(ranks, interrupts)
        if any(not rank.is_running for rank in ranks):
            deadline = min(deadline, now + _ORDERLY_GRACE)
        if len(interrupts.received) > passed:
            for rank in ranks:
                rank.send_signals(*interrupts.received[passed:])
            passed = len(interrupts.received)
            # The second signal ends the ranks at once.
            deadline = min(deadline, now + (_INTERRUPT_GRACE if passed == 1 else 0.0))
        if now >= deadline:
            return _handle_overdue(ranks, interrupts)
        time.sleep(_EVERY)


def _exit_code(ranks: Sequence[Rank], interrupts: LauncherSignals) -> int:
    """Return the exit code after all ranks ended in an orderly way, or after a signal."""
    codes = [rank.code for rank in ranks if rank.code]
    if interrupts.received and (not codes or min(codes) < 0):
        return _interrupted_code(interrupts)
    _raise_reported(ranks)
    return codes[0] if codes else 0


def _interrupted_code(interrupts: LauncherSignals) -> int:
    """Return the exit code of an interrupted job."""
    return 128 + (signal.SIGINT if signal.SIGINT in interrupts.received else signal.SIGTERM)


def _raise_reported(ranks: Sequence[Rank]) -> None:
    """Raise the error of the first rank that rejected its input or stopped the training."""
    for rank in ranks:
        if rank.code == TrainingStopped.exit_code:
            raise TrainingStopped(failure.exception_message(rank) or f"stopped; see {rank.log}")
        if rank.code == PtrainError.exit_code:
            if reason := failure.exception_message(rank):
                raise PtrainError(reason)
            raise RankFailed(f"error: {rank} stopped without a message; see {rank.log}")


def _handle_overdue(ranks: Sequence[Rank], interrupts: LauncherSignals) -> int:
    """Return the exit code if ranks outlive an interrupt. Raises RankFailed if one does not end."""
    if interrupts.received or any(rank.code for rank in ranks):
        return _exit_code([rank for rank in ranks if not rank.is_running], interrupts)
    silent = next(rank for rank in ranks if rank.is_running)
    cause = f"does not end; the other ranks ended {_ORDERLY_GRACE:g} s ago"
    raise RankFailed(failure.format_failure(failure.Failure(rank=silent, cause=cause), 1))


def _raise_root_cause(ranks: Sequence[Rank]) -> int:
    """Wait until the root cause shows, and raise it as RankFailed.

    If a rank ended in an orderly way with an error, it explains the victims, and its error is
    raised instead.
    """
    # A victim may be noticed before its root cause, such as a rank that is stopped or killed.
    deadline = time.monotonic() + _SETTLE
    while True:
        wait_for_ranks(ranks, 0.3)  # seconds in which peers report a lost connection
        failures = failure.find_failures(ranks, time.monotonic())
        living = [rank for rank in ranks if rank.is_running]
        orderly = [rank for rank in ranks if rank.code and rank.code in failure.ORDERLY]
        certain = not all(suspect.is_victim for suspect in failures) or orderly
        if certain or not living or time.monotonic() > deadline:
            break
    if not certain and living:
        _request_stacks(living)
    if orderly and all(suspect.is_victim for suspect in failures):
        _raise_reported(orderly)
        return orderly[0].code or 0
    raise RankFailed(
        failure.format_failure(failure.select_root_cause(failures, living), len(failures))
    )


def _request_stacks(living: Sequence[Rank]) -> None:
    """Make ranks that hang write their stacks to their logs (faulthandler, SIGUSR2)."""
    for rank in living:
        rank.send_signals(signal.SIGUSR2)
    time.sleep(0.3)
