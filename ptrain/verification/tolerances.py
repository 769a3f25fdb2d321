"""Tolerances for the comparison of a correct run with a single device, per step.

Fixed figures apply as long as differences are pure rounding. Once training has amplified them, the
tolerance is derived from the spread of permuted references.

A placement changes the order of sums (`permuted`). Training is a chaotic map: at useful learning
rates a difference of one rounding grows by some percent per step, to ten thousand times its size
after a hundred steps, whatever caused it. A fixed figure cannot distinguish that from a fault, but
references that differ only in the order of sums can.

Let n references have the losses L_i(t), where L_1 uses the usual order. If the run under test is
one more draw of the same distribution, (X - L_1) / (s sqrt 2) has Student's t distribution with n -
1 degrees of freedom, where s is the sample deviation. So the run may differ by lambda · s(t), with
lambda = q · sqrt 2. The quantile q is exceeded once in 10^4, and s(t) is the largest deviation of
the steps up to t: rounding accumulates, and references may come close to each other by chance.
Gradient norms are treated in the same way. For the final parameters, s² is half the mean square
distance of permuted references from the first. The run under test does not affect the tolerance.

- In 16 bits, or if the update computes in 16 bits, only this applies: 7 permuted references.
- In fp32, at least 1e-4 is allowed, absolute; 3 permuted references.
- In fp64, at least 1e-12 is allowed, relative; 3 permuted references.

Permuted references take most of the time. They run only once the run under test exceeds the fixed
figures, because before that they could not change the verdict.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from ptrain.spec.spec import Spec
from ptrain.train.exchange import Exchange
from ptrain.verification.compare import (
    FP64_LOSS,
    FP64_NORM,
    FP64_PARAMETERS,
    tensor_differences,
)
from ptrain.verification.parts import gather_full_tensors
from ptrain.verification.references import (
    ReferenceRequest,
    ReferenceRun,
    is_order_sensitive,
    with_fp64,
    without_dropout,
)

FEW, MANY = 3, 7  # permuted references in addition to a fixed figure, and instead of one
QUANTILES = {FEW: 28.000, MANY: 7.885}  # of Student's t by degrees of freedom: once in 10^4
FP32_LOSS = 1e-4
_FP32 = torch.finfo(torch.float32).eps


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTolerances:
    """The tolerances of a run.

    Attributes:
        losses: The absolute tolerance of each step's loss.
        references: The largest difference of each step's loss between permuted references and the
            first; empty if none ran.
        norms: The relative tolerance of each step's gradient norm; None: not compared.
        parameters: The relative tolerance of the final parameters; None: not compared.
        explanation: The source of the figures, as text.
    """

    losses: tuple[float, ...]
    references: tuple[float, ...] = ()
    norms: tuple[float, ...] | None = None
    parameters: float | None = None
    explanation: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencePlan:
    """The references that a verification may need.

    `exact` and `permuted` are in fp64; `own` are in the spec's dtypes, empty if these are fp64.
    Only `asks` are always needed: permuted references are slow, and not needed for a run that keeps
    to the fixed figures.
    """

    exact: ReferenceRequest
    permuted: tuple[ReferenceRequest, ...]
    own: tuple[ReferenceRequest, ...]
    is_order_sensitive: bool

    @property
    def required(self) -> tuple[ReferenceRequest, ...]:
        return (self.exact, *(self.own if self.is_order_sensitive else self.own[:1]))


def plan_references(spec: Spec, steps: int) -> ReferencePlan:
    """Return the references that a verification may need.

    References that serve several parts have one key, so that they run once.

    Args:
        spec: The spec to verify.
        steps: The number of training steps of each reference.
    """
    own, exact = without_dropout(spec), with_fp64(spec)
    banded = is_order_sensitive(own)
    first, *permuted = _make_requests(exact, steps, FEW)
    return ReferencePlan(
        exact=first,
        permuted=tuple(permuted),
        own=()
        if own.precision == exact.precision
        else _make_requests(own, steps, MANY if banded else FEW),
        is_order_sensitive=banded,
    )


def _make_requests(spec: Spec, steps: int, number: int) -> tuple[ReferenceRequest, ...]:
    plain = ReferenceRequest(spec=spec, steps=steps)
    return (plain, *(replace(plain, seed=seed) for seed in range(number)))


def fixed_fp64_tolerances(exact: ReferenceRun) -> RunTolerances:
    """Return the tolerances of an fp64 run as long as its differences are pure rounding."""
    return RunTolerances(
        losses=tuple(FP64_LOSS * abs(loss) for loss in exact.losses),
        norms=(FP64_NORM,) * len(exact.norms),
        parameters=FP64_PARAMETERS,
    )


def derive_fp64_tolerances(runs: Sequence[ReferenceRun], exchange: Exchange) -> RunTolerances:
    """Derive the tolerances of an fp64 run from references, the first of them in the usual order.

    The results are at least the fixed figures. All ranks must call it.
    """
    fixed = fixed_fp64_tolerances(runs[0])
    losses = _elementwise_max(fixed.losses, _step_tolerances([run.losses for run in runs]))
    parameters = parameter_tolerance(_parameter_distances(runs, exchange))
    return replace(
        fixed,
        losses=losses,
        references=_largest_differences(runs),
        norms=tuple(
            max(FP64_NORM, spread / norm) if norm else FP64_NORM
            for spread, norm in zip(
                _step_tolerances([its.norms for its in runs]), runs[0].norms, strict=True
            )
        ),
        parameters=max(FP64_PARAMETERS, parameters),
        explanation=_growth_sentence("fp64", "1e-12", fixed.losses, losses, len(runs)),
    )


def fixed_fp32_tolerances(own: ReferenceRun) -> RunTolerances:
    """Return the tolerances of an fp32 run as long as its differences are pure rounding."""
    return RunTolerances(
        losses=(FP32_LOSS,) * len(own.losses),
    )


def derive_own_tolerances(spec: Spec, runs: Sequence[ReferenceRun]) -> RunTolerances:
    """Derive the tolerances in the spec's dtypes from references in these; in fp32, the results are
    at least the fixed figures."""
    spread = _step_tolerances([run.losses for run in runs])
    if not is_order_sensitive(spec):
        fixed = fixed_fp32_tolerances(runs[0])
        losses = _elementwise_max(fixed.losses, spread)
        return replace(
            fixed,
            losses=losses,
            references=_largest_differences(runs),
            explanation=_growth_sentence("own dtypes", "1e-4", fixed.losses, losses, len(runs)),
        )
    # A sum of n terms has about sqrt(n) roundings of half a unit in the last place; the difference
    # of two such sums has sqrt(2 n).
    num_addends = spec.batch.accumulate * spec.data_degree
    rounding = (
        _deviation_factor(len(runs)) * _FP32 / 2 * math.sqrt(2 * num_addends)
    )  # of the loss's sum
    return RunTolerances(
        losses=tuple(
            deviation + rounding * abs(loss)
            for deviation, loss in zip(spread, runs[0].losses, strict=True)
        ),
        references=_largest_differences(runs),
        explanation="own dtypes: a loss may differ by "
        f"{_deviation_factor(len(runs)):.1f} deviations of {len(runs)} references, "
        f"{len(runs) - 1} of them with permuted sums",
    )


def _elementwise_max(fixed: Sequence[float], spread: Sequence[float]) -> tuple[float, ...]:
    """Return the larger tolerance of each step; the fixed figure if the spread is not a number."""
    return tuple(max(pair) for pair in zip(fixed, spread, strict=True))


def _deviation_factor(number: int) -> float:
    return QUANTILES[number - 1] * math.sqrt(2)


def _step_tolerances(runs: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the tolerance of each step from its values in all runs.

    It is NaN from the first step with a NaN value. An infinite value (a skipped step) does not
    change the spread of the steps before.
    """
    deviations = (_deviation(values) for values in zip(*runs, strict=True))
    return tuple(
        _deviation_factor(len(runs)) * deviation
        for deviation in accumulate(deviations, _max_or_nan)
    )


