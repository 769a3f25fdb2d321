"""A ranking of placements as text, as plain data and as rows of CSV, and its winner as a file."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Iterable, Iterator, Sequence
from math import isfinite

from ptrain.axes.candidates import Written
from ptrain.axes.context.attention import written_attention
from ptrain.axes.data.form import form_of, joins_units
from ptrain.codec import encode
from ptrain.report.table import (
    MISSING,
    Importance,
    TableColumn,
    make_columns,
    name_column,
    or_missing,
    render,
)
from ptrain.selection.demand import Demand
from ptrain.selection.fit import room_text, usable_text
from ptrain.selection.quantities import keeping, recompute_of, unit_of
from ptrain.selection.ranking import Lost, PlacementRanking, reason
from ptrain.selection.task import Ranked, Scored, SearchGoal
from ptrain.selection.words import words_of
from ptrain.spec.activations import PLAIN
from ptrain.spec.dials import Overlap
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import DATA_AXES, Axis
from ptrain.spec.spec import Spec
from ptrain.spec.write import to_yaml
from ptrain.units import format_bytes, format_count

_OVER_CONTEXT = (
    "peaks over cp are those of a processor's kernels: no GPU has shown them, and none is claimed"
)
TOP, _BILLION = 10, 10**9
_MARKED = {
    SearchGoal.DEVICES: "the fewest devices that meet the demand",
    SearchGoal.COST: "where a token takes least of a device's time",
}


def selection_text(selection: PlacementRanking, top: int = TOP) -> str:
    """Return the table of the best, the front, why well-known choices lost, and the winner's
    command; where nothing fits what would."""
    return "\n".join([*_heading(selection), "", *_body(selection, top)])


def _heading(selection: PlacementRanking) -> Iterator[str]:
    job, counts = selection.job, selection.counts
    base, cluster = job.base, job.base.cluster
    assert cluster is not None, "a job that is searched for has a cluster"
    yield (
        f"{base.name} on {job.devices} devices of {cluster.name} · {base.precision.layout.name} · "
        f"batch {base.batch.global_samples} × {base.batch.sequence} tokens = "
        f"{format_count(base.batch.tokens)}"
    )
    least = "least memory" if _is_by_memory(selection) else "fastest"
    yield (
        f"{counts.scored} legal candidates scored in closed form, {counts.fitting} of them fit; "
        f"{selection.derived} derived exactly, {least} first"
    )
    if reserve := cluster.reserved_bytes:
        yield usable_text(cluster.device_memory, reserve)
    if job.stand_in is not None:
        yield (
            f"scored as a {job.stand_in.family}'s blocks of about as many parameters; the "
            f"{selection.derived} derived with the model itself, traced"
        )
    if job.where.constraints:
        yield f"where {', '.join(rule.text for rule in job.where.constraints)}"
    if stays := written_texts(job.written):
        yield f"as written {', '.join(stays)}"
    if selection.unknown:
        yield f"time is unknown: {selection.unknown}"
        yield _order(selection)


def _order(selection: PlacementRanking) -> str:
    """What rows without a time are ordered by."""
    if _is_by_memory(selection):
        return "the order is that of memory"
    cluster = selection.job.base.cluster
    counted = "operations and bytes" if cluster is not None and cluster.flops else "bytes alone"
    return f"the order is that of nominal seconds, {counted} over what the cluster's file declares"


def _is_by_memory(selection: PlacementRanking) -> bool:
    """Whether that was asked for, or no row has any time, a nominal one neither."""
    rows = selection.ranking
    is_untimed = bool(rows) and not any(isfinite(row.nominal_seconds) for row in rows)
    return selection.ranked_by is SearchGoal.MEMORY or is_untimed


def _body(selection: PlacementRanking, top: int) -> Iterator[str]:
    best = selection.best
    if best is None:
        yield from _nothing_fits(selection)
        return
    yield from _by_number(selection)
    shown = selection.ranking[:top]
    yield _table(shown, selection)
    yield from _untimed(selection, top)
    if any(row.spec.has_token_slices and row.spec.is_for_cuda for row in shown):
        yield _OVER_CONTEXT
    if len(selection.front) > 1:
        yield ""
        yield "no other is faster and needs less memory:"
        yield _table(selection.front, selection)
    if selection.lost:
        yield ""
        yield "well-known choices, each with the best of all else:"
        yield from _lost(selection)
    yield ""
    yield "why the best one is as it is:"
    yield from (f"  {line}" for line in selection.reasons)
    yield ""
    yield f"best: {command(selection, best)}"


def _by_number(selection: PlacementRanking) -> Iterator[str]:
    """What a training, or a billion tokens, takes on each number of devices that was tried."""
    if not selection.by_number:
        return
    demand = selection.demand or Demand(tokens=_BILLION)
    tokens = format_count(demand.tokens)
    table = [
        (
            f"{'*' * (number == selection.job.devices)}{number}",
            described(row.spec),
            _seconds(row),
            *demand.figures(row),
        )
        for number, row in selection.by_number
    ]
    yield (
        f"{_MARKED[selection.objective]} is marked, {demand.text}:"
        if selection.demand
        else (f"{_MARKED[selection.objective]} is marked:")
    )
    heads = (
        TableColumn("devices", Importance.NAME),
        name_column("its best"),
        TableColumn("time"),
        TableColumn(f"{tokens} tokens take", Importance.RESULT),
        TableColumn("money", Importance.RESULT),
    )
    yield render(make_columns(table, *heads))
    yield ""


def _untimed(selection: PlacementRanking, top: int) -> Iterator[str]:
    """Why rows have no time, a line for each reason."""
    rows: dict[str, list[str]] = {}
    for number, row in enumerate(selection.ranking[:top], 1):
        if row.seconds is None and row.why_untimed != selection.unknown:
            rows.setdefault(row.why_untimed, []).append(str(number))
    for why, numbers in rows.items():
        yield f"no step time of {', '.join(numbers)}: {why}"


def _lost(selection: PlacementRanking) -> Iterator[str]:
    rows = [(lost.name, *_figures(selection, lost), lost.why) for lost in selection.lost]
    heads = (
        name_column("choice"),
        TableColumn("its best", left=True),
        TableColumn("time", Importance.RESULT),
        TableColumn("peak", Importance.RESULT),
        TableColumn("", Importance.DETAIL, left=True),
    )
    yield render(make_columns(rows, *heads))


def _figures(selection: PlacementRanking, lost: Lost) -> tuple[str, str, str]:
    """What a choice is at its best, its time and its peak."""
    if lost.best is not None:
        row = lost.best
        return described(row.spec), _seconds(row), format_bytes(row.peak_bytes)
    if lost.closed is None:
        return "", MISSING, MISSING
    spec, closed = lost.closed
    time = or_missing(closed_seconds(selection, closed), "about {:.3g} s".format)
    return described(spec), time, f"about {format_bytes(closed.peak)}"


def closed_seconds(selection: PlacementRanking, closed: Scored) -> float | None:
    """None where nobody knows them: the candidate does not fit, or the cluster has no rates."""
    return closed.seconds if not selection.unknown and closed.seconds < float("inf") else None


def _nothing_fits(selection: PlacementRanking) -> Iterator[str]:
    job, least = selection.job, selection.least
    room = format_bytes(job.base.cluster.usable_memory if job.base.cluster else 0)
    if least is None:
        yield f"nothing fits {room} per device"
        return
    short = max(least.memory.short_bytes, least.memory.host_short_bytes)
    if short > 0:
        why = f"too much by {format_bytes(short)}"
    elif least.memory.unknown:
        why = f"unknown whether it fits: {least.memory.unknown}"
    else:
        why = "which fits, and not under all constraints"
    yield (
        f"nothing fits {room} per device. Least memory has {described(least.spec)}: peak "
        f"{format_bytes(least.peak_bytes)}, {why}"
    )
    for remedy in selection.remedies:
        row = remedy.fitting
        yield (
            f"  fits {remedy.change}: {described(row.spec)}, peak {format_bytes(row.peak_bytes)}"
        )
    if not selection.remedies:
        yield "  neither more devices nor a constraint less would do: a smaller model or sequence"


def _table(rows: Sequence[Ranked], selection: PlacementRanking) -> str:
    """Return a table of rows. It has a column for the host if a row offloads states."""
    alike = [f" (and {row.alike} alike)" if row.alike else "" for row in rows]
    placements = [described(row.spec) + more for row, more in zip(rows, alike, strict=True)]
    columns = [
        TableColumn("", Importance.NAME, [str(number) for number, _ in enumerate(rows, 1)]),
        name_column("placement", placements),
        TableColumn("time", Importance.RESULT, [_seconds(row) for row in rows]),
        TableColumn(
            "tokens/s", cells=[or_missing(row.tokens_per_second, format_count) for row in rows]
        ),
        TableColumn("MFU", cells=[or_missing(row.mfu, "{:.1%}".format) for row in rows]),
        TableColumn("peak", Importance.RESULT, [format_bytes(row.peak_bytes) for row in rows]),
        TableColumn(
            "on a host", cells=[format_bytes(row.memory.host_needed_bytes) for row in rows]
        ),
        TableColumn(
            "between nodes", Importance.DETAIL, [format_bytes(row.tiers.between) for row in rows]
        ),
        TableColumn("within", Importance.DETAIL, [format_bytes(row.tiers.within) for row in rows]),
        TableColumn(
            "per 1B tokens", cells=[or_missing(row.price, "{:.0f}".format) for row in rows]
        ),
    ]
    unused = set()
    if not any(row.memory.host_bytes for row in rows):
        unused.add("on a host")
    if not any(row.price is not None for row in selection.ranking):
        unused.add("per 1B tokens")
    return render([column for column in columns if column.title not in unused])


def _seconds(row: Ranked) -> str:
    return or_missing(row.seconds, "{:.3g} s".format)


def written_texts(written: Written) -> tuple[str, ...]:
    """Return what stays in all candidates as it is written."""
    words = dict.fromkeys(keeping(kept) for kept in written.kept)
    return (*written.texts, *([f"recompute={' or '.join(words)}"] if words else []))


def described(spec: Spec) -> str:
    """Return what is chosen of a spec, in few words: axes with degrees and tuples, schedule,
    micro-batches, recomputation and dials that are not the default."""
    words = [_axis(spec, axis) for axis in Axis if spec.degree(axis) > 1]
    if (attention := written_attention(spec)) is not None:
        words.append(str(attention))
    words.append(f"{spec.batch.micro}×{spec.batch.accumulate}")
    if spec.activations.default != PLAIN:
        words.append(recompute_of(spec))
    if any(f.axis in DATA_AXES for f in spec.factors):
        words += _dials(spec)
    return " ".join(words)


def _axis(spec: Spec, axis: Axis) -> str:
    factor = next(f for f in spec.factors if f.axis is axis)
    if axis is not Axis.PP:
        return f"{axis}={factor.degree}({factor.placement})"
    per_rank = spec.pipeline.stages_over(factor.degree) // factor.degree
    several = f"×{per_rank}" if per_rank > 1 else ""
    return f"pp={factor.degree}({spec.pipeline.schedule}{several})"


def _dials(spec: Spec) -> Iterator[str]:
    if spec.unit is not None or joins_units(spec, form_of(spec)):
        yield f"unit {unit_of(spec)}"
    yield f"sync {spec.sync.gradients}"
    if not spec.sync.reshard_after_forward:
        yield "kept" if not spec.sync.reshard_after_backward else "kept for backward"
    if spec.overlap is not None:
        yield "no overlap" if spec.overlap is Overlap.NONE else "overlap"
    if spec.prefetch:
        yield f"prefetch {spec.prefetch}"


def command(selection: PlacementRanking, row: Ranked) -> str:
    """Return a shell line that trains a candidate."""
    return shlex.join(["ptrain", "train", *words_of(selection.job, row.spec)])


def as_spec(selection: PlacementRanking, row: Ranked) -> str:
    """Return a candidate's spec as a file, with the figures that it was chosen for."""
    job, cluster = selection.job, selection.job.base.cluster
    assert cluster is not None, "a job that is searched for has a cluster"
    lines = [
        f"chosen by ptrain select of {selection.counts.scored} candidates for {job.devices} "
        f"devices of {cluster.name}",
        f"predicted: peak {format_bytes(row.peak_bytes)}{room_text(row.memory)}, "
        f"{format_bytes(row.tiers.between)} sent between nodes and "
        f"{format_bytes(row.tiers.within)} within one, per rank and step",
    ]
    if row.seconds is not None and row.tokens_per_second is not None:
        mfu = "" if row.mfu is None else f", MFU {row.mfu:.1%}"
        lines.append(
            f"predicted: {row.seconds:.4g} s a step, {format_count(row.tokens_per_second)} "
            f"tokens/s{mfu}"
        )
    comments = "".join(f"# {line}\n" for line in lines)
    return comments + to_yaml(row.spec.resolved)


