"""Gradients that are clipped in another way than one device's: group by group, on some ranks only,
by the norm of a rank's own shards, or not at all. No factor is fitted: what each way makes of one
device's gradient before clipping is compared with what the optimizers take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Self

from torch import Tensor

from ptrain.report.finding import Certainty, Culprit, Departure, Subject
from ptrain.verification.factors import multiple
from ptrain.verification.jobs.culprits import culprit
from ptrain.verification.jobs.ranks import Ranks
from ptrain.verification.jobs.shards import ParameterShard
from ptrain.verification.parts import square
from ptrain.verification.updates.case import UpdateCase

_EPSILONS = (1e-6, 0.0)  # that torch adds to a norm, and who clips by hand does not
_LOOSE, _LOOSEST = 10.0, 3e-2  # tolerances of a gradient, of which a factor is a ratio; at most
_FITS = 4.0  # tolerances of a factor, that elements may be off it
_SHARE = 0.1  # of what departs, that a way may leave
_LEAST = 1e-9  # of a factor: what is nearer to 1 is no clipping


class Accumulation:
    """`with Accumulation(wholes) as accumulation:` around one device's step: the square of each
    parameter's gradient as the last backward pass left it, before anything else changes it."""

    def __init__(self, wholes: Mapping[str, ParameterShard]) -> None:
        self.squares: dict[str, float] = {}
        self._wholes = wholes
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for name, shard in self._wholes.items():
            parameter = shard.parameter
            if parameter.requires_grad and parameter.is_leaf:
                hook = parameter.register_post_accumulate_grad_hook(partial(self._keep, name))
                self._stack.callback(hook.remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _keep(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.squares[name] = square(parameter.grad)


@dataclass(frozen=True, slots=True)
class Scaling:
    """What one rank's gradient of one parameter is multiplied by, beside one device's after
    clipping; `group` is that of its optimizer, `local` the norm of what the rank holds of one
    device's gradient before clipping."""

    rank: int
    name: str
    group: int
    factor: float
    local: float


@dataclass(frozen=True, slots=True)
class ClippedGradient:
    """One device's: squares by parameter before clipping, and what clipping multiplied it by."""

    squares: Mapping[str, float]
    factor: float

    @classmethod
    def of(
        cls, squares: Mapping[str, float], gradients: Mapping[str, Tensor], tolerance: float
    ) -> ClippedGradient | None:
        """None where all are not scaled alike, or not at all, or by a power of two (a loss's
        scale)."""
        factors = [
            math.sqrt(square(gradient) / squares[name])
            for name, gradient in gradients.items()
            if squares.get(name)
        ]
        if not factors or max(factors) - min(factors) > tolerance * max(factors):
            return None
        factor = factors[0]
        if not 0.0 < factor < 1.0 - _LEAST or math.log2(factor).is_integer():
            return None
        return cls(squares, factor)

    def norm(self, names: Sequence[str] | None = None) -> float:
        """Return that of these parameters, or of all, before clipping."""
        chosen = self.squares if names is None else names
        return math.sqrt(sum(self.squares.get(name, 0.0) for name in chosen))

    def scaled(self, norm: float, epsilons: tuple[float, float]) -> float:
        """Return the factor of a gradient that is clipped by another norm, beside what one device
        makes of it; epsilons are the reference's and the loop's."""
        whole = self.norm()
        most, length = self.factor * (whole + epsilons[0]), norm + epsilons[1]
        return (most / length if length > most else 1.0) / self.factor


@dataclass(frozen=True, slots=True)
class ClipWay:
    """A way to clip: the norm by which a scaling is, and what is said of it."""

    factor: str
    sentence: str
    proof: str
    norm: Callable[[Scaling], float]
    excused: bool = False  # some ranks may do as one device does


def clipping(
    departures: Sequence[Departure],
    case: UpdateCase,
    wholes: tuple[Mapping[str, float], Mapping[str, Tensor]],
    ranks: Ranks,
) -> Culprit | None:
    """Return the culprit of gradients that are clipped in one of these ways; None where they are
    not. `wholes`: one device's squares before clipping, and its gradients. All ranks call it."""
    tolerance = min(_LOOSE * case.limit.gradients, _LOOSEST)
    gradient = ClippedGradient.of(*wholes, tolerance)
    mine = list(_scalings(case, wholes[1], gradient, tolerance)) if gradient else []
    everyones = ranks.gather((gradient, mine), tuple[ClippedGradient | None, list[Scaling]])
    rows = [row for _, its in everyones for row in its]
    gradient = everyones[0][0]  # ranks' own floats might decide otherwise
    if any(known is None for known, _ in everyones) or not all(
        math.isfinite(row.factor) for row in rows
    ):
        return None
    departure = max((abs(row.factor - 1.0) for row in rows), default=0.0)
    if departure <= tolerance:
        return None
    errors = [
        (_error(way, gradient, rows, (one, other)), way)
        for way in _ways(gradient, rows)
        for one, other in product(_EPSILONS, _EPSILONS)
    ]
    error, way = min(errors, key=lambda pair: pair[0])
    if error > min(tolerance, _SHARE * departure):
        return None
    return _culprit(way, departures, ranks, rows, error, tolerance)


def _scalings(
    case: UpdateCase, wholes: Mapping[str, Tensor], gradient: ClippedGradient, tolerance: float
) -> Iterator[Scaling]:
    """Yield the factors of this rank's gradients: NaN of one that is no multiple."""
    parts = {n: case.holds[n].of(whole) for n, whole in wholes.items() if n in case.holds}
    local = math.sqrt(sum(map(square, parts.values())))
    for name, part in parts.items():
        own = case.gradients.get(name)
        if case.is_noise(name) or not bool(part.any()):
            continue
        fit = multiple(own, part) if own is not None else None
        factor = fit.factor if fit is not None and fit.holds(_FITS * tolerance) else math.nan
        taken = case.seen.before.get(name)
        group = -1 if taken is None else taken.group
        yield Scaling(case.rank, name, group, factor, local / gradient.factor)


def _ways(gradient: ClippedGradient, rows: Sequence[Scaling]) -> Iterator[ClipWay]:
    groups: dict[int, set[str]] = {}
    for row in rows:
        groups.setdefault(row.group, set()).add(row.name)
    before = "one device's gradient before clipping"
    if len(groups) > 1:
        yield ClipWay(
            "clip per group",
            f"Each of {len(groups)} parameter groups is clipped by its own norm, on one device all "
            "are by the norm of all: clip once, over the parameters of all groups.",
            f"{before}, with each group clipped by its own norm, is what the optimizers take",
            lambda row: gradient.norm(sorted(groups[row.group])),
        )
    yield ClipWay(
        "clip per parameter",
        "Every parameter's gradient is clipped by its own norm, on one device all are by the norm "
        "of all: clip once, over all parameters.",
        f"{before}, with each parameter clipped by its own norm, is what the optimizers take",
        lambda row: gradient.norm([row.name]),
    )
    yield ClipWay(
        "clipped by the local norm",
        "Every rank clips by the norm of what it holds: sum the squares over all ranks that hold "
        "other parts first.",
        f"{before}, clipped on each rank by the norm of its part, is what the optimizers take",
        lambda row: row.local,
    )
    yield ClipWay(
        "not clipped",
        "The optimizers take gradients that are not clipped: clip them by the norm of all, after "
        "they are reduced and before the update.",
        f"{before} is what the optimizers take",
        lambda row: 0.0,
        excused=True,
    )


def _error(
    way: ClipWay,
    gradient: ClippedGradient,
    rows: Sequence[Scaling],
    epsilons: tuple[float, float],
) -> float:
    """Return how far the factors are from those of this way, relative."""
    errors = {}
    for rank in {row.rank for row in rows}:
        own = [row for row in rows if row.rank == rank]
        errors[rank] = max(
            abs(row.factor / gradient.scaled(way.norm(row), epsilons) - 1.0) for row in own
        )
        if way.excused:
            errors[rank] = min(errors[rank], max(abs(row.factor - 1.0) for row in own))
    return max(errors.values())


def _culprit(
    way: ClipWay,
    departures: Sequence[Departure],
    ranks: Ranks,
    rows: Sequence[Scaling],
    error: float,
    tolerance: float,
) -> Culprit:
    wrong = sorted({row.rank for row in rows if abs(row.factor - 1.0) > tolerance})
    right = sorted({row.rank for row in rows} - set(wrong))
    factor, sentence, axis, where = way.factor, way.sentence, "", ""
    if way.excused and right:
        factor = f"clip on {'one rank' if len(right) == 1 else 'some ranks'} only"
        sentence = (
            f"Rank {', '.join(map(str, right))} clips the gradients, rank "
            f"{', '.join(map(str, wrong))} does not: let all of them, by the same norm."
        )
        axis = ranks.axis_of([right[0], wrong[0]])
        where = f" on rank {', '.join(map(str, wrong))}"
    elif way.factor == "clipped by the local norm":
        axis = next(iter(ranks.axes), "")
    return culprit(
        departures, ranks, state=Subject.NORM, axis=axis, factor=factor, who=wrong,
        sentence=sentence, certainty=Certainty.PROVEN,
        tried=f"{way.proof}{where}, to {error:.2g}; clipped by the norm of all it is one device's",
    )  # fmt: skip
