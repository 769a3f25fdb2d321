"""Specs on ranks: the bytes of each against the prediction and its figures against one device; and
all of a subject as a page of benchmarks/results/."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks._machine import header, save
from ptrain.derivation.estimate import derive
from ptrain.meters.measure import join_estimates
from ptrain.report.record import Check, compare_estimates
from ptrain.runtime.world import World
from ptrain.simulation.execute import simulate
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from ptrain.traces.facts import facts_of
from ptrain.train.exchange import Exchange
from ptrain.verification.reference import Trajectory
from ptrain.verification.references import Progress, run_references
from ptrain.verification.tolerances import derive_fp64_tolerances, plan_references
from tests.gloo.band import loss_band
from tests.gloo.recording import counted, named, relative
from tests.gloo.runs import judged, train
from tests.gloo.test_exact import failing
from tests.ranks import Ranks
from tests.trajectories import FP64, Tolerances, one_device
from tests.trajectories import compare as compare_runs

STEPS, MEASURED = 4, 3
# False in the default run, where no matrix takes more than STEPS, and simulates only what
# test_simulated.py does
is_run_in_full = True
NORMS = "gradient norms"
_FIGURES = ("memory", "traffic", "peak", "simulated", "loss", "parameters", "")
_REFERENCES: dict[str, Trajectory] = {}


@dataclass(frozen=True)
class Result:
    """One spec after its run."""

    spec: Spec
    checks: tuple[Check, ...]
    against: tuple[Check, ...]
    simulated: tuple[Check, ...] = ()

    @property
    def failed(self) -> list[Check]:
        checks = (*self.checks, *self.against, *self.simulated)
        return [check for check in checks if not check.holds]


def reference(spec: Spec, steps: int = STEPS) -> Trajectory:
    """One device knows nothing of the mesh but the batches that the data axes read."""
    same = (
        spec.model,
        spec.batch,
        spec.data_degree,
        spec.optimizer,
        spec.precision,
        spec.data,
        spec.loss.user_function,
        steps,
    )
    key = repr(same)
    if key not in _REFERENCES:
        _REFERENCES[key] = one_device(spec, steps)
    return _REFERENCES[key]


def run(
    ranks: Ranks,
    spec: Spec,
    exactly: Tolerances = FP64,
    steps: int = STEPS,
    truth: Trajectory | None = None,
) -> Result:
    """Trained on as many ranks as the spec has, measured once and held against both; in fp64
    `exactly` beside one device, or another `truth`. Norms that are farther off may be as far as
    those of one device are by the order of its sums: a step near a cliff makes 1e-11 of 1e-15."""
    truth = truth or reference(spec, steps)
    reports = ranks.run(spec.world_size, train, spec, len(truth.losses), MEASURED)
    measured = join_estimates([report.measured for report in reports if report.measured])
    checks = compare_estimates(judged(derive(spec, facts_of(spec)), reports, MEASURED), measured)
    trajectory = reports[0].trajectory
    assert trajectory is not None
    is_exact = spec.precision.compute_fp64
    tolerances = exactly if is_exact else Tolerances(losses=loss_band(spec, truth))
    against = compare_runs(truth, trajectory, tolerances)
    if is_exact and not all(check.holds for check in named(against, NORMS)):
        own = replace(tolerances, gradient_norms=_norms_of_one_device(spec, len(truth.losses)))
        against = compare_runs(truth, trajectory, own)
    return Result(spec, checks, against)


def _norms_of_one_device(spec: Spec, steps: int) -> tuple[float, ...] | None:
    """Return by how much the norm of each step may differ, relative: what references of this spec
    part by that add in other orders."""
    planned = plan_references(spec, steps)
    alone = Exchange(World())
    runs = run_references([planned.exact, *planned.permuted], alone, Progress())
    growth = [runs[ask.key] for ask in (planned.exact, *planned.permuted)]
    return derive_fp64_tolerances(growth, alone).norms


def simulated_alike(spec: Spec) -> tuple[Check, ...]:
    """Compare what the last rank is predicted to hold, send and compute with its simulation,
    without tolerance."""
    last = spec.world_size - 1
    exact = derive(spec, facts_of(spec)).exact.of_rank(last)
    return tuple(
        replace(check, name=f"simulated {check.name}", holds=check.predicted == check.measured)
        for check in compare_estimates(exact, simulate(spec, last, allow_import=True).estimate)
    )


def all_on_one_page(results: Sequence[Result], theme: str) -> Mapping[str, Sequence[Result]]:
    return {theme: results} if results else {}


def eight_ranks_apart(results: Sequence[Result], theme: str) -> Mapping[str, Sequence[Result]]:
    """Those on up to four ranks and those on eight, where there are any."""
    pages: dict[str, list[Result]] = {}
    for result in results:
        size = "_8_ranks" if result.spec.world_size == 8 else ""
        pages.setdefault(f"{theme}{size}", []).append(result)
    return pages


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The runs of one subject. On its pages, what `cells` says in `columns` of a spec stands before
    its figures; `pages` gives the results by the page's theme."""

    theme: str
    title: str
    claim: str
    columns: tuple[str, ...]
    cells: Callable[[Result], tuple[str, ...]]
    pages: Callable[[Sequence[Result], str], Mapping[str, Sequence[Result]]] = all_on_one_page
    steps: int = STEPS
    simulates: bool = False
    results: list[Result] = field(default_factory=list)

    def differences(self, ranks: Ranks, spec: Spec, truth: Trajectory | None = None) -> list[str]:
        """Run a spec; return what does not hold: bytes, calls, peaks, losses, parameters."""
        steps = self.steps if is_run_in_full else min(STEPS, self.steps)
        result = run(ranks, spec, steps=steps, truth=truth)
        if self.simulates and is_run_in_full:
            result = replace(result, simulated=simulated_alike(spec))
        self.results.append(result)
        return failing((*result.checks, *result.against, *result.simulated))

    def write(self) -> list[Path]:
        """Write the pages."""
        pages = self.pages(self.results, self.theme)
        return [save(theme, self._page(results)) for theme, results in pages.items()]

    def _page(self, results: Sequence[Result]) -> str:
        """A line per spec, and what does not hold in full."""
        columns = (*self.columns, *_FIGURES)
        lines = [
            header(self.title, [shlex.join(["pytest", *sys.argv[1:]])]),
            self.claim,
            _row(columns),
            "|" + "---|" * len(columns),
            *(_row((*self.cells(result), *_figures(result))) for result in results),
        ]
        wrong = [result for result in results if result.failed]
        for result in wrong:
            lines += ["", f"`{result.spec.name}` fails:"]
            lines += [f"- {check.name}: {check.why}" for check in result.failed]
        lines += _wide(results)
        lines += ["", f"Verdict: {len(results) - len(wrong)} of {len(results)} hold."]
        return "\n".join(lines)


