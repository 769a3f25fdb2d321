"""Violations of Theorem 3 on the way in: samples that are missing, doubled or somebody else's, and
losses that are divided by the wrong number."""

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
from tests.faults.planting import FAULTY_STEP, given, is_faulty

DDP = Setting(mesh={"dp_replicate": 2}, micro=2)
ZERO2 = Setting(mesh={"dp_shard": 2})
BLOCKWISE = replace(ZERO2, sections={"unit": "block"})  # of which a fault may be in one
ZERO3 = Setting(mesh={"dp_shard": 2}, placement={"dp_shard": "zero3"})
TP = Setting(mesh={"tp": 2})
PP = Setting(mesh={"pp": 2}, accumulate=4)


def _rows(local: LocalBatch, rows: list[int]) -> LocalBatch:
    """Only these samples, in this order."""
    return replace(
        local, tokens=local.tokens[rows], sample_ids=tuple(local.sample_ids[row] for row in rows)
    )


def missing_sample(program: Program) -> None:
    """One rank never sees its first sample."""

    def change(step: int, local: LocalBatch) -> LocalBatch:
        missing = is_faulty(program) and step == FAULTY_STEP
        return _rows(local, list(range(1, len(local.tokens)))) if missing else local

    given(program, change)


def duplicate_sample(program: Program) -> None:
    """A sample takes the place of another."""

    def change(step: int, local: LocalBatch) -> LocalBatch:
        if not is_faulty(program) or step != FAULTY_STEP:
            return local
        return _rows(local, [0, 0, *range(2, len(local.tokens))])

    given(program, change)


def dropped_last(program: Program) -> None:
    """The last sample of the global batch is dropped, and the loss is that of the others."""
    is_last = program.data_index == program.spec.data_degree - 1

    def change(step: int, local: LocalBatch) -> LocalBatch:
        sequence = program.spec.batch.sequence
        fewer = replace(local, global_tokens=local.global_tokens - sequence)
        return _rows(fewer, list(range(len(local.tokens) - 1))) if is_last else fewer

    given(program, change)


def batch_of(
    program: Program, step: int, data_index: int | None = None, seed: int | None = None
) -> LocalBatch:
    """What a rank is given in a step, or another data rank is, or with another seed."""
    spec = program.spec
    if seed is not None:
        spec = replace(spec, train=replace(spec.train, seed=seed))
    index = program.data_index if data_index is None else data_index
    source = open_corpus(spec.data)
    return read_batch(source, spec=spec, step=step, data_index=index, data_degree=spec.data_degree)


def same_samples(program: Program) -> None:
    """Every data rank takes the first one's samples: a sampler that knows of no ranks."""
    given(program, lambda step, _: batch_of(program, step, data_index=0))


def earlier_batch(program: Program) -> None:
    """One rank's loader is a step behind."""

    def change(step: int, local: LocalBatch) -> LocalBatch:
        return batch_of(program, step - 1) if is_faulty(program) and step else local

    given(program, change)


def other_shuffle(program: Program) -> None:
    """One rank shuffles with another seed."""

    def change(step: int, local: LocalBatch) -> LocalBatch:
        return batch_of(program, step, seed=1) if is_faulty(program) else local

    given(program, change)


def other_tokens_within_tp(program: Program) -> None:
    """The ranks that share operators read other samples: the loader takes tp for a data axis. It
    is the first rank that has the rows and the columns of all tokens that occur."""

    def change(step: int, local: LocalBatch) -> LocalBatch:
        return local if program.mesh.coordinate(Axis.TP) else batch_of(program, step + 7)

    given(program, change)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TargetsTwoAhead(LocalBatch):
    def micro_batches(self, micro: int) -> Iterator[SampleBatch]:
        for tokens in self.tokens.split(micro):
            yield SampleBatch(TokenPair(tokens[:, :-1], tokens[:, 1:].roll(-1, dims=1)))


def shifted_twice(program: Program) -> None:
    """Targets are shifted by the loader and again by the loss."""

    def change(step: int, local: LocalBatch) -> LocalBatch:
        return _TargetsTwoAhead(
            tokens=local.tokens, global_tokens=local.global_tokens, sample_ids=local.sample_ids
        )

    given(program, change)


def other_order_of_targets(program: Program) -> None:
    """The last stage has its micro-batches in another order than the first."""
    is_last = program.mesh.coordinate(Axis.PP) == program.mesh.degrees[Axis.PP] - 1

    def change(step: int, local: LocalBatch) -> LocalBatch:
        return _rows(local, [1, 0, *range(2, len(local.tokens))]) if is_last else local

    given(program, change)


def _divided(program: Program, factor: float) -> None:
    given(
        program,
        lambda _, local: replace(local, global_tokens=round(local.global_tokens / factor)),
    )


def local_normalization(program: Program) -> None:
    """Each rank divides by its own number of tokens, and the sums are summed."""
    given(program, lambda _, local: replace(local, global_tokens=local.tokens[:, 1:].numel()))


def mean_of_micro_batches(program: Program) -> None:
    """Each micro-batch's loss is its mean, and nobody divides by K."""
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
