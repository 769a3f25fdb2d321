"""A run of a spec of the tensor axis: its bytes against the prediction, its figures against one
device; and all of them as a result for benchmarks/results/."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks._machine import header, save
from ptrain.derivation.estimate import derive
from ptrain.meters.measure import join_estimates
from ptrain.report.record import Check, compare
from ptrain.spec.axis import Axis
from ptrain.spec.spec import Spec
from ptrain.traces.facts import facts_of
from ptrain.verification.band import loss_band
from ptrain.verification.compare import FP64, Tolerances
from ptrain.verification.compare import compare as compare_runs
from ptrain.verification.reference import Trajectory, one_device
from tests.gloo.recording import counted, named, relative
from tests.gloo.runs import train
from tests.gloo.test_exact import failing
from tests.ranks import Ranks

STEPS, MEASURED = 4, 3
CLAIM = f"""\
Claim: with operators cut over tp, alone and within data ranks, `exact` and measured differ by 0 in
resident memory (per state and rank) and in traffic (calls, payload and sent per axes, collective,
state and phase), and by at most 2 % in each phase's peak. Where the arithmetic is fp64 the losses
of {STEPS} steps are those of one device to 1e-12 relative and the parameters to 1e-9; else these
losses stay within the band of the layout's rounding.

Measured in step {MEASURED} (from 0), on gloo ranks that share this machine. Memory and traffic:
figures compared / figures that differ. Peak: largest relative difference over phases and ranks.
`loss` and `parameters`: relative to one device.
"""


@dataclass(frozen=True)
class Result:
    """One spec after its run."""

    spec: Spec
    checks: tuple[Check, ...]
    against: tuple[Check, ...]

    @property
    def holds(self) -> bool:
        return all(check.holds for check in (*self.checks, *self.against))


RESULTS: list[Result] = []
_REFERENCES: dict[str, Trajectory] = {}


def reference(spec: Spec) -> Trajectory:
    """One device knows nothing of the mesh but the batches that the data axes read."""
    same = (spec.model, spec.batch, spec.data_degree, spec.optimizer, spec.precision)
    key = repr(same)
    if key not in _REFERENCES:
        _REFERENCES[key] = one_device(spec, STEPS)
    return _REFERENCES[key]


def differences(ranks: Ranks, spec: Spec) -> list[str]:
    """What does not hold: bytes, calls, peaks, losses, parameters."""
    RESULTS.append(result := run(ranks, spec))
    return [*failing(result.checks), *failing(result.against)]


def run(ranks: Ranks, spec: Spec) -> Result:
    """Trained on as many ranks as the spec has, measured once and held against both."""
    truth = reference(spec)
    reports = ranks.run(spec.world_size, train, spec, len(truth.losses), MEASURED)
    measured = join_estimates([each.measured for each in reports if each.measured])
    checks = compare(derive(spec, facts_of(spec)).exact, measured)
    trajectory = reports[0].trajectory
    assert trajectory is not None
    tolerances = FP64 if spec.precision.compute_fp64 else Tolerances(losses=loss_band(spec, truth))
    return Result(spec, checks, compare_runs(truth, trajectory, tolerances))


def write(results: Sequence[Result], command: Sequence[str]) -> Path:
    """A line per spec, and what does not hold in full."""
    lines = [
        header("tensor: operators cut over tp, and one device", [shlex.join(command)]),
        CLAIM,
        "| model | Θ,Ω,G,A | plan | precision | memory | traffic | peak | loss | parameters | |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *map(_line, results),
    ]
    failed = [result for result in results if not result.holds]
    for result in failed:
        wrong = [each for each in (*result.checks, *result.against) if not each.holds]
        lines += ["", f"`{result.spec.name}` fails:", *(f"- {c.name}: {c.why}" for c in wrong)]
    lines += ["", f"Verdict: {len(results) - len(failed)} of {len(results)} hold."]
    return save("tensor", "\n".join(lines))


def _line(result: Result) -> str:
    spec = result.spec
    factors = (f"{each.axis} {each.degree} {each.placement}" for each in spec.factors)
    cut = any(each.axis is Axis.TP for each in spec.factors)
    plan = ("naive" if spec.tensor.is_naive else "paired") if cut else ""
    cells = (
        spec.name,
        " ⊗ ".join(factors).replace("*", "\\*"),
        plan if spec.tensor.loss_parallel else f"{plan}, logits gathered",
        "fp64" if spec.precision.compute_fp64 else spec.precision.layout.name,
        counted(result.checks, "memory"),
        counted(result.checks, "traffic"),
        f"{max(map(relative, named(result.checks, 'peak'))):.2%}",
        *(worst(result, kind) for kind in ("losses", "parameters by norm")),
        "holds" if result.holds else "fails",
    )
    return f"| {' | '.join(cells)} |"


def worst(result: Result, kind: str) -> str:
    found = [check.measured for check in named(result.against, kind) if check.measured is not None]
    return f"{max(found):.0e}" if found else ""
