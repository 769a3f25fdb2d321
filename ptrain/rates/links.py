"""How long a collective takes by what is published of its links: α + hops · α_hop + bytes · factor
/ bandwidth.

Bandwidths are bus bandwidths, as nccl-tests define them by these factors, and so are comparable
between collectives and numbers of ranks. Hops are those of NCCL's rings and trees. Ranks that span
nodes send through as many network cards as they have ranks on a node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ptrain.costs import Collective
from ptrain.spec.rates import LinkTier


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRate:
    """Seconds of any call, seconds of a hop, and bytes per second of one device."""

    call: float
    hop: float
    bandwidth: float


def bus_factor(collective: Collective, ranks: int) -> float:
    """How many times the full tensor a rank's link carries (nccl-tests, PERFORMANCE.md)."""
    match collective:
        case Collective.ALL_REDUCE:
            return 2 * (ranks - 1) / ranks
        case Collective.BROADCAST | Collective.REDUCE | Collective.SEND:
            return 1.0
        case Collective.BARRIER:
            return 0.0
        case _:
            return (ranks - 1) / ranks


def link_seconds(
    links: Mapping[LinkTier, LinkRate],
    collective: Collective,
    *,
    ranks: int,
    nodes: int,
    payload: int,
) -> float:
    """Seconds of one collective; `links` has the tiers that its ranks span."""
    slowest = links[LinkTier.BETWEEN if nodes > 1 else LinkTier.WITHIN]
    within = links.get(LinkTier.WITHIN, slowest)
    here, across = _hops(collective, ranks, nodes)
    latency = slowest.call + here * within.hop + across * slowest.hop
    return latency + _transfer(links, collective, ranks, nodes, payload)


def _hops(collective: Collective, ranks: int, nodes: int) -> tuple[int, int]:
    """Within nodes and between them: one of a send, of all others a ring's, or of an all-reduce
    those of a tree of nodes, whichever is shorter."""
    if collective is Collective.SEND:
        return (0, 1) if nodes > 1 else (1, 0)
    ring = ranks - nodes, nodes - 1
    if collective is not Collective.ALL_REDUCE:
        return ring
    tree = ranks // nodes - 1, (nodes - 1).bit_length()
    here, across = min(ring, tree, key=sum)
    return 2 * here, 2 * across


def _transfer(
    links: Mapping[LinkTier, LinkRate],
    collective: Collective,
    ranks: int,
    nodes: int,
    payload: int,
) -> float:
    bus_bytes = payload * bus_factor(collective, ranks)
    if nodes == 1:
        return bus_bytes / links[LinkTier.WITHIN].bandwidth
    card = links[LinkTier.BETWEEN].bandwidth
    if collective is Collective.SEND:
        return bus_bytes / card
    if collective is Collective.ALL_TO_ALL:  # each rank's own bytes leave by its own card
        return payload * (1 - 1 / nodes) / card
    # Rings enter and leave a node by all the cards of its ranks, and pass through it in between.
    cards = card * (ranks // nodes)
    within = links.get(LinkTier.WITHIN)
    return bus_bytes / (min(cards, within.bandwidth) if within and ranks > nodes else cards)
