"""Whether a prediction fits the device: the largest peak against the device's memory."""

from __future__ import annotations

from dataclasses import dataclass

from ptrain.costs import Estimate
from ptrain.spec.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """`device_memory` None: the spec names no cluster, so there is nothing to compare with."""

    peak_bytes: int
    device_memory: int | None

    @property
    def short_bytes(self) -> int:
        """By how much it does not fit; 0 or less when it fits."""
        return self.peak_bytes - self.device_memory if self.device_memory else 0

    @property
    def fits(self) -> bool:
        return self.short_bytes <= 0


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
    """The peak of `exact` against the memory of the spec's cluster."""
    memory = spec.cluster.device_memory if spec.cluster else None
    return Fit(peak_bytes=peak_bytes(exact), device_memory=memory)
