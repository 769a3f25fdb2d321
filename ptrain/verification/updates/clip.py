"""Diagnosis of gradients that are clipped in another way than the reference's.

The hypotheses: clipping per group or per parameter, on some ranks only, by the norm of a rank's
shards, by a norm that counts replicated squares several times or not at all. No factor is fitted:
each hypothesis is applied to the reference's gradient, and the result is compared with the
gradients that the optimizers take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ptrain.report.finding import Certainty, Mismatch, Moment, RootCause, Subject
from ptrain.verification.compare import Differences
from ptrain.verification.jobs.job import Ranks, Tolerance
from ptrain.verification.jobs.record import StepRecorder, checksum, compare_states, compare_update
from ptrain.verification.jobs.root_causes import list_families, make_root_cause
from ptrain.verification.jobs.shards import ParameterShard
from ptrain.verification.jobs.trials import hook_backward
from ptrain.verification.parts import Magnitude, fit_multiple, squared_norm
from ptrain.verification.updates.repeat import (
    CannotRepeat,
    Ingredients,
    UpdateOutcome,
    UpdateRecord,
    is_row,
    repeat_updates,
)

# In a dtype with a larger epsilon (bfloat16: 7.8e-3; float16 has 9.8e-4), a lost update of some
# elements counts as rounding.
_COARSE = 1e-3


@dataclass(frozen=True, slots=True)
class Remainder:
    """The difference of an update's outcome from the reference's, on one rank or on all ranks.

    Attributes:
        count: The number of tensors that differ.
        worst: The largest relative difference of a parameter or of optimizer state.
    """

    count: int
    worst: float

    @classmethod
    def combine(cls, everyones: Sequence[Remainder]) -> Remainder:
        """Combine the differences of all ranks: the sum of counts, and the largest difference."""
        return cls(sum(its.count for its in everyones), max(its.worst for its in everyones))

    def is_fix_of(self, before: Remainder) -> bool:
        """Return True if no tensor differs any more, and at most a tenth of the difference is left.

        The second condition is needed in 16 bits, whose tolerance is no proof by itself.
        """
        return self.count == 0 and self.worst <= 0.1 * before.worst


def describe_remainder(left: Remainder, obstacle: str, ranks: Ranks) -> str:
    """Describe the difference that a repeated update leaves, or why it could not be repeated.

    All ranks must call it. The text is "" if the update matches the reference's.
    """
    lefts, obstacles = zip(*ranks.gather((left, obstacle), tuple[Remainder, str]), strict=True)
    if why := next(filter(None, obstacles), ""):
        return f"; the update could not be repeated ({why})"
    left = Remainder.combine(lefts)
    still = f"; the update repeated with them still differs by {left.worst:.2g}"
    return still if left.count else ""


BROKEN = Remainder(1, math.inf)  # the difference of an update that cannot be repeated


@dataclass(frozen=True, kw_only=True)
class UpdateCase:
    """The update of one step on both sides.

    Attributes:
        verdict: The differences of both sides on this rank, with the movements of the parameters.
        reference: The record of the reference's step.
        run: The record of the loop's step.
        holds: This rank's shard of each parameter, by name.
        limit: The tolerances.
    """

    verdict: Differences
    reference: StepRecorder
    run: StepRecorder
    holds: Mapping[str, ParameterShard]
    limit: Tolerance

    @cached_property
    def _scale(self) -> Magnitude:
        return Magnitude.measure(self.reference.gradients)

    def is_noise(self, name: str) -> bool:
        """Return True for a parameter whose gradient is only rounding, which is not compared."""
        gradient = self.reference.gradients.get(name)
        return gradient is not None and self._scale.is_noise(gradient)

    @cached_property
    def loop_inputs(self) -> dict[str, Ingredients]:
        """The inputs of the loop's updates on this rank, of parameters that both sides update."""
        return {n: its for n, its in self.run.record.before.items() if n in self.reference_inputs}

    @cached_property
    def reference_inputs(self) -> dict[str, Ingredients]:
        """The inputs of the reference's updates, at this rank's elements."""
        return {
            name: self._shard_ingredients(name, its)
            for name, its in self.reference.record.before.items()
            if name in self.holds
        }

    def _shard_ingredients(self, name: str, whole: Ingredients) -> Ingredients:
        shard = self.holds[name]
        return replace(
            whole,
            value=shard.select(whole.value),
            gradient=None if whole.gradient is None else shard.select(whole.gradient),
            state=self._shard_state(name, whole.state, whole.value),
        )

    def _shard_state(self, name: str, state: Mapping[str, Any], row: Tensor) -> dict[str, Any]:
        shard = self.holds[name]
        return {k: shard.select(its) if is_row(its, row) else its for k, its in state.items()}

    def reference_outcome(self, name: str) -> UpdateOutcome:
        """Return the outcome of the reference's update, at this rank's elements."""
        after, row = self.reference.record.after[name], self.reference.record.before[name].value
        value = self.holds[name].select(after.value)
        return UpdateOutcome(value, self._shard_state(name, after.state, row))

    def measure_remainder(self, outcomes: Mapping[str, UpdateOutcome]) -> Remainder:
        """Return the difference of these outcomes from the reference's."""
        scratch = self.compare_outcomes(outcomes)
        both = Subject.PARAMETERS, Subject.OPTIMIZER
        found = [scratch.largest.get((Moment.UPDATE, subject)) for subject in both]
        worst = max((its.difference for its in found if its), default=0.0)
        return Remainder(len(scratch.mismatches), worst)

    def compare_outcomes(self, outcomes: Mapping[str, UpdateOutcome]) -> Differences:
        """Compare outcomes with the reference's, with the tolerances of the verdict."""
        scratch = Differences(step=self.verdict.step, rank=self.verdict.rank)
        rights: dict[str, dict[str, Tensor]] = {}
        owns: dict[str, dict[str, Tensor]] = {}
        rows: dict[str, ParameterShard] = {}
        for name, outcome in outcomes.items():
            target = self.reference_outcome(name)
            course = replace(
                self.verdict.moves[name],
                before=self.reference_inputs[name].value,
                after=target.value,
                run_before=self.run.record.before[name].value
                if name in self.run.record.before
                else self.verdict.moves[name].run_before,
                run_after=outcome.value,
            )
            compare_update(scratch, name, course, is_noise=self.is_noise(name), limit=self.limit)
            rows[name] = ParameterShard(name, target.value, target.value.shape)
            for side, its in ((rights, target), (owns, outcome)):
                side[name] = {k: v for k, v in its.state.items() if is_row(v, target.value)}
        compare_states(scratch, rights, owns, rows, self.limit)
        return scratch

    def repeat_with_gradients(
        self, gradients: Mapping[str, Tensor | None], trial: UpdateRecord | None = None
    ) -> tuple[Remainder, str]:
        """Repeat the update with other gradients.

        Args:
            gradients: This rank's elements of the gradients before clipping, by name.
            trial: The record of a step that ran with these gradients, if there is one.

        Returns:
            The difference from the reference, and the reason why the update cannot be repeated
            ("" if it can).
        """
        obstacle = self.run.record.obstacle or self.reference.record.obstacle
        moved = any(not its.is_unchanged for its in self.verdict.moves.values())
        if not (self.loop_inputs or obstacle) and moved:
            obstacle = "no torch.optim.Optimizer makes it"
        if obstacle:
            return BROKEN, obstacle
        rows = {n: row * self.reference.clip for n, row in gradients.items() if row is not None}
        its = self.repeat_update(
            {n: replace(own, gradient=rows.get(n)) for n, own in self.loop_inputs.items()}
        )
        try:
            is_own = its[1] or not self.unreproduced_parameters(trial)
        except CannotRepeat as error:
            return BROKEN, str(error)
        return its if is_own else (BROKEN, "its step gives other values than its class computes")

    def repeat_update(self, taken: Mapping[str, Ingredients]) -> tuple[Remainder, str]:
        """Repeat the update with these ingredients. Returns as `repeat_with_gradients`."""
        try:
            return self.measure_remainder(repeat_updates(taken)), ""
        except CannotRepeat as error:
            return BROKEN, str(error)

    def follows_gradients(self, names: Collection[str], ranks: Ranks) -> bool:
        """Return True if the update matches the reference with its gradients for these parameters.

        All ranks must call it.
        """
        own, other = self.loop_inputs, self.reference_inputs
        gradients = {n: (other if n in names else own)[n].gradient for n in own}
        left, obstacle = self.repeat_with_gradients(gradients)
        return all(ranks.gather(not obstacle and left.count == 0))

    def unreproduced_parameters(self, trial: UpdateRecord | None = None) -> list[str]:
        """Return the parameters whose repeated update differs from the outcome in `trial`.

        Default: the loop's step.
        """
        record = trial or self.run.record
        before = {name: its for name, its in record.before.items() if name in self.reference_inputs}
        return [
            name
            for name, outcome in repeat_updates(before).items()
            if not _is_equal_up_to_rounding(
                outcome.value, record.after[name].value, before[name].value
            )
        ]

    def later_written_parameters(self) -> list[str]:
        """Return the parameters whose bits changed between optimizer.step and the step's end."""
        ends = {name: move.run_after for name, move in self.verdict.moves.items()}
        return [
            name
            for name, outcome in self.run.record.after.items()
            if name in ends and not torch.equal(outcome.value.to(ends[name]), ends[name])
        ]

    def shard_checksum(self, name: str) -> str:
        """Return a checksum of the indices of this rank's elements of a parameter."""
        return checksum(self.holds[name].indices)


