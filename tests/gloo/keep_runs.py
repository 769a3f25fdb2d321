"""Activations in every mode: each spec run, held against the prediction and one device, and written
down as a result for benchmarks/results/."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from benchmarks._machine import header, save
from ptrain.spec.spec import Spec
from tests.gloo.recording import counted, named, relative
from tests.gloo.tensor_runs import MEASURED, STEPS, Result, run, worst
from tests.gloo.test_exact import failing
from tests.ranks import Ranks

CLAIM = f"""\
Claim: however blocks keep their activations, on every mesh, `exact` and measured differ by 0 in
resident memory (per state, rank and tier) and in traffic (calls, payload and sent per axes,
collective, state and phase; copies between tiers too), and by at most 2 % in each phase's peak. In
fp64 the losses of {STEPS} steps are those of one device that keeps all to 1e-12 relative, and
the parameters to 1e-9.

Measured in step {MEASURED} (from 0), on gloo ranks that share this machine. Memory and traffic:
figures compared / figures that differ. Peak: largest relative difference over phases and ranks.
`loss` and `parameters`: relative to one device. `saved`: bytes of activations on the device, of the
rank with most, predicted and measured alike where no figure differs.
"""

RESULTS: list[Result] = []


def differences(ranks: Ranks, spec: Spec) -> list[str]:
    """What does not hold: bytes, calls, peaks, losses, parameters."""
    RESULTS.append(result := run(ranks, spec))
    return [*failing(result.checks), *failing(result.against)]


def write(results: Sequence[Result], command: Sequence[str]) -> Path:
    """A line per spec, and what does not hold in full."""
    lines = [
        header("activations: in every mode on every mesh, and one device", [shlex.join(command)]),
        CLAIM,
        "| model | attention | Θ,Ω,G,A | activations | saved | memory | traffic | peak | loss "
        "| parameters | |",
        "|" + "---|" * 11,
        *map(_line, results),
    ]
    failed = [result for result in results if not result.holds]
    for result in failed:
        wrong = [each for each in (*result.checks, *result.against) if not each.holds]
        lines += ["", f"`{result.spec.name}` fails:", *(f"- {c.name}: {c.why}" for c in wrong)]
    lines += ["", f"Verdict: {len(results) - len(failed)} of {len(results)} hold."]
    return save("activation_modes", "\n".join(lines))


def _line(result: Result) -> str:
    spec = result.spec
    factors = (f"{each.axis} {each.degree} {each.placement}" for each in spec.factors)
    saved = [check.measured or 0 for check in named(result.checks, "memory activations")]
    cells = (
        spec.name.partition(".")[0],
        str(spec.resolved.get("attention", "sdpa")),
        " ⊗ ".join(factors).replace("*", "\\*") or "one device",
        _kept(spec),
        f"{max(saved)} B",
        counted(result.checks, "memory"),
        counted(result.checks, "traffic"),
        f"{max(map(relative, named(result.checks, 'peak'))):.2%}",
        *(worst(result, kind) for kind in ("losses", "parameters by norm")),
        "holds" if result.holds else "fails",
    )
    return f"| {' | '.join(cells)} |"


def _kept(spec: Spec) -> str:
    """As the spec says it."""
    said = spec.resolved
    written = [f"{key}: {said[key]}" for key in ("activations", "recompute") if key in said]
    return ", ".join(written).replace("'", "").replace("*", "\\*")
