"""Ranks of one host gather bytes over sockets; threads stand for ranks in these tests."""

from __future__ import annotations

import socket
import stat
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any, TypeVar

import pytest

from ptrain.train import exchange
from ptrain.train.exchange import Gather, HostGroup, PeerConnection, connect_ranks
from ptrain.train.launch import is_victim

T = TypeVar("T")


def on_ranks(size: int, act: Callable[[int, Gather], T]) -> list[T]:
    """What `act` returns on each of so many ranks, given its number and a gather of all."""
    barrier, held = Barrier(size, timeout=10), [None] * size

    def run(rank: int) -> T:
        def gather(value: Any) -> list[Any]:
            held[rank] = value
            barrier.wait()
            values = list(held)
            barrier.wait()
            return values

        return act(rank, gather)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def groups(size: int, seconds: float = 10.0) -> list[HostGroup]:
    met = on_ranks(size, lambda rank, gather: connect_ranks(rank, size, seconds, gather))
    assert None not in met
    return [group for group in met if group is not None]


@pytest.mark.parametrize("size", [2, 5])
def test_every_rank_gets_the_bytes_of_all_in_their_order(size: int) -> None:
    joined = groups(size)
    rows = [b"", b"x" * 3_000_000, *(b"%d" % rank for rank in range(2, size))]

    def twice(rank: int, _: Gather) -> tuple[list[bytes], list[bytes]]:
        return joined[rank].gather(rows[rank]), joined[rank].gather(rows[-1 - rank])

    assert on_ranks(size, twice) == [(rows, rows[::-1])] * size
    for group in joined:
        group.close()


def test_their_socket_lies_where_no_other_user_may_go_and_is_gone_when_they_have_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    modes: list[int] = []

    def act(rank: int, gather: Gather) -> None:
        def looking(value: Any) -> list[Any]:
            values = gather(value)
            if rank == 1 and values[0]:
                modes.extend(stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir())
            return values

        group = connect_ranks(rank, 2, 10.0, looking)
        assert group is not None
        group.close()

    on_ranks(2, act)
    assert set(modes) == {0o700}
    assert not list(tmp_path.iterdir())


def test_if_one_rank_cannot_join_no_rank_has_a_host_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On another host no process listens on the path."""
    first = exchange._open_connection
    calls = iter(range(9))
    elsewhere = "/nowhere/ranks"
    monkeypatch.setattr(
        exchange, "_open_connection", lambda path, s: first(path if next(calls) else elsewhere, s)
    )
    assert on_ranks(3, lambda rank, gather: connect_ranks(rank, 3, 10.0, gather)) == [None] * 3


@pytest.mark.parametrize("lack", ["no such sockets", "a path that is too long"])
def test_if_rank_0_has_no_socket_no_rank_has_a_host_group(
    lack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lack == "no such sockets":
        monkeypatch.delattr(socket, "AF_UNIX")
    else:
        long = tmp_path / ("x" * 120)
        long.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert on_ranks(2, lambda rank, gather: connect_ranks(rank, 2, 10.0, gather)) == [None] * 2


def gather_error(group: HostGroup) -> str:
    with pytest.raises((ConnectionError, TimeoutError)) as raised:
        group.gather(b"")
    words = f"{type(raised.value).__name__}: {raised.value}"
    assert is_victim(words)
    return words


def test_rank_0_names_a_silent_rank_before_the_others_have_waited_long_enough() -> None:
    joined = groups(3, seconds=0.4)
    first, _, last = on_ranks(3, lambda rank, _: "" if rank == 1 else gather_error(joined[rank]))
    assert first == "TimeoutError: Timed out waiting for rank 1: no message for 0.4 s"
    assert last.startswith("ConnectionError: Connection closed by peer, rank 0: ")
    joined[1].close()


def test_a_silent_rank_0_cannot_be_named() -> None:
    joined = groups(2, seconds=0.2)
    words = "TimeoutError: Timed out waiting at rank 0 for all ranks: no message for 0.25 s"
    assert gather_error(joined[1]) == words
    joined[0].close()


def test_a_group_that_failed_once_is_closed() -> None:
    joined = groups(2, seconds=0.2)
    assert gather_error(joined[0]).startswith("TimeoutError")
    for group in (*joined, joined[0]):
        assert gather_error(group).startswith("ConnectionError")


def test_a_rank_at_a_full_queue_does_not_wait(tmp_path: Path) -> None:
    """The system may allow fewer waiting connections than requested."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "ranks"))
        listener.listen(0)
        came = [exchange._open_connection(str(tmp_path / "ranks"), 0.2) for _ in range(3)]
    assert came[0] is not None and came[-1] is None
    for joined in came:
        if joined is not None:
            joined.close()


@pytest.mark.parametrize(("waits", "lost"), [(0, 1), (1, 0)])
def test_a_dead_rank_is_named_by_the_rank_that_waits_for_it(waits: int, lost: int) -> None:
    joined = groups(2)
    joined[lost].close()
    with pytest.raises(ConnectionError, match=f"closed by peer, rank {lost}: ") as raised:
        joined[waits].gather(b"")
    assert is_victim(f"ConnectionError: {raised.value}")
    joined[waits].close()


def test_bytes_that_end_before_they_are_whole_are_no_message() -> None:
    mine, its = socket.socketpair()
    joined = PeerConnection(mine, 3, 10.0)
    its.sendall(exchange._LENGTH.pack(5) + b"1234")
    its.close()
    with pytest.raises(ConnectionError, match="rank 3: the process has ended"):
        joined.receive()
    joined.close()


@pytest.mark.parametrize("hello", [b"1", b"0123456789abcdef1", b"x" * 3000, b""])
def test_a_process_without_the_nonce_is_no_rank(hello: bytes) -> None:
    """It connects before the ranks, and may send anything."""
    strangers: list[socket.socket] = []

    def act(rank: int, gather: Gather) -> HostGroup | None:
        def looking(value: Any) -> list[Any]:
            values = gather(value)
            if rank == 1 and not strangers:
                stranger = socket.socket(socket.AF_UNIX)
                stranger.connect(values[0][0])
                stranger.sendall(exchange._LENGTH.pack(len(hello)) + hello)
                strangers.append(stranger)
            return values

        return connect_ranks(rank, 2, 10.0, looking)

    first, second = on_ranks(2, act)
    assert first is not None and second is not None
    rows = on_ranks(2, lambda rank, _: (first, second)[rank].gather(b"%d" % rank))
    assert rows == [[b"0", b"1"]] * 2
    for each in (first, second, *strangers):
        each.close()


def test_a_process_of_another_user_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = socket.socketpair()
    assert exchange._is_own_process(one)
    monkeypatch.setattr(exchange.os, "geteuid", lambda: 4711)
    assert not exchange._is_own_process(one)
    assert exchange._admit_rank(one, "", 2, 1.0) is None
    other.close()


def test_no_message_of_any_length_is_read() -> None:
    one, other = socket.socketpair()
    other.sendall(exchange._LENGTH.pack(1 << 60) + b"x")
    joined = PeerConnection(one, 1, 1.0)
    with pytest.raises(ConnectionError, match="bytes; at most"):
        joined.receive()
    joined.close()
    other.close()