def compare_masters(differences: Differences, case: UpdateCase) -> None:
    """Compare master copies, whose differences the rounding to the model's dtype may hide.

    Only copies whose dtype is at most as fine as the reference's are compared.
    """
    masters = {
        name: case.run.record.after[name]
        for name in case.run.record.masters & case.loop_inputs.keys()
        if name in case.run.record.after
        and torch.finfo(case.reference_inputs[name].value.dtype).eps
        <= torch.finfo(case.loop_inputs[name].value.dtype).eps
    }
    scratch = case.compare_outcomes(masters)
    for mismatch in scratch.mismatches:
        if mismatch.subject is Subject.PARAMETERS:
            differences.mismatches.append(
                replace(mismatch, subject=Subject.OPTIMIZER, name=f"{mismatch.name} · master copy")
            )


def _is_equal_up_to_rounding(repeated: Tensor, seen: Tensor, before: Tensor) -> bool:
    """Return True if two outcomes differ only by rounding.

    The difference is relative to the movement in a coarse dtype, and to the value in a fine one.
    """
    if torch.equal(repeated, seen):
        return True
    difference, moved, length = (
        float(torch.linalg.vector_norm(row.double()))
        for row in (repeated.double() - seen.double(), repeated.double() - before, seen)
    )
    eps = torch.finfo(seen.dtype).eps
    return difference <= 1e-2 * moved if eps > _COARSE else difference <= 4 * eps * length


# torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6 (torch/nn/utils/clip_grad.py); loops that
# clip by hand usually add nothing.
_EPSILONS = (1e-6, 0.0)
# A factor is a ratio of two gradients, so it may be off by several of their tolerances, but by at
# most 3 %.
_LOOSE, _LOOSEST = 10.0, 3e-2
_FITS = 4.0  # the tolerance of the elements of a multiple, in tolerances of its factor
_SHARE = 0.1  # the largest share of the difference that a hypothesis may leave
_REPRODUCED = 1e-6  # the relative error of a factor up to which a norm over an axis is proven
_LEAST = 1e-9  # a factor nearer to 1 is no clipping


def record_squares(
    wholes: Mapping[str, ParameterShard], squares: dict[str, float]
) -> AbstractContextManager[object]:
    """Return a context that records the squared norm of each gradient after every backward pass.

    The last pass of the step overwrites the earlier ones, so `squares` has the accumulated
    gradients before anything else changes them.
    """

    def keep() -> None:
        gradients = {name: shard.parameter.grad for name, shard in wholes.items()}
        squares.update({n: squared_norm(its) for n, its in gradients.items() if its is not None})

    return hook_backward(lambda tensors: keep)


@dataclass(frozen=True, slots=True)
class Scaling:
    """The ratio of one gradient on one rank to the reference's clipped gradient.

    Attributes:
        rank: The rank.
        name: The parameter.
        group: The index of its parameter group.
        factor: The ratio.
        local: The norm of the rank's elements of the reference's gradients before clipping.
        part: The checksum of the indices of the rank's elements.
    """

    rank: int
    name: str
    group: int
    factor: float
    local: float
    part: str = ""