Record = dict[str, object]
_NESTED = ("closed_form", "mesh")  # no columns of CSV


def as_record(selection: PlacementRanking, top: int | None = None) -> Record:
    """Return all of it as plain data; `top`: so many rows of the ranking, else all."""
    job, least = selection.job, selection.least
    return {
        "job": job.base.name,
        "devices": job.devices,
        "objective": selection.objective.value,
        "where": [rule.text for rule in job.where.constraints],
        "written": list(written_texts(job.written)),
        "candidates": selection.counts.scored,
        "fitting": selection.counts.fitting,
        "untimed": selection.counts.untimed,
        "derived": selection.derived,
        "scored_as": _scored_as(job.stand_in),
        "time_unknown": selection.unknown or None,
        "ranking": list(_ranked(selection, top)),
        "front": [row_record(selection, row) for row in selection.front],
        "lost": [
            {
                "name": lost.name,
                "why": lost.why,
                "best": None if lost.best is None else row_record(selection, lost.best),
                "about": None if lost.closed is None else _about(selection, *lost.closed),
            }
            for lost in selection.lost
        ],
        "reasons": list(selection.reasons),
        "least": None if least is None else row_record(selection, least),
        "remedies": [
            {"change": remedy.change, "fitting": row_record(selection, remedy.fitting)}
            for remedy in selection.remedies
        ],
        "demand": encode(selection.demand),
        "by_number": [
            {"devices": number, **row_record(selection, row)} for number, row in selection.by_number
        ],
    }


