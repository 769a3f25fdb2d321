"""What an explanation looks at: the departures, one step's evidence, and where the ranks are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import torch

from ptrain.axes.context.tokens import Span
from ptrain.interpreter.program import Program
from ptrain.report.finding import Culprit, Departure, Moment, Subject
from ptrain.spec.axis import TOKEN_AXES, Axis
from ptrain.verification.capture import as_held, clipped_by
from ptrain.verification.evidence import Evidence
from ptrain.verification.jobs.culprits import culprit
from ptrain.verification.jobs.ranks import Ranks
from ptrain.verification.jobs.shards import ParameterShard, numbered
from ptrain.verification.own_tokens import TokensOfRank
from ptrain.verification.parts import TensorBox, held, part_of
from ptrain.verification.places import coordinates, data_place, line
from ptrain.verification.reference import MicroBatch, ReferenceTraining

EXACT = 1e-6  # a relative residual below which a cause explains what was found


class Investigation:
    """`found` by all ranks, in the order of time; the first counts, and `one` is explained. All
    ranks look at it together: methods that gather are called by all."""

    def __init__(
        self,
        departures: Sequence[Departure],
        evidence: Evidence | None,
        sides: tuple[Program, ReferenceTraining],
        ranks: Ranks,
    ) -> None:
        self.found = departures
        self.first = self.one = departures[0]
        self.program, self.reference = sides
        self.spec = self.reference.spec
        self.ranks, self.rank = ranks, ranks.rank
        self._evidence = evidence

    @property
    def evidence(self) -> Evidence:
        assert self._evidence is not None, "a step was run"
        return self._evidence

    @property
    def clipped_by(self) -> float:
        """Return what clipping multiplied this rank's gradients by."""
        return clipped_by(self.spec, self.evidence.seen.norm)

    @property
    def has_evidence(self) -> bool:
        return self._evidence is not None

    def culprit(
        self,
        axis: str | None,
        factor: str,
        sentence: str,
        *,
        place: str = "",
        tried: str = "",
    ) -> Culprit:
        """Return the culprit of what is explained; `place` where it is not where that is. Without
        an `axis` it is the one that parts the ranks where it departs from the others."""
        one, ranks = self.one, self.blamed(self.one)
        axis = self.axis_of(ranks) if axis is None else axis
        return culprit(
            [one], self.ranks, state=one.subject, axis=axis, factor=factor, sentence=sentence,
            names=[place or one.place], who=ranks, tried=tried,
        )  # fmt: skip

    def about(self, one: Departure) -> Investigation:
        """Return the same, to explain this departure, which tells more of the first."""
        other = copy(self)
        other.one = one
        return other

    def blamed(self, one: Departure) -> tuple[int, ...]:
        """Return the ranks where the same thing departs; of gradients anything, for a rank may have
        nothing of the first tensor that is not zero."""
        if one.subject is not Subject.GRADIENTS:
            return self.ranks_of(one)
        return tuple(sorted({departure.rank for departure in self.at(one.moment, one.subject)}))

    def ranks_of(self, one: Departure) -> tuple[int, ...]:
        """Return the ranks where the same thing departs at the same moment."""
        alike = (one.step, one.moment, one.subject, one.name)
        departing = (its for its in self.found if (*its.when, its.subject, its.name) == alike)
        return tuple(sorted({departure.rank for departure in departing}))

    def by_all(self, everyone: Sequence[object], one: Departure | None = None) -> bool:
        """Return whether each rank where this departs (without one the first) says something."""
        return all(bool(everyone[rank]) for rank in self.ranks_of(one or self.first))

    def elected(self, votes: Sequence[Any]) -> tuple[Any, bool] | None:
        """Return what most of all ranks' votes are for, and whether each rank where the first
        departure is has one; None where nobody has. Collective."""
        everyone = self.ranks.gather(list(votes))
        known = {str(vote): vote for its in everyone for vote in its}
        counts = Counter(str(vote) for its in everyone for vote in its)
        return (known[counts.most_common(1)[0][0]], self.by_all(everyone)) if known else None

    def boxes(self, own: Mapping[str, TensorBox]) -> dict[str, dict[int, TensorBox]]:
        """Return by name and rank which part of a tensor every rank has. Collective."""
        boxes: dict[str, dict[int, TensorBox]] = {}
        for rank, its in enumerate(self.ranks.gather(own, dict[str, TensorBox])):
            for name, box in its.items():
                boxes.setdefault(name, {})[rank] = box
        return boxes

    def at(self, moment: Moment, subject: Subject | None = None) -> list[Departure]:
        """Return the departures of the first departure's step."""
        return [
            departure
            for departure in self.found
            if departure.step == self.first.step
            and departure.moment is moment
            and subject in (None, departure.subject)
        ]

    @property
    def degrees(self) -> dict[str, int]:
        """Return what a factor may come from: the degrees of the mesh and the number of
        micro-batches."""
        degrees = {str(factor.axis): factor.degree for factor in self.spec.factors}
        return {**degrees, "K": self.spec.batch.accumulate}

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Innermost first: where a rank's neighbours are."""
        return tuple(factor.axis for factor in reversed(self.spec.factors))

    @property
    def token_axis(self) -> str:
        """The axis along which ranks have other tokens of the same samples; "" without one."""
        return next((str(axis) for axis in self.axes if axis in TOKEN_AXES), "")

    def line(self, rank: int, *axes: Axis) -> tuple[int, ...]:
        return line(self.spec, rank, *axes)

    def axis_of(self, ranks: Iterable[int]) -> str:
        """The axis along which some of a rank's neighbours are among `ranks` and others are not:
        the data axes first, whose ranks have most in common; "" where all ranks are."""
        order = sorted(self.axes, key=lambda axis: axis not in (Axis.DP_REPLICATE, Axis.DP_SHARD))
        return self.ranks.parting(ranks, map(str, order))

    def place(self, rank: int) -> dict[Axis, int]:
        return coordinates(self.spec, rank)

    def as_held(
        self, path: str, whole: torch.Tensor, spans: Sequence[Span] | None = None
    ) -> torch.Tensor:
        """Return what a module of one device gives, as this rank holds it: its tokens, or those in
        `spans`."""
        tokens = TokensOfRank(self.spec, self.rank, spans)
        return as_held(self.program, path, whole, tokens)

    def own_micro_batches(self, place: int | None = None) -> Iterator[MicroBatch]:
        """Yield one device's micro-batches of this rank's share of the batch, or of the one at a
        place."""
        index = data_place(self.spec, self.rank) if place is None else place
        return self.reference.micro_batches_of(index, self.evidence.step)

    def own_part(self, tensor: torch.Tensor, whole: torch.Tensor) -> TensorBox | None:
        return part_of(
            tensor,
            whole.shape,
            degree=self.spec.degree(Axis.TP),
            place=self.place(self.rank).get(Axis.TP, 0),
        )

    def shard(self, name: str, tensor: torch.Tensor, whole: torch.Tensor) -> ParameterShard | None:
        """Return which elements of a whole parameter this rank has; None where nothing tells."""
        part = self.own_part(tensor, whole)
        if part is None:
            return None
        at = part.of(numbered(whole.shape)).flatten()
        is_whole = at.numel() == whole.numel()
        return ParameterShard(name, held(tensor), whole.shape, None if is_whole else at)
