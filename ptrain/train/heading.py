"""The start of a training: the lines with the job and its prediction, and the check of this host's
memory before any rank starts. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from ptrain.axes.pipeline.catalogue import pipeline_of, schedule_of, stages_text
from ptrain.by_rank import totals
from ptrain.cost import Estimate
from ptrain.errors import input_error
from ptrain.processor import gpus, physical_memory
from ptrain.report.table import (
    batch_text,
    by_data_lines,
    measuring_command,
    model_name,
    needs_gpu,
)
from ptrain.selection.fit import (
    HOST_UNKNOWN,
    fit,
    host_text,
    peak_text,
    resident_bytes,
    room_text,
)
from ptrain.spec.batch import batch_lines
from ptrain.spec.cluster import PROCESS_BYTES
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec, coordinates
from ptrain.train import environment
from ptrain.units import format_bytes, format_count, format_memory, group_by_key


def job_line(spec: Spec, *, numel: int, backend: str, device: str) -> str:
    """Return the line that describes the job.

    Example: `zero3 · llama 0.8M · 2 ranks gloo/cpu · batch 16 = 2 micro × 4 accumulated × 2 data`.

    Args:
        spec: The spec.
        numel: The number of parameters.
        backend: The backend of the process group, "none" for a single rank without one.
        device: The kind of device.
    """
    return " · ".join(
        (
            spec.name,
            f"{model_name(spec)} {format_count(numel)}",
            f"{spec.world_size} rank{'s' * (spec.world_size > 1)} "
            + (device if backend == "none" else f"{backend}/{device}"),
            batch_text(spec),
        )
    )


def announce_node(rank: int, size: int) -> None:
    """Print the ranks of this node, on the first rank of each node except rank 0's.

    Args:
        rank: The global rank of this process.
        size: The number of ranks on all nodes.
    """
    if rank and environment.is_first_of_node():
        last = rank + max(1, environment.num_ranks_of_node()) - 1
        ranks = f"ranks {rank} to {last}" if last > rank else f"rank {rank}"
        print(f"{ranks} of {size} run on this node; rank 0 prints the results", flush=True)


def rank_stage_texts(spec: Spec) -> tuple[str, ...]:
    """Return the stages of each rank (`stage 1`, `stages 0 and 3`); () without a pipeline."""
    if pipeline_of(spec) is None:
        return ()
    schedule = schedule_of(spec)
    places = (coordinates(spec, rank)[Axis.PP] for rank in range(spec.world_size))
    return tuple(stages_text(schedule.stages_of(place)) for place in places)


def preflight_lines(
    spec: Spec, exact: Estimate, words: Sequence[str] = ("SPEC",), *, allow_import: bool = False
) -> list[str]:
    """Return the lines of the prediction.

    Without a peak, they contain the reason and the command that measures it. If figures are bounds,
    they contain the reason.

    Args:
        spec: The spec.
        exact: Its prediction.
        words: The words that load the spec on the command line.
        allow_import: True if the command imports user code.
    """
    lines = [*batch_lines(spec.batch, spec.data_degree), preflight_line(spec, exact)]
    memory_fit = fit(spec, exact)
    if memory_fit.peak_bytes is None:
        command = measuring_command(spec, exact, words, allow_import=allow_import)
        where = " on a GPU" if needs_gpu(spec, exact) else ""
        lines.append(f"unknown: {memory_fit.why}. Run{where}: {command}")
    elif memory_fit.is_host_unknown and memory_fit.fits is None:
        lines.append(f"unknown: {'. '.join(HOST_UNKNOWN)}")
    return [*lines, *by_data_lines(exact)]


def preflight_line(spec: Spec, exact: Estimate) -> str:
    """Return the line of the prediction, without figures that are not predicted.

    Example: `preflight  peak 58.5 MiB of 12 GiB per rank · traffic 14.2 MB per step`. The bytes
    that are copied between tiers follow, if there are any.
    """
    copied = exact.copied_bytes()
    memory_fit = fit(spec, exact)
    is_known = memory_fit.peak_bytes is not None
    what = "peak" if is_known else "peak unknown, resident without activations:"
    is_told = "traffic" not in exact.undefined
    return (
        f"preflight  {what} {peak_text(memory_fit)}{room_text(memory_fit)} per rank"
        + (f", {host_text(memory_fit)}" if host_text(memory_fit) else "")
        + (f" · traffic {format_bytes(exact.sent_bytes())} per step" if is_told else "")
        + (f" · {format_bytes(copied)} copied between tiers" if copied and is_told else "")
    )


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
        raise input_error("host memory", finding + format_memory(here), remedy)


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
    peaks = group_by_key((row.rank, row.device_bytes) for row in exact.peak)
    return hosted + sum(map(max, peaks.values()))
