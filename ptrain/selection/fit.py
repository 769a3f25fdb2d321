"""The rule by which all commands decide if a prediction fits.

The largest peak plus the cluster's reserve must fit the device's memory, and the host bytes of a
node's ranks must fit the host's memory. The answer is yes, no, or unknown:

- The peak is at least the resident bytes, so states that are too large never fit. If they fit but
  no peak is known, the answer is unknown.
- If the peak depends on data, yes needs the upper bound to fit, and no needs the lower bound not to
  fit.
- If states are offloaded and the cluster does not state the host's memory, the answer is unknown.

A yes is tight if less than 5 % of the device's memory is left.
"""

from __future__ import annotations

from typing import NamedTuple

from ptrain.by_rank import largest
from ptrain.cost import Estimate, State
from ptrain.derivation.ghosts.wrapping import ranks_per_node
from ptrain.spec.spec import Spec
from ptrain.units import format_memory

_PASSING = (State.ACTIVATIONS, State.TRANSIENT)  # not allocated at every moment of a step
# A part of a device's memory. Predicted peaks leave out workspaces of unknown size and
# fragmentation, for which the cluster's reserve is a typical value and not a bound
# (`spec.cluster`).
TIGHT = 0.05
HOST_UNKNOWN = (
    "`cluster.host_memory` is missing, and a node's host holds offloaded states or full models",
    "Add it, for example `cluster.host_memory=2TB`.",
)


class Fit(NamedTuple):
    """The figures that decide if a spec fits, and the answer.

    Attributes:
        peak_bytes: Largest predicted peak of a rank; None if unknown for the spec's device.
        resident_bytes: Bytes that the fullest rank always holds.
        device_memory: Bytes of a device; None if the spec names no cluster.
        reserve_bytes: Part of the device memory that tensors cannot use.
        host_bytes: Offloaded states of all ranks of a node.
        shared_bytes: Device memory of a node's ranks, if it is the host's (a cluster of CPUs).
        startup_host_bytes: Most bytes of a node's ranks on the host before the first step.
        builds_whole: True if each rank builds the full model on the host.
        host_memory: Bytes of the host; None if the cluster does not state it.
        why: The reason why the peak is unknown, or the data that it depends on; else empty.
        lower_bytes: Lower bound of a peak that depends on data; None if it does not.
    """

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
        """The peak, or its lower bound."""
        if self.lower_bytes is not None:
            return self.lower_bytes
        return self.resident_bytes if self.peak_bytes is None else self.peak_bytes

    @property
    def usable_memory(self) -> int | None:
        """The device memory that a peak may fill; None without a cluster."""
        return None if self.device_memory is None else self.device_memory - self.reserve_bytes

    @property
    def spare_bytes(self) -> int:
        """The usable memory minus the largest peak; negative if it may not fit."""
        return (self.usable_memory or 0) - (self.peak_bytes or 0)

    @property
    def short_bytes(self) -> int:
        """The missing device bytes, at least; 0 or less if it fits or that is unknown."""
        return 0 if self.usable_memory is None else self.least_bytes - self.usable_memory

    @property
    def host_needed_bytes(self) -> int:
        """The most bytes of a node's ranks on its host, at start-up or in a step."""
        return max(self.host_bytes + self.shared_bytes, self.startup_host_bytes)

    @property
    def host_short_bytes(self) -> int:
        """The missing host bytes; 0 or less if they fit or the host memory is unknown."""
        return 0 if self.host_memory is None else self.host_needed_bytes - self.host_memory

    @property
    def is_host_unknown(self) -> bool:
        """True if a host of unknown memory must hold offloaded states or full models."""
        is_stated = self.device_memory is None or self.host_memory is not None
        return (self.host_bytes > 0 or self.builds_whole) and not is_stated

    @property
    def is_open(self) -> bool:
        """True if the answer depends on data."""
        has_bounds = self.lower_bytes is not None and self.device_memory is not None
        return has_bounds and self.fits is None and self.spare_bytes < 0

    @property
    def is_tight(self) -> bool:
        """True if it fits and less than 5 % of the device's memory is left."""
        return self.fits is True and self.spare_bytes < TIGHT * (self.device_memory or 0)

    def leaves(self, margin: int) -> bool:
        """Return True if it fits and at least `margin` bytes of the device stay free."""
        return self.fits is True and self.spare_bytes >= margin

    @property
    def unknown(self) -> str:
        """The reason why the peak or the answer is unknown; else empty."""
        if self.peak_bytes is None or self.is_open:
            return self.why
        is_unknown = self.fits is None and self.is_host_unknown
        return HOST_UNKNOWN[0] if is_unknown else ""

    @property
    def fits_device(self) -> bool | None:
        """True if the peak fits a device, False if not, None if unknown.

        Unknown without a cluster or a peak, or if data decides.
        """
        if self.short_bytes > 0:
            return False
        if self.device_memory is None or self.peak_bytes is None or self.spare_bytes < 0:
            return None
        return True

    @property
    def fits(self) -> bool | None:
        """True if devices and hosts can hold it, False if not, None if unknown."""
        if self.host_short_bytes > 0:
            return False
        return None if self.fits_device and self.is_host_unknown else self.fits_device