def common_factor(
    squares: Mapping[str, float], gradients: Mapping[str, Tensor], tolerance: float
) -> float | None:
    """Return the common factor of gradients relative to their earlier norms.

    Args:
        squares: The squared norms before the multiplication, by name.
        gradients: The gradients after it.
        tolerance: The largest relative difference of the factors.

    Returns:
        The factor; 1.0 if all squares are zero, None if the factors differ.
    """
    rows = {name: squared_norm(its) for name, its in gradients.items() if squares.get(name)}
    factors = [math.sqrt(row / squares[name]) for name, row in rows.items()]
    if not factors or max(factors) - min(factors) > tolerance * max(factors):
        return None if factors else 1.0
    return math.sqrt(sum(rows.values()) / sum(squares[name] for name in rows))


@dataclass(frozen=True, slots=True)
class ClippedGradient:
    """The squared norms of the reference's gradients before clipping, and the clipping factor."""

    squares: Mapping[str, float]
    factor: float

    @classmethod
    def detect(
        cls, squares: Mapping[str, float], gradients: Mapping[str, Tensor], tolerance: float
    ) -> ClippedGradient | None:
        """Detect clipping; None if factors differ, are 1, or are a power of two (a loss scale).

        Args:
            squares: The squared norms before clipping, by parameter name.
            gradients: The gradients after it.
            tolerance: The largest relative difference of the factors.
        """
        factor = common_factor(squares, gradients, tolerance) or 1.0
        is_clip = factor < 1.0 - _LEAST and not math.log2(factor).is_integer()
        return cls(squares, factor) if is_clip else None

    def norm(self, names: Sequence[str] | None = None) -> float:
        """Return the norm before clipping, of some parameters or of all."""
        chosen = self.squares if names is None else names
        return math.sqrt(sum(self.squares.get(name, 0.0) for name in chosen))

    def clip_ratio(self, norm: float, epsilons: tuple[float, float]) -> float:
        """Return the ratio of a gradient clipped by another norm to the reference's clipped one.

        Args:
            norm: The other norm.
            epsilons: The numbers added to the norm, by the reference and by the loop.
        """
        whole = self.norm()
        most, length = self.factor * (whole + epsilons[0]), norm + epsilons[1]
        return (most / length if length > most else 1.0) / self.factor


@dataclass(frozen=True, slots=True)
class ClipHypothesis:
    """A hypothesis about clipping, with the texts of its root cause.

    Attributes:
        norm: Returns the norm by which a gradient is clipped.
        is_local: True if the norm depends on the rank's shards.
        axis: The axis over which squares are counted several times or not at all.
        names: The parameters with these squares.
    """

    factor: str
    sentence: str
    fix: str
    proof: str
    norm: Callable[[Scaling], float]
    is_local: bool = False
    axis: str = ""
    names: tuple[str, ...] = ()


