"""`profile: [steps]`: a Chrome trace of each of these steps per rank, for Perfetto or HTA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from ptrain.rooms.world import World


@contextmanager
def traced(folder: Path, step: int, world: World) -> Iterator[None]:
    """Writes trace/rank<r>-step<n>.json.gz; `step` counts from 1."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU]
    if world.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True) as profiler:
        yield
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
    path = folder / f"rank{world.rank}-step{step}.json.gz"
    profiler.export_chrome_trace(str(path))
    path.chmod(0o600)
