"""One process per rank on this machine, as its parent sees it: it runs, is stopped, is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ptrain.errors import RankFailed
from ptrain.train import environment
from ptrain.train.folder import RunFolder
from ptrain.train.parent import die_with


@dataclass(slots=True)
class Rank:
    """`code` is the exit code, or minus the signal that ended it; None while it lives.
    `stopped` is when it was first seen stopped, `ended` when it was seen gone. `has` is what of the
    model it has, where that tells it from others (`stage 1`)."""

    rank: int
    process: subprocess.Popen[bytes]
    log: Path
    error_file: Path
    code: int | None = None
    stopped: float | None = None
    ended: float = field(default=0.0)
    has: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank}{f' ({self.has})' * bool(self.has)}"

    @property
    def lives(self) -> bool:
        return self.code is None

    def poll(self) -> None:
        """Take notice of an exit, a stop or a continuation, without waiting."""
        if not self.lives:
            return
        flags = os.WNOHANG | os.WUNTRACED | getattr(os, "WCONTINUED", 0)
        pid, status = os.waitpid(self.process.pid, flags)
        if pid == 0:
            return
        if os.WIFSTOPPED(status):
            self.stopped = time.monotonic()
        elif os.WIFEXITED(status) or os.WIFSIGNALED(status):
            self.code = self.process.returncode = os.waitstatus_to_exitcode(status)
            self.ended = time.monotonic()
        else:
            self.stopped = None

    def send(self, *signals: signal.Signals) -> None:
        """Signals in this order; a rank that is gone has been reaped, so no stranger is hit."""
        for number in signals:
            if self.lives:
                os.kill(self.process.pid, number)


def start(
    words: Sequence[str],
    *,
    num_ranks: int,
    meeting: environment.Meeting,
    folder: RunFolder,
    output: int | None = None,
    inherited: Sequence[int] = (),
) -> Iterator[Rank]:
    """Start all ranks one after the other, `python -m WORDS`. Their errors go to their logs; rank 0
    prints to `output`, or keeps our standard output. `inherited`: descriptors that stay open in
    every rank. Raises RankFailed where a process cannot be started."""
    for rank in range(num_ranks):
        try:
            yield _start(words, rank, num_ranks, meeting, folder, output, inherited)
        except OSError as error:
            raise RankFailed(f"error: rank {rank} cannot be started: {error}") from error


def end(ranks: Sequence[Rank], grace: float = 3.0) -> None:
    """No process is left: what is stopped is killed as it is (woken, it would go on as if nothing
    had been), the others are asked to go and then killed."""
    for rank in ranks:
        rank.send(signal.SIGKILL if rank.stopped else signal.SIGTERM)
    wait(ranks, grace)
    for rank in ranks:
        rank.send(signal.SIGKILL)
    wait(ranks, 10.0)


def wait(ranks: Iterable[Rank], seconds: float) -> bool:
    """Poll until no rank lives or the time is over; whether none lives."""
    ranks = list(ranks)
    deadline = time.monotonic() + seconds
    while True:
        for rank in ranks:
            rank.poll()
        if not any(rank.lives for rank in ranks):
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)


def _start(
    words: Sequence[str],
    rank: int,
    num_ranks: int,
    meeting: environment.Meeting,
    folder: RunFolder,
    output: int | None,
    inherited: Sequence[int],
) -> Rank:
    log, error_file = folder.log(rank), folder.error(rank)
    error_file.unlink(missing_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", *words],  # -P: without the current folder
            env=environment.rank_environment(rank, num_ranks, meeting, error_file),
            stdin=subprocess.DEVNULL,
            stdout=output if rank == 0 else descriptor,
            stderr=descriptor,
            pass_fds=(*inherited, *([meeting.descriptor] if rank == 0 else [])),
            start_new_session=True,  # Ctrl-C reaches the parent alone, which passes it on
            preexec_fn=partial(die_with, os.getpid()),
        )
    finally:
        os.close(descriptor)
    return Rank(rank, process, log, error_file)
