"""The schedules of a pipeline, by name, and what a spec says of its stages."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ptrain.spec.orders import ListedSchedule


class ScheduleName(StrEnum):
    NAIVE = "naive"  # one micro-batch at a time
    GPIPE = "gpipe"  # Huang et al. 2019: all forward, all backward
    ONE_F_ONE_B = "1f1b"  # Narayanan et al. 2019 (PipeDream-Flush)
    BFS = "bfs"  # Lamy-Poirier 2023: gpipe, stage by stage on each rank
    INTERLEAVED = "interleaved"  # Narayanan et al. 2021: 1f1b over several stages a rank
    ZERO_BUBBLE = "zero-bubble"  # Qi et al. 2024 (ZB-H1), over several stages a rank
    ZBV = "zbv"  # Qi et al. 2024, section 6
    DUALPIPEV = "dualpipev"  # Sea AI Lab 2025: DeepSeek's DualPipe cut in half, each stage once


class SplitBy(StrEnum):
    """What stages have as equal parts of as can be."""

    PARAMETERS = "parameters"
    TIME = "time"  # by `axes.pipeline.times`
    LAYERS = "layers"


# Those that are made for two stages a rank: with one, bfs is gpipe and interleaved is 1f1b.
_TWO_A_RANK = (
    ScheduleName.BFS,
    ScheduleName.INTERLEAVED,
    ScheduleName.ZBV,
    ScheduleName.DUALPIPEV,
)


# Those that compute the gradients of weights apart from those of inputs.
_IN_HALVES = (ScheduleName.ZERO_BUBBLE, ScheduleName.ZBV, ScheduleName.DUALPIPEV)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpec:
    """How micro-batches flow, and where the model is cut. `stages` are those over all ranks of pp,
    None for as many as follow; `split` may be the number of layers of each stage."""

    schedule: ScheduleName | ListedSchedule = ScheduleName.ONE_F_ONE_B
    stages: int | None = None
    split: SplitBy | tuple[int, ...] = SplitBy.PARAMETERS

    def stages_over(self, ranks: int) -> int:
        """As written, else as many as a listed schedule or `split` has, else one a rank, or two
        where the schedule is made for two."""
        if self.stages is not None:
            return self.stages
        if isinstance(self.schedule, ListedSchedule):
            return self.schedule.stages
        if isinstance(self.split, tuple):
            return len(self.split)
        return ranks * (2 if self.schedule in _TWO_A_RANK else 1)

    @property
    def is_in_halves(self) -> bool:
        """Whether some backward passes are computed in two halves."""
        if isinstance(self.schedule, ListedSchedule):
            return self.schedule.is_in_halves
        return self.schedule in _IN_HALVES
