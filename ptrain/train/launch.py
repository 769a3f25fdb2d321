"""The parent of `ptrain train` on one machine: it starts the ranks, watches them, and reports the
root cause of a failure.

The store for the rendezvous only listens on the loopback interface, on a socket that is bound here
and inherited by rank 0, so no port is guessed. The first rank to fail is reported with its cause,
and the others are ended at once. No rank outlives this process. A rank that loses its peer raises,
too, often before the root cause is noticed. Such victims are recognized by their messages and
reported in one line. This module imports no torch.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

from ptrain.errors import PtrainError, RankFailed, TrainingStopped, VerdictFailed
from ptrain.files import open_private
from ptrain.output import standard_output
from ptrain.report.out_of_memory import is_out_of_memory
from ptrain.train import environment, rank_start
from ptrain.train.environment import Rendezvous
from ptrain.train.folder import RunFolder, display_path
from ptrain.train.rank_start import die_with_parent

# Exit codes of a deliberate end: done, a verdict, wrong input, a check, SIGINT, SIGTERM. 3 is
# missing: a rank with RankFailed may be a victim.
ORDERLY = (0, 1, 2, 4, 130, 143)
STOPPED_FOR = 5.0  # seconds after which a stopped rank counts as failed

# Messages of gloo, NCCL, torch's stores and `exchange` on a rank whose peer is gone.
_VICTIM = re.compile(
    r"Connection (closed|reset|refused)|closed by peer|reset by peer|Broken pipe|Timed out waiting"
    r"|Socket Timeout|wait timeout|recvValue failed|failed to (recv|send)|Read error|Write error"
    r"|another rank|could not connect to the other|store.*(timeout|timed out)"
    r"|remote process exited",
    re.IGNORECASE,
)
# In the messages of pipeline stages and of `exchange`.
_AWAITED_RANK = re.compile(r"waiting for rank (\d+)")
_FRAME = re.compile(r"\s*(frame #\d+|<omitting python frames>)")  # lines of torch's C++ stacks


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A rank that failed and the cause. `is_victim`: it failed because another rank had failed."""

    rank: Rank
    cause: str
    is_victim: bool = False


def has_timed_out(failure: Failure) -> bool:
    """Return True if a rank failed because another one did not respond within a limit."""
    return failure.is_victim and "timed out" in failure.cause.lower()


def find_failures(ranks: Sequence[Rank], now: float) -> list[Failure]:
    """Return all failures, in the order in which they were noticed.

    Args:
        ranks: The ranks.
        now: The current time (monotonic). A rank that was stopped for too long counts as failed.
    """
    failed = [failure for rank in ranks if (failure := _classify_exit(rank, now))]
    # A rank that is stopped has not ended: it counts as noticed now.
    return sorted(failed, key=lambda failure: failure.rank.ended or now)


def select_root_cause(failures: Sequence[Failure], living: Sequence[Rank]) -> Failure:
    """Return the failure to report.

    This is the first failure that is no victim. If all are victims, it is a rank that still runs
    and does not respond: the one that most victims waited for.

    Args:
        failures: The failures, in the order in which they were noticed.
        living: The ranks that still run.
    """
    for failure in failures:
        if not failure.is_victim:
            return failure
    if living:
        others = ", ".join(str(failure.rank.rank) for failure in failures)
        named = Counter(
            int(rank) for victim in failures for rank in _AWAITED_RANK.findall(victim.cause)
        )
        silent = max(living, key=lambda rank: (rank.stopped is not None, named[rank.rank]))
        cause = "does not respond" if silent.stopped is None else "was stopped (SIGSTOP)"
        return Failure(rank=silent, cause=f"{cause}; rank {others} timed out waiting for it")
    return failures[0]


def format_failure(failure: Failure, num_failed: int, *, num_lines: int = 12) -> str:
    """Return the report of a failure.

    Args:
        failure: The root cause.
        num_failed: The number of failed ranks, including this one.
        num_lines: The number of lines of its log to include.
    """
    rank = failure.rank
    lines = [f"error: {rank} {failure.cause}"]
    if tail := _last_lines(rank, num_lines):
        lines += [f"  last lines of {rank.log}:", *(f"    | {line}" for line in tail)]
    if num_failed > 1:
        lines.append(
            f"  {num_failed - 1} more failed because of it; their logs are in the same folder"
        )
    if is_out_of_memory(failure.cause):
        run = display_path(rank.log.parent.parent)
        lines.append(f"  remedy: Explain it with `{shlex.join(['ptrain', 'why-oom', run])}`.")
    return "\n".join(lines)


def _classify_exit(rank: Rank, now: float) -> Failure | None:
    """Return the failure of a rank, None if it runs or ended in an orderly way."""
    if rank.code is None:
        if rank.stopped is None or now - rank.stopped < STOPPED_FOR:
            return None
        return Failure(rank=rank, cause=f"was stopped (SIGSTOP) for {STOPPED_FOR:g} s")
    if rank.code in ORDERLY and not _is_early_exit(rank):
        return None
    if rank.code < 0:
        return Failure(rank=rank, cause=_describe_signal(-rank.code))
    raised = _recorded_exception(rank)
    return Failure(
        rank=rank,
        cause=_describe_exception(raised) if raised else f"ended with exit code {rank.code}",
        is_victim=is_victim(raised),
    )