def explain_clipping(
    mismatches: Sequence[Mismatch],
    case: UpdateCase,
    wholes: tuple[Mapping[str, float], Mapping[str, Tensor]],
    ranks: Ranks,
) -> RootCause | None:
    """Return the root cause of gradients that are clipped in another way; None if no one way fits.

    All ranks must call it.

    Args:
        mismatches: The mismatches of gradients.
        case: The update of the step.
        wholes: The squared norms of the reference's gradients before clipping, and its gradients.
        ranks: The ranks.
    """
    tolerance = min(_LOOSE * case.limit.gradients, _LOOSEST)
    gradient = ClippedGradient.detect(*wholes, tolerance)
    mine = list(_measure_scalings(case, wholes[1], gradient, tolerance)) if gradient else []
    everyones = ranks.gather((gradient, mine), tuple[ClippedGradient | None, list[Scaling]])
    rows = [row for _, its in everyones for row in its]
    gradient = everyones[0][0]  # one rank's: float sums of several ranks might decide differently
    if any(known is None for known, _ in everyones) or not all(
        math.isfinite(row.factor) for row in rows
    ):
        return None
    wrong = {row.rank for row in rows if abs(row.factor - 1.0) > tolerance}
    largest = max((abs(row.factor - 1.0) for row in rows), default=0.0)
    bound = min(case.limit.gradients, _LOOSEST, _SHARE * largest)
    fitting = [pair for pair in fit_hypotheses(gradient, rows, ranks, wrong) if pair[0] <= bound]
    if not wrong or len({way.factor for _, way in fitting}) != 1:
        return None  # no hypothesis fits, or several different ones
    error, way = min(fitting, key=lambda pair: pair[0])
    sentence, axis = way.sentence, way.axis or None
    if len(fitting) > 1:
        axis = ""
        sentence += f" The norm fits the same way over {', '.join(w.axis for _, w in fitting)}."
    elif way.is_local:
        axis = next(iter(ranks.axes), "")
    is_proven = len(fitting) == 1 and (not way.names or error <= _REPRODUCED)
    return make_root_cause(
        mismatches, ranks, state=Subject.NORM, axis=axis, factor=way.factor,
        names=way.names or None, who=wrong, sentence=sentence, fix=way.fix,
        certainty=Certainty.PROVEN if is_proven else Certainty.FITS,
        tried=f"{way.proof}, to {error:.2g}",
    )  # fmt: skip


def fit_hypotheses(
    gradient: ClippedGradient, rows: Sequence[Scaling], ranks: Ranks, wrong: Collection[int]
) -> list[tuple[float, ClipHypothesis]]:
    """Return the error of each hypothesis: the largest relative difference of a factor from it.

    A hypothesis about an axis is left out if it predicts the same factors as a general one: on a
    mesh with a single sharded axis, both describe one thing.

    Args:
        gradient: The reference's gradient.
        rows: The factors of all ranks.
        ranks: The ranks.
        wrong: The ranks with factors other than 1.
    """
    measured = []
    predictions: list[list[float]] = []
    general = _general_hypotheses(gradient, rows, wrong)
    for way in (*general, *_axis_hypotheses(gradient, rows, ranks)):
        factors = [gradient.clip_ratio(way.norm(row), (0.0, 0.0)) for row in rows]
        if way.axis and any(
            all(math.isclose(*both, rel_tol=_REPRODUCED) for both in zip(factors, its, strict=True))
            for its in predictions
        ):
            continue
        if not way.axis:
            predictions.append(factors)
        error = min(
            max(abs(row.factor / gradient.clip_ratio(way.norm(row), both) - 1.0) for row in rows)
            for both in product(_EPSILONS, _EPSILONS)
        )
        measured.append((error, way))
    return measured


