"""What is known of a program's first mismatch: both sides of its step, all ranks' mismatches, and
which axis parts the ranks that differ from the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ptrain.interpreter.program import Program
from ptrain.models.objective import StepBatch
from ptrain.report.finding import Mismatch, Moment, RootCause, Subject
from ptrain.spec.placement import TOKEN_AXES, Axis
from ptrain.verification.capture import Outputs, clipped_by
from ptrain.verification.jobs.job import Ranks
from ptrain.verification.jobs.root_causes import root_cause
from ptrain.verification.jobs.shards import ParameterShard, numbered
from ptrain.verification.parts import TensorBox, held, part_of
from ptrain.verification.places import coordinates
from ptrain.verification.preconditions import States
from ptrain.verification.reference import ReferenceTraining
from ptrain.verification.updates.repeat import UpdateRecord

EXACT = 1e-6  # a relative residual below which a cause explains what was found


@dataclass(slots=True, kw_only=True)
class ProgramSide:
    """A program, or the one device that it should be, which shows besides what its modules return,
    its loss and the norm of its gradients (None where nobody computes it)."""

    in_use: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    record: UpdateRecord = field(default_factory=UpdateRecord)
    outputs: Outputs
    loss: float
    norm: float | None = None


@dataclass(slots=True, kw_only=True)
class Evidence:
    """One step of a program and of one device, kept while it is explained. `states` are one
    device's at the start of the last steps, this one last. Gradients are without the loss's `scale`
    and what clipping did: `seen`, the program's, by the norm that their rank has, and its record by
    the number of a leaf of its optimizers."""

    step: int
    states: list[States]
    batch: StepBatch
    seen: ProgramSide
    expected: ProgramSide
    earlier_gradients: Mapping[str, Tensor]
    rates: set[float]
    scale: float


class Investigation:
    """`found` by all ranks, in the order of time; the first counts, and `one` is explained. All
    ranks look at it together: methods that gather are called by all."""

    def __init__(
        self,
        mismatches: Sequence[Mismatch],
        evidence: Evidence | None,
        sides: tuple[Program, ReferenceTraining],
        ranks: Ranks,
    ) -> None:
        self.found = mismatches
        self.first = self.one = mismatches[0]
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

    def root_cause(
        self,
        axis: str | None,
        factor: str,
        sentence: str,
        *,
        place: str = "",
        tried: str = "",
    ) -> RootCause:
        """Return the root cause of what is explained; `place` where it is not where that is.
        Without an `axis` it is the one that parts the ranks where it differs from the others."""
        one, ranks = self.one, self.blamed(self.one)
        axis = self.axis_of(ranks) if axis is None else axis
        return root_cause(
            [one], self.ranks, state=one.subject, axis=axis, factor=factor, sentence=sentence,
            names=[place or one.place], who=ranks, tried=tried,
        )  # fmt: skip

    def about(self, one: Mismatch) -> Investigation:
        """Return the same, to explain this mismatch, which tells more of the first."""
        other = copy(self)
        other.one = one
        return other

    def blamed(self, one: Mismatch) -> tuple[int, ...]:
        """Return the ranks where the same thing differs; of gradients anything, for a rank may have
        nothing of the first tensor that is not zero."""
        if one.subject is not Subject.GRADIENTS:
            return self.ranks_of(one)
        return tuple(sorted({mismatch.rank for mismatch in self.at(one.moment, one.subject)}))

    def ranks_of(self, one: Mismatch) -> tuple[int, ...]:
        """Return the ranks where the same thing differs at the same moment."""
        alike = (one.step, one.moment, one.subject, one.name)
        differing = (its for its in self.found if (*its.when, its.subject, its.name) == alike)
        return tuple(sorted({mismatch.rank for mismatch in differing}))

    def at(self, moment: Moment, subject: Subject | None = None) -> list[Mismatch]:
        """Return the mismatches of the first mismatch's step."""
        return [
            mismatch
            for mismatch in self.found
            if mismatch.step == self.first.step
            and mismatch.moment is moment
            and subject in (None, mismatch.subject)
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

    def axis_of(self, ranks: Iterable[int]) -> str:
        """The axis along which some of a rank's neighbours are among `ranks` and others are not:
        the data axes first, whose ranks have most in common; "" where all ranks are."""
        order = sorted(self.axes, key=lambda axis: axis not in (Axis.DP_REPLICATE, Axis.DP_SHARD))
        return self.ranks.parting(ranks, map(str, order))

    def own_part(self, tensor: torch.Tensor, whole: torch.Tensor) -> TensorBox | None:
        return part_of(
            tensor,
            whole.shape,
            degree=self.spec.degree(Axis.TP),
            place=coordinates(self.spec, self.rank).get(Axis.TP, 0),
        )

    def shard(self, name: str, tensor: torch.Tensor, whole: torch.Tensor) -> ParameterShard | None:
        """Return which elements of a whole parameter this rank has; None where nothing tells."""
        part = self.own_part(tensor, whole)
        if part is None:
            return None
        at = part.of(numbered(whole.shape)).flatten()
        is_whole = at.numel() == whole.numel()
        return ParameterShard(name, held(tensor), whole.shape, None if is_whole else at)
