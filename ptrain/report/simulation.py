"""The screen of `ptrain simulate` for a rank: predicted and simulated figures, and the contents of
the peak. A rank's memory is bytes by state from event to event, and what the peak is made of: plain
data, which a simulation gives and a page or a picture shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ptrain.cost import Estimate, Phase, State
from ptrain.derivation.allocator import Reserved
from ptrain.derivation.workspaces import Workspace
from ptrain.plan.composition import ranks_text
from ptrain.report.heading import by_data_lines
from ptrain.report.predict import operations_lines
from ptrain.report.record import Check, compare
from ptrain.report.reserved import reserved_lines
from ptrain.report.summary import end_table
from ptrain.report.table import Importance, TableColumn, make_columns, name_column, render, size

GARBAGE = (
    "values are garbage, because collectives moved nothing; `ptrain verify` checks whether the "
    "training is correct"
)
_MOST = 20  # kinds of a peak that are listed


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """A simulated rank, and the ranks that are predicted to be like it. `device`: where a rehearsal
    had its tensors, empty where they were fake. `reserved`: by kind of segments, what CUDA's
    caching allocator would reserve, None where it grows on; empty for other devices. `replayed`:
    of how many equal blocks a few ran, None where every block did. `kernels`: whose they were, of a
    spec for GPUs, and `workspaces` what those take within themselves."""

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
        """Figures in which the two columns are not equal, nor the one within the other's bounds."""
        checks = compare(self.exact, self.simulated)
        return [
            check
            for check in checks
            if (check.predicted != check.measured if check.lower is None else not check.holds)
        ]


def one(report: RankReport, name: str) -> str:
    """Return the full account of one rank."""
    return "\n".join(
        [
            heading(report, name),
            "",
            end_table(report.exact, report.simulated, ("predicted", "simulated")),
            "",
            *([] if report.exact.operations else operations_lines(report.simulated)),
            agreement(report),
            *([f"kernels  {report.kernels}"] if report.kernels else []),
            *by_data_lines(report.exact),
            *replay_lines(report),
            *foreign(report),
            "",
            by_phase(report.course),
            "",
            peak(report.course),
            *reserved_lines(report.reserved, report.workspaces),
        ]
    )


def heading(report: RankReport, name: str) -> str:
    """`zero3 · rank 0 of 8, like ranks [1 2 … 7] · simulated in 21.3 s`."""
    others = [rank for rank in report.alike if rank != report.rank]
    like = f", like ranks {ranks_text(others)}" if others else ""
    who = f"rank {report.rank} of {report.simulated.world_size}{like}"
    how = f"rehearsed on {report.device}" if report.device else "simulated"
    return f"{name} · {who} · {how} in {sum(report.seconds.values()):.1f} s"


def agreement(report: RankReport) -> str:
    """Return how many figures are equal, and the kinds of figures that are not predicted."""
    every = len(compare(report.exact, report.simulated))
    equal = every - len(report.differing)
    untold = sorted(report.exact.undefined.keys() & {"activations", "peak", "traffic"})
    besides = f" · not predicted: {', '.join(untold)}" if untold else ""
    within = " or within bounds" if report.exact.by_data else ""
    return f"{equal} of {every} figures are equal{within}{besides}"


def replay_lines(report: RankReport) -> list[str]:
    """Return which blocks ran, where a few stand for all."""
    if report.replayed is None:
        return []
    return [
        f"a few of {report.replayed} equal blocks ran and stand for the others; --every-block runs "
        "all"
    ]


def foreign(report: RankReport) -> list[str]:
    """Return why no peak is predicted for the spec's device, unless a GPU rehearsed it."""
    why = report.exact.unclaimed.get("peak")
    if why is None or report.device.startswith("cuda"):
        return []
    return [f"warning: the peak on a GPU is not predicted: {why}; measure it there with --rehearse"]


def by_phase(course: MemoryHistory) -> str:
    """Each state when a phase needs most."""
    highest = course.by_phase()
    states = {
        str(state): place
        for place, state in enumerate(State)
        if any(moment.device_bytes[place] for moment in highest.values())
    }
    columns = [name_column("memory at each phase's peak", [*states, "all"])]
    for phase, moment in highest.items():
        figures = [*(moment.device_bytes[place] for place in states.values()), moment.total]
        columns.append(TableColumn(str(phase), cells=[*map(size, figures)]))
    return render(columns)


def peak(course: MemoryHistory) -> str:
    """Return the peak and a table of its contents, the largest first."""
    rows = [
        (row.what, str(row.state), size(row.device_bytes), str(row.tensors))
        for row in course.held[:_MOST]
    ]
    if rest := course.held[_MOST:]:
        left, tensors = sum(row.device_bytes for row in rest), sum(row.tensors for row in rest)
        rows.append((f"{len(rest)} more kinds", "", size(left), str(tensors)))
    when = f"{course.peak.phase}, micro-batch {course.peak.micro_batch}"
    columns = make_columns(
        rows,
        name_column("memory at the peak"),
        TableColumn("state", left=True),
        TableColumn("bytes", Importance.RESULT),
        TableColumn("tensors", Importance.DETAIL),
    )
    return f"peak {size(course.peak.total)} in {when}\n{render(columns)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStorages:
    """Storages of one kind that live at the peak: `tensors` of them, in bytes together."""

    what: str
    state: State
    device_bytes: int
    tensors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """Live device bytes by state, in the order of `State`, after `event` births and deaths."""

    event: int
    phase: Phase
    micro_batch: int
    device_bytes: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.device_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryHistory:
    """One rank's memory over a steady step: its moments, and of the highest what lives then, the
    largest first."""

    rank: int
    moments: tuple[MemorySample, ...]
    peak: MemorySample
    held: tuple[LiveStorages, ...]

    def by_phase(self) -> dict[Phase, MemorySample]:
        """Return the highest moment of each phase."""
        peaks: dict[Phase, MemorySample] = {}
        for moment in self.moments:
            known = peaks.setdefault(moment.phase, moment)
            peaks[moment.phase] = max(known, moment, key=lambda sample: sample.total)
        return peaks
