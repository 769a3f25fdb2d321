"""What the job runs on: devices, their memory, and links by tier. Used by fit and legality."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`device_memory` in bytes; bandwidths in bytes per second; latencies in seconds.
    `host_memory` is one node's, which its devices share; None where nobody says it. `kind`: cpu or
    cuda; None where nobody says it."""

    name: str
    devices: int
    devices_per_node: int
    device_memory: int
    intra_node_bandwidth: float
    inter_node_bandwidth: float
    intra_node_latency: float = 5e-6
    inter_node_latency: float = 10e-6
    flops: float = 0.0
    host_memory: int | None = None
    kind: str | None = None
