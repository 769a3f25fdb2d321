"""Exchange of small JSON values between ranks, separate from the traffic of the training.

torch's object collectives unpickle the data that they receive; these do not. They run on a separate
gloo group or, between ranks of one host, on Unix sockets. A gloo collective of a few numbers takes
half a millisecond of CPU time, because its threads wake one another; a socket takes a tenth of it.
The meters do not count this traffic.
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
from ptrain.internals.dispatch import disable_modes
from ptrain.internals.process_groups import all_gather_single
from ptrain.interpreter import program
from ptrain.runtime.world import World

Gather: TypeAlias = "Callable[[Any], list[Any]]"  # every rank's value, on every rank

# The number of bytes that follow, in native byte order: both ends are on one host.
_LENGTH = struct.Struct("=Q")
# The other ranks wait longer than rank 0: its message, which names the silent rank, comes first.
_FOLLOWER_FACTOR = 1.25


class PeerConnection:
    """A connection to another rank, which is lost after some seconds of silence.

    Args:
        connected: The socket, which is closed with the connection.
        rank: The other rank.
        seconds: The silence after which the other rank counts as lost.
    """

    def __init__(self, connected: socket.socket, rank: int, seconds: float) -> None:
        self.rank, self._seconds, self._socket = rank, seconds, connected
        connected.settimeout(seconds)
        # `recv` may return fewer bytes than requested; `read` of a file waits for all of them.
        self._file = connected.makefile("rb")

    def send(self, data: bytes) -> None:
        """Send bytes. Raises as `receive` does."""
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise self._lost_error(error) from error

    def receive(self) -> bytes:
        """Return the bytes that the other rank sent.

        Raises:
            TimeoutError: The other rank was silent for too long.
            ConnectionError: The connection was closed. From both messages the parent recognizes a
                rank that failed because of another (`failure.is_victim`).
        """
        try:
            return self._read_bytes(_LENGTH.unpack(self._read_bytes(_LENGTH.size))[0])
        except (OSError, ValueError) as error:  # ValueError: the file is closed
            raise self._lost_error(error) from error

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._socket.close()

    def _read_bytes(self, size: int) -> bytes:
        """Read exactly `size` bytes. Raises ConnectionError if the connection ends before."""
        data = self._file.read(size)
        if len(data) < size:
            raise ConnectionError("the process has ended")
        return data

    def _lost_error(self, error: Exception) -> OSError:
        """Return the error of a lost connection."""
        if isinstance(error, TimeoutError):
            whom = f"for rank {self.rank}" if self.rank else "at rank 0 for all ranks"
            return TimeoutError(f"Timed out waiting {whom}: no message for {self._seconds:g} s")
        return ConnectionError(f"Connection closed by peer, rank {self.rank}: {error}")


class HostGroup:
    """A star of connections: rank 0 is connected to each other rank.

    Args:
        rank: This rank.
        joined: On rank 0 the connections to all other ranks, in the order of ranks; on any other
            rank the connection to rank 0.
    """

    def __init__(self, rank: int, joined: Sequence[PeerConnection]) -> None:
        self._is_first, self._joined = rank == 0, tuple(joined)

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, in the order of ranks. All ranks call it.

        Raises:
            TimeoutError: A rank is silent. The group is closed.
            ConnectionError: A rank is gone. The group is closed.
        """
        rows: list[bytes] = []
        try:
            rows = self._gather_by_star(data)
        finally:
            if not rows:
                self.close()  # after a partial message, the start of the next one is unknown
        return rows

    def close(self) -> None:
        """Close all connections of this rank."""
        for other in self._joined:
            other.close()

    def _gather_by_star(self, data: bytes) -> list[bytes]:
        """Gather to rank 0, which sends the result to all other ranks."""
        if not self._is_first:
            (first,) = self._joined
            first.send(data)
            return _split_rows(first.receive())
        # The others send before they receive, and rank 0 receives before it sends, so no two ends
        # wait for each other.
        rows = [data, *(other.receive() for other in self._joined)]
        everything = _join_rows(rows)
        for other in self._joined:
            other.send(everything)
        return rows


def connect_ranks(rank: int, size: int, seconds: float, gather: Gather) -> HostGroup | None:
    """Connect all ranks by Unix sockets. All ranks call it.

    Args:
        rank: This rank.
        size: The number of ranks.
        seconds: The silence after which a rank counts as lost.
        gather: A function that gathers a value from all ranks.

    Returns:
        The group, or None on all ranks if they do not share a host and its folder of temporary
        files, or if it supports no Unix sockets.
    """
    return (
        _accept_others(size, seconds, gather)
        if rank == 0
        else _connect_to_first(rank, seconds, gather)
    )


def _accept_others(size: int, seconds: float, gather: Gather) -> HostGroup | None:
    """Accept the other ranks, as rank 0. Until then they wait in the queue of the socket."""
    with ExitStack() as opened:
        # The folder of the socket is removed on return: only connecting needs its path.
        listener = _open_listener(opened, size, seconds)
        gather("" if listener is None else listener.getsockname())
        have_joined = gather(listener is not None)  # all ranks must agree on the use of sockets
        if listener is None or not all(have_joined):
            return None
        by_rank = {}
        with ExitStack() as failing:
            for _ in range(1, size):
                joined = PeerConnection(listener.accept()[0], -1, seconds)  # sends its rank first
                failing.callback(joined.close)
                joined.rank = int(joined.receive())
                # Connections arrive in any order, so each rank sends its number.
                by_rank[joined.rank] = joined
            failing.pop_all()
        return HostGroup(0, [by_rank[rank] for rank in range(1, size)])


