"""Proposition 1: tensor parallelism across a slow interconnect waits for its latency in every sum.

The paper says O(L · α). Here the collectives are those that a step really has, each a ring of
2 (N-1) hops for an all-reduce and N-1 for any other, every hop at the pace of the slowest link.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ptrain.algebra.layout import groups
from ptrain.costs import Collective, Phase, Traffic, busiest
from ptrain.spec.axis import Axis
from ptrain.spec.cluster import Cluster
from ptrain.spec.spec import Spec
from ptrain.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """What a step of one rank of `axis` sends through a link between `nodes` nodes: `calls`
    collectives of together `hops` hops, and `sent_bytes`, which in a ring is what each link
    carries."""

    axis: Axis
    nodes: int
    calls: int
    hops: int
    sent_bytes: int
    latency_seconds: float
    transfer_seconds: float


def crossing(spec: Spec, traffic: Iterable[Traffic]) -> Crossing | None:
    """Of tp, where its groups span nodes of the spec's cluster; `traffic` is the `exact`
    column's."""
    cluster, ranks = spec.cluster, spec.degree(Axis.TP)
    if cluster is None or ranks == 1:
        return None
    nodes = max(_num_nodes(group, cluster) for group in groups(spec, (Axis.TP,)))
    if nodes == 1:
        return None
    rows = _of_tp(traffic)
    hops = sum(row.calls * _hops(row.key.collective, ranks) for row in rows)
    sent = sum(row.sent_bytes for row in rows)
    return Crossing(
        axis=Axis.TP,
        nodes=nodes,
        calls=sum(row.calls for row in rows),
        hops=hops,
        sent_bytes=sent,
        latency_seconds=hops * cluster.inter_node_latency,
        transfer_seconds=sent / cluster.inter_node_bandwidth,
    )


def warnings(spec: Spec, traffic: Iterable[Traffic]) -> Iterator[str]:
    """A sentence about what `crossing` finds."""
    found, cluster = crossing(spec, traffic), spec.cluster
    if found is None or cluster is None:
        return
    yield (
        f"{found.axis} spans {found.nodes} nodes (Proposition 1): in a step its {found.calls} "
        f"collectives wait {found.latency_seconds:.4g} s for the link between them "
        f"({found.hops} hops of {cluster.inter_node_latency:.4g} s), and "
        f"{format_bytes(found.sent_bytes)} cross it, {found.transfer_seconds:.4g} s at "
        f"{format_bytes(cluster.inter_node_bandwidth)}/s; a divisor of the "
        f"{cluster.devices_per_node} devices of a node stays within one"
    )


def _num_nodes(ranks: Iterable[int], cluster: Cluster) -> int:
    return len({rank // cluster.devices_per_node for rank in ranks})


def _of_tp(traffic: Iterable[Traffic]) -> tuple[Traffic, ...]:
    """The steady rows of tp alone."""
    axes = (Axis.TP.value,)
    rows = (row for row in traffic if row.key.axes == axes and row.key.phase is not Phase.SETUP)
    return busiest(rows)


def _hops(collective: Collective, ranks: int) -> int:
    return (2 if collective is Collective.ALL_REDUCE else 1) * (ranks - 1)
