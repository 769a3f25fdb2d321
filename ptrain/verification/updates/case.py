"""One step's update of a loop and of one device, as far as a rank has it, and how far what a
repeated update leaves is from one device's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ptrain.report.finding import Moment, Subject
from ptrain.verification.differences import Differences, ParameterMove
from ptrain.verification.evidence import StepSide
from ptrain.verification.jobs.compare import (
    compare_states,
    compare_update,
    digest,
)
from ptrain.verification.jobs.job import Tolerance
from ptrain.verification.jobs.shards import ParameterShard
from ptrain.verification.magnitude import Magnitude
from ptrain.verification.updates.record import UpdateRecord
from ptrain.verification.updates.repeat import Ingredients, UpdateOutcome, is_row

_COARSE = 1e-3  # a dtype's rounding above which a skipped update of some elements is no difference


@dataclass(frozen=True, slots=True)
class Remainder:
    """How far an update's outcome is from one device's, on one rank or on all: how many tensors
    depart, and the largest differences of parameters and of state, relative as the verdict's."""

    count: int
    parameters: float
    state: float

    @property
    def worst(self) -> float:
        return max(self.parameters, self.state)

    @classmethod
    def of_all(cls, everyones: Sequence[Remainder]) -> Remainder:
        """Return the largest of all ranks' differences."""
        return cls(
            count=sum(its.count for its in everyones),
            parameters=max(its.parameters for its in everyones),
            state=max(its.state for its in everyones),
        )

    def is_cure_of(self, departure: Remainder) -> bool:
        """Return whether nothing departs any more, and what is left is a tenth or less of what
        did: a tolerance of 16 bits is no proof by itself."""
        return self.count == 0 and self.worst <= 0.1 * departure.worst


BROKEN = Remainder(1, math.inf, math.inf)  # of an update that cannot be repeated


