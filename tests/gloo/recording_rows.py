"""Write the results of the data-axis rows to a page of benchmarks/results/."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks._machine import header, save
from ptrain.report.record import Check
from tests.gloo.rows import ROWS, Setting

CLAIM = """\
Claim: for every row of the data axis, pairwise over layouts, dials, accumulation and 2 or 4 ranks,
`exact` and measured differ by 0 in resident memory (per state, rank and tier) and in traffic
(calls, payload and sent per axes, collective, state and phase; copies between tiers too), and by at
most 2 % in each phase's peak. With `compute: fp64` the losses of {steps} steps are those of one
device to 1e-12 relative and the parameters to 1e-9; else the losses stay within the band of the
layout's rounding. All settings of a row hold every legal pair of two dials' values; `--settings N`
takes the first N of each, which hold most of them.

Measured in one steady step, on gloo ranks that share this machine: llama with hidden 42 = 3 heads
x 14, 1 KV head, ffn 101, vocab 259, 3 layers. `loss` and `parameters` are the worst of the settings
in fp64, relative to one device.
"""


@dataclass(frozen=True)
class Result:
    """The checks of one setting after its run: bytes against the prediction, values against a
    single device."""

    setting: Setting
    checks: tuple[Check, ...]
    against: tuple[Check, ...]

    @property
    def holds(self) -> bool:
        return all(check.holds for check in (*self.checks, *self.against))


def write_rows_page(results: Sequence[Result], command: Sequence[str], steps: int) -> Path:
    """Write one line per row, and the failed checks in full. `steps` is the number of steps of each
    setting."""
    title = "rows: every mode, layout and dial of the data axis"
    lines = [
        header(title, [shlex.join(command)]),
        CLAIM.format(steps=steps),
        "| row | Θ,Ω,G,A | settings | hold | checks | worst peak | loss | parameters |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in dict.fromkeys((*ROWS, *(result.setting.row for result in results))):
        if own := [result for result in results if result.setting.row == row]:
            lines.append(_line(row, own))
    failed = [result for result in results if not result.holds]
    for result in failed:
        wrong = [each for each in (*result.checks, *result.against) if not each.holds]
        lines += ["", f"`{result.setting}` fails:", *(f"- {c.name}: {c.why}" for c in wrong)]
    lines += ["", f"Verdict: {len(results) - len(failed)} of {len(results)} settings hold."]
    return save("rows", "\n".join(lines))


def _line(row: str, results: Sequence[Result]) -> str:
    exact = [result for result in results if result.setting.fp64]
    tuples = " ⊗ ".join(
        f"{factor.axis} {factor.placement}" for factor in results[0].setting.spec().factors
    )
    cells = (
        f"`{row}`",
        tuples.replace("*", "\\*"),
        str(len(results)),
        str(sum(result.holds for result in results)),
        str(sum(len(result.checks) for result in results)),
        f"{_worst(results, 'peak', relative=True):.2%}",
        f"{_worst(exact, 'losses'):.0e}",
        f"{_worst(exact, 'parameters by norm'):.0e}",
    )
    return f"| {' | '.join(cells)} |"


def _worst(results: Iterable[Result], name: str, *, relative: bool = False) -> float:
    """Return the largest measured value of the checks whose names begin with `name`, or its
    distance from the prediction, relative."""
    found = [
        abs((check.measured or 0) - check.predicted) / check.predicted
        if relative and check.predicted
        else float(check.measured or 0)
        for result in results
        for check in (result.checks if relative else result.against)
        if check.name.startswith(name) and check.measured is not None
    ]
    return max(found, default=0.0)
