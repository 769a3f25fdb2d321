"""The order of one rank's actions in each schedule, one function each: first the schedules whose
stages go round and round the ranks, then those over a V, where rank r has stage r on the way down
and stage 2p - 1 - r on the way up.

The schedules over a V are written as phases, as in the papers, in words of two letters: the kind
(F, B, I, W) and which of the rank's two stages (0 down, 1 up); micro-batches follow by counting.
`F0&B1` is a pair, and `W` alone takes the gradient of weights that has waited longest.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence

from ptrain.axes.pipeline.schedule import Action, Pair, PipelineShape, Step
from ptrain.timeline import Kind

_Chunk = tuple[int, int]  # a stage and a micro-batch


def naive(pipeline: PipelineShape, rank: int) -> Iterator[Action]:
    """A micro-batch enters when the one before it has gone: one rank at a time works."""
    for microbatch in range(pipeline.microbatches):
        yield Action(Kind.FORWARD, rank, microbatch)
        yield Action(Kind.BACKWARD, rank, microbatch)


def gpipe(pipeline: PipelineShape, rank: int) -> Iterator[Action]:
    """All forward, all backward (GPipe, Huang et al. 2019)."""
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        for microbatch in range(pipeline.microbatches):
            yield Action(kind, rank, microbatch)


def one_forward_one_backward(pipeline: PipelineShape, rank: int) -> Iterator[Action]:
    """As soon as the last stage can, each does a backward after every forward, so that a rank has
    no more micro-batches in flight than stages behind it, its own included."""
    chunks = [(rank, microbatch) for microbatch in range(pipeline.microbatches)]
    yield from _alternating(chunks, chunks, pipeline.ranks - 1 - rank)


def breadth_first(pipeline: PipelineShape, rank: int) -> Iterator[Action]:
    """All micro-batches through one stage before the next one, and the same way back: last stage
    and last micro-batch first (Lamy-Poirier 2023)."""
    chunks = [
        (stage, microbatch)
        for stage in range(rank, pipeline.stages, pipeline.ranks)
        for microbatch in range(pipeline.microbatches)
    ]
    yield from _actions(Kind.FORWARD, chunks)
    yield from _actions(Kind.BACKWARD, reversed(chunks))


def interleaved(pipeline: PipelineShape, rank: int) -> Iterator[Action]:
    """1F1B over several stages a rank (Narayanan et al. 2021): a round of micro-batches goes
    through all stages of a rank before the next round starts. Each rank starts two forwards
    earlier than the one behind it: its first gradient comes two hops later."""
    forwards, backwards = _rounds(pipeline, rank)
    yield from _alternating(forwards, backwards, _warm_up(pipeline, rank, per_hop=2))


def zero_bubble(pipeline: PipelineShape, rank: int) -> Iterator[Action]:
    """ZB-H1 (Qi et al. 2024) over several stages a rank: gradients of the weights lag `rank`
    micro-batches behind those of the inputs, and fill the drain."""
    forwards, backwards = _rounds(pipeline, rank)
    warm_up = _warm_up(pipeline, rank, per_hop=1)
    yield from _actions(Kind.FORWARD, forwards[:warm_up])
    rest = forwards[warm_up:]
    lag = min(rank, len(backwards))
    for index, chunk in enumerate(backwards):
        yield from _actions(Kind.FORWARD, rest[index : index + 1])
        yield Action(Kind.INPUT, *chunk)
        if index >= lag:
            yield Action(Kind.WEIGHT, *backwards[index - lag])
    yield from _actions(Kind.WEIGHT, backwards[len(backwards) - lag :])


def rounds(microbatches: int, ranks: int) -> int:
    """Return in how many rounds interleaved schedules take the micro-batches: of p or more each."""
    return max(1, microbatches // ranks)


def _rounds(pipeline: PipelineShape, rank: int) -> tuple[list[_Chunk], list[_Chunk]]:
    """Return what one rank computes forward and what backward, each in its order."""
    round_size = _round_size(pipeline)
    stages = range(rank, pipeline.stages, pipeline.ranks)

    def through(order: Sequence[int]) -> list[_Chunk]:
        return [
            (stage, microbatch)
            for first in range(0, pipeline.microbatches, round_size)
            for stage in order
            for microbatch in range(first, first + round_size)
        ]

    return through(stages), through(stages[::-1])


def _round_size(pipeline: PipelineShape) -> int:
    return pipeline.microbatches // rounds(pipeline.microbatches, pipeline.ranks)


def _warm_up(pipeline: PipelineShape, rank: int, *, per_hop: int) -> int:
    """Return the number of forwards before the first backward, beside the one that goes with it: a
    round through every stage but the last, and `per_hop` more for each rank behind this one, at
    most all."""
    round_size = _round_size(pipeline)
    wanted = (pipeline.stages_per_rank - 1) * round_size + per_hop * (pipeline.ranks - 1 - rank)
    return min(wanted, pipeline.stages_per_rank * pipeline.microbatches)


def _alternating(
    forwards: Sequence[_Chunk], backwards: Sequence[_Chunk], warm_up: int
) -> Iterator[Action]:
    """Forwards to warm up, then one forward and one backward, then the backwards that are left."""
    yield from _actions(Kind.FORWARD, forwards[:warm_up])
    rest = forwards[warm_up:]
    for index, chunk in enumerate(backwards):
        yield from _actions(Kind.FORWARD, rest[index : index + 1])
        yield Action(Kind.BACKWARD, *chunk)


def _actions(kind: Kind, chunks: Sequence[_Chunk] | Iterator[_Chunk]) -> Iterator[Action]:
    return (Action(kind, stage, microbatch) for stage, microbatch in chunks)


def zbv(pipeline: PipelineShape, rank: int) -> Iterator[Step]:
    """ZB-V (Qi et al. 2024, section 6): with F = I = W no rank idles once it has begun. Fewer
    micro-batches than fill the pipeline are as many as do, without those that are not there."""
    ranks, behind = pipeline.ranks, pipeline.ranks - rank
    filling = max(2 * ranks - 1, pipeline.microbatches)
    words = [
        *_times(2 * behind - 1, "F0"),
        *_times(rank, "F1 F0"),
        *_times(behind, "F1 I1 W1"),
        *_times(filling - ranks - behind + 1, "F0 I0 W0 F1 I1 W1"),
        *_times(behind - 1, "I0 W0 F1 I1 W1"),
        *_times(rank, "I0 I1"),
        *_times(behind, "I0 W0"),
        *_times(rank, "W1"),
        *_times(rank, "W0"),
    ]
    for step in _numbered(words, _stages(pipeline, rank)):
        if all(part.microbatch < pipeline.microbatches for part in step.parts):
            yield step


def dualpipev(pipeline: PipelineShape, rank: int) -> Iterator[Step]:
    """DualPipeV, the half of DualPipe (DeepSeek-V3) that Sea AI Lab cut out of it: pairs while
    both ends have work; of the last backwards on each rank the second half is split, to fill the
    drain."""
    after = pipeline.ranks - 1 - rank
    main = _times(pipeline.microbatches - 2 * pipeline.ranks + rank + 1, "F0&B1 F1&B0")
    if after == 0:
        main[:1] = ["F0", "B1"]  # both are the last rank's own: apart, the gradient goes up sooner
    whole = [f"B{1 - index % 2}" for index in range(rank + 1)]
    split = [f"I{1 - index % 2}" for index in range(rank + 1, 2 * (rank + 1))]
    words = [
        *_times(2 * after, "F0"),
        *_times(rank + 1, "F0 F1"),
        *_times(after, "I1 W F1"),
        *main,
        *_times(after, "B1 F1&B0"),
        *whole,
        *split,
        *_times(after, "W I0"),
        *_times(rank + 1, "W"),
    ]
    return _numbered(words, _stages(pipeline, rank))


def _times(count: int, words: str) -> list[str]:
    return words.split() * count


def _stages(pipeline: PipelineShape, rank: int) -> tuple[int, int]:
    return rank, 2 * pipeline.ranks - 1 - rank


def _numbered(words: Sequence[str], stages: tuple[int, int]) -> Iterator[Step]:
    """The steps that the words mean: the n-th forward or backward of a stage is micro-batch n, and
    a W the oldest that waits, of its stage where it names one."""
    begun: Counter[tuple[bool, int]] = Counter()
    waiting = {stage: deque[tuple[int, int]]() for stage in stages}  # (when, micro-batch)

    def action(word: str) -> Action:
        kind, index = Kind(word[0]), word[1:]
        if kind is Kind.WEIGHT:
            named = [stages[int(index)]] if index else [s for s in stages if waiting[s]]
            stage = min(named, key=lambda stage: waiting[stage][0])
            return Action(kind, stage, waiting[stage].popleft()[1])
        stage = stages[int(index)]
        counted = (kind is Kind.FORWARD, stage)
        microbatch = begun[counted]
        begun[counted] += 1
        if kind is Kind.INPUT:
            waiting[stage].append((sum(begun.values()), microbatch))
        return Action(kind, stage, microbatch)

    for word in words:
        parts = [action(part) for part in word.split("&")]
        yield parts[0] if len(parts) == 1 else Pair(*parts)
