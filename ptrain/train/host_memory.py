"""Checks of this host's memory before any rank starts. This module imports no torch."""

from __future__ import annotations

from ptrain.by_rank import totals
from ptrain.cost import Estimate
from ptrain.errors import refused
from ptrain.processor import gpus, physical_memory
from ptrain.selection.fit import resident_bytes
from ptrain.spec.cluster import PROCESS_BYTES
from ptrain.spec.spec import Spec
from ptrain.units import format_memory, grouped


def require_host_memory(needed: int, what: str, remedy: str) -> None:
    """Reject a job that needs more memory than this host has.

    Without this check, the kernel kills the ranks, or other processes, when the memory is
    exhausted.

    Args:
        needed: The bytes that the job needs.
        what: The noun phrase that needs the memory, for the message.
        remedy: The fix, for the message.

    Raises:
        SpecError: `needed` exceeds the host's memory.
    """
    here = physical_memory()
    if needed > here:
        finding = f"{what} need {format_memory(needed)} of memory, but this host has "
        raise refused("host memory", finding + format_memory(here), remedy)


def require_ranks_fit_host(spec: Spec, exact: Estimate, words: str, *, nodes: int = 1) -> None:
    """Reject a training whose ranks run on this host's CPU and need more memory than it has.

    Args:
        spec: The spec.
        exact: Its prediction.
        words: The SPEC and its overrides in shell syntax, for the message.
        nodes: The number of hosts that share the ranks.

    Raises:
        SpecError: The ranks need more memory than the host has.
    """
    ranks = -(-spec.world_size // nodes)
    if spec.device != "cuda" and (spec.device != "auto" or ranks > gpus()):
        require_host_memory(
            # The larger of two needs at different times: in a step, and before the first one.
            ranks * PROCESS_BYTES + max(needed_bytes(exact) // nodes, ranks * exact.startup_bytes),
            f"{ranks} ranks of {spec.name} on the CPU",
            f"Use `ptrain simulate {words}`, which needs no such memory, or a smaller model. "
            "`ptrain train --force` starts the ranks anyway.",
        )


def needed_bytes(exact: Estimate) -> int:
    """Return the device and host bytes of all ranks of an estimate.

    Each rank has its peak, or the states of the fullest rank if no peak is known.
    """
    hosted = sum(totals(exact.memory, lambda row: row.host_bytes))
    if "peak" in exact.undefined or not exact.peak:
        return hosted + exact.world_size * resident_bytes(exact)
    peaks = grouped((row.rank, row.device_bytes) for row in exact.peak)
    return hosted + sum(map(max, peaks.values()))
