"""Violations of Theorem 3 in the input: missing, repeated or exchanged samples, and wrong loss
divisors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ptrain.data.corpus import open_corpus
from ptrain.data.sampler import LocalBatch, read_batch
from ptrain.interpreter.program import Program
from ptrain.models.objective import SampleBatch, TokenPair
from ptrain.report.finding import Subject
from ptrain.spec.placement import Axis
from tests.faults.fault import Fault, Setting
from tests.faults.planting import FAULTY_STEP, change_batches, is_faulty

DDP = Setting(mesh={"dp_replicate": 2}, micro=2)
ZERO2 = Setting(mesh={"dp_shard": 2})
BLOCKWISE = replace(ZERO2, sections={"unit": "block"})  # of which a fault may be in one
ZERO3 = Setting(mesh={"dp_shard": 2}, placement={"dp_shard": "zero3"})
TP = Setting(mesh={"tp": 2})
PP = Setting(mesh={"pp": 2}, accumulate=4)


def _rows(local: LocalBatch, rows: list[int]) -> LocalBatch:
    """Return only these samples, in this order."""
    return replace(
        local, tokens=local.tokens[rows], sample_ids=tuple(local.sample_ids[row] for row in rows)
    )


def missing_sample(program: Program) -> None:
    """Skip the first sample on one rank."""

    def change(step: int, local: LocalBatch) -> LocalBatch:
        missing = is_faulty(program) and step == FAULTY_STEP
        return _rows(local, list(range(1, len(local.tokens)))) if missing else local

    change_batches(program, change)


def duplicate_sample(program: Program) -> None:
    """Replace a sample by another."""

    def change(step: int, local: LocalBatch) -> LocalBatch:
        if not is_faulty(program) or step != FAULTY_STEP:
            return local
        return _rows(local, [0, 0, *range(2, len(local.tokens))])

    change_batches(program, change)


def dropped_last(program: Program) -> None:
    """Drop the last sample of the global batch and average the others."""
    is_last = program.data_index == program.spec.data_degree - 1

    def change(step: int, local: LocalBatch) -> LocalBatch:
        sequence = program.spec.batch.sequence
        fewer = replace(local, global_tokens=local.global_tokens - sequence)
        return _rows(fewer, list(range(len(local.tokens) - 1))) if is_last else fewer

    change_batches(program, change)


def batch_of(
    program: Program, step: int, data_index: int | None = None, seed: int | None = None
) -> LocalBatch:
    """Return the batch of a data rank in a step with a seed."""
    spec = program.spec
    if seed is not None:
        spec = replace(spec, train=replace(spec.train, seed=seed))
    index = program.data_index if data_index is None else data_index
    source = open_corpus(spec.data)
    return read_batch(source, spec=spec, step=step, data_index=index, data_degree=spec.data_degree)


def same_samples(program: Program) -> None:
    """Give every data rank the samples of the first: a sampler without ranks."""
    change_batches(program, lambda step, _: batch_of(program, step, data_index=0))


def earlier_batch(program: Program) -> None:
    """Delay one rank's loader by a step."""

    def change(step: int, local: LocalBatch) -> LocalBatch:
        return batch_of(program, step - 1) if is_faulty(program) and step else local

    change_batches(program, change)


def other_shuffle(program: Program) -> None:
    """Shuffle with another seed on one rank."""

    def change(step: int, local: LocalBatch) -> LocalBatch:
        return batch_of(program, step, seed=1) if is_faulty(program) else local

    change_batches(program, change)


def other_tokens_within_tp(program: Program) -> None:
    """Give the ranks that share operators different samples: the loader treats tp as a data axis.
    The first rank has the rows and columns of all occurring tokens."""

    def change(step: int, local: LocalBatch) -> LocalBatch:
        return local if program.mesh.coordinate(Axis.TP) else batch_of(program, step + 7)

    change_batches(program, change)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TargetsTwoAhead(LocalBatch):
    def micro_batches(self, micro: int) -> Iterator[SampleBatch]:
        for tokens in self.tokens.split(micro):
            yield SampleBatch(TokenPair(tokens[:, :-1], tokens[:, 1:].roll(-1, dims=1)))


