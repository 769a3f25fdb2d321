"""The always-on counter: collectives since the last look, from c10d's flight recorder.

The recorder runs anyway and keeps the last 2000 collectives (TORCH_FR_BUFFER_SIZE enlarges it). A
step costs a microsecond; a look costs some 20 us for each collective that is kept, 40 ms once the
ring is full. So a look that is only wanted waits until it costs at most a hundredth of the time
since the last one, and one that is needed comes when another step might overwrite what was not seen
yet: the groups count their collectives, which says so for nothing. Limits: gloo's send and receive
are absent, and there is neither state nor phase. What is executed appears: a reduce-scatter on gloo
as an all-reduce, between two ranks as an exchange, of which every rank is taken to keep its share,
an all-gather of a large tensor as a broadcast of every part. The meters of `measure` know what was
meant.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ptrain.cost import Collective
from ptrain.internals import process_groups
from ptrain.meters.traffic import ring_bytes
from ptrain.rooms.world import flight_recorder_size

_NAMES = {
    "all_reduce": Collective.ALL_REDUCE,
    "all_gather": Collective.ALL_GATHER,
    "_all_gather_base": Collective.ALL_GATHER,
    "all_gather_into_tensor_coalesced": Collective.ALL_GATHER,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "_reduce_scatter_base": Collective.REDUCE_SCATTER,
    "all_to_all": Collective.ALL_TO_ALL,
    "broadcast": Collective.BROADCAST,
    "reduce": Collective.REDUCE,
    "gather": Collective.GATHER,
    "scatter": Collective.SCATTER,
    "send": Collective.SEND,
    "recv": Collective.RECV,
}
_ITEMSIZES = {
    "Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2,
    "Byte": 1, "Char": 1, "Bool": 1,
}  # fmt: skip

SHARE = 0.01  # of the time between two looks that the second may cost


@dataclass(frozen=True, slots=True)
class Counted:
    """Collectives of one rank since the last look. `missed` were overwritten before it."""

    calls: int
    sent_bytes: int
    missed: int


class Counter:
    """Looks at the flight recorder from time to time; None where this torch build has none."""

    def __init__(self) -> None:
        recorder = process_groups.RECORDER
        self._dump = getattr(recorder, "_dump_fr_trace_json", None)
        self._ring = flight_recorder_size()
        self._next = 0
        self._issued = self._seen = _issued()
        self._most = 0  # collectives between two questions, of those that the ring can hold
        self._began = self._ended = 0.0  # of the last look
        self.read()

    def look(self, *, wanted: bool) -> Counted | None:
        """`read` where it is wanted and cheap, or due; asked once a step."""
        issued = _issued()
        since, unseen = issued - self._issued, issued - self._seen
        self._issued = issued
        if since <= self._ring:
            self._most = max(self._most, since)
        cost, passed = self._ended - self._began, time.perf_counter() - self._ended
        is_due = unseen <= self._ring < unseen + self._most
        return self.read() if is_due or (wanted and cost <= SHARE * passed) else None

    def read(self) -> Counted | None:
        """Return what was issued since the last call of `read`; None where this torch build has no
        recorder."""
        if self._dump is None:
            return None
        self._began, issued = time.perf_counter(), _issued()
        dump = json.loads(self._dump(True, False))
        fresh = [entry for entry in dump.get("entries", ()) if entry["record_id"] >= self._next]
        sizes = _group_sizes()
        missed = fresh[0]["record_id"] - self._next if fresh else issued - self._seen
        sent = sum(_sent(entry, sizes) for entry in fresh)
        if fresh:
            self._next = fresh[-1]["record_id"] + 1
        self._seen, self._ended = issued, time.perf_counter()
        return Counted(calls=len(fresh), sent_bytes=sent, missed=missed)


def _issued() -> int:
    """Collectives that this rank has issued, by the groups' own count; whether they were kept or
    not."""
    return process_groups.collectives(group for group in process_groups.names() if group)


def _sent(entry: dict[str, Any], group_sizes: dict[str, int]) -> int:
    collective = _NAMES.get(entry["profiling_name"].partition(":")[2])
    ranks = group_sizes.get(entry["process_group"][0])
    if collective is None or ranks is None:
        return 0
    side = "output" if collective in (Collective.ALL_GATHER, Collective.GATHER) else "input"
    payload = sum(_nbytes(entry[f"{side}_sizes"], entry[f"{side}_dtypes"]))
    return ring_bytes(collective, payload, ranks)


def _nbytes(sizes: list[list[int]], dtypes: list[str]) -> Iterator[int]:
    for position, size in enumerate(sizes):
        dtype = dtypes[min(position, len(dtypes) - 1)]
        yield math.prod(size) * _ITEMSIZES.get(dtype, 4)


def _group_sizes() -> dict[str, int]:
    """Ranks by name of process group; the recorder's own list leaves sub-groups empty."""
    names = process_groups.names()
    return {name: group.size() for group, name in names.items() if group is not None}
