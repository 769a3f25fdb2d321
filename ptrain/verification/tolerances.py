"""How far a correct run may be off one device, step by step: by fixed figures as long as these are
about rounding alone, and by what permuted references part by where training has made more of it.

A placement changes in which order sums are made (`permuted`). Training is a chaotic map: at the
learning rates at which it is worth its while, a difference of one rounding grows by some percent a
step, and is ten thousand times as large after a hundred, whoever made it. No fixed figure can tell
that from a fault; references that differ from each other by nothing but their order can.

Let n references have the losses L_i(t), the first of them in the usual order. If the run under test
is one more draw of the same kind, (X - L_1) / (s sqrt 2) has Student's t distribution with n - 1
degrees of freedom, s being the sample deviation. So the run may be off by lambda · s(t), lambda =
q · sqrt 2, where q is exceeded once in 10^4, and s(t) is the largest deviation of the steps up to
t: roundings add up, and references may come close to each other by chance. The same holds for
gradient norms; for the parameters at the end, s² is
half the mean square distance of permuted references from the first. Nothing of it is of the run
under test.

- In 16 bits, and where the update computes in them, that is all: 7 permuted references.
- In fp32 at least 1e-4 is allowed, absolute; 3 permuted references.
- In fp64 at least 1e-12, relative; 3 permuted references.

Of a run that keeps to the fixed figures permuted references can say no more, so they are run once
it does not: they take more time than all else.
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
    apart_by_tensor,
)
from ptrain.verification.parts import whole
from ptrain.verification.references import (
    Ask,
    ReferenceRun,
    exactly,
    is_banded,
    without_dropout,
)

FEW, MANY = 3, 7  # permuted references beside a fixed figure, and instead of one
QUANTILES = {FEW: 28.000, MANY: 7.885}  # of Student's t by degrees of freedom: once in 10^4
FP32_LOSS = 1e-4
_FP32 = torch.finfo(torch.float32).eps


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """Of every step's loss, absolute; of its gradient norm and of the parameters at the end,
    relative (None: not compared).
    `references`: how far the losses of permuted references are off at most, empty where none were
    run. `explanation`: where figures are from."""

    losses: tuple[float, ...]
    references: tuple[float, ...] = ()
    norms: tuple[float, ...] | None = None
    parameters: float | None = None
    explanation: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencePlan:
    """Which references a verification may need: in fp64, `permuted` ones too, and in the spec's own
    dtypes (none where these are fp64). Of `asks` it needs all: permuted ones take most of its time,
    and beside a fixed figure say nothing of a run that keeps to it."""

    exact: Ask
    permuted: tuple[Ask, ...]
    own: tuple[Ask, ...]
    is_banded: bool

    @property
    def asks(self) -> tuple[Ask, ...]:
        return (self.exact, *(self.own if self.is_banded else self.own[:1]))


def plan(spec: Spec, steps: int) -> ReferencePlan:
    """Return which references a verification may need. Of those that several parts need there is
    one: they have one key."""
    own, exact = without_dropout(spec), exactly(spec)
    banded = is_banded(own)
    first, *permuted = _permuted(exact, steps, FEW)
    return ReferencePlan(
        exact=first,
        permuted=tuple(permuted),
        own=()
        if own.precision == exact.precision
        else _permuted(own, steps, MANY if banded else FEW),
        is_banded=banded,
    )


def _permuted(spec: Spec, steps: int, number: int) -> tuple[Ask, ...]:
    plain = Ask(spec=spec, steps=steps)
    return (plain, *(replace(plain, seed=seed) for seed in range(number)))


def fixed_in_fp64(exact: ReferenceRun) -> Allowed:
    """Return what is allowed of a run in fp64 as long as it is about rounding alone."""
    return Allowed(
        losses=tuple(FP64_LOSS * abs(loss) for loss in exact.losses),
        norms=(FP64_NORM,) * len(exact.norms),
        parameters=FP64_PARAMETERS,
    )


def in_fp64(runs: Sequence[ReferenceRun], exchange: Exchange) -> Allowed:
    """Derive what is allowed beyond that from references in fp64, the first of them in the usual
    order. All ranks call it."""
    fixed = fixed_in_fp64(runs[0])
    losses = _larger(fixed.losses, _spread([run.losses for run in runs]))
    parameters = from_permuted(_distances(runs, exchange))
    return replace(
        fixed,
        losses=losses,
        references=_farthest(runs),
        norms=tuple(
            max(FP64_NORM, spread / norm) if norm else FP64_NORM
            for spread, norm in zip(
                _spread([its.norms for its in runs]), runs[0].norms, strict=True
            )
        ),
        parameters=max(FP64_PARAMETERS, parameters),
        explanation=_until("fp64", "1e-12", fixed.losses, losses, len(runs)),
    )


def fixed_in_fp32(own: ReferenceRun) -> Allowed:
    """Return what is allowed of a run in fp32 as long as it is about rounding alone."""
    return Allowed(
        losses=(FP32_LOSS,) * len(own.losses),
    )


def in_own_dtypes(spec: Spec, runs: Sequence[ReferenceRun]) -> Allowed:
    """Derive what is allowed in the spec's own dtypes from references in these: where they are
    fp32, beyond the fixed figures."""
    spread = _spread([run.losses for run in runs])
    if not is_banded(spec):
        fixed = fixed_in_fp32(runs[0])
        losses = _larger(fixed.losses, spread)
        return replace(
            fixed,
            losses=losses,
            references=_farthest(runs),
            explanation=_until("own dtypes", "1e-4", fixed.losses, losses, len(runs)),
        )
    num_addends = spec.batch.accumulate * spec.data_degree
    rounding = _factor(len(runs)) * _FP32 / 2 * math.sqrt(2 * num_addends)  # of the loss's sum
    return Allowed(
        losses=tuple(
            deviation + rounding * abs(loss)
            for deviation, loss in zip(spread, runs[0].losses, strict=True)
        ),
        references=_farthest(runs),
        explanation=f"own dtypes: a loss may differ by {_factor(len(runs)):.1f} deviations "
        f"of {len(runs)} references, {len(runs) - 1} of them with permuted sums",
    )


def _larger(fixed: Sequence[float], spread: Sequence[float]) -> tuple[float, ...]:
    """Of each step; the fixed figure where the other is not a number."""
    return tuple(max(pair) for pair in zip(fixed, spread, strict=True))


def _factor(number: int) -> float:
    return QUANTILES[number - 1] * math.sqrt(2)


def _spread(runs: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return what is allowed of each step, from its values in all runs; not a number from where one
    is none. Where a value is infinite (a step that is skipped) the spread is the one before."""
    deviations = (_deviation(values) for values in zip(*runs, strict=True))
    return tuple(_factor(len(runs)) * deviation for deviation in accumulate(deviations, _largest))


