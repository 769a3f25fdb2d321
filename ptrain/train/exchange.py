"""Exchange small JSON values between ranks outside of the training's own traffic.

torch's object collectives unpickle what they receive; these do not. They run on a gloo group of
their own or, between ranks of one host, on Unix sockets (a gloo collective of a few numbers takes
half a millisecond of CPU time, as its threads wake one another; a socket takes a tenth of that). So
they never mix with, nor count as, the traffic of the program.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ptrain.codec import decode, encode
from ptrain.internals.dispatch import without_modes
from ptrain.internals.process_groups import all_gather_single
from ptrain.interpreter import program
from ptrain.rooms.world import World

Gather: TypeAlias = "Callable[[Any], list[Any]]"  # every rank's value, on every rank

_LENGTH = struct.Struct("=Q")  # bytes of what follows
_LONGER = 1.25  # others wait than rank 0, which alone knows who is silent


class Joined:
    """A connection to another rank, which is lost after so many seconds of silence."""

    def __init__(self, connected: socket.socket, rank: int, seconds: float) -> None:
        self.rank, self._seconds, self._socket = rank, seconds, connected
        connected.settimeout(seconds)
        self._file = connected.makefile("rb")

    def send(self, data: bytes) -> None:
        """Raises as `receive` does."""
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise self._lost(error) from error

    def receive(self) -> bytes:
        """Return what the other rank sent. Raises TimeoutError or ConnectionError, in words by
        which a parent knows a rank that waited in vain."""
        try:
            return self._read(_LENGTH.unpack(self._read(_LENGTH.size))[0])
        except (OSError, ValueError) as error:  # the latter of a file that is closed
            raise self._lost(error) from error

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise ConnectionError("the process has ended")
        return data

    def _lost(self, error: Exception) -> OSError:
        if isinstance(error, TimeoutError):
            whom = f"for rank {self.rank}" if self.rank else "at rank 0 for all ranks"
            return TimeoutError(f"Timed out waiting {whom}: no message for {self._seconds:g} s")
        return ConnectionError(f"Connection closed by peer, rank {self.rank}: {error}")


class HostGroup:
    """A star: rank 0 is joined to each of the others, in the order of the ranks, and each of them
    to rank 0."""

    def __init__(self, rank: int, joined: Sequence[Joined]) -> None:
        self._is_first, self._joined = rank == 0, tuple(joined)

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, on every rank, in the order of the ranks. Raises TimeoutError where
        one is silent, ConnectionError where one is gone; the group is closed then."""
        rows: list[bytes] = []
        try:
            rows = self._gathered(data)
        finally:
            if not rows:
                self.close()  # behind half a message nobody knows where the next begins
        return rows

    def close(self) -> None:
        for other in self._joined:
            other.close()

    def _gathered(self, data: bytes) -> list[bytes]:
        if not self._is_first:
            (first,) = self._joined
            first.send(data)
            return _parted(first.receive())
        rows = [data, *(other.receive() for other in self._joined)]
        everything = _together(rows)
        for other in self._joined:
            other.send(everything)
        return rows


def meet(rank: int, size: int, seconds: float, gather: Gather) -> HostGroup | None:
    """Return the group of all ranks. None, on all of them alike, where they do not share a host and
    its folder of temporary files, or where that takes no sockets. All ranks call it, with a
    `gather` of theirs. Whoever is silent for so many seconds is lost."""
    return _lead(size, seconds, gather) if rank == 0 else _follow(rank, seconds, gather)


def _lead(size: int, seconds: float, gather: Gather) -> HostGroup | None:
    """The part of rank 0. When it accepts the others they wait in the socket's queue."""
    with ExitStack() as opened:
        listener = _listener(opened, size, seconds)
        gather("" if listener is None else listener.getsockname())
        have_joined = gather(listener is not None)
        if listener is None or not all(have_joined):
            return None
        by_rank = {}
        with ExitStack() as failing:
            for _ in range(1, size):
                joined = Joined(listener.accept()[0], -1, seconds)
                failing.callback(joined.close)
                joined.rank = int(joined.receive())
                by_rank[joined.rank] = joined
            failing.pop_all()
        return HostGroup(0, [by_rank[rank] for rank in range(1, size)])


def _follow(rank: int, seconds: float, gather: Gather) -> HostGroup | None:
    with ExitStack() as failing:
        path = gather("")[0]
        first = _first(path, seconds * _LONGER) if path else None
        if first is not None:
            failing.callback(first.close)
        have_joined = gather(first is not None)
        if first is None or not all(have_joined):
            return None
        first.send(b"%d" % rank)
        failing.pop_all()
        return HostGroup(rank, [first])


def _listener(opened: ExitStack, size: int, seconds: float) -> socket.socket | None:
    """A socket in a folder that nobody but this user may enter, and that goes with it."""
    if not hasattr(socket, "AF_UNIX"):
        return None
    with suppress(OSError):  # no such folder, or a path that is longer than a socket's may be
        folder = opened.enter_context(TemporaryDirectory(prefix="ptrain-"))
        listener = opened.enter_context(socket.socket(socket.AF_UNIX))
        listener.settimeout(seconds)
        listener.bind(str(Path(folder) / "ranks"))
        listener.listen(size)
        return listener
    return None


def _first(path: str, seconds: float) -> Joined | None:
    """A connection to rank 0; None on another host, where nobody is behind the path, and where more
    ranks come than its queue takes."""
    with suppress(OSError), ExitStack() as failing:
        connected = failing.enter_context(socket.socket(socket.AF_UNIX))
        connected.settimeout(seconds)  # else it waits for a place in the queue
        connected.connect(path)
        failing.pop_all()
        return Joined(connected, 0, seconds)
    return None


def _together(rows: Sequence[bytes]) -> bytes:
    return b"".join(_LENGTH.pack(len(row)) + row for row in rows)


def _parted(data: bytes) -> list[bytes]:
    rows, start = [], 0
    while start < len(data):
        (length,) = _LENGTH.unpack_from(data, start)
        start += _LENGTH.size + length
        rows.append(data[start - length : start])
    return rows


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
        return program.gather(value, self.world.size, torch.device("cpu"), self.group, kind)

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
            return [list(numbers.unpack(row)) for row in self._host.gather(numbers.pack(*values))]
        with without_modes():
            vector = torch.tensor(values, dtype=torch.float64, device="cpu")
            by_rank = vector.new_empty(self.world.size * len(values))
            all_gather_single(by_rank, vector, group=group)
        rows: list[list[float]] = by_rank.view(self.world.size, -1).tolist()
        return rows
