"""Collectives of every group of ranks that a mesh may have, called as ptrain calls them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from ptrain.calibration.bench import Bench, RateSheet, Work
from ptrain.calibration.points import Points
from ptrain.costs import Collective
from ptrain.rooms.comm import all_gather, all_reduce, reduce_scatter
from ptrain.rooms.registry import Registry
from ptrain.spec.dials import ReduceScatterVia


@dataclass(frozen=True, slots=True)
class Peers:
    """This rank's group among those of one size that all ranks are divided into, and on how many
    nodes each of them is."""

    group: dist.ProcessGroup
    ranks: int
    nodes: int


def peers_of(world_size: int, ranks_per_node: int, rank: int) -> Iterator[Peers]:
    """Yield a group of each size that divides the ranks of a node, and over nodes one of a rank of
    each and one of all."""
    nodes = world_size // ranks_per_node
    for size in _divisors(ranks_per_node):
        lines = [list(range(first, first + size)) for first in range(0, world_size, size)]
        yield Peers(_own(lines, rank), size, 1)
    if nodes > 1:
        lines = [list(range(first, world_size, ranks_per_node)) for first in range(ranks_per_node)]
        yield Peers(_own(lines, rank), nodes, nodes)
        if ranks_per_node > 1:
            yield Peers(_own([list(range(world_size))], rank), world_size, nodes)


def _divisors(number: int) -> list[int]:
    return [size for size in range(2, number + 1) if number % size == 0]


def _own(lines: list[list[int]], rank: int) -> dist.ProcessGroup:
    """The group of this rank; every rank makes all of them."""
    groups = [dist.new_group(line) for line in lines]
    return next(group for group, line in zip(groups, lines, strict=True) if rank in line)


def collectives(bench: Bench, sheet: RateSheet, points: Points, peers: list[Peers]) -> None:
    for size in bench.in_time(_ends_first(points.sent), least=3):
        for known in peers:
            whole = max(1, size // 4 // known.ranks) * known.ranks
            for collective, work in _works(known, whole, bench.device):
                key = (collective, known.ranks, known.nodes, 4 * whole)
                sheet.note("collectives", *key, seconds=bench.meeting_seconds(work))
            if known is _neighbours(peers, known.nodes):
                one_by_one = bench.device.type == "cuda"  # of a GPU's queue there and back
                taken = bench.seconds_beside(
                    partial(_messages, known, whole, bench.device), parts=2 if one_by_one else 1
                )
                sent = (Collective.SEND, 2, known.nodes, 4 * whole)
                sheet.note("collectives", *sent, seconds=taken)


def _ends_first(sizes: Sequence[int]) -> Iterator[int]:
    """Yield the smallest, then from the largest downwards: what is left out lies between, or what
    each byte of a large tensor takes would be what one of a small does."""
    yield sizes[0]
    yield from reversed(sizes[1:])


def _neighbours(peers: list[Peers], nodes: int) -> Peers:
    """The smallest group on so many nodes: a pair, where the ranks are an even number."""
    return min((known for known in peers if known.nodes == nodes), key=lambda known: known.ranks)


def _works(
    peers: Peers, numel: int, device: torch.device
) -> Iterator[tuple[Collective, Callable[[], object]]]:
    """Of a full tensor of `numel` numbers."""
    group, registry = peers.group, Registry()
    whole, other = torch.zeros(numel, device=device), torch.zeros(numel, device=device)
    shard = torch.zeros(numel // peers.ranks, device=device)
    yield Collective.ALL_REDUCE, lambda: all_reduce(whole, group)
    yield Collective.ALL_GATHER, lambda: all_gather(whole, shard, group, registry)
    yield (
        Collective.REDUCE_SCATTER,
        lambda: reduce_scatter(shard, whole, group, ReduceScatterVia.NATIVE, registry).wait(),
    )
    yield Collective.ALL_TO_ALL, lambda: dist.all_to_all_single(other, whole, group=group)
    yield Collective.BROADCAST, lambda: dist.broadcast(whole, group=group, group_src=0)


@contextmanager
def _messages(peers: Peers, numel: int, device: torch.device) -> Iterator[Work]:
    """Messages as stages of a pipeline send them, which compute while they are under way: each
    call sends one to the next rank and waits for what the call before sent and received."""
    group, place = peers.group, dist.get_rank(peers.group)
    pending: deque[tuple[dist.Work | None, torch.Tensor]] = deque()

    def send() -> None:
        sent = torch.zeros(numel, device=device)
        pending.append((dist.isend(sent, group=group, group_dst=(place + 1) % peers.ranks), sent))

    def receive() -> None:
        received = torch.empty(numel, device=device)
        source = (place - 1) % peers.ranks
        pending.append((dist.irecv(received, group=group, group_src=source), received))

    # a ring in which all send first would wait for itself on NCCL
    acts = (send, receive) if place % 2 == 0 else (receive, send)

    def wait(left: int) -> None:
        while len(pending) > left:
            work, _ = pending.popleft()
            assert work is not None, "a rank of the group"
            work.wait()

    def work() -> None:
        for act in acts:
            act()
        wait(len(acts))

    yield work
    wait(0)
