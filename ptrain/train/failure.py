"""One process per rank on this machine, as its parent sees it; which rank failed first, and why.
Torch-free.

A rank that loses its peer raises too, often earlier than the root cause is noticed. Such victims
are recognised by what they say, and folded into one line.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ptrain.errors import RankFailed, VerdictFailed
from ptrain.train import environment
from ptrain.train.folder import RunFolder
from ptrain.train.rank_start import die_with

# A deliberate end: done, a verdict, the user's input, a check, an interrupt.
ORDERLY = (0, 1, 2, 4, 130, 143)
STOPPED_FOR = 5.0  # seconds after which a stopped rank counts as failed

_VICTIM = re.compile(
    r"Connection (closed|reset|refused)|closed by peer|reset by peer|Broken pipe|Timed out waiting"
    r"|Socket Timeout|wait timeout|recvValue failed|failed to (recv|send)|Read error|Write error"
    r"|another rank|could not connect to the other|store.*(timeout|timed out)"
    r"|remote process exited",
    re.IGNORECASE,
)
_WAITED_FOR = re.compile(r"waiting for rank (\d+)")  # in the words of a stage of a pipeline
_FRAME = re.compile(r"\s*(frame #\d+|<omitting python frames>)")  # of torch's C++ stacks


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One rank and what ended it. `is_victim`: it failed because another one had."""

    rank: Rank
    cause: str
    is_victim: bool = False


def failures(ranks: Sequence[Rank], now: float) -> list[Failure]:
    """Return every failure by now, in the order in which they were noticed."""
    failed = [failure for rank in ranks if (failure := _failure(rank, now))]
    return sorted(failed, key=lambda failure: failure.rank.ended or now)


def root_cause(failures: Sequence[Failure], living: Sequence[Rank]) -> Failure:
    """Return who is to blame: the first that is no victim; if all are, one that lives and is
    silent, of several the one that most victims waited for."""
    for failure in failures:
        if not failure.is_victim:
            return failure
    if living:
        others = ", ".join(str(failure.rank.rank) for failure in failures)
        named = Counter(
            int(rank) for victim in failures for rank in _WAITED_FOR.findall(victim.cause)
        )
        silent = max(living, key=lambda rank: named[rank.rank])
        return Failure(
            rank=silent, cause=(f"does not respond; rank {others} timed out waiting for it")
        )
    return failures[0]


def message(failure: Failure, num_failed: int, *, num_lines: int = 12) -> str:
    """The root cause's number, cause and last words; the others in one line."""
    rank = failure.rank
    lines = [f"error: {rank} {failure.cause}"]
    if tail := _tail(rank, num_lines):
        lines += [f"  last lines of {rank.log}:", *(f"    | {line}" for line in tail)]
    if num_failed > 1:
        lines.append(
            f"  {num_failed - 1} more failed because of it; their logs are in the same folder"
        )
    return "\n".join(lines)


def _failure(rank: Rank, now: float) -> Failure | None:
    if rank.code is None:
        if rank.stopped is None or now - rank.stopped < STOPPED_FOR:
            return None
        return Failure(rank=rank, cause=f"was stopped (SIGSTOP) for {STOPPED_FOR:g} s")
    if rank.code in ORDERLY and not _died_early(rank):
        return None
    if rank.code < 0:
        return Failure(rank=rank, cause=_signalled(-rank.code))
    raised = _raised(rank)
    return Failure(
        rank=rank,
        cause=_in_words(raised) if raised else f"ended with exit code {rank.code}",
        is_victim=is_victim(raised),
    )


def is_victim(raised: str) -> bool:
    """Return whether an exception says that another rank failed."""
    return bool(_VICTIM.search(raised))


def _in_words(raised: str) -> str:
    """What a rank found out about itself needs no name of an exception."""
    name, _, message = raised.partition(": ")
    return f"failed: {message}" if name == RankFailed.__name__ else f"raised {raised}"


def _died_early(rank: Rank) -> bool:
    """Exit code 1 is a failed verdict, but also Python's own when a rank cannot even import: then
    there is no summary with a verdict in the run folder."""
    summary = rank.log.parent.parent / "summary.json"
    return rank.code == VerdictFailed.exit_code and not summary.exists()


def said(rank: Rank) -> str:
    """Return what the rank had to say to the user: its exception's text without the class."""
    return re.sub(r"^\w+: ", "", _raised(rank))


def _signalled(number: int) -> str:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    hint = " (by a user, or by the kernel because memory ran out)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def _raised(rank: Rank) -> str:
    """Return the exception in the rank's error file, "" where there is none."""
    try:
        content = json.loads(rank.error_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    message = content.get("message", "") if isinstance(content, dict) else ""
    return str(message.get("message", "") if isinstance(message, dict) else message)


def _tail(rank: Rank, num_lines: int) -> list[str]:
    try:
        with rank.log.open("rb") as file:
            file.seek(max(0, rank.log.stat().st_size - 8192))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = [line for line in text.splitlines() if line.strip() and not _FRAME.match(line)]
    return [line[:160] for line in lines[-num_lines:]]


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
