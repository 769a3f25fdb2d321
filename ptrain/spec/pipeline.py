"""The section `pipeline`: schedules by name or as a list of passes, and the split into stages."""

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from ptrain.spec.leaf import (
    INVALID,
    Choice,
    Either,
    Integer,
    Numbers,
    UserFile,
    one_of,
    reject,
    section_dataclass,
)
from ptrain.spec.text import read_bytes
from ptrain.timeline import Kind
from ptrain.word import MeantWord, Word, words_of

MAX_CELLS = 1_000_000  # a schedule of 1000 ranks and 500 micro-batches
Pass = tuple[Kind, int, int]  # kind, stage, micro-batch

_PASS = re.compile(r"(\d{1,5})(F|B|I|W)(\d{1,6})")
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_COMMUNICATION = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B)\d*")
_PARAMETERS = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")
_REMEDY = "Use one row of passes per rank: `0F0,0F1,0B0,0B1`."


@dataclass(frozen=True, slots=True)
class ListedSchedule:
    """A schedule as one row of cells per rank; `passes_of` parses a cell."""

    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        return "the listed order"

    def to_lines(self) -> list[str]:
        """Return the rows as in a spec or a CSV file."""
        return [",".join(row) for row in self.rows]

    @property
    def orders(self) -> tuple[tuple[tuple[Pass, ...], ...], ...]:
        """The steps of each rank: one pass, or the two passes of a pair."""
        return tuple(tuple(map(passes_of, row)) for row in self.rows)

    @property
    def stages(self) -> int:
        return 1 + max(stage for _, stage, _ in self._iter_passes())

    @property
    def microbatches(self) -> int:
        return 1 + max(microbatch for *_, microbatch in self._iter_passes())

    @property
    def is_in_halves(self) -> bool:
        return any(kind in (Kind.INPUT, Kind.WEIGHT) for kind, *_ in self._iter_passes())

    def _iter_passes(self) -> Iterator[Pass]:
        return (action for order in self.orders for step in order for action in step)


def parse_rows(lines: Sequence[str]) -> ListedSchedule:
    """Return the schedule of lines that `slip` accepts.

    Empty cells, torch's idle slots, are dropped: the start of a pass follows from its dependencies.
    """
    rows = csv.reader(lines)
    return ListedSchedule(
        tuple(tuple(cell.replace(" ", "") for cell in row if cell.strip()) for row in rows)
    )


def find_invalid_cell(lines: Sequence[str]) -> tuple[str, str] | None:
    """Return the finding and the remedy for the first cell that is not a pass; None if all are.

    The finding names the row and the cell, counted from 1.
    """
    if not lines or sum(line.count(",") + 1 for line in lines) > MAX_CELLS:
        return f"a list of 1 to {MAX_CELLS:,} passes; got {len(lines)} rows", _REMEDY
    try:
        rows = list(csv.reader(lines))
    except csv.Error as error:  # an unclosed quote, or a field beyond csv's size limit
        return f"it is not a CSV file: {error}", _REMEDY
    for number, row in enumerate(rows, start=1):
        if not any(cell.strip() for cell in row):
            return f"row {number} is empty; every rank needs at least one pass", _REMEDY
        for place, cell in enumerate(row, start=1):
            if reason := _explain_invalid(cell.replace(" ", "")):
                return f"row {number}, cell {place}: {reason[0]}", reason[1]
    return None


def passes_of(cell: str) -> tuple[Pass, ...]:
    """Return the passes of a cell: one, or an overlapped forward and backward pair."""
    pair = _PAIR.fullmatch(cell)
    return tuple(_parse_pass(part) for part in (pair.groups() if pair else (cell,)))