def shifted_twice(program: Program) -> None:
    """Shift targets in the loader and again in the loss."""

    def change(step: int, local: LocalBatch) -> LocalBatch:
        return _TargetsTwoAhead(
            tokens=local.tokens, global_tokens=local.global_tokens, sample_ids=local.sample_ids
        )

    change_batches(program, change)


def other_order_of_targets(program: Program) -> None:
    """Give the last stage its micro-batches in another order than the first."""
    is_last = program.mesh.coordinate(Axis.PP) == program.mesh.degrees[Axis.PP] - 1

    def change(step: int, local: LocalBatch) -> LocalBatch:
        return _rows(local, [1, 0, *range(2, len(local.tokens))]) if is_last else local

    change_batches(program, change)


def _divided(program: Program, factor: float) -> None:
    change_batches(
        program,
        lambda _, local: replace(local, global_tokens=round(local.global_tokens / factor)),
    )


def local_normalization(program: Program) -> None:
    """Divide by the local token count on each rank, and sum the results."""
    change_batches(
        program, lambda _, local: replace(local, global_tokens=local.tokens[:, 1:].numel())
    )


def mean_of_micro_batches(program: Program) -> None:
    """Average each micro-batch without dividing by K."""
    _divided(program, program.spec.batch.accumulate)


FAULTS = (
    Fault(
        name="missing sample",
        setting=DDP,
        plant=missing_sample,
        subjects=(Subject.BATCH,),
        axis="dp_replicate",
        factor="missing",
    ),
    Fault(
        name="duplicate sample",
        setting=DDP,
        plant=duplicate_sample,
        subjects=(Subject.BATCH,),
        axis="dp_replicate",
        factor="doubled|twice|duplicate",
    ),
    Fault(
        name="dropped last sample",
        setting=DDP,
        plant=dropped_last,
        subjects=(Subject.BATCH,),
        axis="dp_replicate",
        factor="missing",
    ),
    Fault(
        name="every data rank takes the same samples",
        setting=ZERO3,
        plant=same_samples,
        subjects=(Subject.BATCH,),
        axis="dp_shard",
        factor="missing|doubled|twice|duplicate|same",
    ),
    Fault(
        name="one rank's loader is a step behind",
        setting=DDP,
        plant=earlier_batch,
        subjects=(Subject.BATCH,),
        axis="dp_replicate",
        factor="step|stale|missing",
    ),
    Fault(
        name="one rank shuffles with another seed",
        setting=ZERO2,
        plant=other_shuffle,
        subjects=(Subject.BATCH,),
        axis="dp_shard",
        factor="missing|unknown|other",
    ),
    Fault(
        name="ranks of tp read different samples",
        setting=TP,
        plant=other_tokens_within_tp,
        subjects=(Subject.BATCH,),
        axis="tp",
        factor="no sample|order|place",
    ),
    Fault(
        name="targets shifted twice",
        setting=DDP,
        plant=shifted_twice,
        subjects=(Subject.BATCH, Subject.LOSS),
        factor="targets",
    ),
    Fault(
        name="micro-batches of the last stage in another order than the first's",
        setting=PP,
        plant=other_order_of_targets,
        subjects=(Subject.BATCH, Subject.LOSS),
        axis="pp",
        factor="order|targets",
    ),
    Fault(
        name="local normalisation",
        setting=DDP,
        plant=local_normalization,
        subjects=(Subject.LOSS, Subject.GRADIENTS),
        axis="dp_replicate",
        factor="× 2",
    ),
    Fault(
        name="gradient times K: a mean per micro-batch, not divided by K",
        setting=ZERO2,
        plant=mean_of_micro_batches,
        subjects=(Subject.LOSS, Subject.GRADIENTS),
        factor="× 3",
    ),
)