def _scored_as(shape: ModelShape | None) -> Record | None:
    """Whose blocks were scored in the place of the model's own."""
    if shape is None:
        return None
    names = ("heads", "kv_heads", "ffn")
    return {"family": shape.family.value} | {name: getattr(shape, name) for name in names}


def _about(selection: PlacementRanking, spec: Spec, closed: Scored) -> Record:
    return {
        "placement": described(spec),
        "step_seconds": closed_seconds(selection, closed),
        "peak_bytes": closed.peak,
    }


def _ranked(selection: PlacementRanking, top: int | None) -> Iterator[Record]:
    """The rows of the ranking, each with its rank and why it is no better one."""
    for rank, row in enumerate(selection.ranking[:top], 1):
        why = reason(row, selection.ranking[0], selection.ranked_by)
        yield {"rank": rank, **row_record(selection, row), "why": why}


def row_record(selection: PlacementRanking, row: Ranked) -> Record:
    """Return one row: what was chosen, exact figures, and those of the closed form."""
    spec, demand = row.spec, selection.demand
    training: Record = {}
    if demand is not None:
        training = {"training_seconds": demand.seconds(row), "training_price": demand.money(row)}
    return {
        "placement": described(spec),
        "alike": row.alike,
        "mesh": {factor.axis.value: factor.degree for factor in spec.factors},
        "words": list(words_of(selection.job, spec)),
        "front": row in selection.front,
        "fits": row.memory.fits,
        "tight": row.memory.is_tight,
        "step_seconds": row.seconds,
        "time_unknown": row.why_untimed or None,
        "tokens_per_second": row.tokens_per_second,
        "mfu": row.mfu,
        "peak_bytes": row.peak_bytes,
        "reserve_bytes": row.memory.reserve_bytes,
        "host_bytes": row.memory.host_bytes,
        "between_nodes_bytes": row.tiers.between,
        "within_node_bytes": row.tiers.within,
        "copied_bytes": row.tiers.copied,
        "price_per_billion_tokens": row.price,
        **training,
        "closed_form": {
            "step_seconds": row.closed.seconds if isfinite(row.closed.seconds) else None,
            "peak_bytes": row.closed.peak,
        },
    }


