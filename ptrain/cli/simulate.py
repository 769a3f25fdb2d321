"""The command `ptrain simulate`: run the training program on fake ranks and fake tensors.

A job of any size can be simulated.
"""

from __future__ import annotations

import resource
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ptrain.charts.canvas import ChartFile, chart_file
from ptrain.charts.memory import course_sheet
from ptrain.cli.arguments import missing_spec, print_json
from ptrain.cli.predict import load_facts
from ptrain.cli.progress import show_progress
from ptrain.codec import encode
from ptrain.cost import State
from ptrain.derivation.estimate import Derivation, derive
from ptrain.derivation.kernels import workspaces
from ptrain.errors import input_error
from ptrain.facts.parameters import count_weights
from ptrain.installed import torch_minor
from ptrain.meters.measure import join_estimates
from ptrain.report.record import result_record, rows_of
from ptrain.report.screen import command_line, next_line, print_screen
from ptrain.report.simulation import GARBAGE, RankReport, simulation_screen
from ptrain.report.table import heading
from ptrain.runtime import simulated_gpu
from ptrain.runtime.patches import require_supported
from ptrain.selection.fit import fit
from ptrain.selection.recompute import resolve_auto
from ptrain.simulation.choice import choose_ranks, rank_classes, require_ranks
from ptrain.simulation.execute import SimulatedRank, rehearsal_device, simulate
from ptrain.spec.batch import batch_lines
from ptrain.spec.load import expand_sweeps, load, split_arguments
from ptrain.spec.spec import Spec
from ptrain.units import format_memory

# Compute capability and torch version whose kernels an H100 confirmed (benchmarks/results, gpu).
_CONFIRMED = ("90", "2.11")


def run(args: Namespace) -> int:
    """Simulate ranks of every spec; return 0, since a simulation has no verdict."""
    require_supported()
    chart = chart_file(args.chart)
    sources, overrides = split_arguments(args.arguments)
    if not sources:
        raise missing_spec("simulate")
    specs = [
        resolve_auto(load(source, choice))
        for source in sources
        for choice in expand_sweeps(overrides)
    ]
    if chart and len(specs) > 1:
        raise input_error("--chart", f"draws one spec; got {len(specs)}", "Name one spec.")
    for spec in specs:
        require_ranks(spec, args.rank)
    lacking = (
        simulated_gpu.missing_requirement()
        or "specs for several kinds of GPU, or from a pipe: one file each"
    )
    are_files = all(Path(source).is_file() or not Path(source).exists() for source in sources)
    # A new process pretends to have the GPUs, so that torch selects CUDA's kernels. It reads the
    # specs again, which is not possible for a pipe.
    if not args.rehearse and are_files and (sm := _gpu_capability(specs)):
        try:
            return simulated_gpu.run_python(
                ["-m", "ptrain", "simulate", *_typed_arguments(args)], sm
            )
        except simulated_gpu.StubsNotCompiled as error:
            lacking = str(error)
    records = []
    for spec in specs:
        simulations = list(_simulate_ranks(spec, args, lacking))
        records.append(as_record(spec, simulations))
        chart_lines = [_draw_memory(spec, simulations, chart)] if chart else []
        if not args.json:
            print_screen(*chart_lines, _host_memory_line(), GARBAGE, *[""] * (len(specs) > 1))
    if args.json:
        print_json(records if len(records) > 1 else records[0])
    else:
        words = command_line("verify", args.arguments, allow_import=args.allow_import)
        print_screen("", next_line(words, "ptrain verify --help"))
    return 0


def _gpu_capability(specs: list[Spec]) -> int | None:
    """Return the compute capability of the GPUs, if a new process can use their kernels.

    Returns:
        None if the specs are for different GPUs or none, if this process already pretends to have a
        GPU, or if that is not possible here.
    """
    for_gpus = [spec for spec in specs if spec.is_for_cuda]
    capabilities = {spec.sm for spec in for_gpus}
    if len(capabilities) != 1 or simulated_gpu.is_on() or simulated_gpu.missing_requirement():
        return None
    return capabilities.pop()


def _typed_arguments(args: Namespace) -> list[str]:
    """Return the arguments of this command as typed, for the new process."""
    flags = {
        "--every-block": args.every_block,
        "--allow-import": args.allow_import,
        "--json": args.json,
    }
    ranks = [word for rank in args.rank for word in ("--rank", rank)]
    chart = ["--chart", str(args.chart)] if args.chart else []
    return [*args.arguments, *ranks, *chart, *(name for name, is_on in flags.items() if is_on)]


def _kernels_sentence(spec: Spec, simulated: SimulatedRank, lacking: str) -> str:
    """Return a sentence on the kernels that were simulated; empty for a spec that is not for GPUs.

    Args:
        spec: The simulated spec.
        simulated: The result of the simulation.
        lacking: The reason why CUDA's kernels were not used.
    """
    if not spec.is_for_cuda:
        return ""
    if simulated_gpu.is_on():
        attention = ", ".join(simulated.run.attention) or "attention operator by operator"
        sm, torch = simulated_gpu.compute_capability(), torch_minor()
        confirmed_by = "an H100" if (sm, torch) == _CONFIRMED else "no GPU"
        return f"CUDA's for sm {sm} and torch {torch}, which {confirmed_by} confirmed: {attention}"
    if spec.sm is None:
        return "a CPU's: no cluster.sm says the compute capability of the GPUs (90: H100)"
    return f"a CPU's: {lacking}"


