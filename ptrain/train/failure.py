"""Which rank failed first, and why: what the parent reads off the ranks that ended. Torch-free.

A rank that loses its peer raises too, often earlier than the root cause is noticed. Such victims
are recognised by what they say, and folded into one line.
"""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ptrain.errors import RankFailed, VerdictFailed
from ptrain.train.ranks import Rank

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
