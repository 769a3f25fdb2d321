"""Run specs on ranks, compare them with the prediction and the single-device reference, and write
one page of benchmarks/results/ per subject."""

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
from tests.gloo.recording import checks_of_kind, count_text, relative_difference
from tests.gloo.runs import expected_estimates, train_on_rank
from tests.gloo.test_exact import failed_checks
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
    """The checks of a spec after its run."""

    spec: Spec
    checks: tuple[Check, ...]
    against: tuple[Check, ...]
    simulated: tuple[Check, ...] = ()

    @property
    def failed(self) -> list[Check]:
        checks = (*self.checks, *self.against, *self.simulated)
        return [check for check in checks if not check.holds]


def reference(spec: Spec, steps: int = STEPS) -> Trajectory:
    """Return the single-device trajectory. It depends on the mesh only through the batches that the
    data axes read."""
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


def run_spec(
    ranks: Ranks,
    spec: Spec,
    exactly: Tolerances = FP64,
    steps: int = STEPS,
    truth: Trajectory | None = None,
) -> Result:
    """Train a spec on its ranks, measure one step, and compare with the prediction and the
    reference.

    The reference is `truth`, or a single device in fp64 with the tolerances `exactly`. Gradient
    norms outside the tolerance may differ by as much as references with permuted summation order
    differ: near a discontinuity a difference of 1e-15 becomes 1e-11."""
    truth = truth or reference(spec, steps)
    reports = ranks.run(spec.world_size, train_on_rank, spec, len(truth.losses), MEASURED)
    measured = join_estimates([report.measured for report in reports if report.measured])
    checks = compare_estimates(
        expected_estimates(derive(spec, facts_of(spec)), reports, MEASURED), measured
    )
    trajectory = reports[0].trajectory
    assert trajectory is not None
    is_exact = spec.precision.compute_fp64
    tolerances = exactly if is_exact else Tolerances(losses=loss_band(spec, truth))
    against = compare_runs(truth, trajectory, tolerances)
    if is_exact and not all(check.holds for check in checks_of_kind(against, NORMS)):
        own = replace(tolerances, gradient_norms=_norm_tolerances(spec, len(truth.losses)))
        against = compare_runs(truth, trajectory, own)
    return Result(spec, checks, against)


def _norm_tolerances(spec: Spec, steps: int) -> tuple[float, ...] | None:
    """Return the tolerance of the gradient norm of each step, relative: the spread between
    references that add in different orders."""
    planned = plan_references(spec, steps)
    alone = Exchange(World())
    runs = run_references([planned.exact, *planned.permuted], alone, Progress())
    growth = [runs[ask.key] for ask in (planned.exact, *planned.permuted)]
    return derive_fp64_tolerances(growth, alone).norms


def compare_simulation(spec: Spec) -> tuple[Check, ...]:
    """Compare the prediction for the last rank with its simulation: memory, traffic and operations,
    without tolerance."""
    last = spec.world_size - 1
    exact = derive(spec, facts_of(spec)).exact.of_rank(last)
    return tuple(
        replace(check, name=f"simulated {check.name}", holds=check.predicted == check.measured)
        for check in compare_estimates(exact, simulate(spec, last, allow_import=True).estimate)
    )


def single_page(results: Sequence[Result], theme: str) -> Mapping[str, Sequence[Result]]:
    return {theme: results} if results else {}


def split_by_ranks(results: Sequence[Result], theme: str) -> Mapping[str, Sequence[Result]]:
    """Split the results into those of up to four ranks and those of eight ranks."""
    pages: dict[str, list[Result]] = {}
    for result in results:
        size = "_8_ranks" if result.spec.world_size == 8 else ""
        pages.setdefault(f"{theme}{size}", []).append(result)
    return pages


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The runs of one subject.

    `cells` returns the values of `columns` for a result, which precede the figures on the page.
    `pages` groups the results by the theme of their page."""

    theme: str
    title: str
    claim: str
    columns: tuple[str, ...]
    cells: Callable[[Result], tuple[str, ...]]
    pages: Callable[[Sequence[Result], str], Mapping[str, Sequence[Result]]] = single_page
    steps: int = STEPS
    simulates: bool = False
    results: list[Result] = field(default_factory=list)

    def differences(self, ranks: Ranks, spec: Spec, truth: Trajectory | None = None) -> list[str]:
        """Run a spec and return the checks that fail: bytes, calls, peaks, losses, parameters."""
        steps = self.steps if is_run_in_full else min(STEPS, self.steps)
        result = run_spec(ranks, spec, steps=steps, truth=truth)
        if self.simulates and is_run_in_full:
            result = replace(result, simulated=compare_simulation(spec))
        self.results.append(result)
        return failed_checks((*result.checks, *result.against, *result.simulated))

    def write(self) -> list[Path]:
        """Write all pages."""
        pages = self.pages(self.results, self.theme)
        return [save(theme, self._page(results)) for theme, results in pages.items()]

    def _page(self, results: Sequence[Result]) -> str:
        """Return one line per spec, and the failed checks in full."""
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
        lines += _widened_norms(results)
        lines += ["", f"Verdict: {len(results) - len(wrong)} of {len(results)} hold."]
        return "\n".join(lines)


def placement_text(spec: Spec) -> str:
    """Return the placements on all axes as the page shows them."""
    factors = (f"{factor.axis} {factor.degree} {factor.placement}" for factor in spec.factors)
    return " ⊗ ".join(factors).replace("*", "\\*")


def dtypes_text(spec: Spec) -> str:
    """Return the dtypes of a spec as the page shows them."""
    return "fp64" if spec.precision.compute_fp64 else spec.precision.layout.name


def details(spec: Spec, keys: Sequence[str]) -> Iterator[str]:
    """Yield the schedule and stages, micro-batches x samples, and the values of `keys` in the
    spec."""
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
        count_text(result.checks, "memory"),
        count_text(result.checks, "traffic"),
        _worst_peak(result.checks),
        count_text(result.simulated, "simulated"),
        *(_worst(result, kind) for kind in ("losses", "parameters by norm")),
        "fails" if result.failed else "holds",
    )


def _widened_norms(results: Sequence[Result]) -> Iterator[str]:
    """Yield the specs whose norms needed the widened tolerance."""
    for result in results:
        for check in checks_of_kind(result.against, NORMS):
            if check.holds and check.tolerance > FP64.gradient_norms:
                yield ""
                yield (
                    f"`{result.spec.name}`, {placement_text(result.spec)}: a gradient norm is "
                    f"{check.measured:.0e} off, of {check.tolerance:.0e} that one device allows "
                    "itself when it adds in other orders."
                )


def _worst_peak(checks: Sequence[Check]) -> str:
    """Return the largest relative difference of a peak, or nothing if no peak is predicted because
    routing depends on data."""
    mismatches = [relative_difference(check) for check in checks_of_kind(checks, "peak")]
    return f"{max(mismatches):.2%}" if mismatches else ""


def _worst(result: Result, kind: str) -> str:
    measured = [check.measured for check in checks_of_kind(result.against, kind)]
    mismatches = [mismatch for mismatch in measured if mismatch is not None]
    return f"{max(mismatches):.0e}" if mismatches else ""


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