def is_victim(raised: str) -> bool:
    """Return True if an exception's text names the failure of another rank."""
    return bool(_VICTIM.search(raised))


def _describe_exception(raised: str) -> str:
    """Return the cause for an exception. A RankFailed is reported without the name of its class."""
    name, _, message = raised.partition(": ")
    return f"failed: {message}" if name == RankFailed.__name__ else f"raised {raised}"


def _is_early_exit(rank: Rank) -> bool:
    """Return True if exit code 1 is no verdict.

    Python also exits with 1 if an import fails; then the run folder has no summary.
    """
    summary = rank.log.parent.parent / "summary.json"
    return rank.code == VerdictFailed.exit_code and not summary.exists()


def exception_message(rank: Rank) -> str:
    """Return the message of a rank's exception, without the class."""
    return re.sub(r"^\w+: ", "", _recorded_exception(rank))


def _describe_signal(number: int) -> str:
    """Return the cause for a rank that a signal ended."""
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    hint = " (by a user, or by the kernel because memory ran out)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def _recorded_exception(rank: Rank) -> str:
    """Return the exception in the rank's error file, "" without one."""
    try:
        content = json.loads(rank.error_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    message = content.get("message", "") if isinstance(content, dict) else ""
    return str(message.get("message", "") if isinstance(message, dict) else message)


def _last_lines(rank: Rank, num_lines: int) -> list[str]:
    """Return the last lines of a rank's log, without torch's C++ frames."""
    try:
        with rank.log.open("rb") as file:
            # 12 lines of 160 characters need 2 KiB. The rest is for the C++ frames that are left
            # out.
            file.seek(max(0, rank.log.stat().st_size - 8192))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = [line for line in text.splitlines() if line.strip() and not _FRAME.match(line)]
    return [line[:160] for line in lines[-num_lines:]]


@dataclass(slots=True)
class Rank:
    """A rank that runs as a child process.

    Attributes:
        rank: The rank.
        process: The process.
        log: Its log file.
        error_file: The file that @record writes its exception to.
        code: The exit code, or minus the signal that ended it. None: it runs.
        stopped: The time (monotonic) at which it was first seen stopped. None: it is not.
        ended: The time at which its end was noticed.
        is_hung: True if the other ranks timed out waiting for it.
        has: Its part of the model, such as `stage 1`, if ranks differ.
    """

    rank: int
    process: subprocess.Popen[bytes]
    log: Path
    error_file: Path
    code: int | None = None
    stopped: float | None = None
    ended: float = field(default=0.0)
    is_hung: bool = False
    has: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank}{f' ({self.has})' * bool(self.has)}"

    @property
    def is_running(self) -> bool:
        """True until the process has ended."""
        return self.code is None

    def poll(self) -> None:
        """Update the state after an exit, a stop or a continuation, without blocking."""
        if not self.is_running:
            return
        # Not Popen.poll, which reports no stops. Some systems lack WCONTINUED.
        flags = os.WNOHANG | os.WUNTRACED | getattr(os, "WCONTINUED", 0)
        pid, status = os.waitpid(self.process.pid, flags)
        if pid == 0:
            return
        if os.WIFSTOPPED(status):
            self.stopped = time.monotonic()
        elif os.WIFEXITED(status) or os.WIFSIGNALED(status):
            # Popen must not wait again for a process that has been reaped.
            self.code = self.process.returncode = os.waitstatus_to_exitcode(status)
            self.ended = time.monotonic()
        else:
            self.stopped = None

    def send_signals(self, *signals: signal.Signals) -> None:
        """Send signals in this order, unless the rank has ended.

        An ended rank has been reaped, so its process id may belong to another process.
        """
        for number in signals:
            if self.is_running:
                os.kill(self.process.pid, number)


def start_ranks(
    words: Sequence[str],
    *,
    num_ranks: int,
    meeting: environment.Rendezvous,
    folder: RunFolder,
    output: int | None = None,
    inherited: Sequence[int] = (),
) -> Iterator[Rank]:
    """Start all ranks with `python -m WORDS`, and yield each one after its start.

    Args:
        words: The module and its arguments.
        num_ranks: The number of ranks.
        meeting: The rendezvous.
        folder: The run folder, for the logs.
        output: The descriptor that rank 0 prints to. None: the standard output of this process.
        inherited: Descriptors that stay open in every rank.

    Raises:
        RankFailed: A process cannot be started.
    """
    for rank in range(num_ranks):
        try:
            # Yielded one by one, so that the caller can end the ranks before one that cannot be
            # started.
            yield _start_rank(words, rank, num_ranks, meeting, folder, output, inherited)
        except OSError as error:
            raise RankFailed(f"error: rank {rank} cannot be started: {error}") from error