def _read_lines(path: Path) -> list[str] | str:
    """Return the lines of a CSV file, or the reason why it cannot be read."""
    data = read_bytes(path, 8 * MAX_CELLS)
    if isinstance(data, str):
        return data
    if len(data) > 8 * MAX_CELLS:
        return f"it is larger than {8 * MAX_CELLS:,} bytes"
    try:
        return [line for line in data.decode("utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError:
        return "it is not UTF-8"


FILE = UserFile(
    ".csv",
    _read_lines,
    find_invalid_cell,
    "Use a file in torch's CSV format of compute actions, or a schedule name.",
)


def _parse_pass(cell: str) -> Pass:
    match = _PASS.fullmatch(cell)
    assert match, "cells are checked when they are read"
    stage, kind, microbatch = match.groups()
    return Kind(kind), int(stage), int(microbatch)


def _explain_invalid(cell: str) -> tuple[str, str] | None:
    """Return the finding and the remedy for a cell; None if it is a pass or idle."""
    if not cell or _PASS.fullmatch(cell):
        return None
    if match := _COMMUNICATION.fullmatch(cell):
        reason = (
            f"{cell} is communication ({match[1]}), which ptrain derives from the order "
            "of the passes"
        )
        return reason, "Remove sends and receives (torch's compute_only format)."
    if match := _PARAMETERS.fullmatch(cell):
        reason = f"{cell} ({match[1]}) moves parameters or gradients, which `sync` controls"
        return reason, "Remove it, and set `sync.reshard_after_forward` or `sync.gradients`."
    if match := _PAIR.fullmatch(cell):
        inner = [_PASS.fullmatch(part) for part in match.groups()]
        kinds = "".join(part[2] if part else "?" for part in inner)
        if kinds == "FB":
            return None
        return f"{cell} does not pair a forward with a full backward", "Use `(0F1;1B0)OVERLAP_F_B`."
    return f"{cell[:40]!r} is not a pass", _REMEDY


MAX_LAYERS = 10_000


class ScheduleName(Word):
    """A pipeline schedule that a spec can name.

    Each member is a row: name, meaning, torch class, other names, default number of stages per
    rank, and whether weight gradients are computed separately from input gradients. Its behaviour
    and cost are in `axes.pipeline.catalogue`.
    """

    meaning: str
    words: tuple[str, ...]
    torch: str
    stages: int
    is_in_halves: bool

    def __new__(
        cls,
        name: str,
        meaning: str = "",
        torch: str = "",
        words: tuple[str, ...] = (),
        stages: int = 1,
        is_in_halves: bool = False,
    ) -> Self:
        member = str.__new__(cls, name)
        member._value_ = name
        member.meaning, member.torch, member.stages = meaning, torch, stages
        of_class = (torch.lower(), torch.lower().removeprefix("schedule")) if torch else ()
        member.words = tuple(word for word in (*words, *of_class) if word != name)
        member.is_in_halves = is_in_halves
        return member

    NAIVE = "naive", "one micro-batch at a time: one rank computes, the others wait"
    # Huang et al. 2019
    GPIPE = (
        "gpipe",
        "all forward passes, then all backward passes",
        "ScheduleGPipe",
        ("afab", "fill-drain"),
    )
    # Narayanan et al. 2019 (PipeDream-Flush)
    ONE_F_ONE_B = (
        "1f1b",
        "one forward, one backward: a stage holds at most as many micro-batches as stages "
        "follow it, plus one",
        "Schedule1F1B",
        ("pipedream-flush", "one-f-one-b"),
    )
    # Lamy-Poirier 2023; made for two stages per rank, equals gpipe with one
    BFS = (
        "bfs",
        "several stages per rank, breadth-first: gpipe stage by stage",
        "ScheduleLoopedBFS",
        ("looped-bfs", "schedulelooped-bfs"),
        2,
    )
    # Narayanan et al. 2021; equals 1f1b with one stage per rank
    INTERLEAVED = (
        "interleaved",
        "several stages per rank, one forward, one backward (Megatron)",
        "ScheduleInterleaved1F1B",
        ("interleaved-1f1b",),
        2,
    )
    # Qi et al. 2024 (ZB-H1), over several stages a rank
    ZERO_BUBBLE = (
        "zero-bubble",
        "weight gradients computed separately to fill the bubble (ZB-H1)",
        "ScheduleInterleavedZeroBubble",
        ("zb-h1", "zb1p", "zero_bubble"),
        1,
        True,
    )
    # Qi et al. 2024, section 6
    ZBV = (
        "zbv",
        "two stages per rank in a V, weight gradients computed separately",
        "ScheduleZBVZeroBubble",
        ("zb-v",),
        2,
        True,
    )
    # Sea AI Lab 2025: half of DeepSeek's DualPipe, with one copy of each stage
    DUALPIPEV = (
        "dualpipev",
        "two stages per rank in a V, forward and backward overlapped",
        "ScheduleDualPipeV",
        (),
        2,
        True,
    )


class SplitBy(MeantWord):
    """The quantity that the split into stages balances."""

    PARAMETERS = (
        "parameters",
        "minimize the parameters of the largest stage, with embedding, final norm and head",
    )
    TIME = (
        "time",
        "minimize the operations of the slowest stage: matrix products and attention scores, "
        "with the head",
    )
    LAYERS = "layers", "equal numbers of layers"


*_FIRST_OF_TWO, _LAST_OF_TWO = [name for name in ScheduleName if name.stages == 2]
_ASYNCHRONOUS = ("pipedream", "pipedream-2bw", "async", "asynchronous", "pipemare", "wpipe")
_TWO_COPIES = (
    "DualPipe runs the pipeline in both directions and stores two copies of parameters, "
    "gradients and optimizer state (671B parameters in bf16 over pp=16: 167.8 GB of "
    "parameters per rank instead of 83.9 GB). Use `dualpipev`, which overlaps the same "
    "passes with one copy."
)


class ScheduleText(Choice):
    """A schedule by name, or listed rank by rank; the rows have already replaced a file name. The
    remedy for an unsupported schedule states the reason."""

    def convert(self, value: Any) -> object:
        if not isinstance(value, list) or not all(isinstance(row, str) for row in value):
            return INVALID
        if wrong := find_invalid_cell(value):
            reject(*wrong)
        return value

    def schema(self) -> dict[str, Any]:
        file = {
            "type": "string",
            "pattern": r"\.[cC][sS][vV]$",
            "description": "a file in torch's CSV format of compute actions, a row per rank",
        }
        rows = {"type": "array", "items": {"type": "string"}, "minItems": 1}
        return one_of(super().schema(), file, {**rows, "description": "the rows of such a file"})

    def suggest(self, value: object) -> str:
        word = re.sub(r"[ _]", "-", value.lower()) if isinstance(value, str) else ""
        if word in ("dualpipe", "dual-pipe"):
            return _TWO_COPIES
        if word in _ASYNCHRONOUS:
            return (
                "asynchronous pipelines compute gradients with outdated parameters and do "
                "not equal a single device [Theorem 3]. Use `1f1b`, the same schedule with a "
                "flush after each step."
            )
        return super().suggest(value)


_MOVING = ("dynamic", "adaptive", "rebalance", "elastic", "runtime")


def _guess_split(value: object) -> str:
    """Return the remedy for a value that is not a split."""
    if isinstance(value, list):
        return f"Use numbers of layers from 1 to {MAX_LAYERS}, for example `[3, 5]`."
    if isinstance(value, str) and value.lower() in _MOVING:
        return (
            "placements are static: layers do not move during a run. Set another split and "
            "continue from a checkpoint with `ptrain train SPEC --resume RUN`."
        )
    return _SPLITS.suggest(value)


_SPLITS = Choice(
    "",
    words_of(SplitBy),
    slips={"balanced": "parameters", "auto": "parameters", "even": "layers", "uniform": "layers"},
    read=SplitBy,
)


def _to_file_syntax(schedule: ScheduleName | ListedSchedule) -> object:
    """Return the name of a schedule, or the rows of a list."""
    return schedule.to_lines() if isinstance(schedule, ListedSchedule) else schedule.value


@section_dataclass
class PipelineSpec:
    """Pipeline schedule, and the assignment of layers to stages."""

    schedule: Annotated[
        ScheduleName | ListedSchedule,
        ScheduleText(
            "Order in which a rank runs its micro-batches, or a CSV file with your schedule.",
            {name.value: name.meaning for name in ScheduleName},
            slips={word: name.value for name in ScheduleName for word in name.words},
            read=lambda written: (
                ScheduleName(written) if isinstance(written, str) else parse_rows(written)
            ),
            file=FILE,
            write=_to_file_syntax,
        ),
    ] = ScheduleName.ONE_F_ONE_B
    stages: Annotated[
        int | None,
        Integer(
            "Total number of stages, a multiple of the pp ranks. Default: one per rank; two with "
            f"{', '.join(_FIRST_OF_TWO)} and {_LAST_OF_TWO}.",
            1,
            MAX_LAYERS,
        ),
    ] = None
    split: Annotated[
        SplitBy | tuple[int, ...],
        Either(
            "How layers are assigned to stages: balanced by parameters or time, by equal "
            "numbers of layers, or a list with each stage's number of layers.",
            "parameters, time, layers or a list of each stage's number of layers",
            (_SPLITS, Numbers("each stage's number of layers", 1, MAX_LAYERS, is_integer=True)),
            hint=_guess_split,
        ),
    ] = SplitBy.PARAMETERS

    def stages_over(self, ranks: int) -> int:
        """Return the total number of stages.

        Args:
            ranks: The degree of pp.

        Returns:
            `stages` if set, otherwise the number in a listed schedule or in `split`, otherwise
            `ranks` times the schedule's default number per rank (1 or 2).
        """
        if self.stages is not None:
            return self.stages
        if isinstance(self.schedule, ListedSchedule):
            return self.schedule.stages
        if isinstance(self.split, tuple):
            return len(self.split)
        return ranks * self.schedule.stages

    @property
    def is_in_halves(self) -> bool:
        """True if some backward passes compute input and weight gradients separately."""
        return self.schedule.is_in_halves
