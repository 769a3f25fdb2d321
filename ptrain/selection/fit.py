"""Whether a prediction fits: the largest peak plus the cluster's reserve against the device's
memory, and the bytes of a node's ranks on the host against the host's memory. All commands use this
rule.

There are three answers. The peak is at least what is resident, so that states which are too large
do not fit whatever the peak is; without a peak nothing else is known, and another command tells. Of
a peak that depends on data the upper bound must fit, and the lower one must not: else it is
unknown. It is unknown too if states are offloaded to a host whose memory the cluster does not
state. An answer of yes is tight if less than 5 % of the device's memory is left.
"""

from __future__ import annotations

from typing import NamedTuple

from ptrain.by_rank import largest
from ptrain.cost import Estimate, State
from ptrain.derivation.memory import ranks_per_node
from ptrain.spec.spec import Spec
from ptrain.units import format_memory

_PASSING = (State.ACTIVATIONS, State.TRANSIENT)  # not there at every moment of a step
TIGHT = 0.05  # of a device's memory: another sequence length or driver takes as much
HOST_UNKNOWN = (
    "`cluster.host_memory` is missing, and a node's host holds offloaded states or full models",
    "Add it, for example `cluster.host_memory=2TB`.",
)


class Fit(NamedTuple):
    """The figures that decide whether a spec fits, and the answer.

    `peak_bytes` None: no peak is known for the device that runs the spec, and `why` gives the
    reason (else it is empty). `lower_bytes`: the peak depends on data; it is at least this and at
    most `peak_bytes`, and `why` names the data. `resident_bytes`: the bytes that the fullest rank
    always holds. `device_memory` None: the spec names no cluster, so there is nothing to compare
    with. `reserve_bytes`: the part of it that tensors cannot use. `host_bytes`: offloaded states of
    all ranks of a node; `shared_bytes`: their device memory, if that is the host's (a cluster of
    CPUs); `startup_host_bytes`: the most that all ranks of a node hold on the host before the first
    step. `host_memory` None: the cluster does not state it."""

    peak_bytes: int | None
    resident_bytes: int
    device_memory: int | None
    reserve_bytes: int = 0
    host_bytes: int = 0
    shared_bytes: int = 0
    startup_host_bytes: int = 0
    builds_whole: bool = False
    host_memory: int | None = None
    why: str = ""
    lower_bytes: int | None = None

    @property
    def least_bytes(self) -> int:
        """The peak, or what it is at least."""
        if self.lower_bytes is not None:
            return self.lower_bytes
        return self.resident_bytes if self.peak_bytes is None else self.peak_bytes

    @property
    def usable_memory(self) -> int | None:
        """The device memory that a peak may fill."""
        return None if self.device_memory is None else self.device_memory - self.reserve_bytes

    @property
    def spare_bytes(self) -> int:
        """The usable memory beyond the largest peak; less than 0 where that may not fit."""
        return (self.usable_memory or 0) - (self.peak_bytes or 0)

    @property
    def short_bytes(self) -> int:
        """By how much it does not fit, at least; 0 or less if it fits or that is unknown."""
        return 0 if self.usable_memory is None else self.least_bytes - self.usable_memory

    @property
    def host_needed_bytes(self) -> int:
        """The most that all ranks of a node hold on its host, at start-up or in a step."""
        return max(self.host_bytes + self.shared_bytes, self.startup_host_bytes)

    @property
    def host_short_bytes(self) -> int:
        """By how much the host has too little; 0 or less if that fits or is unknown."""
        return 0 if self.host_memory is None else self.host_needed_bytes - self.host_memory

    @property
    def is_host_unknown(self) -> bool:
        """Return True if states are offloaded to a host of unknown memory, or each rank builds the
        full model there."""
        is_stated = self.device_memory is None or self.host_memory is not None
        return (self.host_bytes > 0 or self.builds_whole) and not is_stated

    @property
    def is_open(self) -> bool:
        """Return True if data decides whether it fits."""
        has_bounds = self.lower_bytes is not None and self.device_memory is not None
        return has_bounds and self.fits is None and self.spare_bytes < 0

    @property
    def is_tight(self) -> bool:
        """Return True if it fits and less than 5 % of the device's memory is left."""
        return self.fits is True and self.spare_bytes < TIGHT * (self.device_memory or 0)

    def leaves(self, margin: int) -> bool:
        """Return True if it fits and at least so many bytes of the device stay free."""
        return self.fits is True and self.spare_bytes >= margin

    @property
    def unknown(self) -> str:
        """The reason why the peak, or whether it fits, is unknown; else empty."""
        if self.peak_bytes is None or self.is_open:
            return self.why
        is_unknown = self.fits is None and self.is_host_unknown
        return HOST_UNKNOWN[0] if is_unknown else ""

    @property
    def fits_device(self) -> bool | None:
        """Whether the peak fits a device; None: unknown, without a cluster or a peak, or where data
        decides."""
        if self.short_bytes > 0:
            return False
        if self.device_memory is None or self.peak_bytes is None or self.spare_bytes < 0:
            return None
        return True

    @property
    def fits(self) -> bool | None:
        """Whether devices and hosts hold it; None: unknown, as for a device, or if the memory of
        the host is."""
        if self.host_short_bytes > 0:
            return False
        return None if self.fits_device and self.is_host_unknown else self.fits_device