@dataclass(frozen=True, kw_only=True)
class UpdateCase:
    """`seen` and `expected`: what the loop's and the reference's optimizers were given and left;
    `gradients`: the loop's; `courses`: how the model's parameters went in this step, by name.
    `is_noise`: whether the verdict compares a parameter at all, or its gradient is nothing."""

    step: int
    rank: int
    seen: UpdateRecord
    expected: UpdateRecord
    gradients: Mapping[str, Tensor]
    holds: Mapping[str, ParameterShard]
    courses: Mapping[str, ParameterMove]
    is_noise: Callable[[str], bool]
    limit: Tolerance

    @classmethod
    def of(
        cls,
        differences: Differences,
        sides: tuple[StepSide, StepSide],
        holds: Mapping[str, ParameterShard],
        limit: Tolerance,
    ) -> UpdateCase:
        """`sides`: the reference's step and the loop's; `differences`: with how parameters went."""
        expected, seen = sides
        return cls(
            step=differences.step,
            rank=differences.rank,
            seen=seen.record,
            expected=expected.record,
            gradients=seen.gradients,
            holds=holds,
            courses=differences.courses,
            is_noise=Magnitude.noise_among(expected.gradients),
            limit=limit,
        )

    @cached_property
    def own(self) -> dict[str, Ingredients]:
        """What the loop's optimizers step on this rank, where one device's step it too."""
        return {name: its for name, its in self.seen.before.items() if name in self.other}

    @cached_property
    def other(self) -> dict[str, Ingredients]:
        """This rank's elements of what one device's optimizers are given."""
        return {
            name: self._part(name, its)
            for name, its in self.expected.before.items()
            if name in self.holds
        }

    def _part(self, name: str, whole: Ingredients) -> Ingredients:
        shard = self.holds[name]
        return replace(
            whole,
            value=shard.of(whole.value),
            gradient=None if whole.gradient is None else shard.of(whole.gradient),
            state=self._part_of_state(name, whole.state, whole.value),
        )

    def _part_of_state(self, name: str, state: Mapping[str, Any], row: Tensor) -> dict[str, Any]:
        shard = self.holds[name]
        return {k: shard.of(value) if is_row(value, row) else value for k, value in state.items()}

    def target(self, name: str) -> UpdateOutcome:
        """This rank's elements of what one device's step left."""
        after, row = self.expected.after[name], self.expected.before[name].value
        value = self.holds[name].of(after.value)
        return UpdateOutcome(value, self._part_of_state(name, after.state, row))

    def remainder(self, outcomes: Mapping[str, UpdateOutcome]) -> Remainder:
        """Return how far these outcomes are from one device's."""
        scratch = self.differences(outcomes)
        values, state = (
            scratch.most(Moment.UPDATE, subject)
            for subject in (Subject.PARAMETERS, Subject.OPTIMIZER)
        )
        return Remainder(len(scratch.departures), values, state)

    def differences(self, outcomes: Mapping[str, UpdateOutcome]) -> Differences:
        """Compare outcomes with one device's as the verdict does."""
        scratch = Differences(step=self.step, rank=self.rank)
        rights: dict[str, dict[str, Tensor]] = {}
        owns: dict[str, dict[str, Tensor]] = {}
        rows: dict[str, ParameterShard] = {}
        for name, outcome in outcomes.items():
            target = self.target(name)
            course = replace(
                self.courses[name],
                before=self.other[name].value,
                after=target.value,
                run_before=self.seen.before[name].value
                if name in self.seen.before
                else self.courses[name].run_before,
                run_after=outcome.value,
            )
            compare_update(
                scratch, name, course, is_noise=self.is_noise(name),
                limit=self.limit,
            )  # fmt: skip
            rows[name] = ParameterShard(name, target.value, target.value.shape)
            for side, its in ((rights, target), (owns, outcome)):
                side[name] = {k: v for k, v in its.state.items() if is_row(v, target.value)}
        compare_states(scratch, rights, owns, rows, self.limit)
        return scratch

    def repeats(self, outcomes: Mapping[str, UpdateOutcome]) -> list[str]:
        """Return the parameters of which the repeated update is not what the loop's step left."""
        return [
            name
            for name, outcome in outcomes.items()
            if not _is_alike(outcome.value, self.seen.after[name].value, self.own[name].value)
        ]

    def written_after(self) -> list[str]:
        """Return the parameters that are not what this rank's optimizer left, bit by bit."""
        return [
            name
            for name, outcome in self.seen.after.items()
            if name in self.courses
            and not torch.equal(
                outcome.value.to(self.courses[name].run_after), self.courses[name].run_after
            )
        ]

    def part(self, name: str) -> str:
        """Return a checksum of which elements of the whole this rank has."""
        return digest(self.holds[name].at)


def compare_masters(differences: Differences, case: UpdateCase) -> None:
    """Compare what the optimizer updates in the place of a parameter, where one device's optimizer
    has as fine a dtype: roundings to the model's dtype hide it."""
    masters = {
        name: case.seen.after[name]
        for name in case.seen.masters & case.own.keys()
        if name in case.seen.after and _is_as_fine(case.own[name].value, case.other[name].value)
    }
    scratch = case.differences(masters)
    for departure in scratch.departures:
        if departure.subject is Subject.PARAMETERS:
            differences.departures.append(
                replace(
                    departure, subject=Subject.OPTIMIZER, name=f"{departure.name} · master copy"
                )
            )


def _is_as_fine(own: Tensor, other: Tensor) -> bool:
    return torch.finfo(other.dtype).eps <= torch.finfo(own.dtype).eps


def _is_alike(repeated: Tensor, seen: Tensor, before: Tensor) -> bool:
    """Whether what is left is rounding: of the move, or where the dtype is fine of the value."""
    if torch.equal(repeated, seen):
        return True
    difference, moved, length = (
        float(torch.linalg.vector_norm(row.double()))
        for row in (repeated.double() - seen.double(), repeated.double() - before, seen)
    )
    eps = torch.finfo(seen.dtype).eps
    return difference <= 1e-2 * moved if eps > _COARSE else difference <= 4 * eps * length
