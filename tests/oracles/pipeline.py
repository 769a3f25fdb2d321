"""The cost of the pipeline axis in closed form, independent of schedules and derivation.

Written from what the literature says of each schedule, and reading neither a schedule's order nor
the exchanges that follow from it; sizes and chunks in flight are `axes.pipeline.cost`'s.

What lies between two ranks follows from the chunks in flight, where a buffer is made as its message
is sent and a sent tensor is let go once an answer shows that it has come: of the chunks that are in
flight on a rank and not on the next one, this one holds the input, which waits for its turn, or the
gradient, which has gone back and has no answer yet. Nothing of a chunk outlives both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ptrain.axes.pipeline.cost import PipelineSize, round_size
from ptrain.cost import Collective, Phase
from ptrain.spec.model import ModelShape
from ptrain.spec.pipeline import ScheduleName
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from ptrain.steps.step import Pipeline
from tests.oracles.tensor import LayerSpan, parameters

Crossing = tuple[Collective, Phase]


def chunks_in_flight(size: PipelineSize, rank: int) -> int:
    """Return the highest number of chunks with activations on a rank, over all of its stages."""
    return size.cost.in_flight(size, rank)


def forwards_first(size: PipelineSize, rank: int) -> int:
    """Return the forwards of a rank before its first backward pass: with a zero bubble as many as
    of 1F1B, since the chunks whose weights are left come later; of a DualPipeV's rank all but the
    forward of the first pair, which the last rank does not have."""
    if size.schedule is ScheduleName.ZERO_BUBBLE:
        forwards = (size.stages_per_rank - 1) * round_size(size) + size.ranks - rank
        return min(size.stages_per_rank * size.microbatches, forwards)
    is_paired = size.schedule is ScheduleName.DUALPIPEV and rank < size.ranks - 1
    return chunks_in_flight(size, rank) - is_paired


def chunks_between(size: PipelineSize, rank: int) -> int:
    """Return how many more chunks are in flight on the previous rank than on this one, when both
    are at their maximum."""
    return chunks_in_flight(size, rank - 1) - chunks_in_flight(size, rank) if rank else 0


def messages_of_rank(size: PipelineSize, rank: int) -> Mapping[Crossing, int]:
    """Return a rank's sends and receives in a step: calls by collective and phase. Consecutive
    stages on one rank send nothing."""
    per_rank, last = size.stages_per_rank, size.ranks - 1
    if size.ranks == 1:
        onward = inward = 0
    elif size.cost.is_v_shaped:
        # to and from the next rank on the way down, to and from the rank before on the way up
        onward = inward = (rank < last) + (rank > 0)
    else:
        onward, inward = per_rank - (rank == last), per_rank - (rank == 0)
    calls = {
        (Collective.SEND, Phase.FORWARD): onward,
        (Collective.RECV, Phase.FORWARD): inward,
        (Collective.SEND, Phase.BACKWARD): inward,
        (Collective.RECV, Phase.BACKWARD): onward,
    }
    return {key: size.microbatches * number for key, number in calls.items() if number}


def boundary_bytes(spec: Spec, hidden: int) -> int:
    """Return the bytes of one micro-batch at a boundary: b·s·H·e of hidden states or their
    gradient, of a token slice if tp shards these between the blocks."""
    tokens = spec.batch.micro * spec.batch.sequence
    for factor in spec.factors:
        if factor.axis is Axis.TP and str(factor.placement.activations) != "R":
            tokens //= factor.degree
    return tokens * hidden * spec.precision.effective_layout.parameters.itemsize


def spans(step: Pipeline) -> tuple[LayerSpan, ...]:
    """Return the layers of each stage, first to last."""
    counts = [len(layers) for layers in step.layers]
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    return tuple(
        LayerSpan(start=end - count, end=end, layers=ends[-1])
        for count, end in zip(counts, ends, strict=True)
    )


def rank_parameters(
    spec: Spec, shape: ModelShape, step: Pipeline, rank: int, index: int = 0
) -> int:
    """Return the elements of the parameters of a rank's stages, at shard `index` along tp: layers,
    and the embedding and head of its first and last stage. A tied head is on both."""
    of_stage = spans(step)
    return sum(
        parameters(
            shape,
            of_stage[stage],
            sequence=spec.batch.sequence,
            degree=spec.degree(Axis.TP),
            index=index,
        )
        for stage in step.stages_of(rank)
    )


def shared_elements(shape: ModelShape, size: PipelineSize, rank: int, rows: int) -> int:
    """Return the elements of the gradient that a rank sums with another one's in a step, of a tied
    head of which it has so many rows: the ranks of the first and the last stage do, unless these
    are one."""
    first, last = 0, 0 if size.cost.is_v_shaped else size.ranks - 1
    is_end = rank in (first, last) and first != last
    return rows * shape.hidden if shape.tied and is_end else 0


def kept_at_boundaries(stages: int, boundary: int, logits: int, *, is_wide: bool) -> int:
    """Return by how many bytes a micro-batch's activations over all stages are more than without
    pp: each boundary's hidden states as an output and as an input, and the logits, which the last
    stage's schedule holds. `is_wide`: norms take the hidden states as they are (fp32, fp64), so
    that the model keeps one of the two itself."""
    return (stages - 1) * boundary * (1 if is_wide else 2) + logits


def held_bytes(size: PipelineSize, rank: int, chunks: Sequence[int], boundary: int) -> int | None:
    """Return the most bytes of activations that a rank holds as a backward pass begins: its chunks
    in flight, the gradient that the pass takes, and what lies between the rank before and this one.

    `chunks` are the bytes of one chunk on each of its stages, from forward to backward: what
    autograd saves, the stage's input and its output (loss and logits on the last one); `boundary`
    those of hidden states. None where a backward pass has halves: what the first one leaves for
    the second is known from a trace; and, of several interleaved stages a rank, where their chunks
    differ and on the first and the last rank: these are neighbours too, and what lies between them
    depends on the pace of all. Of these only `least_held_bytes` is known.
    """
    last = size.ranks - 1
    is_round = size.schedule is ScheduleName.INTERLEAVED and len(chunks) > 1
    if size.schedule.is_in_halves or (is_round and (len({*chunks}) > 1 or rank in (0, last))):
        return None
    flight = chunks_in_flight(size, rank)
    in_flight = flight * sum(chunks) // len(chunks)  # equal chunks, or all micro-batches'
    return in_flight + boundary * ((rank < last) + chunks_between(size, rank))


def held_behind(size: PipelineSize, rank: int, chunk: int, boundary: int, done: int) -> int:
    """Return the bytes of activations as a rank of gpipe begins a backward pass behind `done`
    others, arguments as `held_bytes`'s: the chunks that are left, the gradient that came, and the
    last one that went, which the next one frees: no forward comes any more to answer it."""
    arrived, sent = rank < size.ranks - 1, done > 0 < rank
    return (size.microbatches - done) * chunk + boundary * (arrived + sent)


def peak_beyond_naive(size: PipelineSize, rank: int, chunk: int, boundary: int) -> int | None:
    """Return by how many bytes a rank's peaks of the forward and of the backward phase are more
    than where one micro-batch at a time is in flight; arguments as `held_bytes`'s, of one stage a
    rank. What is held more as a backward pass begins is so in the forward before it, too: of the
    chunk that this one takes up its input has come, and lies between the ranks no longer, and the
    one that has just gone has left its gradient there.

    gpipe's are above those of a naive step of one micro-batch, before there are gradients, where
    these take less than a chunk; 1f1b's with more micro-batches than are in flight above those of a
    naive step of several, beside gradients. None for every other schedule.
    """
    is_filled = size.microbatches > chunks_in_flight(size, rank)
    if size.schedule is not ScheduleName.GPIPE and not (
        size.schedule is ScheduleName.ONE_F_ONE_B and is_filled
    ):
        return None
    held = held_bytes(size, rank, (chunk,), boundary)
    assert held is not None, "one stage a rank, whole backward passes"
    return held - chunk - boundary * (rank < size.ranks - 1)  # less one chunk and its gradient


def least_held_bytes(size: PipelineSize, rank: int, chunks: Sequence[int], boundary: int) -> int:
    """Return the least bytes that the most which a rank holds may be, arguments as `held_bytes`'s:
    of backward passes in halves its forwards before the first one, on its smallest stage; of
    interleaved stages all but what lies between two ranks, at most a round's messages. Where a V
    turns the output of one stage is the input of the other, of half of these forwards at most."""
    if size.schedule is ScheduleName.INTERLEAVED:
        passes = range(size.stages_per_rank * size.microbatches)
        return max(_in_rounds(size, rank, chunks, boundary, done) for done in passes)
    held = held_bytes(size, rank, chunks, boundary)
    if held is not None:
        return held
    forwards = forwards_first(size, rank)
    turns = size.cost.is_v_shaped and rank == size.ranks - 1
    return forwards * min(chunks) - turns * (forwards // 2) * boundary


def _in_rounds(
    size: PipelineSize, rank: int, chunks: Sequence[int], boundary: int, done: int
) -> int:
    """Bytes of the chunks in flight as an interleaved backward pass begins behind `done` others,
    and of the gradient that it takes."""
    forwards = min(chunks_in_flight(size, rank) + done, size.stages_per_rank * size.microbatches)
    ahead, back = _through(size, forwards), _through(size, done)[::-1]
    in_flight = sum((f - b) * chunk for f, b, chunk in zip(ahead, back, chunks, strict=True))
    is_on_last = _through(size, done + 1)[0] > _through(size, done)[0]
    return in_flight + boundary * (not is_on_last or rank < size.ranks - 1)


def _through(size: PipelineSize, chunks: int) -> list[int]:
    """Micro-batches that have gone through each stage of a rank, of so many chunks, round by
    round, in the order in which a round takes the stages."""
    height, per_rank = round_size(size), size.stages_per_rank
    rounds, left = divmod(chunks, height * per_rank)
    return [
        rounds * height + max(0, min(height, left - place * height)) for place in range(per_rank)
    ]
