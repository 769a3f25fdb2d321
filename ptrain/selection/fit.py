"""Whether a prediction fits: the largest peak against the device's memory, and what lies on the
host against the host's, where the cluster says how much that is.

There are three answers. The peak is at least what is resident, so that states which are too large
do not fit whatever the peak is; without a peak nothing else is known, and another command tells. Of
a peak that depends on data the upper bound must fit, and the lower one must not: else it is
unknown.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ptrain.by_rank import largest
from ptrain.costs import Estimate, Footprint, State
from ptrain.spec.axis import Axis
from ptrain.spec.model import Attention, ExternalModel, ModelShape
from ptrain.spec.spec import Spec
from ptrain.units import format_bytes

_PASSING = (State.ACTIVATIONS, State.TRANSIENT)  # not there at every moment of a step
_ON_CUDA = "device=cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """`peak_bytes` None: no peak is known for the device that runs the spec, and `why` says why not
    (else it is empty). `lower_bytes`: the peak depends on data; it is at least this, `peak_bytes`
    at most, and `why` says on what. `resident_bytes`: what the fullest rank always holds.
    `device_memory` None: the spec names no cluster, so there is nothing to compare with.
    `host_bytes`: offloaded states of all ranks of a node, `host_memory` what its host has."""

    peak_bytes: int | None
    resident_bytes: int
    device_memory: int | None
    host_bytes: int = 0
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
    def spare_bytes(self) -> int:
        """What the device has beyond the largest peak; less than 0 where that may not fit."""
        return (self.device_memory or 0) - (self.peak_bytes or 0)

    @property
    def short_bytes(self) -> int:
        """By how much it does not fit, at least; 0 or less when it fits or nobody knows."""
        return self.least_bytes - self.device_memory if self.device_memory else 0

    @property
    def host_short_bytes(self) -> int:
        """By how much the host has too little; 0 or less when that fits, or nobody says it."""
        return self.host_bytes - self.host_memory if self.host_memory else 0

    @property
    def is_open(self) -> bool:
        """Whether data decides if it fits."""
        return self.lower_bytes is not None and self.device_memory is not None and self.fits is None

    @property
    def unknown(self) -> str:
        """Why nobody knows the peak, or whether it fits; else empty."""
        return self.why if self.peak_bytes is None or self.is_open else ""

    @property
    def fits(self) -> bool | None:
        """None: unknown, without a cluster or without a peak, or where data decides."""
        if self.short_bytes > 0 or self.host_short_bytes > 0:
            return False
        if self.device_memory is None or self.peak_bytes is None or self.spare_bytes < 0:
            return None
        return True


def peak_text(memory_fit: Fit) -> str:
    """Return the peak, its bounds where it depends on data, or what it is at least: `61.3 MB`, `1.2
    MB … 3.4 MB`."""
    if memory_fit.lower_bytes is None or memory_fit.peak_bytes is None:
        return format_bytes(memory_fit.least_bytes)
    return f"{format_bytes(memory_fit.lower_bytes)} … {format_bytes(memory_fit.peak_bytes)}"


def resident_bytes(estimate: Estimate) -> int:
    """Return the device bytes that are resident on the fullest rank: the peak is at least this."""

    def resident(row: Footprint) -> int:
        return 0 if row.state in _PASSING else row.device_bytes

    return largest(estimate.memory, resident)


def fit(spec: Spec, exact: Estimate, *, takes_unclaimed: bool = False) -> Fit:
    """The peak of `exact` and what rests on the host, against the memory of the spec's cluster.
    `takes_unclaimed`: the peak stands for one that nobody has confirmed."""
    cluster = spec.cluster
    unclaimed = "" if takes_unclaimed else exact.unclaimed.get("peak", "")
    why = exact.undefined.get("peak") or exact.assumed.get("peak") or unclaimed
    peak, lower = (None, None) if why else (exact.peak_bytes(), exact.lower_peak_bytes())
    nodes_ranks = min(spec.world_size, cluster.devices_per_node) if cluster else 0
    return Fit(
        peak_bytes=peak,
        resident_bytes=resident_bytes(exact),
        device_memory=cluster.device_memory if cluster else None,
        host_bytes=host_bytes(exact, nodes_ranks),
        host_memory=cluster.host_memory if cluster else None,
        why=why or exact.by_data.get("peak", ""),
        lower_bytes=None if lower == peak else lower,
    )


def host_bytes(estimate: Estimate, ranks: int) -> int:
    """Return the bytes that rest on the host of a node of so many ranks, each like the fullest."""
    return ranks * largest(estimate.memory, lambda row: row.host_bytes)


def telling(
    spec: Spec, exact: Estimate, words: Sequence[str], *, allow_import: bool = False
) -> str:
    """The shell line that tells the peak where `exact` does not. `words` are those that load the
    spec: its name or file, and overrides."""
    on_gpu = needs_gpu(spec, exact)
    is_on_cuda = spec.device == "cuda" or _ON_CUDA in words
    overrides = [_ON_CUDA] if on_gpu and not is_on_cuda else []
    is_uneven = spec.degree(Axis.PP) > 1 or spec.degree(Axis.TP) > 1
    flags = [
        *(["--allow-import"] if allow_import or spec.user_functions else []),
        *(["--rank", "all-distinct"] if is_uneven else []),
        *(["--rehearse"] if on_gpu or _reads_values(spec, exact) else []),
    ]
    return shlex.join(["ptrain", "simulate", *words, *overrides, *flags])


def _reads_values(spec: Spec, exact: Estimate) -> bool:
    """Return whether only real tensors tell the peak: of a model that is not built in it is
    undefined where its code does not run on fake ones."""
    return not isinstance(spec.model, ModelShape) and "peak" in exact.undefined


def needs_gpu(spec: Spec, exact: Estimate) -> bool:
    """Return whether only a GPU tells the peak: fake ranks have a CPU's kernels, and of
    flex_attention a CPU has no backward pass."""
    model = spec.model
    is_flex = not isinstance(model, ExternalModel) and model.attention is Attention.FLEX
    return is_flex or "peak" in exact.unclaimed
