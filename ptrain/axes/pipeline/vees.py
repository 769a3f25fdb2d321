"""The schedules over a V: rank r has stage r on the way down and stage 2p - 1 - r on the way up.

Each is written as its phases are told in the papers, in words of two letters: what (F, B, I, W) and
which of the rank's two stages (0 down, 1 up); micro-batches follow by counting. `F0&B1` is a pair,
and `W` alone whichever gradient of weights has waited longest.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence

from ptrain.axes.pipeline.schedule import Action, Pair, PipelineShape, Step
from ptrain.timeline import Kind


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
