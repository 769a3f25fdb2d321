"""One step of a program beside the reference, as the explainers of any training loop take it: which
elements of each tensor this rank has, what each micro-batch gives to the gradients, and what the
optimizers were given and left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from torch import Tensor

from ptrain.axes.context.attention import all_spans, context_of
from ptrain.interpreter.program import Program
from ptrain.models.objective import IGNORED, SampleBatch, TokenPair
from ptrain.spec.spec import Spec
from ptrain.train.exchange import Exchange
from ptrain.verification.capture import Outputs
from ptrain.verification.compare import Differences, ParameterMove
from ptrain.verification.jobs.evidence import MOST, JobEvidence, OwnGradients, sampled
from ptrain.verification.jobs.job import TOLERANCES, Ranks
from ptrain.verification.jobs.shards import ParameterShard
from ptrain.verification.parts import whole
from ptrain.verification.reference import MicroBatch, ReferenceTraining
from ptrain.verification.samples import data_place, token_place, tokens_in
from ptrain.verification.updates.clip import UpdateCase
from ptrain.verification.updates.repeat import UpdateRecord


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
    """One step of both sides. `holds`: which elements of each parameter this rank's optimizers
    update, of which `seen`, the program's side, has gradients and updates. Gradients are without
    what clipping did. `rates`: the learning rates that the optimizers used."""

    step: int
    program: Program
    reference: ReferenceTraining
    exchange: Exchange
    ranks: Ranks
    holds: Mapping[str, ParameterShard]
    seen: ProgramSide
    expected: ProgramSide
    earlier_gradients: Mapping[str, Tensor]
    rates: set[float]

    def lost(self) -> list[str]:
        """Return the parameters with a gradient in the reference that have none, or zeros, on every
        rank. All ranks call it."""
        own = [name for name, its in self.seen.gradients.items() if bool(its.any())]
        reached = {name for its in self.ranks.gather(own) for name in its}
        expected = self.expected.gradients.items()
        return [name for name, whole in expected if name not in reached and bool(whole.any())]

    def job_evidence(self) -> JobEvidence:
        """Return the evidence from which gradients are explained, with the gradients of at most
        MOST micro-batches. All ranks call it."""
        truths, module = self.expected.gradients, self.reference.module
        known = {name for its in self.ranks.gather(sorted(self.holds)) for name in its}
        holds = {}
        for name in (name for name in truths if name in self.holds or name not in known):
            parameter = module.get_parameter(name)
            shard = self.holds.get(name, ParameterShard(name, parameter, parameter.shape))
            holds[name] = replace(shard, parameter=parameter, within=None)
        given = list(islice(self._of_micro_batches(), MOST))  # each is as large as all parameters
        own = OwnGradients(
            holds=holds, truths=truths, given=given, before=self.earlier_gradients,
            taken={n: row for n, row in self.seen.gradients.items() if n in holds},
            micro_batches=max(self.ranks.gather(len(given))),  # as many rows on all ranks
        )  # fmt: skip
        return replace(sampled(self.ranks, own), is_weighed=True)

    def _of_micro_batches(self) -> Iterator[dict[str, Tensor]]:
        """Yield what each of this rank's micro-batches gives to the gradients of all parameters;
        where ranks of cp have some of the tokens, the losses at its own."""
        rank, device = self.ranks.rank, self.reference
        for micro_batch in device.micro_batches_of(data_place(device.spec, rank), self.step):
            part = list(_of_each_slice(device.spec, micro_batch))[token_place(device.spec, rank)]
            yield _gradients(device, part)

    def update_case(self) -> UpdateCase:
        """Return the evidence from which an update is explained. All ranks call it."""
        now = whole(self.program.state_dict()["model"], self.exchange)
        seen, expected = self.seen.record, self.expected.record
        holds, courses = {}, {}
        for name, taken in seen.before.items():
            if name not in expected.after or name not in now:
                continue
            shard = replace(self.holds[name], parameter=taken.value.view(taken.shape), within=None)
            before = shard.of(expected.before[name].value)
            holds[name] = shard
            courses[name] = ParameterMove(
                parameter=shard.parameter,
                origin=before,
                before=before,
                after=shard.of(expected.after[name].value),
                run_before=taken.value,
                run_after=shard.of(now[name]),
                sure=torch.ones_like(before, dtype=torch.bool),
            )
        differences = Differences(step=self.step, rank=self.ranks.rank, courses=courses)
        sides = self.expected, replace(self.seen, gradients={})
        return UpdateCase.of(differences, sides, holds, TOLERANCES[torch.float64])


def _gradients(device: ReferenceTraining, part: MicroBatch) -> dict[str, Tensor]:
    parameters = {n: its for n, its in device.module.named_parameters() if its.requires_grad}
    scale = device.updater.scale  # of the loss: what a module adds to it beside has it, too
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
