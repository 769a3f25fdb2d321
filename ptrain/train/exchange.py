"""What ranks tell each other outside the training itself: small JSON values, as bytes.

torch's object collectives unpickle what they receive; these do not. All calls run on a gloo group
of their own, or between ranks of one host on sockets beside it, so that they never mix with, nor
count as, the traffic of the program.
"""

from __future__ import annotations

import json
import struct
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ptrain.codec import decode, encode
from ptrain.internals.dispatch import without_modes
from ptrain.internals.process_groups import all_gather_single
from ptrain.interpreter import agreement
from ptrain.rooms.world import World
from ptrain.train.host_group import HostGroup, meet


class Exchange:
    """A group over all ranks of a world, on the CPU. With one rank everything is the identity."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.group: dist.ProcessGroup | None = None
        self._host: HostGroup | None = None
        if world.size > 1:
            waits = timedelta(seconds=world.timeout.step)
            self.group = dist.new_group(backend="gloo", timeout=waits, group_desc="ptrain exchange")
            self._host = meet(world.rank, world.size, world.timeout.step, self.gather)

    def add(self, values: list[float]) -> list[float]:
        """The ranks' sum of each value, in the order of the ranks. Meters do not see it. Between
        hosts it is a gather, which of a few numbers takes half the messages of an all-reduce."""
        if self.group is None:
            return values
        return [sum(numbers) for numbers in zip(*self._rows(self.group, values), strict=True)]

    def first(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        return self.gather(value if self.world.is_first else None)[0]

    def gather(self, value: Any, kind: Any = Any) -> list[Any]:
        """Return every rank's value of this type, in the order of the ranks."""
        if self.group is None:
            return [value]
        if self._host is not None:
            texts = self._host.gather(json.dumps(encode(value, kind)).encode())
            return [decode(json.loads(text), kind) for text in texts]
        return agreement.gather(value, self.world.size, torch.device("cpu"), self.group, kind)

    def barrier(self) -> None:
        self.gather(None)

    def close(self) -> None:
        """Needed where the default group is not ours to destroy."""
        if self._host is not None:
            self._host.close()
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)

    def _rows(self, group: dist.ProcessGroup, values: list[float]) -> list[list[float]]:
        """Every rank's numbers."""
        if self._host is not None:
            numbers = struct.Struct(f"={len(values)}d")
            data = self._host.gather(numbers.pack(*values))
            return [list(numbers.unpack(row)) for row in data]
        with without_modes():
            vector = torch.tensor(values, dtype=torch.float64, device="cpu")
            by_rank = vector.new_empty(self.world.size * len(values))
            all_gather_single(by_rank, vector, group=group)
        rows: list[list[float]] = by_rank.view(self.world.size, -1).tolist()
        return rows