def as_csv(selection: PlacementRanking, top: int | None = None) -> str:
    """Return a row for each candidate of the ranking, for those of the front that are not in it,
    for the well-known choices, and, where nothing fits, for what needs least and what would fit;
    `choice` is empty in rows of the ranking."""
    rows = list(_rows(selection, top))
    columns = dict.fromkeys(name for row in rows for name in row if name not in _NESTED)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        words = row.get("words")
        said = {"words": shlex.join(map(str, words))} if isinstance(words, Iterable) else {}
        writer.writerow(row | said)
    return text.getvalue()


def _rows(selection: PlacementRanking, top: int | None) -> Iterator[Record]:
    ranking = list(_ranked(selection, top))
    yield from ({"rank": row.pop("rank"), "choice": "", **row} for row in ranking)
    for row in selection.front:
        if row not in selection.ranking[:top]:
            why = reason(row, selection.ranking[0], selection.ranked_by)
            yield {"choice": "front", **row_record(selection, row), "why": why}
    for lost in selection.lost:
        yield {"choice": lost.name, **_of_lost(selection, lost), "why": lost.why}
    if selection.least is not None:
        yield {"choice": "least memory", **row_record(selection, selection.least)}
    for remedy in selection.remedies:
        yield {"choice": remedy.change, **row_record(selection, remedy.fitting), "why": "fits"}


def _of_lost(selection: PlacementRanking, lost: Lost) -> Record:
    if lost.best is not None:
        return row_record(selection, lost.best)
    return {} if lost.closed is None else _about(selection, *lost.closed)
