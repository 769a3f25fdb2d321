"""One step of a program beside the reference, as the explainers of any training loop take it: which
elements of each tensor this rank has, what each micro-batch gives to the gradients, and what the
optimizers were given and left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ptrain.axes.context.attention import all_spans, context_of
from ptrain.axes.data.run.target import NamedTarget
from ptrain.interpreter.program import Program
from ptrain.models.objective import IGNORED, SampleBatch, TokenPair
from ptrain.report.finding import Subject
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec, coordinates
from ptrain.verification.capture import Outputs
from ptrain.verification.compare import Differences, ParameterMove
from ptrain.verification.jobs.evidence import MOST, JobEvidence, OwnGradients, sampled
from ptrain.verification.jobs.job import TOLERANCES, Ranks
from ptrain.verification.jobs.shards import ParameterShard, numbered
from ptrain.verification.parts import TensorBox, held, part_of
from ptrain.verification.preconditions import of_program
from ptrain.verification.reference import MicroBatch, ReferenceTraining
from ptrain.verification.samples import data_place, token_place, tokens_in
from ptrain.verification.updates.clip import UpdateCase
from ptrain.verification.updates.repeat import (
    Ingredients,
    UpdateOutcome,
    UpdateRecord,
    is_row,
)


@dataclass(slots=True, kw_only=True)
class ProgramSide:
    """One side of a step, the program or its reference: besides gradients and the update record,
    the outputs of its modules, its loss and its gradient norm (None if it is not computed)."""

    in_use: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    record: UpdateRecord = field(default_factory=UpdateRecord)
    outputs: Outputs
    loss: float
    norm: float | None = None


@dataclass(slots=True, kw_only=True)
class ProgramStep:
    """One step of both sides. Gradients are without the loss's `scale` and what clipping did: those
    of `seen`, the program's, by the norm that their rank has, and its record by the number of a
    leaf of its optimizers. `rates`: the learning rates that they used;
    `omitted`: parameters with a gradient that no optimizer takes."""

    step: int
    program: Program
    reference: ReferenceTraining
    ranks: Ranks
    seen: ProgramSide
    expected: ProgramSide
    earlier_gradients: Mapping[str, Tensor]
    rates: set[float]
    omitted: set[str]
    scale: float

    @property
    def spec(self) -> Spec:
        return self.reference.spec

    def part_of(self, tensor: Tensor, whole: Tensor) -> TensorBox | None:
        """Return which part of the reference's tensor this rank's is; None where nothing tells."""
        place = coordinates(self.spec, self.ranks.rank).get(Axis.TP, 0)
        return part_of(tensor, whole.shape, degree=self.spec.degree(Axis.TP), place=place)

    def shard(self, name: str, tensor: Tensor, whole: Tensor) -> ParameterShard | None:
        """Return which elements of a whole parameter this rank has; None where nothing tells."""
        part = self.part_of(tensor, whole)
        if part is None:
            return None
        at = part.of(numbered(whole.shape)).flatten()
        is_whole = at.numel() == whole.numel()
        return ParameterShard(name, held(tensor), whole.shape, None if is_whole else at)

    def lost(self) -> list[str]:
        """Return the parameters with a gradient in the reference that have none, or zeros, on every
        rank. All ranks call it."""
        own = [name for name, its in self.seen.gradients.items() if bool(held(its).any())]
        own += self.omitted
        reached = {name for its in self.ranks.gather(own) for name in its}
        expected = self.expected.gradients.items()
        return [name for name, whole in expected if name not in reached and bool(whole.any())]

    def job_evidence(self) -> JobEvidence:
        """Return the evidence from which gradients are explained, with the gradients of at most
        MOST micro-batches. All ranks call it."""
        truths = self.expected.gradients
        taken = {name: held(its).flatten() for name, its in self.seen.gradients.items()}
        reached = {name for its in self.ranks.gather(sorted(taken)) for name in its}
        holds = {
            name: shard
            for name, whole in truths.items()
            if (shard := self._gradient_shard(name, whole, is_reached=name in reached)) is not None
        }
        given = list(islice(self._of_micro_batches(), MOST))  # each is as large as all parameters
        own = OwnGradients(
            holds=holds, truths=truths, taken={n: row for n, row in taken.items() if n in holds},
            given=given, before=self.earlier_gradients,
            micro_batches=max(self.ranks.gather(len(given))),  # as many rows on all ranks
        )  # fmt: skip
        return replace(sampled(self.ranks, own), is_weighed=True)

    def _gradient_shard(
        self, name: str, whole: Tensor, *, is_reached: bool
    ) -> ParameterShard | None:
        """Return which elements this rank's gradient is of; all, where no rank has one."""
        gradient = self.seen.gradients.get(name)
        if gradient is None:
            parameter = self.reference.module.get_parameter(name)
            return None if is_reached else ParameterShard(name, parameter, whole.shape)
        return self.shard(name, gradient, whole)

    def _of_micro_batches(self) -> Iterator[dict[str, Tensor]]:
        """Yield what each of this rank's micro-batches gives to the gradients of all parameters;
        where ranks of cp have some of the tokens, the losses at its own."""
        rank, device = self.ranks.rank, self.reference
        for micro_batch in device.micro_batches_of(data_place(self.spec, rank), self.step):
            part = list(_of_each_slice(self.spec, micro_batch))[token_place(self.spec, rank)]
            yield _gradients(device, part, self.scale)

    def update_case(self) -> UpdateCase | None:
        """Return the evidence from which an update is explained; None if the optimizers of a
        stage's ranks stepped different parameters. All ranks call it."""
        program, seen = self.program, self.seen.record
        taken = [
            (target, str(index))
            for index, (target, _) in enumerate(program.update.leaves())
            if str(index) in seen.after and seen.before[str(index)].value.numel()
        ]
        # what is mapped to parameters by collectives is the same on all ranks of a stage
        mine = [[name, _rows(seen.before[name])] for _, name in taken]
        everyones = self.ranks.gather([program.pieces[0].index, mine])
        alike = dict(everyones)
        if any(not its or its != alike[place] for place, its in everyones):
            return None
        record, tensors = UpdateRecord(obstacle=seen.obstacle), dict[str, Tensor]()
        for target, name in taken:
            _split(program, target, seen, name, record, tensors)
        holds = {}
        for name, tensor in tensors.items():
            whole = self.reference.parameters.get(name)
            if whole is not None and (shard := self.shard(name, tensor, whole)) is not None:
                holds[name] = shard
        courses = _courses(program, record, self.expected.record, holds)
        sides = self.expected, replace(self.seen, record=record, gradients={})
        differences = Differences(step=self.step, rank=self.ranks.rank, courses=courses)
        its = {name: holds[name] for name in courses}
        return UpdateCase.of(differences, sides, its, TOLERANCES[torch.float64])


