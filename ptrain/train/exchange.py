"""What ranks tell each other outside the training itself: small JSON values, as bytes in tensors.

torch's object collectives unpickle what they receive; these do not. All calls run on a gloo group
of their own, so that they never mix with, nor count as, the traffic of the program.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ptrain.internals.dispatch import without_modes
from ptrain.internals.process_groups import all_gather_single
from ptrain.interpreter import agreement
from ptrain.rooms.world import World


class Exchange:
    """A group over all ranks of a world, on the CPU. With one rank everything is the identity."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.group: dist.ProcessGroup | None = None
        if world.size > 1:
            waits = timedelta(seconds=world.timeout.step)
            self.group = dist.new_group(backend="gloo", timeout=waits, group_desc="ptrain exchange")

    def add(self, values: list[float]) -> list[float]:
        """The ranks' sum of each value, in the order of the ranks. Meters do not see it. Of a few
        numbers a gather takes half the messages of an all-reduce."""
        if self.group is None:
            return values
        with without_modes():
            vector = torch.tensor(values, dtype=torch.float64, device="cpu")
            by_rank = vector.new_empty(self.world.size * len(values))
            all_gather_single(by_rank, vector, group=self.group)
        rows = by_rank.view(self.world.size, -1).tolist()
        return [sum(numbers) for numbers in zip(*rows, strict=True)]

    def first(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        return self.gather(value if self.world.is_first else None)[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank, in the order of the ranks."""
        if self.group is None:
            return [value]
        return agreement.gather(value, self.world.size, torch.device("cpu"), self.group)

    def barrier(self) -> None:
        self.gather(None)

    def close(self) -> None:
        """Needed where the default group is not ours to destroy."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
