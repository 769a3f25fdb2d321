"""The `ptrain simulate` screen of one rank: its figures, memory by phase, and the peak's contents.

`MemoryHistory` and its parts are plain data that a simulation produces. Pages and pictures of
memory read the same classes.

Also the memory that CUDA's caching allocator would reserve on a device, as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ptrain.cost import Estimate, Phase, State
from ptrain.derivation.allocator import COMPUTING, Reserved
from ptrain.derivation.kernels import Workspace
from ptrain.plan.composition import ranks_text
from ptrain.report.predict import operations_lines
from ptrain.report.record import Check, compare_estimates
from ptrain.report.summary import end_table
from ptrain.report.table import (
    Importance,
    TableColumn,
    by_data_lines,
    make_columns,
    memory_text,
    name_column,
    render_table,
)

GARBAGE = (
    "values are garbage, because collectives moved nothing; `ptrain verify` checks whether the "
    "training is correct"
)
_MOST = 20  # kinds of a peak that are listed


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """The predicted and simulated figures of one rank, for the screen of `ptrain simulate`.

    Attributes:
        device: The device of a rehearsal's tensors; empty if the tensors were fake.
        alike: The ranks that are predicted to have the same figures, this rank included.
        course: Live device memory over the simulated step.
        seconds: The wall time of each part of the simulation, in seconds.
        reserved: Memory that CUDA's caching allocator would reserve, by kind of segments. None: it
            still grows after 32 steps. Empty for other devices.
        replayed: The number of equal blocks of which only a few ran; None if every block ran.
        kernels: A sentence on the kernels that the fake tensors used; empty except for GPU specs.
        workspaces: Memory that kernels allocate internally.
    """

    rank: int
    device: str
    alike: tuple[int, ...]
    exact: Estimate
    simulated: Estimate
    course: MemoryHistory
    seconds: Mapping[str, float]
    reserved: Mapping[str, Reserved | None] = field(default_factory=dict)
    replayed: int | None = None
    kernels: str = ""
    workspaces: tuple[Workspace, ...] = ()

    @property
    def differing(self) -> list[Check]:
        """The checks whose two figures differ; a figure with bounds differs if it is outside of
        them.
        """
        checks = compare_estimates(self.exact, self.simulated)
        return [
            check
            for check in checks
            if (check.predicted != check.measured if check.lower is None else not check.holds)
        ]


def simulation_screen(report: RankReport, name: str) -> str:
    """Return the full screen of one rank.

    Args:
        report: The simulated rank.
        name: The name of the spec, for the heading.
    """
    return "\n".join(
        [
            rank_heading(report, name),
            "",
            end_table(report.exact, report.simulated, ("predicted", "simulated")),
            "",
            *([] if report.exact.operations else operations_lines(report.simulated)),
            agreement_sentence(report),
            *([f"kernels  {report.kernels}"] if report.kernels else []),
            *by_data_lines(report.exact),
            *replay_lines(report),
            *peak_warning(report),
            "",
            phase_table(report.course),
            "",
            peak_table(report.course),
            *reserved_lines(report.reserved, report.workspaces),
        ]
    )


def rank_heading(report: RankReport, name: str) -> str:
    """Return the heading: `zero3 · rank 0 of 8, like ranks [1 2 … 7] · simulated in 21.3 s`."""
    others = [rank for rank in report.alike if rank != report.rank]
    like = f", like ranks {ranks_text(others)}" if others else ""
    rank_text = f"rank {report.rank} of {report.simulated.world_size}{like}"
    method = f"rehearsed on {report.device}" if report.device else "simulated"
    return f"{name} · {rank_text} · {method} in {sum(report.seconds.values()):.1f} s"


def agreement_sentence(report: RankReport) -> str:
    """Return a sentence with the number of equal figures and the figures that are not predicted."""
    total = len(compare_estimates(report.exact, report.simulated))
    equal = total - len(report.differing)
    unpredicted = sorted(report.exact.undefined.keys() & {"activations", "peak", "traffic"})
    remarks = f" · not predicted: {', '.join(unpredicted)}" if unpredicted else ""
    bounds_text = " or within bounds" if report.exact.by_data else ""
    return f"{equal} of {total} figures are equal{bounds_text}{remarks}"


def replay_lines(report: RankReport) -> list[str]:
    """Return a line stating that only some of the equal blocks ran; empty if every block ran."""
    if report.replayed is None:
        return []
    return [
        f"a few of {report.replayed} equal blocks ran and stand for the others; --every-block runs "
        "all"
    ]


def peak_warning(report: RankReport) -> list[str]:
    """Return a warning if the peak on a GPU is not predicted; empty if a GPU rehearsed the rank."""
    why = report.exact.unclaimed.get("peak")
    if why is None or report.device.startswith("cuda"):
        return []
    return [f"warning: the peak on a GPU is not predicted: {why}; measure it there with --rehearse"]


def phase_table(course: MemoryHistory) -> str:
    """Return a table of memory by state, with a column for the highest moment of each phase."""
    highest = course.phase_peaks()
    states = {
        str(state): place
        for place, state in enumerate(State)
        if any(moment.device_bytes[place] for moment in highest.values())
    }
    columns = [name_column("memory at each phase's peak", [*states, "all"])]
    for phase, moment in highest.items():
        figures = [*(moment.device_bytes[place] for place in states.values()), moment.total]
        columns.append(TableColumn(str(phase), cells=[*map(memory_text, figures)]))
    return render_table(columns)


def peak_table(course: MemoryHistory) -> str:
    """Return the peak and a table of its contents, the largest kind of storage first."""
    rows = [
        (row.what, str(row.state), memory_text(row.device_bytes), str(row.tensors))
        for row in course.held[:_MOST]
    ]
    if rest := course.held[_MOST:]:
        left, tensors = sum(row.device_bytes for row in rest), sum(row.tensors for row in rest)
        rows.append((f"{len(rest)} more kinds", "", memory_text(left), str(tensors)))
    when = f"{course.peak.phase}, micro-batch {course.peak.micro_batch}"
    columns = make_columns(
        rows,
        name_column("memory at the peak"),
        TableColumn("state", left=True),
        TableColumn("bytes", Importance.RESULT),
        TableColumn("tensors", Importance.DETAIL),
    )
    return f"peak {memory_text(course.peak.total)} in {when}\n{render_table(columns)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStorages:
    """The `tensors` storages of one kind that are alive at the peak, with their total bytes."""

    what: str
    state: State
    device_bytes: int
    tensors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """The live device bytes after `event` allocations and frees, by state in the order of State."""

    event: int
    phase: Phase
    micro_batch: int
    device_bytes: tuple[int, ...]

    @property
    def total(self) -> int:
        """The live device bytes of all states."""
        return sum(self.device_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryHistory:
    """The memory of one rank over a steady step.

    `held` lists the storages that are alive at `peak`, the largest kind first.
    """

    rank: int
    moments: tuple[MemorySample, ...]
    peak: MemorySample
    held: tuple[LiveStorages, ...]

    def phase_peaks(self) -> dict[Phase, MemorySample]:
        """Return the sample with the most live bytes of each phase."""
        peaks: dict[Phase, MemorySample] = {}
        for moment in self.moments:
            highest = peaks.setdefault(moment.phase, moment)
            peaks[moment.phase] = max(highest, moment, key=lambda sample: sample.total)
        return peaks


_NOT_RESERVED = "not claimed: without what is unknown below, and CUDA's context"


def reserved_lines(
    reserved: Mapping[str, Reserved | None], workspaces: Sequence[Workspace] = ()
) -> list[str]:
    """Return a table of reserved memory by kind of segments, with the reason why it is not claimed.

    Args:
        reserved: The reserved memory by kind of segments; None for a kind that keeps growing. If
            there are no kinds, the result is empty.
        workspaces: Memory that kernels allocate, in a second table; unknown sizes are marked.
    """
    if not reserved:
        return []
    rows: list[tuple[str, ...]] = []
    for segments, reservation in reserved.items():
        if reservation is None:
            rows.append((segments, "grows on", "", "", "", ""))
            continue
        # Memory of other streams cannot be reused by the computing stream.
        elsewhere = sum(left for stream, left in reservation.beyond.items() if stream != COMPUTING)
        between = reservation.beyond.get(COMPUTING, 0) - reservation.gap
        figures = (
            reservation.device_bytes,
            reservation.living,
            reservation.gap,
            between,
            elsewhere,
        )
        rows.append((segments, *map(memory_text, figures)))
    columns = make_columns(
        rows,
        name_column("reserved by CUDA's allocator"),
        TableColumn("in all", Importance.RESULT),
        TableColumn("allocated"),
        TableColumn("largest gap"),
        TableColumn("other gaps", Importance.DETAIL),
        TableColumn("streams", Importance.DETAIL),
    )
    workspace_rows = [
        (space.what, "unknown" if space.device_bytes is None else memory_text(space.device_bytes))
        for space in workspaces
    ]
    space = make_columns(
        workspace_rows, name_column("of that within kernels"), TableColumn("bytes")
    )
    return [
        "",
        render_table(columns),
        _NOT_RESERVED,
        *([render_table(space)] if workspace_rows else []),
    ]