def _farthest(runs: Sequence[ReferenceRun]) -> tuple[float, ...]:
    """Return of each step the largest difference to the first."""
    by_step = zip(*(run.losses for run in runs), strict=True)
    return tuple(max(abs(loss - first) for loss in others) for first, *others in by_step)


def _deviation(values: Sequence[float]) -> float:
    """Written out: statistics.stdev refuses what is not finite."""
    if any(map(math.isinf, values)):
        return 0.0
    mean = statistics.fmean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _largest(before: float, now: float) -> float:
    return now if math.isnan(now) or now > before else before


def _distances(runs: Sequence[ReferenceRun], exchange: Exchange) -> list[float]:
    """Return how far the parameter that differs most is from the first reference's, of each
    permuted one: each rank knows of its own runs."""
    first = whole(runs[0].solo.parameters if runs[0].solo else {}, exchange)
    solos = (run.solo for run in runs[1:] if run.solo)
    own = [max(apart_by_tensor(first, solo.parameters).values()) for solo in solos]
    distances = [distance for its in exchange.gather(own) for distance in its]
    assert len(distances) == len(runs) - 1, "each permuted reference is some rank's"
    return distances


def from_permuted(distances: Sequence[float]) -> float:
    """Return what is allowed, from how far each of FEW or MANY permuted references is from the
    first."""
    squares = [distance**2 for distance in distances]
    return _factor(len(distances) + 1) * math.sqrt(statistics.fmean(squares) / 2)


def _until(
    place: str, fixed: str, least: Sequence[float], allowed: Sequence[float], number: int
) -> str:
    """From which step on rounding has grown beyond the fixed figure; "" where it never does."""
    beyond = (
        step for step, (one, other) in enumerate(zip(least, allowed, strict=True)) if one != other
    )
    first = next(beyond, None)
    if first is None:
        return ""
    return (
        f"{place}: losses may differ by {fixed} up to step {first}; from there rounding has "
        f"grown to more, and {_factor(number):.1f} deviations of {number} references are "
        f"allowed, {number - 1} of them with permuted sums"
    )
