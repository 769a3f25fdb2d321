"""The interface of a machine's rates (`Pace`), and collective times from published link rates.

A pace gives the seconds of operators, collectives, copies, updates and hooks. By published figures
a collective takes α + hops · α_hop + bytes · factor / bandwidth.

Bandwidths are bus bandwidths, which nccl-tests defines by these factors, so they compare between
collectives and numbers of ranks. The number of hops is that of NCCL's rings and trees. Ranks on
several nodes use as many network cards as they have ranks on a node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from ptrain.cost import Collective
from ptrain.facts.model import Operator, PassWork
from ptrain.spec.activations import ActivationMode
from ptrain.spec.cluster import Cluster, Hook, LinkTier, OperatorKind
from ptrain.spec.placement import Tier
from ptrain.spec.precision import FP8_CAPABILITY, DType, Layout
from ptrain.timeline import Kind


class LinkRate(NamedTuple):
    """The rates of a link.

    Attributes:
        call: Seconds of any call.
        hop: Seconds of each hop.
        bandwidth: Bytes per second of one device.
    """

    call: float
    hop: float
    bandwidth: float


def bus_factor(collective: Collective, ranks: int) -> float:
    """Return the bytes on a rank's link over the bytes of the full tensor.

    nccl-tests defines the factors (PERFORMANCE.md).

    Args:
        collective: The kind of collective.
        ranks: The number of ranks of the group.
    """
    match collective:
        case Collective.ALL_REDUCE:
            # A reduce-scatter and an all-gather.
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
    """Return the seconds of one collective by published link rates.

    Args:
        links: The rates of the tiers that the group spans.
        collective: The kind of collective.
        ranks: The number of ranks of the group.
        nodes: The number of nodes of the group.
        payload: The bytes of the full tensor.
    """
    slowest = links[LinkTier.BETWEEN if nodes > 1 else LinkTier.WITHIN]
    within = links.get(LinkTier.WITHIN, slowest)
    here, across = _count_hops(collective, ranks, nodes)
    latency = slowest.call + here * within.hop + across * slowest.hop
    return latency + _transfer_seconds(links, collective, ranks, nodes, payload)


def _count_hops(collective: Collective, ranks: int, nodes: int) -> tuple[int, int]:
    """Return the number of hops within nodes, and between nodes.

    A send has one hop. Other collectives have the hops of a ring. An all-reduce has twice the hops
    of a ring, or of a tree of nodes if that is shorter, because it reduces and then broadcasts.

    Args:
        collective: The kind of collective.
        ranks: The number of ranks of the group.
        nodes: The number of nodes of the group, each with as many ranks.
    """
    if collective is Collective.SEND:
        return (0, 1) if nodes > 1 else (1, 0)
    ring = ranks - nodes, nodes - 1  # one hop enters each further node
    if collective is not Collective.ALL_REDUCE:
        return ring
    tree = ranks // nodes - 1, (nodes - 1).bit_length()  # a chain in each node, a tree of nodes
    here, across = min(ring, tree, key=sum)
    return 2 * here, 2 * across


def _transfer_seconds(
    links: Mapping[LinkTier, LinkRate],
    collective: Collective,
    ranks: int,
    nodes: int,
    payload: int,
) -> float:
    """Return the seconds that the bytes of a collective take, without latency.

    Args:
        links: The rates of the tiers that the group spans.
        collective: The kind of collective.
        ranks: The number of ranks of the group.
        nodes: The number of nodes of the group.
        payload: The bytes of the full tensor.
    """
    bus_bytes = payload * bus_factor(collective, ranks)
    if nodes == 1:
        return bus_bytes / links[LinkTier.WITHIN].bandwidth
    card = links[LinkTier.BETWEEN].bandwidth
    if collective is Collective.SEND:
        return bus_bytes / card
    if collective is Collective.ALL_TO_ALL:  # each rank sends its bytes by its network card
        return payload * (1 - 1 / nodes) / card
    # NCCL's rings enter and leave a node by all network cards of its ranks, and pass through the
    # node in between: the slower of the two bounds them.
    cards = card * (ranks // nodes)
    within = links.get(LinkTier.WITHIN)
    return bus_bytes / (min(cards, within.bandwidth) if within and ranks > nodes else cards)


# The ratio of the dense peaks in the data sheets of the L4, L40S, RTX 4090, H100, H200, B200, B300.
_FP8_OVER_BF16 = 2.0
Figures = list[tuple[tuple[Any, ...], float]]


def with_fp8(products: Figures, cluster: Cluster) -> Figures:
    """Return the seconds of products by dtype and dimensions, with fp8 products derived from bf16
    ones if the GPUs have fp8 products of which none was measured."""
    has_fp8 = cluster.kind == "cuda" and (cluster.sm or 0) >= FP8_CAPABILITY
    if not has_fp8 or any(dtype is DType.FP8 for (dtype, *_), _ in products):
        return products
    derived = (
        ((DType.FP8, *dimensions), taken / _FP8_OVER_BF16)
        for (dtype, *dimensions), taken in products
        if dtype is DType.BF16
    )
    return [*products, *derived]


class UnknownRate(Exception):
    """The error for a rate that a machine's file lacks, with the remedy."""


