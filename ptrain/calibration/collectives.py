"""Measure collectives on every process group that a mesh can have, copies between device and host,
and the delay that computation adds to a collective.

The delay exists on CPUs only, where collectives and computation share the cores.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ptrain.calibration.bench import Bench, Points, RateSheet, Work, compute
from ptrain.cost import Collective, State
from ptrain.rooms.comm import all_gather, all_reduce, reduce_scatter
from ptrain.rooms.registry import Registry
from ptrain.rooms.torch import Tiers
from ptrain.spec.dials import ReduceScatterVia
from ptrain.spec.placement import Tier

_WIDTH, _HEADS, _SAMPLES, _TOKENS = 128, 4, 2, 128
_BYTES = 64 * 2**10  # of the full tensor
_MOST_IN_TURNS = 2  # of the points


def lateness(bench: Bench, sheet: RateSheet, points: Points) -> None:
    """Note it of a gather of 64 KiB by all ranks, which stands for every collective."""
    if bench.world.size == 1 or bench.device.type == "cuda":
        return
    group, registry = dist.group.WORLD, Registry()
    assert group is not None, "several ranks"
    shard = torch.zeros(_BYTES // 4 // bench.world.size, device=bench.device)
    whole = torch.zeros(shard.numel() * bench.world.size, device=bench.device)
    layer = Layer(bench.device)

    def gather() -> None:
        all_gather(whole, shard, group, registry)

    first = bench.meeting_seconds(gather)
    _note(bench, sheet, bench.busy_seconds(lambda: compute(bench.device)), 0.0)
    of_layer = bench.busy_seconds(layer)
    # Where ranks take turns it is a small part of what many passes take, and lost in their spread.
    passes = points.late[:_MOST_IN_TURNS] if bench.is_shared else points.late
    for times in bench.in_time(passes, least=1):
        late = bench.meeting_seconds(gather, between=partial(layer, times)) - first
        _note(bench, sheet, times * of_layer, late)


def _note(bench: Bench, sheet: RateSheet, computed: float, late: float) -> None:
    """Write one rank's figures down on all: a mean of what is cut off below nothing is too much."""
    microseconds = round(1e6 * bench.agreed(computed))
    sheet.note("lateness", microseconds, seconds=bench.agreed(late))


class Layer:
    """A layer's passes, as a step has them between two collectives."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(
            _WIDTH, _HEADS, 4 * _WIDTH, dropout=0.0, batch_first=True, device=device
        )
        self.x = torch.ones(_SAMPLES, _TOKENS, _WIDTH, device=device, requires_grad=True)

    def __call__(self, times: int = 1) -> None:
        for _ in range(times):
            self.layer(self.x).sum().backward()


_ROUTES = {
    Tier.HOST: (Collective.DEVICE_TO_HOST, Collective.HOST_TO_DEVICE),
    Tier.FILE: (Collective.FILE_WRITE, Collective.FILE_READ),
}


def copies(bench: Bench, sheet: RateSheet, points: Points) -> None:
    """Files are in the system's temporary folder, and as warm as the kernel keeps them."""
    tiers = Tiers(bench.device, Registry())
    for tier, (there, back) in _ROUTES.items():
        for size in bench.in_time(points.copied):
            here = torch.zeros(size // 4, device=bench.device)
            stored = tiers.move(here, tier, State.OPTIMIZER)
            for copy, target, source in ((there, stored, here), (back, here, stored)):
                taken = bench.seconds(partial(target.copy_, source, non_blocking=True))
                sheet.note("copies", copy, size, seconds=taken)


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