def peak_text(memory_fit: Fit) -> str:
    """Return the peak, its bounds if it depends on data, or its lower bound: `58.5 MiB`, `1.2 MiB …
    3.4 MiB`."""
    if memory_fit.lower_bytes is None or memory_fit.peak_bytes is None:
        return format_memory(memory_fit.least_bytes)
    return f"{format_memory(memory_fit.lower_bytes)} … {format_memory(memory_fit.peak_bytes)}"


def room_text(memory_fit: Fit) -> str:
    """Return reserve and device memory, to follow a peak: ` + reserve 5 GiB of 79 GiB`.

    Empty without a cluster.
    """
    if memory_fit.device_memory is None:
        return ""
    reserve = memory_fit.reserve_bytes
    return (
        f" + reserve {format_memory(reserve)}" * bool(reserve)
        + f" of {format_memory(memory_fit.device_memory)}"
    )


def usable_text(device_memory: int, reserve: int) -> str:
    """Return one line that states the memory that a peak may fill."""
    return (
        f"usable memory per device: {format_memory(device_memory - reserve)} "
        f"({format_memory(device_memory)} less a reserve of {format_memory(reserve)})"
    )


def host_text(memory_fit: Fit) -> str:
    """Return a node's host bytes and host memory; "" if nothing is offloaded and the host
    suffices."""
    if not (memory_fit.host_bytes or memory_fit.host_short_bytes > 0):
        return ""
    memory, needed = memory_fit.host_memory, format_memory(memory_fit.host_needed_bytes)
    if memory is None:
        return f"{needed} on a node's host (memory unknown)"
    return f"{needed} of {format_memory(memory)} on a node's host"


def resident_bytes(estimate: Estimate) -> int:
    """Return the bytes that the fullest rank's device always holds, a lower bound of the peak."""
    return largest(estimate.memory, lambda row: 0 if row.state in _PASSING else row.device_bytes)


def fit(
    spec: Spec, exact: Estimate, *, takes_unclaimed: bool = False, takes_assumed: bool = False
) -> Fit:
    """Compare the peak and the host bytes of an estimate with the memory of the spec's cluster.

    Args:
        spec: The spec, whose cluster has the memory.
        exact: Its estimate.
        takes_unclaimed: Use a peak that no device has confirmed.
        takes_assumed: Use a peak that holds if tokens are routed as the spec states.
    """
    cluster = spec.cluster
    unclaimed = "" if takes_unclaimed else exact.unclaimed.get("peak", "")
    assumed = "" if takes_assumed else exact.assumed.get("peak", "")
    why = exact.undefined.get("peak") or assumed or unclaimed
    peak, lower = (None, None) if why else (exact.peak_bytes(), exact.lower_peak_bytes())
    resident = resident_bytes(exact)
    ranks = ranks_per_node(spec)
    least = resident if peak is None else peak if lower is None else lower
    hosted = largest(  # offloaded parameters are on the host at start-up too
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
    """Return the host bytes of a node with `ranks` ranks, each like the fullest."""
    return ranks * largest(estimate.memory, lambda row: row.host_bytes)
