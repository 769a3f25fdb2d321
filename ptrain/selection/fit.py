"""Whether a prediction fits: the largest peak against the device's memory, and what lies on the
host against the host's, where the cluster says how much that is."""

from __future__ import annotations

from dataclasses import dataclass

from ptrain.costs import Estimate
from ptrain.spec.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """`device_memory` None: the spec names no cluster, so there is nothing to compare with.
    `host_bytes`: offloaded states of all ranks of a node, `host_memory` what its host has.
    `is_known`: `peak_bytes` is a peak, and not only what is resident."""

    peak_bytes: int
    device_memory: int | None
    host_bytes: int = 0
    host_memory: int | None = None
    is_known: bool = True

    @property
    def short_bytes(self) -> int:
        """By how much it does not fit; 0 or less when it fits."""
        return self.peak_bytes - self.device_memory if self.device_memory else 0

    @property
    def host_short_bytes(self) -> int:
        """By how much the host has too little; 0 or less when that fits, or nobody says it."""
        return self.host_bytes - self.host_memory if self.host_memory else 0

    @property
    def fits(self) -> bool:
        return self.short_bytes <= 0 and self.host_short_bytes <= 0


def peak_bytes(estimate: Estimate) -> int:
    """The largest peak over phases and ranks; where no peak is known, the sum of what is resident
    on the fullest rank."""
    if estimate.peak:
        return max(row.device_bytes for row in estimate.peak)
    totals: dict[int, int] = {}
    for row in estimate.memory:
        totals[row.rank] = totals.get(row.rank, 0) + row.device_bytes
    return max(totals.values(), default=0)


def fit(spec: Spec, exact: Estimate) -> Fit:
    """The peak of `exact` and what rests on the host, against the memory of the spec's cluster."""
    cluster = spec.cluster
    if cluster is None:
        return Fit(
            peak_bytes=peak_bytes(exact), device_memory=None, is_known="peak" not in exact.undefined
        )
    return Fit(
        peak_bytes=peak_bytes(exact),
        device_memory=cluster.device_memory,
        host_bytes=host_bytes(exact, min(spec.world_size, cluster.devices_per_node)),
        host_memory=cluster.host_memory,
        is_known="peak" not in exact.undefined,
    )


def host_bytes(estimate: Estimate, ranks: int) -> int:
    """What rests on the host of a node of so many ranks, each taken for the fullest."""
    totals: dict[int, int] = {}
    for row in estimate.memory:
        totals[row.rank] = totals.get(row.rank, 0) + row.host_bytes
    return ranks * max(totals.values(), default=0)
