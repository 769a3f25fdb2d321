"""Proposition 1: the latency of tensor parallelism across a slow interconnect.

The paper gives O(L · α). Here the collectives are those of the step, each a ring: 2 (N-1) hops for
an all-reduce, N-1 for any other collective, one for a send. Every hop has the latency of the
slowest link. Overlap with compute is not considered.

The module also computes how many nodes of a cluster a group of ranks spans.

It also has the bytes that a backend sends for the bytes that the ring model predicts (Theorem 2).
The ring model gives the bytes that a collective must move. A backend may send more. The factors of
gloo follow from its algorithms (torch 2.13). It executes a reduce-scatter as an all-reduce, which
sends 2 (N - 1) / N of the tensor instead of (N - 1) / N. An exception is the reduce-scatter of
gradients between two ranks, which exchange halves (`runtime.comm`). All other calls send the bytes
of the model. A broadcast is a tree in which ranks send different amounts, so figures are means over
the ranks. The mean of a tree, (N - 1) / N of the tensor, equals the model's.

gloo's headers, 48 bytes for each message, are not predicted. They are visible for small tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import product
from math import log2
from typing import NamedTuple

from ptrain.cost import Collective, Estimate, Phase, State, Traffic, busiest
from ptrain.rates.pace import UnknownRate
from ptrain.spec.cluster import Cluster
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec, rank_groups
from ptrain.units import format_bytes, with_noun

# The fraction of the host's memory bandwidth that an update reaches: DeepSpeed's CPU-Adam takes
# 0.22 s for a billion elements of 28 bytes on a DGX-2 with 256 GB/s (Ren et al. 2021, ZeRO-Offload,
# table 4, not re-checked).
_HOST_SHARE = 0.5

Degrees = tuple[tuple[str, int], ...]  # of the mesh, outermost axis first


def host_seconds(cluster: Cluster | None, size: int, ranks: int) -> float:
    """Return the seconds for each of `ranks` ranks of a node to read and write `size` bytes of host
    memory.

    Args:
        cluster: The cluster, or None if the spec has none.
        size: Bytes that each rank reads and writes, in total.
        ranks: Ranks on the node, which share its memory bandwidth.

    Raises:
        UnknownRate: The bandwidth of the host's memory is unknown.
    """
    if cluster is None or not cluster.host_bandwidth:
        raise UnknownRate("the host computes the update, and the cluster has no `host_bandwidth`")
    # All ranks of a node update at the same time and share the bandwidth of its memory.
    return size * ranks / (_HOST_SHARE * cluster.host_bandwidth)


class Network:
    """The placement of a spec's `world` ranks on `nodes` nodes."""

    def __init__(self, spec: Spec) -> None:
        self._degrees = tuple((factor.axis.value, factor.degree) for factor in spec.factors)
        self.cluster = spec.cluster
        self._per_node = spec.cluster.devices_per_node if spec.cluster else spec.world_size
        self.world = spec.world_size
        self.nodes = -(-self.world // self._per_node)
        self._names: dict[Sequence[Axis], tuple[str, ...]] = {}

    @property
    def interference(self) -> float:
        """The fraction by which compute is slower while a collective runs."""
        return self.cluster.slowdown_beside_collectives if self.cluster else 0.0

    @property
    def straggler_share(self) -> float:
        """The fraction by which this number of nodes makes a step longer."""
        per_doubling = self.cluster.slowdown_per_doubling if self.cluster else 0.0
        # The default comes from published jobs on up to 64 nodes (`spec.cluster`). That the delay
        # grows with the logarithm of the nodes is assumed.
        return per_doubling * log2(self.nodes)

    def host_seconds(self, size: int) -> float:
        """Return the seconds for one rank to read and write `size` bytes of host memory, shared
        with the other ranks of its node.

        Raises:
            UnknownRate: The bandwidth of the host's memory is unknown.
        """
        return host_seconds(self.cluster, size, min(self.world, self._per_node))

    def axis_names(self, axes: Sequence[Axis]) -> tuple[str, ...]:
        """Return the names of axes, in the order of the mesh."""
        if (key := tuple(axes)) not in self._names:
            self._names[key] = tuple(name for name, _ in self._degrees if name in key)
        return self._names[key]

    def group(self, axes: tuple[str, ...], neighbours: int | None = None) -> tuple[int, int]:
        """Return the ranks and the nodes of a group along `axes`, or of `neighbours` consecutive
        ranks of it.

        The number of nodes is the maximum over all such groups.

        Args:
            axes: Names of axes, in the order of the mesh.
            neighbours: Number of consecutive ranks. None selects the full group.

        Returns:
            The number of ranks and the number of nodes that they span.
        """
        members, _ = _group_ranks(self._degrees, axes)
        number = neighbours or len(members)
        # Neighbours are groups of a fixed size that start at multiples of it, not at every rank.
        return number, self._nodes(axes, tuple(range(0, len(members), number)), number)

    def pair(self, axis: Axis) -> int:
        """Return 2 if any two consecutive ranks along an axis are on different nodes, else 1."""
        axes = (axis.value,)
        members, _ = _group_ranks(self._degrees, axes)
        return self._nodes(axes, tuple(range(len(members) - 1)), 2)

    def ends(self, axis: Axis) -> int:
        """Return the number of nodes, 1 or 2, of the first and the last rank along an axis."""
        members, others = _group_ranks(self._degrees, (axis.value,))
        last = members[-1]
        return max(
            len({rank // self._per_node, (rank + last) // self._per_node}) for rank in others
        )

    def _nodes(self, axes: tuple[str, ...], starts: tuple[int, ...], number: int) -> int:
        return _nodes(self._degrees, axes, self._per_node, starts, number)


@lru_cache(maxsize=256)  # a search has many candidates on few meshes
def _group_ranks(degrees: Degrees, axes: tuple[str, ...]) -> tuple[list[int], list[int]]:
    """Return the ranks of the first group along `axes`, and the first rank of each group."""
    members, others = [0], [0]
    stride = 1
    for name, degree in reversed(degrees):
        steps = [stride * place for place in range(degree)]
        if name in axes:
            members = [high + low for high, low in product(steps, members)]
        else:
            others = [high + low for high, low in product(steps, others)]
        stride *= degree
    return members, others


@lru_cache(maxsize=256)
def _nodes(
    degrees: Degrees, axes: tuple[str, ...], per_node: int, starts: tuple[int, ...], number: int
) -> int:
    """Return the maximum number of nodes of `number` consecutive ranks of a group, from any of
    `starts`."""
    members, others = _group_ranks(degrees, axes)
    return max(
        len({(first + rank) // per_node for rank in members[start : start + number]})
        for start in starts
        for first in others
    )


_FEW_RANKS = 8  # a message lists at most this number of ranks


class Link(NamedTuple):
    """The traffic of one rank along an axis in a step, over the slowest link of its group.

    Attributes:
        axis: The axis.
        nodes: Nodes that a group spans. The slowest link is between nodes if there are several.
        calls: Collectives.
        hops: Hops of all collectives.
        sent_bytes: Bytes that each link of a ring carries.
        latency_seconds: Latency of all hops.
        transfer_seconds: Seconds to transfer the bytes.
    """

    axis: Axis
    nodes: int
    calls: int
    hops: int
    sent_bytes: int
    latency_seconds: float
    transfer_seconds: float


def axis_link(spec: Spec, traffic: Iterable[Traffic], axis: Axis) -> Link | None:
    """Return the link of an axis in the `exact` column's traffic.

    Args:
        spec: The spec. Its cluster gives the latency and the bandwidth.
        traffic: Rows of the `exact` column. Only calls over `axis` alone count.
        axis: The axis of the mesh.

    Returns:
        Calls, hops and bytes of one step, and their seconds without overlap. None without a
        cluster, or if the axis has one rank.
    """
    cluster, ranks = spec.cluster, spec.degree(axis)
    if cluster is None or ranks == 1:
        return None
    _, nodes = Network(spec).group((axis.value,))
    rows = _rows_over(traffic, axis)
    hops = sum(row.calls * _count_hops(row.key.collective, ranks) for row in rows)
    sent = sum(row.sent_bytes for row in rows)
    latency, bandwidth = cluster.intra_node_latency, cluster.intra_node_bandwidth
    if nodes > 1:
        latency, bandwidth = cluster.inter_node_latency, cluster.inter_node_bandwidth
    return Link(
        axis=axis,
        nodes=nodes,
        calls=sum(row.calls for row in rows),
        hops=hops,
        sent_bytes=sent,
        latency_seconds=hops * latency,
        transfer_seconds=sent / bandwidth,
    )


def tp_link_across_nodes(spec: Spec, traffic: Iterable[Traffic]) -> Link | None:
    """Return the link of tp if its groups span nodes of the spec's cluster, else None."""
    tp_link = axis_link(spec, traffic, Axis.TP)
    return tp_link if tp_link and tp_link.nodes > 1 else None


def placement_warnings(spec: Spec, traffic: Iterable[Traffic]) -> Iterator[str]:
    """Yield a warning if tp is not the innermost axis, and one if its groups span nodes."""
    rows = tuple(traffic)
    yield from _warn_scattered(spec, rows)
    tp_link, cluster = tp_link_across_nodes(spec, rows), spec.cluster
    if tp_link is None or cluster is None:
        return
    yield (
        f"{tp_link.axis} spans {tp_link.nodes} nodes: per step, its {tp_link.calls} "
        f"collectives wait {tp_link.latency_seconds:.4g} s for the latency between nodes "
        f"({tp_link.hops} hops of {cluster.inter_node_latency:.4g} s) and send "
        f"{format_bytes(tp_link.sent_bytes)} between nodes, {tp_link.transfer_seconds:.4g} s "
        f"at {format_bytes(cluster.inter_node_bandwidth)}/s; a divisor of the "
        f"{cluster.devices_per_node} devices per node stays within a node [Proposition 1]"
    )


def _warn_scattered(spec: Spec, traffic: Sequence[Traffic]) -> Iterator[str]:
    """Yield a warning about the cost of a tp axis whose groups are not consecutive ranks.

    The mesh lists the outermost axis first. The distance between two ranks of a group is the number
    of ranks of the axes inside of it.
    """
    names = [factor.axis for factor in spec.factors if factor.degree > 1]
    if Axis.TP not in names or names[-1] is Axis.TP:
        return
    rows, first = _rows_over(traffic, Axis.TP), next(iter(rank_groups(spec, (Axis.TP,))))
    last = sorted(spec.factors, key=lambda factor: factor.axis is Axis.TP)
    mesh = ", ".join(f"{factor.axis}: {factor.degree}" for factor in last)
    text = (
        f"tp is not innermost: ranks {_ranks_text(first)} share operators, but Theorem 6.1 needs "
        f"consecutive ranks; per step, {sum(row.calls for row in rows)} tp collectives send "
        f"{format_bytes(sum(row.sent_bytes for row in rows))} between ranks. With tp last, "
        f"`mesh: {{{mesh}}}`, these ranks are neighbours"
    )
    here = axis_link(spec, traffic, Axis.TP)
    there = axis_link(replace(spec, factors=tuple(last)), traffic, Axis.TP)
    if here and there and here.nodes > there.nodes:
        text += (
            f": a group then spans {with_noun(there.nodes, 'node')} instead of {here.nodes} and "
            f"waits {_link_seconds(there):.4g} s instead of {_link_seconds(here):.4g} s"
        )
    yield text


def _link_seconds(link: Link) -> float:
    return link.latency_seconds + link.transfer_seconds


def _ranks_text(ranks: Sequence[int]) -> str:
    shown = ranks if len(ranks) <= _FEW_RANKS else [*ranks[:2], "…", ranks[-1]]
    return " ".join(map(str, shown))


def _rows_over(traffic: Iterable[Traffic], axis: Axis) -> tuple[Traffic, ...]:
    """Return the traffic rows of one axis alone, without setup."""
    axes = (axis.value,)
    rows = (row for row in traffic if row.key.axes == axes and row.key.phase is not Phase.SETUP)
    return busiest(rows)


def _count_hops(collective: Collective, ranks: int) -> int:
    match collective:
        case Collective.SEND:
            return 1
        case Collective.RECV:  # counted as a send
            return 0
        case Collective.ALL_REDUCE:
            return 2 * (ranks - 1)
        case _:
            return ranks - 1


# Ratio of the bytes that gloo sends to the bytes of the ring model. The default is 1.
# ProcessGroupGloo.cpp runs a reduce-scatter as an all-reduce, of which each rank keeps its part.
GLOO = {Collective.REDUCE_SCATTER: Fraction(2)}
# The headers, 48 bytes for each message, are less than 0.1 % of messages of 1 MiB.
TOLERANCE = 0.001  # relative, for steps whose tensors are larger than 1 MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class WireRow:
    """The bytes that a rank sends over `axes` in a steady step, as the mean over the ranks."""

    axes: tuple[str, ...]
    predicted_bytes: int
    measured_bytes: int
    factor: str


def wire_rows(exact: Estimate, measured: Estimate) -> tuple[WireRow, ...]:
    """Return a row for each set of axes that was predicted or measured. Empty without a
    measurement."""
    if not measured.wire:
        return ()
    known = [row.axes for row in measured.wire] + [
        row.key.axes for row in _steady_rows(exact.traffic)
    ]
    return tuple(
        WireRow(
            axes=axes,
            predicted_bytes=predicted_bytes(exact, axes),
            measured_bytes=round(
                sum(row.sent_bytes for row in measured.wire if row.axes == axes)
                / measured.world_size
            ),
            factor=_factor(exact, axes),
        )
        for axes in dict.fromkeys(known)
    )


def predicted_bytes(exact: Estimate, axes: tuple[str, ...]) -> int:
    """Return the bytes that gloo sends over `axes`: the mean over ranks, rounded up.

    Args:
        exact: The `exact` column.
        axes: Names of axes. Only calls over exactly these axes count.
    """
    kinds = exact.by_rank()
    rows = [row for rows in kinds for row in _steady_rows(rows) if row.key.axes == axes]
    total = sum(row.sent_bytes * gloo_factor(row) for row in rows) / Fraction(len(kinds))
    return -int(-total // 1)


def gloo_factor(row: Traffic) -> Fraction:
    """Return the bytes that gloo sends per byte of the ring model.

    A substitute, such as an exchange in place of a reduce-scatter, sends the bytes of the model.
    """
    # A row has no number of ranks. Only two ranks send half of the tensor or less, each call
    # rounded up.
    is_pair = 2 * row.sent_bytes <= row.payload_bytes + row.calls  # (N - 1) / N, rounded up
    if row.key.via or (is_pair and row.key.state is State.GRADIENTS):
        return Fraction(1)
    return GLOO.get(row.key.collective, Fraction(1))


def _steady_rows(rows: Iterable[Traffic]) -> Iterator[Traffic]:
    """Yield the calls between ranks of every step. Copies between tiers have no axes."""
    return (row for row in rows if row.key.axes and row.key.phase is not Phase.SETUP)


def _factor(exact: Estimate, axes: tuple[str, ...]) -> str:
    """Return a text like `gloo: reduce_scatter 2, all others 1; mean over ranks`."""
    rows = [row for row in _steady_rows(exact.traffic) if row.key.axes == axes]
    more = {str(row.key.collective): gloo_factor(row) for row in rows if gloo_factor(row) != 1}
    factors = [f"{name} {float(value):g}" for name, value in sorted(more.items())]
    trees = [tree for tree in rows if tree.key.collective is Collective.BROADCAST]
    factors += ["broadcast 1 (a tree: ranks differ)"] * bool(trees)
    others = "all others 1" if factors else "1"
    return f"gloo: {', '.join([*factors, others])}; mean over ranks"