def _connect_to_first(rank: int, seconds: float, gather: Gather) -> HostGroup | None:
    """Connect to rank 0, as any other rank."""
    with ExitStack() as failing:
        path = gather("")[0]
        first = _open_connection(path, seconds * _FOLLOWER_FACTOR) if path else None
        if first is not None:
            failing.callback(first.close)
        have_joined = gather(first is not None)
        if first is None or not all(have_joined):
            return None
        first.send(b"%d" % rank)
        failing.pop_all()
        return HostGroup(rank, [first])


def _open_listener(opened: ExitStack, size: int, seconds: float) -> socket.socket | None:
    """Return a listening socket in a folder that only this user may enter; None on failure."""
    if not hasattr(socket, "AF_UNIX"):
        return None
    with suppress(OSError):  # no temporary folder, or its path is too long for a socket
        folder = opened.enter_context(TemporaryDirectory(prefix="ptrain-"))
        listener = opened.enter_context(socket.socket(socket.AF_UNIX))
        listener.settimeout(seconds)
        listener.bind(str(Path(folder) / "ranks"))
        # The queue must hold all ranks: rank 0 accepts them after all have connected.
        listener.listen(size)
        return listener
    return None


def _open_connection(path: str, seconds: float) -> PeerConnection | None:
    """Return a connection to rank 0.

    None on another host, where the path does not exist, or if the queue of the socket is full.
    """
    with suppress(OSError), ExitStack() as failing:
        connected = failing.enter_context(socket.socket(socket.AF_UNIX))
        connected.settimeout(seconds)  # without a timeout, connecting blocks on a full queue
        connected.connect(path)
        failing.pop_all()
        return PeerConnection(connected, 0, seconds)
    return None


def _join_rows(rows: Sequence[bytes]) -> bytes:
    """Concatenate rows, each with its length."""
    return b"".join(_LENGTH.pack(len(row)) + row for row in rows)


def _split_rows(data: bytes) -> list[bytes]:
    """Split the bytes of `_join_rows` into rows."""
    rows, start = [], 0
    while start < len(data):
        (length,) = _LENGTH.unpack_from(data, start)
        start += _LENGTH.size + length
        rows.append(data[start - length : start])
    return rows


class Exchange:
    """The group of all ranks of a world, on the CPU. With one rank, it returns its arguments.

    All ranks must create it, and call its methods in the same order.

    Attributes:
        world: The ranks.
        group: The gloo group. None: there is one rank.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.group: dist.ProcessGroup | None = None
        self._host: HostGroup | None = None
        if world.size > 1:
            waits = timedelta(seconds=world.timeout.step)
            self.group = dist.new_group(backend="gloo", timeout=waits, group_desc="ptrain exchange")
            # `gather` uses the gloo group as long as `_host` is not set.
            self._host = connect_ranks(world.rank, world.size, world.timeout.step, self.gather)

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        """Return the sum over the ranks of each value, added in the order of ranks.

        Between hosts it is an all-gather, which for a few numbers needs half the messages of an
        all-reduce. The meters do not count it.
        """
        if self.group is None:
            return values
        return [
            sum(numbers) for numbers in zip(*self._gather_numbers(self.group, values), strict=True)
        ]

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value, on all ranks."""
        return self.gather(value if self.world.is_first else None)[0]

    def gather(self, value: Any, kind: Any = Any) -> list[Any]:
        """Return the values of all ranks, in the order of ranks.

        Args:
            value: This rank's value.
            kind: Its type hint, for `codec.decode`.
        """
        if self.group is None:
            return [value]
        if self._host is not None:
            texts = self._host.gather(json.dumps(encode(value, kind)).encode())
            return [decode(json.loads(text), kind) for text in texts]
        return program.gather(value, self.world.size, torch.device("cpu"), self.group, kind)

    def barrier(self) -> None:
        """Wait until all ranks have called it."""
        # A gather returns on a rank only after all ranks have sent.
        self.gather(None)

    def close(self) -> None:
        """Close the sockets and destroy the group, if the caller owns the default group."""
        if self._host is not None:
            self._host.close()
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)

    def _gather_numbers(self, group: dist.ProcessGroup, values: list[float]) -> list[list[float]]:
        """Return the numbers of all ranks."""
        if self._host is not None:
            # The bits of fp64: all ranks must add equal numbers and take equal branches.
            numbers = struct.Struct(f"={len(values)}d")
            return [list(numbers.unpack(row)) for row in self._host.gather(numbers.pack(*values))]
        with disable_modes():  # so that the meters do not see these tensors
            vector = torch.tensor(values, dtype=torch.float64, device="cpu")
            by_rank = vector.new_empty(self.world.size * len(values))
            all_gather_single(by_rank, vector, group=group)
        rows: list[list[float]] = by_rank.view(self.world.size, -1).tolist()
        return rows
