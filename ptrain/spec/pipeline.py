"""The schedules of a pipeline, by name."""

from __future__ import annotations

from enum import StrEnum


class ScheduleName(StrEnum):
    NAIVE = "naive"  # one micro-batch at a time
    GPIPE = "gpipe"  # Huang et al. 2019: all forward, all backward
    ONE_F_ONE_B = "1f1b"  # Narayanan et al. 2019 (PipeDream-Flush)
    BFS = "bfs"  # Lamy-Poirier 2023: gpipe, stage by stage on each rank
    INTERLEAVED = "interleaved"  # Narayanan et al. 2021: 1f1b over several stages a rank
    ZERO_BUBBLE = "zero-bubble"  # Qi et al. 2024 (ZB-H1), over several stages a rank
    ZBV = "zbv"  # Qi et al. 2024, section 6
    DUALPIPEV = "dualpipev"  # Sea AI Lab 2025: DeepSeek's DualPipe cut in half, each stage once
