"""The verdict: checks, mismatches and the root cause, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

from ptrain.errors import VerdictFailed
from ptrain.report.finding import Mismatch, MismatchFound, RootCause
from ptrain.report.record import Check


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is said of a run, or of a part of it; equal on all ranks. `notes`: what was not tried,
    and why."""

    checks: tuple[Check, ...]
    mismatches: tuple[Mismatch, ...] = ()
    root_cause: RootCause | None = None
    notes: tuple[str, ...] = ()

    @property
    def fails(self) -> bool:
        return self.root_cause is not None or not all(check.holds for check in self.checks)

    @property
    def holds(self) -> bool:
        return bool(self.checks) and not self.fails


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopVerdict(Verdict):
    """Printable. `losses` are the reference's and the loop's, as far as the run went."""

    losses: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    num_ranks: int = 1
    steps: int = 0

    def raise_for_verdict(self) -> None:
        """Raises MismatchFound with the root cause, VerdictFailed where there is none."""
        if self.root_cause is not None:
            raise MismatchFound(self.root_cause)
        if not self.holds:
            raise VerdictFailed(str(self))

    def __str__(self) -> str:
        held = sum(check.holds for check in self.checks)
        ranks = f"{self.num_ranks} rank{'s' * (self.num_ranks != 1)}"
        head = (
            f"verdict: {'holds' if self.holds else 'fails'} ({held} of {len(self.checks)} "
            f"checks, {self.steps} step{'s' * (self.steps != 1)}, {ranks} against the "
            "single-device reference)"
        )
        rows = [str(self.root_cause)] if self.root_cause else []
        rows += [_row(check) for check in self.checks]
        rows += [f"note: {note}" for note in self.notes]
        return "\n".join([head, *(f"  {line}" for row in rows for line in row.splitlines())])


def _row(check: Check) -> str:
    mark = "ok  " if check.holds else "FAIL"
    limit = f" (limit {check.tolerance:g})" if check.tolerance else ""
    value = "" if check.measured is None else f": {check.measured:.3g}"
    return f"{mark} {check.name}{value}{limit}{f' · {check.why}' if check.why else ''}"
