"""The wire meter: bytes that this process's own sockets sent, by axes, from the kernel's counters.

No root, no namespace, nothing of torch: getsockopt(TCP_INFO) of every TCP socket that the process
holds, before and after a step. Which socket belongs to which process group is read off the store
where gloo's ranks published the addresses that they listen on; a group's sockets have one of these
addresses at one end. Limits: Linux 4.19 or newer (the kernel's counter of bytes sent), gloo over
TCP; a scan takes 0.2 ms and asks no other rank.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Self

import torch.distributed as dist

from ptrain.costs import Wire
from ptrain.internals import process_groups

# struct tcp_info of Linux: eight bytes, 24 times u32, then u64s and u32s as they came to be added.
_NOT_SENT = struct.Struct("=I"), 144  # in the send buffer still
_SENT = struct.Struct("=QQ"), 200  # bytes sent, and of them retransmitted
_LENGTH = 216
_WORD = struct.calcsize("=Q")

Address = tuple[str, int]


class WireMeter:
    """Reads the counters when it is entered and when it is left."""

    def __init__(self, axes_by_group: Mapping[str, tuple[str, ...]], *, rank: int) -> None:
        self._rank = rank
        self.absent, self._axes_by_socket = "", {}
        try:
            self._axes_by_socket = _axes_by_socket(axes_by_group)
        except _CannotTell as error:
            self.absent = str(error)
        self._before: dict[str, int] = {}
        self._sent: dict[tuple[str, ...], int] = {}

    def rows(self) -> tuple[Wire, ...]:
        """Bytes by axes; none where `absent` says why."""
        return tuple(
            Wire(axes=axes, rank=self._rank, sent_bytes=sent) for axes, sent in self._sent.items()
        )

    def __enter__(self) -> Self:
        if not self.absent:
            self._before = self._counters()
        return self

    def __exit__(self, *_: object) -> None:
        if self.absent:
            return
        after = self._counters()
        if gone := self._axes_by_socket.keys() - (self._before.keys() & after.keys()):
            self.absent = f"{len(gone)} connections were closed during the step"
            return
        for name, axes in self._axes_by_socket.items():
            self._sent[axes] = self._sent.get(axes, 0) + after[name] - self._before[name]

    def _counters(self) -> dict[str, int]:
        return {
            name: _sent_bytes(connection)
            for name, connection in _connections()
            if name in self._axes_by_socket
        }


class _CannotTell(Exception):
    """Why there are no figures."""


def _axes_by_socket(axes_by_group: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    if not sys.platform.startswith("linux"):
        raise _CannotTell("the kernel's counters of a connection are read on Linux only")
    ends = {}
    for name, connection in _connections():
        with suppress(OSError):  # a peer that is gone
            ends[name] = (_address(connection.getsockname()), _address(connection.getpeername()))
            if len(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)) < _LENGTH:
                raise _CannotTell("this kernel does not count the bytes sent on a connection")
    axes_of: dict[str, tuple[str, ...]] = {}
    for group_name, axes in axes_by_group.items():
        group = process_groups.named(group_name)
        axes_of |= dict.fromkeys(_sockets(group, ends), axes)
    return axes_of


def _sockets(group: dist.ProcessGroup, ends: Mapping[str, tuple[Address, Address]]) -> list[str]:
    """Return the sockets that connect this rank with the group's others, one for each of them."""
    if group.size() == 1:
        return []
    if (backend := dist.get_backend(group)) != "gloo":
        raise _CannotTell(f"{backend} sends past the sockets whose counters could be read")
    listening = [_published(group, rank) for rank in range(group.size())]
    own = listening.pop(group.rank())
    names = [name for name, (here, there) in ends.items() if here == own or there in listening]
    if len(names) != len(listening):
        raise _CannotTell(
            f"{len(listening)} connections were expected for the group {group.group_name}, "
            f"{len(names)} found"
        )
    return names


def _published(group: dist.ProcessGroup, rank: int) -> Address:
    """Where a rank of a gloo group listens. The store has its host's name and a socket address,
    the length before each, as the host writes them."""
    store = process_groups.store_of(group)
    key = f"cpu//0/{rank}"
    if not store.check([key]):
        raise _CannotTell("gloo's addresses are not in the store under the name of torch 2.13")
    raw = bytes(store.get(key))
    raw = raw[_WORD + int.from_bytes(raw[:_WORD], sys.byteorder) + _WORD :]
    family = int.from_bytes(raw[:2], sys.byteorder)
    port = int.from_bytes(raw[2:4], "big")
    if family == socket.AF_INET:
        return socket.inet_ntop(family, raw[4:8]), port
    if family == socket.AF_INET6:
        return _address((socket.inet_ntop(family, raw[8:24]), port))
    raise _CannotTell(f"gloo's ranks listen on an address of family {family}")


def _address(name: tuple[str | int, ...]) -> Address:
    """IPv4 in IPv6 is IPv4."""
    return str(name[0]).removeprefix("::ffff:"), int(name[1])


def _connections() -> Iterator[tuple[str, socket.socket]]:
    """Every TCP connection of this process, as a copy that is closed after its turn."""
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if not name.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as copy:
                is_tcp = copy.type == socket.SOCK_STREAM and copy.family in (
                    socket.AF_INET,
                    socket.AF_INET6,
                )
                if is_tcp:
                    yield name, copy


def _sent_bytes(connection: socket.socket) -> int:
    """Payload given to the kernel so far, once each."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    sent, again = _SENT[0].unpack_from(info, _SENT[1])
    (waiting,) = _NOT_SENT[0].unpack_from(info, _NOT_SENT[1])
    return int(sent) - int(again) + int(waiting)