def _measure_scalings(
    case: UpdateCase, wholes: Mapping[str, Tensor], gradient: ClippedGradient, tolerance: float
) -> Iterator[Scaling]:
    """Yield the factors of this rank's gradients; NaN for one that is no multiple."""
    parts = {n: case.holds[n].select(whole) for n, whole in wholes.items() if n in case.holds}
    local = math.sqrt(sum(map(squared_norm, parts.values())))
    for name, part in parts.items():
        own = case.run.gradients.get(name)
        if case.is_noise(name) or not bool(part.any()):
            continue
        fit = fit_multiple(own, part) if own is not None else None
        factor = fit.factor if fit is not None and fit.is_within(_FITS * tolerance) else math.nan
        taken = case.run.record.before.get(name)
        group = -1 if taken is None else taken.group
        yield Scaling(
            case.verdict.rank, name, group, factor, local / gradient.factor,
            case.shard_checksum(name),
        )  # fmt: skip


def _general_hypotheses(
    gradient: ClippedGradient, rows: Sequence[Scaling], wrong: Collection[int]
) -> Iterator[ClipHypothesis]:
    groups: dict[int, set[str]] = {}
    for row in rows:
        groups.setdefault(row.group, set()).add(row.name)
    before = "the reference gradient before clipping"
    if len(groups) > 1:
        yield ClipHypothesis(
            "clip per group",
            f"Each of {len(groups)} parameter groups is clipped separately, but the "
            "reference clips all by the global norm.",
            "Clip once, over the parameters of all groups.",
            f"{before}, with each group clipped separately, equals the gradients that "
            "the optimizers take",
            lambda row: gradient.norm(sorted(groups[row.group])),
        )
    yield ClipHypothesis(
        "clip per parameter",
        "Every parameter's gradient is clipped separately, but the reference clips all "
        "by the global norm.",
        "Clip once, over all parameters.",
        f"{before}, with each parameter clipped separately, equals the gradients that "
        "the optimizers take",
        lambda row: gradient.norm([row.name]),
    )
    yield ClipHypothesis(
        "clipped by the local norm",
        "Every rank clips by its local norm.",
        "Sum the squares over all ranks that hold other shards first.",
        f"{before}, clipped on each rank by its local norm, equals the gradients that the "
        "optimizers take",
        lambda row: row.local,
        is_local=True,
    )
    yield ClipHypothesis(
        "not clipped",
        "The optimizers of these ranks take unclipped gradients.",
        "Clip them by the global norm, after they are reduced and before the update.",
        f"{before} equals the gradients that the optimizers of these ranks take",
        lambda row: 0.0 if row.rank in wrong else gradient.norm(),
    )


def _axis_hypotheses(
    gradient: ClippedGradient, rows: Sequence[Scaling], ranks: Ranks
) -> Iterator[ClipHypothesis]:
    """Yield the hypotheses that a norm counts squares several times, or leaves them out.

    There are up to three for each axis and each combination of axes: the squares of replicated
    parameters counted once per copy, or left out, and those of sharded parameters left out.
    """
    parts = {(row.name, row.rank): row.part for row in rows}
    names = sorted({row.name for row in rows})
    for axis, groups in ranks.sum_groups.items():
        degree = len(groups[0])
        copied = tuple(
            name
            for name in names
            if all(len({parts.get((name, rank)) for rank in group}) == 1 for group in groups)
        )
        sharded = tuple(name for name in names if name not in copied)
        for chosen, kind, times in (
            (copied, "replicated", 0), (copied, "replicated", degree), (sharded, "sharded", 0)
        ):  # fmt: skip
            if not chosen:
                continue
            verb = f"counted {times} times" if times else "left out"
            squares = gradient.norm() ** 2 + (times - 1) * gradient.norm(chosen) ** 2
            yield ClipHypothesis(
                "counted several times" if times else "left out of the norm",
                f"In the norm, the squares of what is {kind} over {axis} "
                f"({list_families(chosen)}) are {verb}.",
                "Count each element once.",
                f"the reference gradient before clipping, with these squares {verb}, equals "
                "the gradients that the optimizers take",
                partial(_constant_norm, math.sqrt(max(squares, 0.0))), axis=axis, names=chosen,
            )  # fmt: skip


def _constant_norm(length: float, row: Scaling) -> float:
    return length