def end_ranks(ranks: Sequence[Rank], grace: float = 3.0) -> None:
    """End all ranks and wait for them.

    Stopped ranks are killed, because they would continue to train when woken, and so are hung
    ones. The others get SIGTERM, and SIGKILL after the grace period.

    Args:
        ranks: The ranks.
        grace: The seconds between the two signals.
    """
    for rank in ranks:
        rank.send_signals(signal.SIGKILL if rank.stopped or rank.is_hung else signal.SIGTERM)
    wait_for_ranks(ranks, grace)
    for rank in ranks:
        rank.send_signals(signal.SIGKILL)
    # A process that is blocked in a driver or a file system may not end at all.
    wait_for_ranks(ranks, 10.0)


def wait_for_ranks(ranks: Iterable[Rank], seconds: float) -> bool:
    """Poll until all ranks have ended or the time is over.

    Args:
        ranks: The ranks.
        seconds: The limit.

    Returns:
        True if all ranks have ended.
    """
    ranks = list(ranks)
    deadline = time.monotonic() + seconds
    while True:
        for rank in ranks:
            rank.poll()
        if not any(rank.is_running for rank in ranks):
            return True
        if time.monotonic() >= deadline:
            return False
        # The shortest wait of a caller is 0.3 s.
        time.sleep(0.02)


def _start_rank(
    words: Sequence[str],
    rank: int,
    num_ranks: int,
    meeting: environment.Rendezvous,
    folder: RunFolder,
    output: int | None,
    inherited: Sequence[int],
) -> Rank:
    """Start one rank. It prints to its log, except for the standard output of rank 0."""
    log, error_file = folder.log(rank), folder.error(rank)
    error_file.unlink(missing_ok=True)  # from an earlier attempt
    # Empty, because @record would create it with the mode of the umask.
    os.close(open_private(error_file, os.O_WRONLY | os.O_EXCL))
    descriptor = open_private(log, os.O_WRONLY | os.O_APPEND)
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", *words],  # -P: without the current folder
            env=environment.rank_environment(rank, num_ranks, meeting, error_file),
            # Several ranks cannot share the input of a terminal.
            stdin=subprocess.DEVNULL,
            stdout=output if rank == 0 else descriptor,
            stderr=descriptor,
            pass_fds=(*inherited, *([meeting.descriptor] if rank == 0 else [])),
            start_new_session=True,  # Ctrl-C reaches only the parent, which forwards it
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
    finally:
        # The process has a copy.
        os.close(descriptor)
    return Rank(rank, process, log, error_file)


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
        before = {number: signal.signal(number, self) for number in rank_start.handled_signals()}
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
            for rank in ranks:
                with suppress(OSError):
                    if rank.error_file.stat().st_size == 0:  # of a rank that raised nothing
                        rank.error_file.unlink()


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
        if not interrupts.received and find_failures(ranks, now):
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
            raise TrainingStopped(exception_message(rank) or f"stopped; see {rank.log}")
        if rank.code == PtrainError.exit_code:
            if reason := exception_message(rank):
                raise PtrainError(reason)
            raise RankFailed(f"error: {rank} stopped without a message; see {rank.log}")


def _handle_overdue(ranks: Sequence[Rank], interrupts: LauncherSignals) -> int:
    """Return the exit code if ranks outlive an interrupt. Raises RankFailed if one does not end."""
    if interrupts.received or any(rank.code for rank in ranks):
        return _exit_code([rank for rank in ranks if not rank.is_running], interrupts)
    silent = next(rank for rank in ranks if rank.is_running)
    cause = f"does not end; the other ranks ended {_ORDERLY_GRACE:g} s ago"
    raise RankFailed(format_failure(Failure(rank=silent, cause=cause), 1))


def _raise_root_cause(ranks: Sequence[Rank]) -> int:
    """Wait until the root cause shows, and raise it as RankFailed.

    If a rank ended in an orderly way with an error, it explains the victims, and its error is
    raised instead.
    """
    # A victim may be noticed before its root cause, such as a rank that is stopped or killed.
    deadline = time.monotonic() + _SETTLE
    while True:
        wait_for_ranks(ranks, 0.3)  # seconds in which peers report a lost connection
        failures = find_failures(ranks, time.monotonic())
        living = [rank for rank in ranks if rank.is_running]
        orderly = [rank for rank in ranks if rank.code and rank.code in ORDERLY]
        certain = not all(suspect.is_victim for suspect in failures) or orderly
        # All others have timed out, so the last one will not show another cause.
        is_hung = len(living) == 1 and all(map(has_timed_out, failures))
        if certain or is_hung or not living or time.monotonic() > deadline:
            break
    if not certain and living:
        _request_stacks(living)
    if orderly and all(suspect.is_victim for suspect in failures):
        _raise_reported(orderly)
        return orderly[0].code or 0
    root_cause = select_root_cause(failures, living)
    root_cause.rank.is_hung = root_cause.rank.is_running
    raise RankFailed(format_failure(root_cause, len(failures)))


def _request_stacks(living: Sequence[Rank]) -> None:
    """Make ranks that hang write their stacks to their logs (faulthandler, SIGUSR2)."""
    for rank in living:
        rank.send_signals(signal.SIGUSR2)
    time.sleep(0.3)
