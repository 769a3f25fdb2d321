"""The order of one rank's actions in each schedule, one function per schedule.

The first schedules place stages in a loop over the ranks. The others use a V, in which rank r has
stage r on the way down and stage 2p - 1 - r on the way up. These are written as phases, as in the
papers, in words of two letters: the kind (F, B, I, W) and the rank's stage (0 down, 1 up).
Micro-batches are counted. `F0&B1` is a pair, and `W` without a stage is the weight half that has
waited longest.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence

from ptrain.axes.pipeline.schedule import Action, Pair, PipelineShape, Step
from ptrain.timeline import Kind

_Chunk = tuple[int, int]  # a stage and a micro-batch


def naive_order(pipeline: PipelineShape, rank: int) -> Iterator[Action]:
    """Yield the actions of one micro-batch at a time, so that one rank computes at a time."""
    for microbatch in range(pipeline.microbatches):
        yield Action(Kind.FORWARD, rank, microbatch)
        yield Action(Kind.BACKWARD, rank, microbatch)


def gpipe_order(pipeline: PipelineShape, rank: int) -> Iterator[Action]:
    """Yield all forwards, then all backwards (GPipe, Huang et al. 2019)."""
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        for microbatch in range(pipeline.microbatches):
            yield Action(kind, rank, microbatch)


def one_forward_one_backward(pipeline: PipelineShape, rank: int) -> Iterator[Action]:
    """Yield the actions of 1F1B: after the warm-up, one backward after every forward.

    A rank has at most as many micro-batches in flight as there are stages from its stage on.
    """
    chunks = [(rank, microbatch) for microbatch in range(pipeline.microbatches)]
    # The first gradient reaches a rank after its micro-batch has passed all later ranks, so a rank
    # can run one forward for each of them before it has to wait.
    yield from _alternate(chunks, chunks, pipeline.ranks - 1 - rank)


def breadth_first(pipeline: PipelineShape, rank: int) -> Iterator[Action]:
    """Yield all micro-batches of one stage before the next stage, and backwards in reverse order.

    Lamy-Poirier 2023. Backward begins with the last stage and the last micro-batch.
    """
    chunks = [
        (stage, microbatch)
        for stage in range(rank, pipeline.stages, pipeline.ranks)
        for microbatch in range(pipeline.microbatches)
    ]
    yield from _actions_of_kind(Kind.FORWARD, chunks)
    yield from _actions_of_kind(Kind.BACKWARD, reversed(chunks))


def interleaved_order(pipeline: PipelineShape, rank: int) -> Iterator[Action]:
    """Yield the actions of 1F1B over several stages per rank (Narayanan et al. 2021).

    A round of micro-batches goes through all stages of a rank before the next round starts. Each
    rank runs two more warm-up forwards than the next rank, because its first gradient arrives two
    hops later.
    """
    forwards, backwards = _round_chunks(pipeline, rank)
    yield from _alternate(forwards, backwards, _num_warm_up(pipeline, rank, per_hop=2))


def zero_bubble(pipeline: PipelineShape, rank: int) -> Iterator[Action]:
    """Yield the actions of ZB-H1 (Qi et al. 2024) over several stages per rank.

    Weight halves lag `rank` micro-batches after input halves, and fill the drain.
    """
    forwards, backwards = _round_chunks(pipeline, rank)
    warm_up = _num_warm_up(pipeline, rank, per_hop=1)
    yield from _actions_of_kind(Kind.FORWARD, forwards[:warm_up])
    rest = forwards[warm_up:]
    lag = min(rank, len(backwards))
    for index, chunk in enumerate(backwards):
        yield from _actions_of_kind(Kind.FORWARD, rest[index : index + 1])
        yield Action(Kind.INPUT, *chunk)
        if index >= lag:
            yield Action(Kind.WEIGHT, *backwards[index - lag])
    yield from _actions_of_kind(Kind.WEIGHT, backwards[len(backwards) - lag :])


def num_rounds(microbatches: int, ranks: int) -> int:
    """Return the number of rounds of the interleaved schedules, each of p or more micro-batches."""
    return max(1, microbatches // ranks)


def _round_chunks(pipeline: PipelineShape, rank: int) -> tuple[list[_Chunk], list[_Chunk]]:
    """Return one rank's forward chunks and backward chunks, each in order."""
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
    """Return the number of micro-batches in a round."""
    return pipeline.microbatches // num_rounds(pipeline.microbatches, pipeline.ranks)