class Pace(Protocol):
    """The rates of one machine while all ranks of a node compute. Methods raise UnknownRate.

    A rate is unknown if the machine's file has no measurement from which it can be interpolated.
    """

    overlaps: bool  # communication overlaps with computing: True on GPUs, False on CPU cores

    def operator_seconds(self, operator: Operator) -> float:
        """Return the seconds of all `operator.times` operators."""
        ...

    def collective_seconds(
        self, collective: Collective, *, ranks: int, nodes: int, payload: int
    ) -> float:
        """Return the seconds of one collective.

        Args:
            collective: The kind of collective.
            ranks: The number of ranks of the group.
            nodes: The number of nodes of the group.
            payload: The bytes of the full tensor; of a send, the bytes sent.
        """
        ...

    def late_seconds(self, computed: float) -> float:
        """Return the additional seconds of a collective after its ranks computed for a while.

        Ranks arrive at different times after computing. The collectives of `collective_seconds` are
        measured with almost no computing between them.

        Args:
            computed: The seconds of computing since the previous collective.
        """
        ...

    def copy_seconds(self, copy: Collective, size: int) -> float:
        """Return the seconds of a copy between two tiers.

        Args:
            copy: The kind of copy.
            size: The bytes.
        """
        ...

    def update_seconds(
        self, optimizer: str, layout: Layout, *, elements: int, tensors: int
    ) -> float:
        """Return the seconds of an optimizer step, with the casts before and after it.

        Args:
            optimizer: The name of the optimizer.
            layout: The dtypes of parameters, gradients and optimizer state.
            elements: The number of elements of all tensors.
            tensors: The number of tensors.
        """
        ...

    def clip_seconds(self, layout: Layout, *, elements: int, tensors: int) -> float:
        """Return the seconds of the gradients' norm and scaling, without the norm's all-reduce.

        Args:
            layout: The dtypes; gradients have the layout's.
            elements: The number of elements of all gradients.
            tensors: The number of gradients.
        """
        ...

    def hook_seconds(self, hook: Hook) -> float:
        """Return the host's seconds for one execution of a hook."""
        ...


def operator_hook(kept: ActivationMode, kind: Kind) -> Hook:
    """Return the kind of host work per operator in a layer's pass.

    It depends on how the layer keeps its activations: with selective recomputation a dispatch mode
    handles every operator, and offloaded activations are copied.

    Args:
        kept: The placement of the layer's activations.
        kind: The kind of pass.
    """
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
    """Return the host's seconds for matrix products with sharded operands.

    Args:
        pace: The rates of the machine.
        work: A pass of a rank on the tensor axis.
    """
    number = sum(
        item.times
        for item in work
        if isinstance(item, Operator)
        and item.kind is OperatorKind.PRODUCT
        and item.dimensions[0] == 1  # batched products are attention's: each rank has full heads
    )
    return number * pace.hook_seconds(Hook.CUT_PRODUCT) if number else 0.0


class TimedOperators:
    """A cache of operator times: many passes share an operator object."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        # By id(); the operator is stored too, so that its id is not reused.
        self._known: dict[int, tuple[Operator, float]] = {}

    def seconds(self, operator: Operator) -> float:
        """Return the seconds of an operator."""
        timed = self._known.get(id(operator))
        if timed is None:
            timed = self._known[id(operator)] = operator, self._pace.operator_seconds(operator)
        return timed[1]


def operators_seconds(
    pace: Pace,
    work: PassWork,
    around: Hook,
    operator_seconds: Callable[[Operator], float] | None = None,
) -> float:
    """Return the seconds of a pass's operators, one after the other.

    Args:
        pace: The rates of the machine. If its communication does not overlap (CPU), the host's work
            around operators is added; a GPU's host runs concurrently.
        work: The pass.
        around: The kind of host work per operator.
        operator_seconds: Returns the seconds of an operator; by default the pace's.
    """
    operators = (item for item in work if isinstance(item, Operator))
    host = 0.0 if pace.overlaps else around_seconds(pace, work, around)
    return host + sum(map(operator_seconds or pace.operator_seconds, operators))


def around_seconds(pace: Pace, work: PassWork, around: Hook) -> float:
    """Return the host's seconds around a pass's operators; on a GPU, the time to launch them.

    Args:
        pace: The rates of the machine.
        work: The pass.
        around: The kind of host work per operator.
    """
    number = sum(item.times for item in work if isinstance(item, Operator))
    return number * pace.hook_seconds(around)
