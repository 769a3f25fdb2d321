"""Does a spec fit its devices, and if not, by how much not: the preflight."""

from __future__ import annotations

from dataclasses import dataclass

from ptrain.costs import Estimate
from ptrain.spec.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What the fullest rank needs against what a device has, in bytes. `is_peak` says whether
    `needed` is a peak or, where none is known, the sum of what stays resident."""

    needed: int
    available: int
    is_peak: bool

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    @property
    def missing(self) -> int:
        """Bytes by which it does not fit."""
        return max(0, self.needed - self.available)


def fit(estimate: Estimate, cluster: Cluster) -> Fit:
    """`estimate` on the devices of `cluster`."""
    return Fit(
        needed=needed_bytes(estimate),
        available=cluster.device_memory,
        is_peak=bool(estimate.peak),
    )


def needed_bytes(estimate: Estimate) -> int:
    """The largest peak of any rank and phase, or else the largest resident sum of any rank."""
    if estimate.peak:
        return max(row.device_bytes for row in estimate.peak)
    totals: dict[int, int] = {}
    for row in estimate.memory:
        totals[row.rank] = totals.get(row.rank, 0) + row.device_bytes
    return max(totals.values(), default=0)