def product(spec: Spec) -> str:
    """The placements on the axes, as a page has them."""
    factors = (f"{factor.axis} {factor.degree} {factor.placement}" for factor in spec.factors)
    return " ⊗ ".join(factors).replace("*", "\\*")


def arithmetic(spec: Spec) -> str:
    """In which numbers a spec computes, as a page has it."""
    return "fp64" if spec.precision.compute_fp64 else spec.precision.layout.name


def details(spec: Spec, keys: Sequence[str]) -> Iterator[str]:
    """Yield schedule and stages, micro-batches x samples in each, and what of `keys` the spec
    says."""
    if spec.degree(Axis.PP) > 1:
        stages = spec.pipeline.stages_over(spec.degree(Axis.PP))
        yield f"{spec.pipeline.schedule}, {stages} stages"
    yield f"{spec.batch.accumulate} x {spec.batch.micro}"
    said = spec.resolved
    for key in keys:
        if key in said:
            yield f"{key}: {said[key]}".replace("'", "").replace("*", "\\*")


def _figures(result: Result) -> tuple[str, ...]:
    return (
        counted(result.checks, "memory"),
        counted(result.checks, "traffic"),
        _worst_peak(result.checks),
        counted(result.simulated, "simulated"),
        *(_worst(result, kind) for kind in ("losses", "parameters by norm")),
        "fails" if result.failed else "holds",
    )


def _wide(results: Sequence[Result]) -> Iterator[str]:
    """Yield whose norms were held to more than is allowed by itself."""
    for result in results:
        for check in named(result.against, NORMS):
            if check.holds and check.tolerance > FP64.of_norm(0):
                yield ""
                yield (
                    f"`{result.spec.name}`, {product(result.spec)}: a gradient norm is "
                    f"{check.measured:.0e} off, of {check.tolerance:.0e} that one device allows "
                    "itself when it adds in other orders."
                )


def _worst_peak(checks: Sequence[Check]) -> str:
    """Nothing, where no peak is predicted for what a run routes."""
    mismatches = [relative(check) for check in named(checks, "peak")]
    return f"{max(mismatches):.2%}" if mismatches else ""


def _worst(result: Result, kind: str) -> str:
    measured = [check.measured for check in named(result.against, kind)]
    mismatches = [mismatch for mismatch in measured if mismatch is not None]
    return f"{max(mismatches):.0e}" if mismatches else ""


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
