"""The schedules of a pipeline, by name, and what a spec says of its stages."""

import re
from typing import Annotated, Any, Self

from ptrain.spec.leaf import Choice, Either, Numbers, Whole, one_of, refuse, section
from ptrain.spec.schedule_file import FILE, ListedSchedule, listed, slip
from ptrain.word import MeantWord, Word, words_of

MAX_LAYERS = 10_000


class ScheduleName(Word):
    """The schedules that a spec names.

    Each is a row: its name, its meaning, torch's class, other words for it, how many stages a rank
    has where nothing says so, and whether it computes the gradients of weights apart from those of
    inputs. What it does and costs is its row of `axes.pipeline.catalogue`.
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
    # Lamy-Poirier 2023; made for two stages a rank: with one it is gpipe
    BFS = (
        "bfs",
        "several stages per rank, breadth-first: gpipe stage by stage",
        "ScheduleLoopedBFS",
        ("looped-bfs", "schedulelooped-bfs"),
        2,
    )
    # Narayanan et al. 2021; with one stage a rank it is 1f1b
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
    # Sea AI Lab 2025: DeepSeek's DualPipe cut in half, each stage once
    DUALPIPEV = (
        "dualpipev",
        "two stages per rank in a V, forward and backward overlapped",
        "ScheduleDualPipeV",
        (),
        2,
        True,
    )


class SplitBy(MeantWord):
    """What stages have as equal parts of as can be."""

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
    """A schedule by its name, or listed rank by rank (a file's name has given way to its rows). Of
    one that there is not the remedy says why."""

    def check(self, value: Any) -> object:
        if not isinstance(value, list) or not all(isinstance(row, str) for row in value):
            return super().check(value)
        wrong = slip(value)
        if wrong is not None:
            refuse(*wrong)
        return value

    def schema(self) -> dict[str, Any]:
        file = {
            "type": "string",
            "pattern": r"\.[cC][sS][vV]$",
            "description": "a file in torch's CSV format of compute actions, a row per rank",
        }
        rows = {"type": "array", "items": {"type": "string"}, "minItems": 1}
        return one_of(super().schema(), file, {**rows, "description": "the rows of such a file"})

    def meant(self, value: object) -> str:
        word = re.sub(r"[ _]", "-", value.lower()) if isinstance(value, str) else ""
        if word in ("dualpipe", "dual-pipe"):
            return _TWO_COPIES
        if word in _ASYNCHRONOUS:
            return (
                "asynchronous pipelines compute gradients with outdated parameters and do "
                "not equal a single device [Theorem 3]. Use `1f1b`, the same schedule with a "
                "flush after each step."
            )
        return super().meant(value)


_MOVING = ("dynamic", "adaptive", "rebalance", "elastic", "runtime")


def _split_meant(value: object) -> str:
    """What was meant in place of a split."""
    if isinstance(value, list):
        return f"Use numbers of layers from 1 to {MAX_LAYERS}, for example `[3, 5]`."
    if isinstance(value, str) and value.lower() in _MOVING:
        return (
            "placements are static: layers do not move during a run. Set another split and "
            "continue from a checkpoint with `ptrain train SPEC --resume RUN`."
        )
    return _SPLITS.meant(value)


_SPLITS = Choice(
    "",
    words_of(SplitBy),
    slips={"balanced": "parameters", "auto": "parameters", "even": "layers", "uniform": "layers"},
    read=SplitBy,
)


def _schedule(written: str | list[str]) -> ScheduleName | ListedSchedule:
    return ScheduleName(written) if isinstance(written, str) else listed(written)


def _written(schedule: ScheduleName | ListedSchedule) -> object:
    """Return a name, or the rows of a list."""
    return schedule.lines() if isinstance(schedule, ListedSchedule) else schedule.value


@section
class PipelineSpec:
    """How micro-batches flow through the stages of pp, and which layers a stage has."""

    schedule: Annotated[
        ScheduleName | ListedSchedule,
        ScheduleText(
            "Order in which a rank runs its micro-batches, or a CSV file with your schedule.",
            {name.value: name.meaning for name in ScheduleName},
            slips={word: name.value for name in ScheduleName for word in name.words},
            read=_schedule,
            file=FILE,
            write=_written,
        ),
    ] = ScheduleName.ONE_F_ONE_B
    stages: Annotated[
        int | None,
        Whole(
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
            (_SPLITS, Numbers("each stage's number of layers", 1, MAX_LAYERS, whole=True)),
            hint=_split_meant,
        ),
    ] = SplitBy.PARAMETERS

    def stages_over(self, ranks: int) -> int:
        """Return the number of stages: as written, else as many as a listed schedule or `split`
        has, else one a rank, or two where the schedule is made for two."""
        if self.stages is not None:
            return self.stages
        if isinstance(self.schedule, ListedSchedule):
            return self.schedule.stages
        if isinstance(self.split, tuple):
            return len(self.split)
        return ranks * self.schedule.stages

    @property
    def is_in_halves(self) -> bool:
        """Whether some backward passes are computed in two halves."""
        return self.schedule.is_in_halves
