"""The result of a verification, as a record and as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ptrain.codec import encode
from ptrain.report.finding import Mismatch, RootCause
from ptrain.report.record import Check, result_record, verdict_line

_MOST = 20  # mismatches in a record; the first explain the others
_WIDTH = 46  # of a check's name


def as_record(
    name: str,
    checks: Sequence[Check],
    *,
    root_cause: RootCause | None = None,
    mismatches: Sequence[Mismatch] = (),
    **more: object,
) -> dict[str, object]:
    """Return the result record (`report.record`) with the root cause and the first mismatches.

    Args:
        name: The name of the spec.
        checks: The checks of all stages.
        root_cause: The explanation of the first mismatch, if there is one.
        mismatches: All mismatches; the record has the first 20 and their number.
        more: Further keys of the record.
    """
    return result_record(name, (), checks=checks) | {
        "culprit": encode(root_cause),
        "departures": encode(mismatches[:_MOST]),
        "num_departures": len(mismatches),
        **more,
    }


def stage_text(name: str, checks: Sequence[Check], seconds: float, *, verbose: bool = False) -> str:
    """Return a line for a stage, and a line for each check that fails.

    Args:
        name: The name of the stage.
        checks: The checks of the stage.
        seconds: The duration of the stage.
        verbose: Add the checks that hold. Checks without a prediction (the run is finite, and it
            learns) share one line.
    """
    holding = sum(check.holds for check in checks)
    lines = [f"{name:<{_WIDTH + 2}}{f'{holding} of {len(checks)} hold':>14}{seconds:>12.1f} s"]
    lines += [
        _check_line(check)
        for check in checks
        if not check.holds or (verbose and check.predicted is not None)
    ]
    # Checks without a prediction only require that a run is finite, moves and learns.
    alive = [check for check in checks if check.predicted is None and check.holds]
    if alive and verbose:
        lines.append(
            _align_cells("reference and run finite, moving and learning", f"{len(alive)} hold")
        )
    return "\n".join(lines)


def end_text(
    checks: Sequence[Check], *, torch: str, root_cause: RootCause | None, notes: Sequence[str]
) -> str:
    """Return the notes and the verdict, with the root cause if the verification fails.

    Args:
        checks: The checks of all stages.
        torch: The version of torch, for the verdict's claim.
        root_cause: The explanation of the first mismatch; None if there is none.
        notes: Sentences on the limits of the verification.
    """
    lines = [f"note: {note}" for note in notes]
    lines.append(verdict_line(checks, torch=torch))
    if root_cause is not None:
        lines.append(str(root_cause))
    return "\n".join(lines)


def _check_line(check: Check) -> str:
    """Return the line of one check: its name, the measured figure, and the allowed one."""
    measured, allowed = check.measured, check.tolerance
    if isinstance(check.predicted, int) and check.predicted:
        cells = f"{measured} of {check.predicted}", ""
    else:
        cells = (
            _number_text(measured),
            f"<= {_number_text(allowed)}" if check.predicted is not None else "",
        )
    end = "" if check.holds else f"  fails: {check.why}"
    return _align_cells(check.name, *cells) + end


def _align_cells(name: str, measured: str, allowed: str = "") -> str:
    """Return a name and two figures, aligned."""
    return f"  {name:<{_WIDTH}}{measured:>14}{allowed:>14}".rstrip()


def _number_text(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}" if math.isfinite(value) else str(value)
