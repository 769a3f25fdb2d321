"""Write the results of a run of the matrix to a page of benchmarks/results/."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from benchmarks._machine import header, save
from ptrain.report.record import Check
from tests.gloo.band import loss_band
from tests.gloo.cases import Case
from tests.gloo.outcomes import MEASURED_STEP, STEPS, Outcome, Runs
from tests.trajectories import FP64, Tolerances, compare

CLAIM = f"""\
Claim: `exact` and measured differ by 0 in resident memory (per state and rank) and traffic (calls,
payload and sent per axes, collective, state and phase), and by at most 2 % in each phase's peak.
With `compute: fp64` (fp64 in the name) the losses of all {STEPS} steps are those of one device to
1e-12 relative and the parameters to 1e-9; otherwise the losses stay within the band that
`tests/gloo/band.py` derives from the layout's rounding.

Measured in step {MEASURED_STEP} (from 0), on gloo ranks that share this machine. The model is llama
with hidden 42 = 3 heads x 14, 1 KV head, ffn 101, vocab 259, 2 layers; `external` has dims 0 of 2
and 5, `tied` is gpt with the same sizes and a tied head. Memory and traffic: figures compared /
figures that differ. Peak: largest relative difference over phases and ranks. Loss: largest relative
difference over all steps, and its tolerance there.
"""


def write_page(runs: Runs, command: Sequence[str]) -> Path:
    """Write one row per case, and the verdict over all cases."""
    rows = [_row(case, outcome, runs) for case, outcome in runs.all()]
    lines = [
        header("matrix: exact against measured, and against one device", [shlex.join(command)]),
        CLAIM,
        "| spec | memory | traffic | peak | loss | tolerance | parameters | verdict |",
        "|---|---|---|---|---|---|---|---|",
        *(row for row, _ in rows),
        "",
        f"Verdict: {sum(holds for _, holds in rows)} of {len(rows)} hold.",
    ]
    return save("matrix", "\n".join(lines))


def _row(case: Case, outcome: Outcome, runs: Runs) -> tuple[str, bool]:
    reference = runs.reference(case)
    tolerances = FP64 if case.fp64 else Tolerances(losses=loss_band(outcome.spec, reference))
    against = compare(reference, outcome.trajectory, tolerances)
    checks = outcome.checks
    loss = next(check for check in against if check.name == "losses")
    parameters = [check.measured for check in against if check.name == "parameters by norm"]
    holds = all(check.holds for check in (*checks, *against))
    cells = (
        str(case),
        count_text(checks, "memory"),
        count_text(checks, "traffic"),
        f"{max(map(relative_difference, checks_of_kind(checks, 'peak'))):.2%}",
        f"{loss.measured:.1e}",
        f"{loss.tolerance:.1e}",
        f"{parameters[0]:.1e}" if parameters else "",
        "holds" if holds else "fails",
    )
    return f"| {' | '.join(cells)} |", holds


def checks_of_kind(checks: Sequence[Check], kind: str) -> list[Check]:
    return [check for check in checks if check.name.startswith(kind)]


def count_text(checks: Sequence[Check], kind: str) -> str:
    found = checks_of_kind(checks, kind)
    return f"{len(found)} / {sum(not check.holds for check in found)}"


def relative_difference(check: Check) -> float:
    if check.predicted is None or check.measured is None:
        return float("inf")
    if check.lower is not None:  # how far it lies beyond its bounds
        nearest = min(max(check.measured, check.lower), check.predicted)
        return abs(check.measured - nearest) / nearest
    return abs(check.measured - check.predicted) / check.predicted
