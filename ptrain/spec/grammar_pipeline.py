"""The section of a spec about the stages of pp."""

import re
from typing import Annotated, Any

from ptrain.spec.leaf import Choice, Either, Numbers, Whole, declared, one_of, refuse
from ptrain.spec.orders import slip
from ptrain.spec.pipeline import PipelineSpec

_PIPELINE = PipelineSpec()
MAX_LAYERS = 10_000

_ASYNCHRONOUS = ("pipedream", "pipedream-2bw", "async", "asynchronous", "pipemare", "wpipe")
# Other words for schedules, torch's class names among them.
_OTHER_WORDS = {
    "afab": "gpipe",
    "schedulegpipe": "gpipe",
    "fill-drain": "gpipe",
    "pipedream-flush": "1f1b",
    "schedule1f1b": "1f1b",
    "one-f-one-b": "1f1b",
    "looped-bfs": "bfs",
    "loopedbfs": "bfs",
    "schedulelooped-bfs": "bfs",
    "interleaved1f1b": "interleaved",
    "interleaved-1f1b": "interleaved",
    "scheduleinterleaved1f1b": "interleaved",
    "interleavedzerobubble": "zero-bubble",
    "scheduleinterleavedzerobubble": "zero-bubble",
    "zb-h1": "zero-bubble",
    "zb1p": "zero-bubble",
    "zero_bubble": "zero-bubble",
    "zb-v": "zbv",
    "zbvzerobubble": "zbv",
    "schedulezbvzerobubble": "zbv",
    "scheduledualpipev": "dualpipev",
}


_TWO_COPIES = (
    "DualPipe runs the pipeline in both directions, so every rank has two stages where others have "
    "one: two copies of Θ, of its gradients and of its optimizer state (of 671B parameters in bf16 "
    "over pp=16, two copies are 167.8 GB of Θ a rank, one is 83.9 GB); dualpipev overlaps the same "
    "passes with one copy"
)


class ScheduleText(Choice):
    """A schedule by its name, or listed rank by rank (a file's name has given way to its rows). Of
    one that there is not the remedy says why."""

    def check(self, value: Any) -> object:
        if not isinstance(value, list) or not all(isinstance(row, str) for row in value):
            return super().check(value)
        found = slip(value)
        if found is not None:
            refuse(*found)
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
                "an asynchronous pipeline updates a stage while micro-batches are in flight, so "
                "that their gradients are of older parameters: no step of it equals one of one "
                "device (Theorem 3); its schedule with a flush after each step is 1f1b"
            )
        return super().meant(value)


_MOVING = ("dynamic", "adaptive", "rebalance", "elastic", "runtime")


def _split_meant(value: object) -> str:
    """What was meant in place of a split."""
    if isinstance(value, list):
        return f"write numbers of layers from 1 to {MAX_LAYERS}: [3, 5]"
    if isinstance(value, str) and value.lower() in _MOVING:
        return (
            "a layer stays on its rank while a run lasts (a placement is static); to move it, "
            "write another split and continue from a checkpoint: ptrain train SPEC --resume RUN"
        )
    return _SPLITS.meant(value)


_SPLITS = Choice(
    "",
    {
        "parameters": "the largest stage as small as can be, embedding in front and norm and head "
        "behind included",
        "time": "the slowest stage as fast as can be, by the operations of its matrices and "
        "scores: the head counts, looking up the embedding does not",
        "layers": "as many layers in each",
    },
    slips={"balanced": "parameters", "auto": "parameters", "even": "layers", "uniform": "layers"},
)


@declared
class PipelineRaw:
    """How micro-batches flow through the stages of pp, and which layers a stage has."""

    schedule: Annotated[
        str | list[str],
        ScheduleText(
            "in which order a rank computes its micro-batches; or FILE.csv, a list of one's own",
            {
                "naive": "one micro-batch at a time: one rank works, the others wait",
                "gpipe": "all forward, all backward (AFAB)",
                "1f1b": "one forward, one backward: as few in flight as stages are behind",
                "bfs": "several stages a rank, breadth first: gpipe stage by stage",
                "interleaved": "several stages a rank, one forward, one backward",
                "zero-bubble": "gradients of weights apart, to fill the drain (ZB-H1)",
                "zbv": "two stages a rank in a V, gradients of weights apart",
                "dualpipev": "two stages a rank in a V, a forward beside a backward",
            },
            slips=_OTHER_WORDS,
        ),
    ] = str(_PIPELINE.schedule)
    stages: Annotated[
        int | None,
        Whole(
            "stages over all ranks of pp, a multiple of them; without: one a rank, and two with "
            "bfs, interleaved, zbv and dualpipev",
            1,
            MAX_LAYERS,
        ),
    ] = None
    split: Annotated[
        str | list[int],
        Either(
            "which layers a stage has",
            "parameters, time, layers or a list of each stage's number of layers",
            (
                _SPLITS,
                Numbers("each stage's number of layers", 1, MAX_LAYERS, whole=True),
            ),
            hint=_split_meant,
        ),
    ] = str(_PIPELINE.split)
