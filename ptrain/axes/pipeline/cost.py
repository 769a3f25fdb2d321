"""What the pipeline axis costs, in closed form: a second opinion beside schedules and derivation.

Written from what the literature says of each schedule, and reading neither a schedule's order nor
the exchanges that follow from it. p ranks with v stages each, of which a loop gives rank r the
stages r, p + r …, and a V the stages r and 2p - 1 - r; m micro-batches a step. A chunk is one
micro-batch's activations on one stage, from its forward to the last half of its backward.

Sources: Huang et al. 2019 (GPipe), Narayanan et al. 2019 and 2021 (1F1B, interleaved), Lamy-Poirier
2023 (breadth first), Qi et al. 2024 (ZB-H1, ZB-V), DeepSeek-V3's technical report, table 2, and Sea
AI Lab 2025 (DualPipeV); for how long torch holds what crosses a boundary,
torch/distributed/pipelining/schedules.py. The bubble is `axes.pipeline.bubble`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from ptrain.axes.tensor.cost import LayerSpan, parameters
from ptrain.costs import Collective, Phase
from ptrain.spec.axis import Axis
from ptrain.spec.model import ModelShape
from ptrain.spec.pipeline import ScheduleName
from ptrain.spec.spec import Spec
from ptrain.steps.step import Pipeline

Crossing = tuple[Collective, Phase]

_V_SHAPED = (ScheduleName.ZBV, ScheduleName.DUALPIPEV)
_SCALAR = 4  # bytes of a micro-batch's loss, fp32; twice that in fp64


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSize:
    """A schedule with its p ranks, v stages on each and m micro-batches."""

    schedule: ScheduleName
    ranks: int
    stages_per_rank: int
    microbatches: int

    @property
    def stages(self) -> int:
        """The number of stages over all ranks."""
        return self.ranks * self.stages_per_rank


def size_of(step: Pipeline, microbatches: int) -> PipelineSize:
    """Return the size of a plan's pipeline; there are no closed forms of a list of one's own."""
    assert isinstance(step.schedule, ScheduleName), "a schedule with a name"
    ranks = 1 + max(step.rank_of)
    return PipelineSize(
        schedule=step.schedule,
        ranks=ranks,
        stages_per_rank=step.stages // ranks,
        microbatches=microbatches,
    )


def stages_of(size: PipelineSize, rank: int) -> tuple[int, ...]:
    """Return the stages of a rank in the order of a forward pass."""
    if size.schedule in _V_SHAPED:
        return rank, 2 * size.ranks - 1 - rank
    return tuple(range(rank, size.stages, size.ranks))


# -------- in flight


def round_size(size: PipelineSize) -> int:
    """Return how many micro-batches of the interleaved schedules go through a rank's stages
    together: p, or a few more where p does not divide m (as torch's Interleaved1F1B does)."""
    return size.microbatches // max(1, size.microbatches // size.ranks)


def chunks_in_flight(size: PipelineSize, rank: int) -> int:
    """Return the most chunks whose activations a rank holds at once, over all of its stages."""
    ranks, per_rank, microbatches = size.ranks, size.stages_per_rank, size.microbatches
    ahead = ranks - 1 - rank  # ranks that a micro-batch has still to pass
    match size.schedule:
        case ScheduleName.NAIVE:
            return 1
        case ScheduleName.GPIPE | ScheduleName.BFS:
            return per_rank * microbatches
        case ScheduleName.ONE_F_ONE_B:
            return min(microbatches, ahead + 1)
        case ScheduleName.INTERLEAVED:
            # a round through all stages but the last, two forwards for each hop, and one
            return min(per_rank * microbatches, (per_rank - 1) * round_size(size) + 2 * ahead + 1)
        case ScheduleName.ZERO_BUBBLE:
            # 1F1B's of each rank, and the weights that lag `rank` behind: p on all of them
            return min(per_rank * microbatches, (per_rank - 1) * round_size(size) + ranks)
        case ScheduleName.ZBV:
            # 2p halves of a 1F1B stage; of fewer micro-batches those that there are
            return min(microbatches, ranks + ahead) + min(microbatches, rank + 1)
        case ScheduleName.DUALPIPEV:
            # "PP + 1" of DeepSeek's table, PP being the stages: a pair's forward is one more
            return 2 * ranks + 1
        case _:
            assert_never(size.schedule)


# -------- sends and receives


def crossings(size: PipelineSize, rank: int) -> Mapping[Crossing, int]:
    """Return a rank's sends and receives in a step, calls by collective and phase. Nothing is sent
    where two stages of a rank follow each other."""
    per_rank, last = size.stages_per_rank, size.ranks - 1
    if size.ranks == 1:
        onward = inward = 0
    elif size.schedule in _V_SHAPED:
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
    gradient, of a slice of the tokens where tp leaves these between the blocks."""
    tokens = spec.batch.micro * spec.batch.sequence
    for factor in spec.factors:
        if factor.axis is Axis.TP and str(factor.placement.activations) != "R":
            tokens //= factor.degree
    return tokens * hidden * spec.precision.effective.parameters.itemsize


# -------- resident


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
    """Return the elements of Theta of a rank's stages, of its slices at `index` along tp: layers,
    and the ends that its first and its last stage have. A tied head is on both."""
    size = size_of(step, spec.batch.accumulate)
    of_stage = spans(step)
    return sum(
        parameters(
            shape,
            of_stage[stage],
            sequence=spec.batch.sequence,
            degree=spec.degree(Axis.TP),
            index=index,
        )
        for stage in stages_of(size, rank)
    )


def shared_elements(shape: ModelShape, size: PipelineSize, rank: int, rows: int) -> int:
    """Return the elements of the gradient that a rank sums with another one's in a step, of a tied
    head of which it has so many rows: the ranks of the first and the last stage do, unless these
    are one."""
    first, last = 0, 0 if size.schedule in _V_SHAPED else size.ranks - 1
    is_end = rank in (first, last) and first != last
    return rows * shape.hidden if shape.tied and is_end else 0


# -------- activations


def kept_at_boundaries(stages: int, boundary: int, logits: int, *, is_wide: bool) -> int:
    """Return by how many bytes a micro-batch's activations over all stages are more than without
    pp: each boundary's hidden states as an output and as an input, and the logits, which the last
    stage's schedule holds. `is_wide`: norms take the hidden states as they are (fp32, fp64), so
    that the model keeps one of the two itself."""
    return (stages - 1) * boundary * (1 if is_wide else 2) + logits


def held_bytes(
    size: PipelineSize, rank: int, chunks: Sequence[int], boundary: int, *, scalar: int = _SCALAR
) -> int | None:
    """Return the most bytes of activations that a rank holds as a backward pass begins.

    `chunks` are the bytes of one chunk on each of its stages, from forward to backward: what
    autograd saves, the stage's input and its output (loss and logits on the last one); `boundary`
    those of hidden states, `scalar` of a loss. None where a backward pass has halves: what the
    first one leaves for the second is known from a trace; and, of several interleaved stages a
    rank, where their chunks differ and on the last rank: what arrives before its turn depends on
    the pace of the ranks. Of these only `least_held_bytes` is known.
    """
    last, microbatches = size.ranks - 1, size.microbatches
    arrived = boundary * (rank < last)  # the gradient that the pass takes
    match size.schedule:
        case ScheduleName.NAIVE:
            return chunks[0] + arrived
        case ScheduleName.GPIPE | ScheduleName.BFS:
            return microbatches * sum(chunks) + arrived
        case ScheduleName.ONE_F_ONE_B if rank == last:
            # each loss keeps its node, whose last one names the stage's input; and the last send
            before = microbatches - 1
            return chunks[0] + before * (boundary + scalar) + boundary * (before > 0 < last)
        case ScheduleName.ONE_F_ONE_B:
            flight = chunks_in_flight(size, rank)
            # `bwd_sends` names the gradient before, `send_work` the last output of the warm-up
            sent = boundary * (rank > 0 and microbatches > flight)
            output = boundary * (microbatches >= 2 * flight - 1)
            return flight * chunks[0] + arrived + sent + output
        case ScheduleName.INTERLEAVED if len({*chunks}) == 1 and (rank < last or len(chunks) == 1):
            return _interleaved(size, rank, chunks, boundary, scalar)
        case _:
            return None


def _interleaved(
    size: PipelineSize, rank: int, chunks: Sequence[int], boundary: int, scalar: int
) -> int:
    """Bytes where most are held as a backward pass begins, without what arrives before its turn."""
    passes = range(size.stages_per_rank * size.microbatches)
    return max(held_behind(size, rank, chunks, boundary, done, scalar=scalar) for done in passes)


def held_behind(
    size: PipelineSize,
    rank: int,
    chunks: Sequence[int],
    boundary: int,
    done: int,
    *,
    scalar: int = _SCALAR,
) -> int:
    """Return the bytes of activations as a rank of gpipe or of an interleaved loop begins a
    backward pass behind `done` others, arguments as `held_bytes`'s: chunks in flight, the gradient
    that came, and of those that are gone what is held to the step's end. What arrives before its
    turn is not among them."""
    stages = stages_of(size, rank)
    forwards = min(chunks_in_flight(size, rank) + done, size.stages_per_rank * size.microbatches)
    ahead, back = _through(size, forwards), _through(size, done)[::-1]
    beginning = next(
        stage
        for stage, before, after in zip(stages, back, _through(size, done + 1)[::-1], strict=True)
        if after > before
    )
    in_flight = sum((f - b) * chunk for f, b, chunk in zip(ahead, back, chunks, strict=True))
    gone = sum(
        times * _left_bytes(size, stage, boundary, scalar)
        for times, stage in zip(back, stages, strict=True)
    )
    return in_flight + gone + boundary * (beginning < size.stages - 1)


def _through(size: PipelineSize, chunks: int) -> list[int]:
    """Micro-batches that have gone through each stage of a rank, of so many chunks, round by
    round, in the order in which a round takes the stages."""
    height, per_rank = round_size(size), size.stages_per_rank
    rounds, left = divmod(chunks, height * per_rank)
    return [
        rounds * height + max(0, min(height, left - place * height)) for place in range(per_rank)
    ]


def _left_bytes(size: PipelineSize, stage: int, boundary: int, scalar: int) -> int:
    """Bytes that a chunk leaves to the end of the step: its output and its input's gradient, where
    they were sent (the runtime of several stages a rank waits for its sends then); on the last
    stage its loss, whose last node names the input, unless the backward pass had halves."""
    is_split = size.schedule in (ScheduleName.ZERO_BUBBLE, ScheduleName.ZBV)
    is_last, turn = stage == size.stages - 1, size.ranks - 1
    is_v = size.schedule in _V_SHAPED
    output = not is_last and not (is_v and stage == turn)
    gradient = stage > 0 and not (is_v and stage == turn + 1)
    named = is_last and not is_split
    return boundary * (output + gradient + named) + scalar * is_last


def held_growth(size: PipelineSize, rank: int, boundary: int, *, scalar: int = _SCALAR) -> int:
    """Return by how many bytes the most that a rank holds grows with each further micro-batch, from
    4p of them on: as many chunks are in flight as before, and one more has come and gone. 1f1b's
    runtime waits for each send with the next exchange, and leaves losses and what they name; that
    of the others holds all sends. Raises ValueError for a schedule that has all micro-batches in
    flight."""
    stages = stages_of(size, rank)
    match size.schedule:
        case ScheduleName.GPIPE | ScheduleName.BFS:
            raise ValueError(f"{size.schedule} has all micro-batches in flight")
        case ScheduleName.NAIVE:
            return 0
        case ScheduleName.ONE_F_ONE_B:
            return (boundary + scalar) * (size.stages - 1 in stages)
        case _:
            return sum(_left_bytes(size, stage, boundary, scalar) for stage in stages)


def peak_beyond_naive(
    size: PipelineSize,
    rank: int,
    phase: Phase,
    chunk: int,
    boundary: int,
    *,
    scalar: int = _SCALAR,
) -> int | None:
    """Return by how many bytes a rank's peak of the forward or of the backward phase is more than
    where one micro-batch at a time is in flight; arguments as `held_bytes`'s, of one stage a rank.

    gpipe's are above those of a naive step of one micro-batch, before there are gradients, where
    these take less than a chunk; 1f1b's with more micro-batches than are in flight above those of a
    naive step of several, beside gradients. None for every other schedule.
    """
    held = held_bytes(size, rank, (chunk,), boundary, scalar=scalar)
    if held is None:
        return None
    flight = chunks_in_flight(size, rank)
    match size.schedule:
        case ScheduleName.GPIPE:
            before_forward = (flight - 1) * chunk
        case ScheduleName.ONE_F_ONE_B if size.microbatches > flight:
            # in place of the gradient that came that of the backward pass before is named still
            before_forward = held - chunk
        case _:
            return None
    arrived = boundary * (rank < size.ranks - 1)
    return before_forward if phase is Phase.FORWARD else held - (chunk + arrived)


def least_held_bytes(
    size: PipelineSize, rank: int, chunks: Sequence[int], boundary: int, *, scalar: int = _SCALAR
) -> int:
    """Return the least bytes that the most which a rank holds may be, arguments as `held_bytes`'s:
    of backward passes in halves its forwards before the first one, on its smallest stage; of
    interleaved stages all but what arrives before its turn, at most a round's inputs."""
    if size.schedule is ScheduleName.INTERLEAVED:
        return _interleaved(size, rank, chunks, boundary, scalar)
    held = held_bytes(size, rank, chunks, boundary, scalar=scalar)
    return forwards_first(size, rank) * min(chunks) if held is None else held


def forwards_first(size: PipelineSize, rank: int) -> int:
    """Return the forwards of a rank before its first backward pass."""
    flight = chunks_in_flight(size, rank)
    match size.schedule:
        case ScheduleName.ZERO_BUBBLE:
            # ZB-H1 warms up as 1F1B does: what its weights hold comes later
            warm_up = (size.stages_per_rank - 1) * round_size(size) + size.ranks - rank
            return min(size.stages_per_rank * size.microbatches, warm_up)
        case ScheduleName.DUALPIPEV:
            return flight - 1 if rank < size.ranks - 1 else flight
        case _:
            return flight