def _draw_memory(
    spec: Spec, simulations: list[tuple[Derivation, RankReport]], chart: ChartFile
) -> str:
    """Draw the memory of the rank with the highest peak; return a line that names the file."""
    course = max(
        (report.course for _, report in simulations),
        key=lambda drawn: drawn.peak.total,
    )
    usable = fit(spec, simulations[0][0].exact).usable_memory
    chart.draw(course_sheet(course, spec.name, usable))
    return f"chart {chart.path} (rank {course.rank})"


def _simulate_ranks(
    spec: Spec, args: Namespace, lacking: str
) -> Iterator[tuple[Derivation, RankReport]]:
    """Simulate the chosen ranks of a spec, and print each one as soon as it is done.

    Args:
        spec: The spec to simulate.
        args: The options of the command.
        lacking: The reason why a CPU's kernels are used.

    Yields:
        The derivation of the spec, and the report of one rank.
    """
    # The prediction is for the device of the rehearsal, whose kernels may allocate differently.
    if args.rehearse:
        spec = replace(spec, device=rehearsal_device(spec).type)
    facts = load_facts(
        spec,
        allow_import=args.allow_import,
        runs_fakes=not args.rehearse,
        is_quiet=args.json,
    )
    derivation = derive(spec, facts)
    equal_ranks = {rank: ranks for ranks in rank_classes(spec, derivation.exact) for rank in ranks}
    if not args.json:
        lines = batch_lines(spec.batch, spec.data_degree)
        print_screen(heading(spec, count_weights(facts)), *lines)
    ranks = choose_ranks(spec, derivation.exact, args.rank)
    for number, rank in enumerate(ranks):
        with show_progress(f"simulating rank {rank} of {spec.world_size}") as step:
            step(number, len(ranks))
            simulated = simulate(
                spec,
                rank,
                rehearse=args.rehearse,
                allow_import=args.allow_import,
                every_block=args.every_block,
            )
        report = RankReport(
            rank=rank,
            device=simulated.device if args.rehearse else "",
            alike=equal_ranks[rank],
            exact=derivation.exact.of_rank(rank),
            simulated=simulated.estimate,
            course=simulated.memory_history,
            seconds=simulated.seconds,
            replayed=simulated.replayed,
            kernels=_kernels_sentence(spec, simulated, lacking) if not args.rehearse else "",
            reserved=simulated.reserved_memory(spec) if not args.rehearse else {},
            workspaces=workspaces(spec) if not args.rehearse else (),
        )
        if not args.json:
            print_screen("", simulation_screen(report, spec.name), "")
        yield derivation, report


def as_record(spec: Spec, simulations: list[tuple[Derivation, RankReport]]) -> dict[str, Any]:
    """Return the result record with the column `simulated`, and the contents of each peak.

    Ranks that were not simulated have no rows. Nothing is checked, so the verdict is null.

    Args:
        spec: The simulated spec.
        simulations: The derivation, which is the same for all ranks, and the report of each rank.
    """
    derivation = simulations[0][0]
    simulated = join_estimates([report.simulated for _, report in simulations])
    devices = ", ".join(dict.fromkeys(report.device for _, report in simulations))
    ranks = {report.rank for _, report in simulations}
    derived = (estimate.of_ranks(ranks) for estimate in (derivation.paper, derivation.exact))
    result = result_record(spec.name, (*derived, simulated), device=devices)
    result["simulation"] = {
        "note": GARBAGE,
        "host_bytes": host_bytes(),
        "ranks": [
            {
                "rank": report.rank,
                "alike": len(report.alike),
                "seconds": dict(report.seconds),
                "kernels": report.kernels or None,
                "replayed_blocks": report.replayed,
                "differing": [
                    {
                        "name": difference.name,
                        "exact": difference.predicted,
                        "simulated": difference.measured,
                    }
                    for difference in report.differing
                ],
                "peak": {
                    "phase": str(report.course.peak.phase),
                    "micro_batch": report.course.peak.micro_batch,
                    "device_bytes": report.course.peak.total,
                },
                "held": encode(report.course.held),
                "by_phase": [
                    {
                        "phase": str(phase),
                        "micro_batch": moment.micro_batch,
                        "device_bytes": dict(zip(State, moment.device_bytes, strict=True)),
                    }
                    for phase, moment in report.course.phase_peaks().items()
                ],
                "traffic": [*rows_of("traffic", report.simulated)],
                "reserved": encode(report.reserved),
                "workspaces": encode(report.workspaces),
            }
            for _, report in simulations
        ],
    }
    return result


def host_bytes() -> int:
    """Return the most memory that this process has held, in bytes.

    On Linux it is VmHWM of /proc/self/status. `getrusage` would not do: the peak of a forked
    process begins with its parent's.
    """
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, else KiB
    return peak if sys.platform == "darwin" else peak * 1024


def _host_memory_line() -> str:
    """Return the line on the host memory of this process."""
    return f"host memory of this process: {format_memory(host_bytes())}"