def _gradients(device: ReferenceTraining, part: MicroBatch, scale: float) -> dict[str, Tensor]:
    parameters = {n: its for n, its in device.module.named_parameters() if its.requires_grad}
    loss = part.loss(device.objective, device.module) * scale
    rows = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if row is None else row / scale
        for (name, parameter), row in zip(parameters.items(), rows, strict=True)
    }


def _of_each_slice(spec: Spec, sample: MicroBatch) -> Iterator[MicroBatch]:
    """Yield it with the losses at one rank's tokens alone, for each rank of cp."""
    step = context_of(spec)
    if step is None:
        yield sample
    for spans in all_spans(step) if step else ():
        inputs, whole = sample.samples.data
        targets, own = torch.full_like(whole, IGNORED), tokens_in(spans)
        targets[:, own] = whole[:, own]
        yield replace(sample, samples=SampleBatch(TokenPair(inputs, targets)))


def _rows(taken: Ingredients) -> list[str]:
    keys = sorted(key for key, value in taken.state.items() if is_row(value, taken.value))
    return [*keys, *(["gradient"] if taken.gradient is not None else [])]


def _split(
    program: Program,
    target: NamedTarget,
    leaves: UpdateRecord,
    leaf: str,
    record: UpdateRecord,
    tensors: dict[str, Tensor],
) -> None:
    """Add what a leaf was given and left, by the names of the parameters that it stands for."""
    before, after = leaves.before[leaf], leaves.after[leaf]

    def named(row: Tensor) -> dict[str, Tensor]:
        return program.canonical(target.named(row.view(before.shape)))

    def named_state(state: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
        return {key: named(state[key]) for key in sorted(state) if is_row(state[key], before.value)}

    values, left = named(before.value), named(after.value)
    gradients = {} if before.gradient is None else named(before.gradient)
    states = named_state(before.state), named_state(after.state)
    for name, tensor in values.items():
        own, its = (
            {key: _row(rows[key][name]) if key in rows else value for key, value in entries.items()}
            for rows, entries in zip(states, (before.state, after.state), strict=True)
        )
        tensors[name] = tensor
        record.before[name] = replace(
            before,
            shape=held(tensor).shape,
            value=_row(tensor),
            gradient=_row(gradients[name]) if name in gradients else None,
            state=own,
        )
        record.after[name] = UpdateOutcome(_row(left[name]), its)


def _row(tensor: Tensor) -> Tensor:
    return held(tensor).flatten()


def _courses(
    program: Program,
    record: UpdateRecord,
    expected: UpdateRecord,
    holds: Mapping[str, ParameterShard],
) -> dict[str, ParameterMove]:
    now = of_program(program)
    courses = {}
    for name, shard in holds.items():
        if name not in expected.after or (Subject.PARAMETERS, name) not in now:
            continue
        before = shard.of(expected.before[name].value)
        courses[name] = ParameterMove(
            parameter=shard.parameter,
            origin=before,
            before=before,
            after=shard.of(expected.after[name].value),
            run_before=record.before[name].value,
            run_after=_row(now[Subject.PARAMETERS, name]),
            sure=torch.ones_like(before, dtype=torch.bool),
        )
    return courses
