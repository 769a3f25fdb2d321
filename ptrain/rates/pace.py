"""What a clock asks a machine for: seconds of operators, collectives, copies, updates and hooks;
and the time of a collective by the published figures of its links: α + hops · α_hop + bytes ·
factor / bandwidth.

Bandwidths are bus bandwidths, as nccl-tests define them by these factors, so they compare between
collectives and numbers of ranks. Hops are those of NCCL's rings and trees. Ranks that span nodes
send through as many network cards as they have ranks on a node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from ptrain.cost import Collective
from ptrain.facts.model import Operator, PassWork
from ptrain.spec.activations import Kept
from ptrain.spec.placement import Tier
from ptrain.spec.precision import Layout
from ptrain.spec.rates import Hook, LinkTier, OperatorKind
from ptrain.timeline import Kind


class LinkRate(NamedTuple):
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


class UnknownRate(Exception):
    """The machine's rates do not say it; the text says what they lack and who gives it."""


class Pace(Protocol):
    """One machine's rates, of ranks that all compute at once. Each raises UnknownRate for what
    was not measured."""

    overlaps: bool  # whether what is sent moves while the rank computes: not on a processor's cores

    def operator_seconds(self, operator: Operator) -> float:
        """Seconds of all `operator.times` of them."""
        ...

    def collective_seconds(
        self, collective: Collective, *, ranks: int, nodes: int, payload: int
    ) -> float:
        """Seconds of one collective of `ranks` ranks on `nodes` nodes, of a full tensor of
        `payload` bytes; of a send between two ranks, of its bytes."""
        ...

    def late_seconds(self, computed: float) -> float:
        """Seconds that a collective takes longer where its ranks computed for so long since the one
        before, than where that was the little that lies between those that are measured."""
        ...

    def copy_seconds(self, copy: Collective, size: int) -> float:
        """Seconds of a copy of `size` bytes between two tiers."""
        ...

    def update_seconds(
        self, optimizer: str, layout: Layout, *, elements: int, tensors: int
    ) -> float:
        """Seconds of an optimizer's step over `tensors` tensors with together `elements`, what is
        cast before and after it included."""
        ...

    def clip_seconds(self, layout: Layout, *, elements: int, tensors: int) -> float:
        """Seconds of the norm of so many gradients, and of their scaling; not of the all-reduce of
        the norm."""
        ...

    def hook_seconds(self, hook: Hook) -> float:
        """Seconds of the host's for one of a wrapper's own parts."""
        ...


def around(kept: Kept, kind: Kind) -> Hook:
    """Return what the host does around the operators of a layer's pass, by how its activations are
    kept."""
    if kept.policy is not None:
        return Hook.SELECTED_OPERATOR if kept.policy.keep else Hook.RECOMPUTED_OPERATOR
    if kept.tier is not Tier.DEVICE:
        return Hook.MOVED_OPERATOR
    match kind:
        case Kind.FORWARD:
            return Hook.FORWARD_OPERATOR
        case Kind.BACKWARD:
            return Hook.BACKWARD_OPERATOR
        case Kind.INPUT | Kind.WEIGHT:
            return Hook.HALVES_OPERATOR


def cut_seconds(pace: Pace, work: PassWork) -> float:
    """Return the seconds of the host's for products with cut operands."""
    number = sum(
        item.times
        for item in work
        if isinstance(item, Operator)
        and item.kind is OperatorKind.PRODUCT
        and item.dimensions[0] == 1  # several matrices are attention's, of heads that are whole
    )
    return number * pace.hook_seconds(Hook.CUT_PRODUCT) if number else 0.0


class TimedOperators:
    """The seconds of operators, each of which is one object in many passes: asked once for it."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._known: dict[int, tuple[Operator, float]] = {}  # by identity, and so kept alive

    def seconds(self, operator: Operator) -> float:
        """Return those of one of them."""
        known = self._known.get(id(operator))
        if known is None:
            known = self._known[id(operator)] = operator, self._pace.operator_seconds(operator)
        return known[1]


def operators_seconds(
    pace: Pace,
    work: PassWork,
    around: Hook,
    operator_seconds: Callable[[Operator], float] | None = None,
) -> float:
    """Return the seconds of a pass's operators, one after the other, and of what the host does
    `around` them, unless a device computes beside its host. Of an operator they are the pace's, or
    what somebody knows of it already."""
    operators = (item for item in work if isinstance(item, Operator))
    host = 0.0 if pace.overlaps else around_seconds(pace, work, around)
    return host + sum(map(operator_seconds or pace.operator_seconds, operators))


def around_seconds(pace: Pace, work: PassWork, around: Hook) -> float:
    """Return the seconds of what the host does `around` a pass's operators. Where a device computes
    beside it that is all of its work for them: it issues them."""
    number = sum(item.times for item in work if isinstance(item, Operator))
    return number * pace.hook_seconds(around)
