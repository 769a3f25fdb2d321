"""Collectives of every group of ranks that a mesh may have, called as ptrain calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ptrain.calibration.bench import Bench, Sheet, Work
from ptrain.calibration.extent import Extent
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


def collectives(bench: Bench, sheet: Sheet, extent: Extent, peers: list[Peers]) -> None:
    for known in peers:
        for size in extent.sent:
            whole = max(1, size // 4 // known.ranks) * known.ranks
            for collective, work in _works(known, whole, bench.device):
                key = (collective, known.ranks, known.nodes, 4 * whole)
                sheet.note("collectives", *key, seconds=bench.seconds(work))
            if known.ranks == 2:
                taken = bench.seconds(_ping_pong(known.group, whole, bench.device), parts=2)
                key = (Collective.SEND, 2, known.nodes, 4 * whole)
                sheet.note("collectives", *key, seconds=taken)


def _works(
    peers: Peers, numel: int, device: torch.device
) -> Iterator[tuple[Collective, Callable[[], object]]]:
    """Of a full tensor of `numel` numbers."""
    group, registry = peers.group, Registry()
    whole, other = torch.zeros(numel, device=device), torch.zeros(numel, device=device)
    shard = torch.zeros(numel // peers.ranks, device=device)
    yield Collective.ALL_REDUCE, lambda: all_reduce(whole, group)
    yield Collective.ALL_GATHER, lambda: all_gather(whole, shard, group)
    yield (
        Collective.REDUCE_SCATTER,
        lambda: reduce_scatter(shard, whole, group, ReduceScatterVia.NATIVE, registry),
    )
    yield Collective.ALL_TO_ALL, lambda: dist.all_to_all_single(other, whole, group=group)
    yield Collective.BROADCAST, lambda: dist.broadcast(whole, group=group, group_src=0)


def _ping_pong(group: dist.ProcessGroup, numel: int, device: torch.device) -> Work:
    """There and back, as a pipeline's neighbours send."""
    tensor, place = torch.zeros(numel, device=device), dist.get_rank(group)

    def send() -> None:
        work = dist.isend(tensor, group=group, group_dst=1 - place)
        assert work is not None, "a rank of the group"
        work.wait()

    def receive() -> None:
        work = dist.irecv(tensor, group=group, group_src=1 - place)
        assert work is not None, "a rank of the group"
        work.wait()

    order = (send, receive) if place == 0 else (receive, send)

    def there_and_back() -> None:
        for act in order:
            act()

    return there_and_back