def _largest_differences(runs: Sequence[ReferenceRun]) -> tuple[float, ...]:
    """Return the largest difference of each step's loss to the first reference."""
    by_step = zip(*(run.losses for run in runs), strict=True)
    return tuple(max(abs(loss - first) for loss in others) for first, *others in by_step)


def _deviation(values: Sequence[float]) -> float:
    """Return the sample deviation, 0.0 if a value is infinite. statistics.stdev raises on such
    values."""
    if any(map(math.isinf, values)):
        return 0.0
    mean = statistics.fmean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _max_or_nan(before: float, now: float) -> float:
    return now if math.isnan(now) or now > before else before


def _parameter_distances(runs: Sequence[ReferenceRun], exchange: Exchange) -> list[float]:
    """Return, per permuted reference, the largest relative difference of a parameter to the first.

    Each rank computes the distances of its runs, and the ranks gather them.
    """
    first = gather_full_tensors(
        runs[0].trajectory.parameters if runs[0].trajectory else {}, exchange
    )
    solos = (run.trajectory for run in runs[1:] if run.trajectory)
    own = [max(tensor_differences(first, solo.parameters).values()) for solo in solos]
    distances = [distance for its in exchange.gather(own) for distance in its]
    assert len(distances) == len(runs) - 1, "each permuted reference is some rank's"
    return distances


def parameter_tolerance(distances: Sequence[float]) -> float:
    """Return the tolerance for the distances of FEW or MANY permuted references from the first."""
    squares = [distance**2 for distance in distances]
    return _deviation_factor(len(distances) + 1) * math.sqrt(statistics.fmean(squares) / 2)


def _growth_sentence(
    place: str, fixed: str, least: Sequence[float], allowed: Sequence[float], number: int
) -> str:
    """Return a sentence about the step at which rounding exceeds the fixed figure; "" if it never
    does."""
    beyond = (
        step for step, (one, other) in enumerate(zip(least, allowed, strict=True)) if one != other
    )
    first = next(beyond, None)
    if first is None:
        return ""
    return (
        f"{place}: losses may differ by {fixed} up to step {first}; from there rounding has "
        f"grown to more, and {_deviation_factor(number):.1f} deviations of {number} references are "
        f"allowed, {number - 1} of them with permuted sums"
    )