def peak_text(memory_fit: Fit) -> str:
    """Return the peak, its bounds where it depends on data, or what it is at least: `58.5 MiB`,
    `1.2 MiB … 3.4 MiB`."""
    if memory_fit.lower_bytes is None or memory_fit.peak_bytes is None:
        return format_memory(memory_fit.least_bytes)
    return f"{format_memory(memory_fit.lower_bytes)} … {format_memory(memory_fit.peak_bytes)}"


def room_text(memory_fit: Fit) -> str:
    """Return the reserve and the device memory, to follow a peak: ` + reserve 5 GiB of 79 GiB`;
    empty without a cluster."""
    if memory_fit.device_memory is None:
        return ""
    reserve = memory_fit.reserve_bytes
    return (
        f" + reserve {format_memory(reserve)}" * bool(reserve)
        + f" of {format_memory(memory_fit.device_memory)}"
    )


def usable_text(device_memory: int, reserve: int) -> str:
    """Return one line on the memory that a peak may fill."""
    return (
        f"usable memory per device: {format_memory(device_memory - reserve)} "
        f"({format_memory(device_memory)} less a reserve of {format_memory(reserve)})"
    )


def host_text(memory_fit: Fit) -> str:
    """Return the host bytes of a node and its host memory, if states are offloaded or the host is
    too small; else empty."""
    if not (memory_fit.host_bytes or memory_fit.host_short_bytes > 0):
        return ""
    memory, needed = memory_fit.host_memory, format_memory(memory_fit.host_needed_bytes)
    if memory is None:
        return f"{needed} on a node's host (memory unknown)"
    return f"{needed} of {format_memory(memory)} on a node's host"


def resident_bytes(estimate: Estimate) -> int:
    """Return the device bytes that are resident on the fullest rank: the peak is at least this."""
    return largest(estimate.memory, lambda row: 0 if row.state in _PASSING else row.device_bytes)


def fit(
    spec: Spec, exact: Estimate, *, takes_unclaimed: bool = False, takes_assumed: bool = False
) -> Fit:
    """Compare the peak and the host bytes of an estimate with the memory of the spec's cluster.

    Args:
        takes_unclaimed: use a peak that no device has confirmed.
        takes_assumed: use a peak that holds if tokens are routed as the spec states.
    """
    cluster = spec.cluster
    unclaimed = "" if takes_unclaimed else exact.unclaimed.get("peak", "")
    assumed = "" if takes_assumed else exact.assumed.get("peak", "")
    why = exact.undefined.get("peak") or assumed or unclaimed
    peak, lower = (None, None) if why else (exact.peak_bytes(), exact.lower_peak_bytes())
    resident = resident_bytes(exact)
    ranks = ranks_per_node(spec)
    least = resident if peak is None else peak if lower is None else lower
    hosted = largest(  # parameters that are offloaded are there at start-up
        exact.memory, lambda row: row.host_bytes if row.state is State.PARAMETERS else 0
    )
    return Fit(
        peak_bytes=peak,
        resident_bytes=resident,
        device_memory=cluster.device_memory if cluster else None,
        reserve_bytes=cluster.reserved_bytes if cluster else 0,
        host_bytes=host_bytes(exact, ranks),
        shared_bytes=ranks * (least + cluster.reserved_bytes)
        if cluster and cluster.kind == "cpu" and cluster.host_memory
        else 0,
        builds_whole=exact.builds_whole,
        startup_host_bytes=ranks * (exact.startup_bytes + hosted),
        host_memory=cluster.host_memory if cluster else None,
        why=why or exact.by_data.get("peak", ""),
        lower_bytes=None if lower == peak else lower,
    )


def host_bytes(estimate: Estimate, ranks: int) -> int:
    """Return the bytes that rest on the host of a node of so many ranks, each like the fullest."""
    return ranks * largest(estimate.memory, lambda row: row.host_bytes)