def _num_warm_up(pipeline: PipelineShape, rank: int, *, per_hop: int) -> int:
    """Return the number of forwards before the first pair of forward and backward.

    This is a round through every stage but the last, and `per_hop` more per later rank, at most
    all.
    """
    round_size = _round_size(pipeline)
    wanted = (pipeline.stages_per_rank - 1) * round_size + per_hop * (pipeline.ranks - 1 - rank)
    return min(wanted, pipeline.stages_per_rank * pipeline.microbatches)


def _alternate(
    forwards: Sequence[_Chunk], backwards: Sequence[_Chunk], warm_up: int
) -> Iterator[Action]:
    """Yield `warm_up` forwards, then forwards and backwards in turn, then the backwards left."""
    yield from _actions_of_kind(Kind.FORWARD, forwards[:warm_up])
    rest = forwards[warm_up:]
    for index, chunk in enumerate(backwards):
        yield from _actions_of_kind(Kind.FORWARD, rest[index : index + 1])
        yield Action(Kind.BACKWARD, *chunk)


def _actions_of_kind(kind: Kind, chunks: Sequence[_Chunk] | Iterator[_Chunk]) -> Iterator[Action]:
    """Yield actions of one kind."""
    return (Action(kind, stage, microbatch) for stage, microbatch in chunks)


def zbv_order(pipeline: PipelineShape, rank: int) -> Iterator[Step]:
    """Yield the steps of ZB-V (Qi et al. 2024, section 6).

    With F = I = W no rank idles after its first action. If micro-batches do not fill the pipeline,
    the schedule is built for enough micro-batches without the missing ones.
    """
    ranks, behind = pipeline.ranks, pipeline.ranks - rank
    # 2p - 1 is the least number for which the count of the steady phase is not negative on any
    # rank.
    filling = max(2 * ranks - 1, pipeline.microbatches)
    words = [
        *_repeat(2 * behind - 1, "F0"),
        *_repeat(rank, "F1 F0"),
        *_repeat(behind, "F1 I1 W1"),
        *_repeat(filling - ranks - behind + 1, "F0 I0 W0 F1 I1 W1"),
        *_repeat(behind - 1, "I0 W0 F1 I1 W1"),
        *_repeat(rank, "I0 I1"),
        *_repeat(behind, "I0 W0"),
        *_repeat(rank, "W1"),
        *_repeat(rank, "W0"),
    ]
    for step in _number_steps(words, _v_stages(pipeline, rank)):
        if all(part.microbatch < pipeline.microbatches for part in step.parts):
            yield step


def dualpipev_order(pipeline: PipelineShape, rank: int) -> Iterator[Step]:
    """Yield the steps of DualPipeV, the half of DualPipe (DeepSeek-V3) extracted by Sea AI Lab.

    Pairs run while both ends have work. The second half of the last backwards on each rank is
    split, to fill the drain.
    """
    after = pipeline.ranks - 1 - rank
    main = _repeat(pipeline.microbatches - 2 * pipeline.ranks + rank + 1, "F0&B1 F1&B0")
    if after == 0:
        # both stages are on the last rank: separate, the gradient is sent up earlier
        main[:1] = ["F0", "B1"]
    whole = [f"B{1 - index % 2}" for index in range(rank + 1)]
    split = [f"I{1 - index % 2}" for index in range(rank + 1, 2 * (rank + 1))]
    words = [
        *_repeat(2 * after, "F0"),
        *_repeat(rank + 1, "F0 F1"),
        *_repeat(after, "I1 W F1"),
        *main,
        *_repeat(after, "B1 F1&B0"),
        *whole,
        *split,
        *_repeat(after, "W I0"),
        *_repeat(rank + 1, "W"),
    ]
    return _number_steps(words, _v_stages(pipeline, rank))


def _repeat(count: int, words: str) -> list[str]:
    """Return words repeated `count` times; [] for negative counts."""
    return words.split() * count


def _v_stages(pipeline: PipelineShape, rank: int) -> tuple[int, int]:
    """Return the two stages of a rank in a V."""
    return rank, 2 * pipeline.ranks - 1 - rank


def _number_steps(words: Sequence[str], stages: tuple[int, int]) -> Iterator[Step]:
    """Yield the steps of the words.

    The n-th forward or backward of a stage is micro-batch n. A W is the weight half that has waited
    longest, of its stage if the word has one.
    """
    begun: Counter[tuple[bool, int]] = Counter()
    waiting = {stage: deque[tuple[int, int]]() for stage in stages}  # (time, micro-batch)

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
