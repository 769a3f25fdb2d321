"""The pace of a machine that nobody measured: operations over the operations per second that its
cluster declares, bytes over its declared bandwidths. No prediction of time: what it gives orders
candidates by what they compute and send, where nothing better is known."""

from __future__ import annotations

from ptrain.costs import Collective
from ptrain.facts.operators import Operator
from ptrain.rates.links import bus_factor
from ptrain.spec.cluster import Cluster
from ptrain.spec.precision import Layout
from ptrain.spec.rates import Hook


class NominalPace:
    """By what a cluster's file says of its devices and links."""

    overlaps = False

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def operator_seconds(self, operator: Operator) -> float:
        flops = self.cluster.flops
        return operator.times * operator.flops / flops if flops else 0.0

    def collective_seconds(
        self, collective: Collective, *, ranks: int, nodes: int, payload: int
    ) -> float:
        cluster = self.cluster
        bandwidth = cluster.inter_node_bandwidth if nodes > 1 else cluster.intra_node_bandwidth
        return payload * bus_factor(collective, ranks) / bandwidth

    def late_seconds(self, computed: float) -> float:
        return 0.0

    def copy_seconds(self, copy: Collective, size: int) -> float:
        return size / self.cluster.intra_node_bandwidth

    def update_seconds(
        self, optimizer: str, layout: Layout, *, elements: int, tensors: int
    ) -> float:
        return 0.0

    def clip_seconds(self, layout: Layout, *, elements: int, tensors: int) -> float:
        return 0.0

    def hook_seconds(self, hook: Hook) -> float:
        return 0.0
