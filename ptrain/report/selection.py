"""A ranking of placements as text, plain data and CSV, and its winner as a spec file."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import isfinite

from ptrain.axes.candidates import FixedChoices
from ptrain.axes.context.attention import written_attention
from ptrain.axes.data.form import form_of, joins_units
from ptrain.codec import encode
from ptrain.report.reasons import losing_reason, placement_idea, placement_reasons
from ptrain.report.step_time import device_name, pace_parts
from ptrain.report.table import (
    Importance,
    TableColumn,
    make_columns,
    name_column,
    render_table,
    text_or_dash,
)
from ptrain.selection.fit import room_text, usable_text
from ptrain.selection.job import words_of
from ptrain.selection.ranking import Demand, Lost, PlacementRanking, Ranked, SearchGoal, order_of
from ptrain.selection.where import keeping, recompute_of, unit_of
from ptrain.spec.activations import PLAIN
from ptrain.spec.dials import STOCK_BUCKET_BYTES, Overlap
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import DATA_AXES, Axis
from ptrain.spec.shorthand import placement_names
from ptrain.spec.spec import Spec
from ptrain.spec.write import to_yaml
from ptrain.units import format_bytes, format_count, format_memory, format_seconds, group_by_key

_OVER_CONTEXT = "peaks with cp are those of CPU kernels and have not been confirmed on a GPU"
TOP, _BILLION = 10, 10**9
_ALIKE_TIME, _ALIKE_MEMORY = 0.01, 0.05  # rows of one idea within these shares are merged
_MARK_LEGENDS = {
    SearchGoal.DEVICES: "* marks the fewest devices that meet the demand",
    SearchGoal.COST: "* marks the least device time per token",
}


def selection_text(selection: PlacementRanking, top: int = TOP) -> str:
    """Return the screen of a ranking.

    It has the best placement, the ranking, the Pareto front, the reasons why well-known placements
    lost, and the reasons for the best. If nothing fits, it has changes that make something fit.
    """
    return "\n".join([*_heading_lines(selection), "", *_body_lines(selection, top)])


def _heading_lines(selection: PlacementRanking) -> Iterator[str]:
    """Yield the lines above the ranking: the job, the answer, the counts, and the assumptions."""
    job, counts = selection.job, selection.counts
    base, cluster = job.base, job.base.cluster
    assert cluster is not None, "a job that is searched for has a cluster"
    yield (
        f"{base.name} on {job.devices} devices of {cluster.name} · {base.precision.layout.name} · "
        f"batch {base.batch.global_samples} × {base.batch.sequence} tokens = "
        f"{format_count(base.batch.tokens)}"
    )
    yield from _answer_lines(selection)
    least = "least memory" if _is_by_memory(selection) else "fastest"
    yield (
        f"{counts.scored} legal candidates · {counts.fitting} fit · {selection.derived} derived "
        f"exactly · {least} first"
    )
    if reserve := cluster.reserved_bytes:
        yield usable_text(cluster.device_memory, reserve)
    if margin := job.margin_bytes:
        yield f"margin: {format_memory(margin)} ({job.margin:.0%}) stay free; change it by --margin"
    elif selection.best is not None and selection.asked_margin:
        yield f"margin: none, because no placement leaves {selection.asked_margin:.0%} free"
    elif selection.best is not None and selection.best.memory.is_tight:
        yield "margin: none, as you asked or by your constraint of memory"
    if job.stand_in is not None:
        like = f"as blocks of a {job.stand_in.family} with about as many parameters"
        if job.stand_in == base.model:
            like = "as eager blocks without fp8 products and autocast"
        yield (
            f"scored {like}; the "
            f"{selection.derived} exact ones are derived from traces of the model"
        )
    if job.where.constraints:
        yield f"constraints: {', '.join(rule.text for rule in job.where.constraints)}"
    if stays := fixed_settings(job.written):
        yield f"fixed by the spec: {', '.join(stays)}"
    if selection.unknown:
        yield f"time is unknown: {selection.unknown}"
        yield _order_text(selection)


def _answer_lines(selection: PlacementRanking) -> Iterator[str]:
    """Yield the best placement and its figures; nothing if no placement fits."""
    if (best := selection.best) is None:
        return
    spec, memory = best.spec, best.memory
    usable, device = memory.usable_memory or 0, device_name(spec)
    parts = [
        f"peak {format_memory(best.peak_bytes)} of {format_memory(usable)} per {device}",
        f"{_headroom_text(best)} free",
        *pace_parts(spec, best.seconds, best.throughput),
    ]
    yield f"Best: {' · '.join(filter(None, _placement_cells(spec)))}"
    yield f"Fits{', but tight' * memory.is_tight}: {' · '.join(parts)}"


def _order_text(selection: PlacementRanking) -> str:
    """Return a sentence on how rows without a step time are ordered."""
    if _is_by_memory(selection):
        return "rows are ordered by memory"
    cluster = selection.job.base.cluster
    counted = "operations and bytes" if cluster is not None and cluster.flops else "bytes alone"
    return f"rows are ordered by nominal seconds: {counted} over the rates of the cluster's file"


def _is_by_memory(selection: PlacementRanking) -> bool:
    """Return True if rows are ordered by memory: by request, or because no row has any time."""
    rows = selection.ranking
    is_untimed = bool(rows) and not any(isfinite(row.nominal_seconds) for row in rows)
    return selection.ranked_by is SearchGoal.MEMORY or is_untimed


def _body_lines(selection: PlacementRanking, top: int) -> Iterator[str]:
    """Yield the ranking, the Pareto front, comparisons, and the reasons for the best placement."""
    if selection.best is None:
        yield from _nothing_fits(selection)
        return
    yield from _cost_by_number(selection)
    numbered = dict(enumerate(best_of_ideas(selection)[:top], 1))
    shown = list(numbered.values())
    yield _ranking_table(shown, selection, [*map(str, numbered)])
    yield from _untimed_lines(selection, numbered)
    if any(row.spec.has_token_slices and row.spec.is_for_cuda for row in shown):
        yield _OVER_CONTEXT
    yield from (
        f"peaks with ep are {why}" for why in dict.fromkeys(r.assumed for r in shown) if why
    )
    if front := distinct_front(selection, shown):
        yield ""
        yield "Pareto front of time and memory, without the rows above:"
        yield _ranking_table(front, selection, [""] * len(front))
    yield ""
    yield from _comparison_lines(selection, numbered)
    yield from _micro_batches(selection)
    yield ""
    yield "reasons for the best:"
    yield from (f"  {line}" for line in winner_reasons(selection))


def _cost_by_number(selection: PlacementRanking) -> Iterator[str]:
    """Yield a table of the cost of a training, or of a billion tokens, by number of devices."""
    if not selection.by_number:
        return
    demand = selection.demand or Demand(tokens=_BILLION)
    tokens = format_count(demand.tokens)
    table = [
        (
            f"{'*' * (number == selection.job.devices)}{number}",
            placement_text(row.spec),
            _step_text(row),
            *demand.figures(row),
        )
        for number, row in selection.by_number
    ]
    yield (
        f"{_MARK_LEGENDS[selection.objective]}, {demand.text}:"
        if selection.demand
        else (f"{_MARK_LEGENDS[selection.objective]}:")
    )
    heads = (
        TableColumn("devices", Importance.NAME),
        name_column("best placement"),
        TableColumn("step time"),
        TableColumn(f"time for {tokens} tokens", Importance.RESULT),
        TableColumn("money", Importance.RESULT),
    )
    yield render_table(make_columns(table, *heads))
    yield ""


def _untimed_lines(selection: PlacementRanking, numbered: Mapping[int, Ranked]) -> Iterator[str]:
    """Yield a line for each reason why rows have no step time, unless it holds for all rows."""
    rows = group_by_key(
        (row.why_untimed, str(number))
        for number, row in numbered.items()
        if row.seconds is None and row.why_untimed != selection.unknown
    )
    for why, numbers in rows.items():
        yield f"no step time of {', '.join(numbers)}: {why}"


def best_of_ideas(selection: PlacementRanking) -> list[Ranked]:
    """Return the best row of each idea, the winner first.

    Placements on the winner's axes are separate ideas if they differ in recomputation or
    offloading. Other placements are one idea per combination of axes.
    """
    lost_rows = (lost.best for lost in selection.lost)
    margin = selection.job.margin_bytes
    fitting = [row for row in (*selection.front, *lost_rows) if row and row.memory.leaves(margin)]
    order = partial(order_of, selection.ranked_by)
    winner, *others = selection.ranking
    axes, *_ = placement_idea(winner.spec).partition(",")
    best = {placement_idea(winner.spec): winner}
    for row in sorted((*others, *fitting), key=order):
        idea = placement_idea(row.spec)
        best.setdefault(idea if idea.partition(",")[0] == axes else idea.partition(",")[0], row)
    return list(best.values())


def distinct_front(selection: PlacementRanking, shown: Iterable[Ranked] = ()) -> list[Ranked]:
    """Return the Pareto front, without rows that nearly equal one of `shown` or a smaller row."""
    # From the smallest on, so that the smaller of two similar rows is kept.
    front = reversed(
        [row for row in selection.front if not any(_are_similar(row, o) for o in shown)]
    )
    rows: list[Ranked] = []
    for row in front:
        if not any(_are_similar(row, other) for other in rows):
            rows.append(row)
    return rows[::-1]


def _are_similar(row: Ranked, other: Ranked) -> bool:
    """Return True if two rows of one idea differ by at most 1 % of time and 5 % of memory."""
    pairs = (
        (row.nominal_seconds, other.nominal_seconds, _ALIKE_TIME),
        (float(row.peak_bytes), float(other.peak_bytes), _ALIKE_MEMORY),
    )
    is_near = all(abs(one - two) <= part * max(one, two) for one, two, part in pairs)
    return is_near and placement_idea(row.spec) == placement_idea(other.spec)


def _comparison_lines(selection: PlacementRanking, numbered: Mapping[int, Ranked]) -> Iterator[str]:
    """Yield a sentence for each row, and for each well-known placement that is not in the table."""
    best, by = selection.ranking[0], selection.ranked_by
    yield "against the best:"
    for number, row in numbered.items():
        if row.figures != best.figures:
            yield f"  {number:>2}  {placement_idea(row.spec)}: {losing_reason(row, best, by)}"
    figures = [row.figures for row in numbered.values()]
    for lost in selection.lost:
        if lost.best is None or lost.best.figures not in figures:
            yield f"      {lost.name}: {why_lost(selection, lost)}"


def why_lost(selection: PlacementRanking, lost: Lost) -> str:
    """Return the reason why a well-known placement is not the best one."""
    return lost.why or losing_reason(lost.best, selection.ranking[0], selection.ranked_by)


def winner_reasons(selection: PlacementRanking) -> list[str]:
    """Return the reasons for the best placement; empty if nothing was derived for it."""
    return [] if selection.winner is None else placement_reasons(selection.winner)


def _micro_batches(selection: PlacementRanking) -> Iterator[str]:
    """Yield the best row of each micro-batch size with the winner's idea, if there are several."""
    # The ranking is ordered, so the first row of each micro-batch is its best.
    idea = placement_idea(selection.ranking[0].spec)
    rows: dict[int, Ranked] = {}
    for row in selection.ranking:
        if placement_idea(row.spec) == idea:
            rows.setdefault(row.spec.batch.micro, row)
    if len(rows) > 1:
        listed = (
            f"{micro}×{row.spec.batch.accumulate} {_step_text(row)}, "
            f"{format_memory(row.peak_bytes)}"
            for micro, row in sorted(rows.items())
        )
        yield f"micro-batches of {idea}: {' · '.join(listed)}"


def _nothing_fits(selection: PlacementRanking) -> Iterator[str]:
    """Yield the candidate with the least memory, and the changes that make something fit."""
    job, least = selection.job, selection.least
    room = format_memory(job.base.cluster.usable_memory if job.base.cluster else 0)
    if least is None:
        yield f"Nothing fits {room} per device."
        return
    short = max(least.memory.short_bytes, least.memory.host_short_bytes)
    if short > 0:
        why = f"too much by {format_memory(short)}"
    elif least.memory.unknown:
        why = f"unknown whether it fits: {least.memory.unknown}"
    else:
        why = "which fits, but violates a constraint"
    yield f"Nothing fits {room} per device."
    yield (
        f"least memory: {placement_text(least.spec)}: peak {format_memory(least.peak_bytes)}, {why}"
    )
    for remedy in selection.remedies:
        row = remedy.fitting
        peak = format_memory(row.peak_bytes)
        yield f"  fits {remedy.change}: {placement_text(row.spec)}, peak {peak}"
    if not selection.remedies:
        yield "  Neither more devices nor fewer constraints help. Use a smaller model or sequence."


def _ranking_table(
    rows: Sequence[Ranked], selection: PlacementRanking, numbers: Sequence[str]
) -> str:
    """Return a table of rows; columns without figures are left out."""
    placements, batches, _, dials = zip(*(_placement_cells(row.spec) for row in rows), strict=True)
    device = device_name(rows[0].spec)
    paces = [row.tokens_per_second for row in rows]
    per_device = [pace and pace / selection.job.devices for pace in paces]
    columns = [
        TableColumn("row" if any(numbers) else "", Importance.NAME, numbers),
        name_column("idea", [placement_idea(row.spec) for row in rows]),
        TableColumn("placement", Importance.RESULT, placements, left=True),
        TableColumn("micro×accum", cells=batches, left=True),
        TableColumn("step time", Importance.RESULT, [_step_text(row) for row in rows]),
        TableColumn("tokens/s", cells=[text_or_dash(pace, format_count) for pace in paces]),
        TableColumn(
            f"tokens/s/{device}",
            Importance.DETAIL,
            [text_or_dash(pace, format_count) for pace in per_device],
        ),
        TableColumn(
            "MFU", Importance.DETAIL, [text_or_dash(row.mfu, "{:.1%}".format) for row in rows]
        ),
        TableColumn("peak", Importance.RESULT, [format_memory(row.peak_bytes) for row in rows]),
        TableColumn("headroom", Importance.RESULT, [_headroom_text(row) for row in rows]),
        TableColumn(
            "host memory", cells=[format_memory(row.memory.host_needed_bytes) for row in rows]
        ),
        TableColumn("options", cells=dials, left=True),
        TableColumn(
            "between nodes", Importance.DETAIL, [format_bytes(row.tiers.between) for row in rows]
        ),
        TableColumn(
            "within nodes", Importance.DETAIL, [format_bytes(row.tiers.within) for row in rows]
        ),
        TableColumn(
            "per 1B tokens", cells=[text_or_dash(row.price, "{:.0f}".format) for row in rows]
        ),
    ]
    unused = {column.title for column in columns if not any(column.cells)}
    if not any(row.memory.host_bytes for row in rows):
        unused.add("host memory")
    if not any(row.price is not None for row in selection.ranking):
        unused.add("per 1B tokens")
    return render_table([column for column in columns if column.title not in unused])


def _step_text(row: Ranked) -> str:
    """Return the step time of a row as text."""
    return text_or_dash(row.seconds, format_seconds)


def _headroom_text(row: Ranked) -> str:
    """Return the bytes that stay free on a device, and their share of its memory."""
    memory = row.memory
    part = memory.spare_bytes / (memory.device_memory or 1)
    return f"{format_memory(memory.spare_bytes)} ({part:.0%})"


def placement_text(spec: Spec) -> str:
    """Return the placement for a screen, with the names of tuples that have one.

    An example is `dp_shard=8 fsdp-mixed, 1×128, last, overlap`.
    """
    return ", ".join(filter(None, _placement_cells(spec)))


def _chosen_settings(spec: Spec, *, named: bool = False) -> tuple[str, str, str, list[str]]:
    """Return axes with placements, `micro×accumulate`, recomputation, and non-default options."""
    words = [_axis_text(spec, axis, named=named) for axis in Axis if spec.degree(axis) > 1]
    if (attention := written_attention(spec)) is not None:
        words.append(str(attention))
    kept = recompute_of(spec) if spec.activations.default != PLAIN else ""
    has_data_axis = any(f.axis in DATA_AXES for f in spec.factors)
    batch = f"{spec.batch.micro}×{spec.batch.accumulate}"
    return " ".join(words), batch, kept, list(_option_texts(spec)) if has_data_axis else []


def _placement_cells(spec: Spec) -> tuple[str, str, str, str]:
    """Return the parts of `_chosen_settings` as cells of a table, with the names of tuples."""
    words, batch, kept, dials = _chosen_settings(spec, named=True)
    return words or "one device", batch, kept, ", ".join(dials)


def fixed_settings(written: FixedChoices) -> tuple[str, ...]:
    """Return the settings that the spec fixes, which are the same in all candidates."""
    words = dict.fromkeys(keeping(kept) for kept in written.kept)
    return (*written.overrides, *([f"recompute={' or '.join(words)}"] if words else []))


def describe_settings(spec: Spec) -> str:
    """Return the chosen settings of a spec in one line, without options that are defaults."""
    words, batch, kept, dials = _chosen_settings(spec)
    return " ".join(filter(None, [words, batch, kept, *dials]))


def _axis_text(spec: Spec, axis: Axis, *, named: bool = False) -> str:
    """Return an axis with its degree and its placement, or with its schedule if it is pp."""
    factor = next(f for f in spec.factors if f.axis is axis)
    if axis is not Axis.PP:
        name = placement_names(axis).get(str(factor.placement)) if named else None
        return f"{axis}={factor.degree}" + (f" {name}" if name else f"({factor.placement})")
    per_rank = spec.pipeline.stages_over(factor.degree) // factor.degree
    several = f"×{per_rank}" if per_rank > 1 else ""
    return f"pp={factor.degree}({spec.pipeline.schedule}{several})"


def _option_texts(spec: Spec) -> Iterator[str]:
    """Yield the options of the data axes that are not defaults."""
    if spec.unit is not None or joins_units(spec, form_of(spec)):
        yield f"unit {unit_of(spec)}"
    yield f"sync {spec.sync.gradients}"
    if not spec.sync.reshard_after_forward:
        yield "kept" if not spec.sync.reshard_after_backward else "kept for backward"
    if spec.overlap is not None:
        yield "no overlap" if spec.overlap is Overlap.NONE else "overlap"
    if spec.prefetch:
        yield f"prefetch {spec.prefetch}"
    if spec.bucket_bytes != STOCK_BUCKET_BYTES:
        yield f"bucket {format_bytes(spec.bucket_bytes)}"


def as_spec(selection: PlacementRanking, row: Ranked) -> str:
    """Return a candidate as the text of a spec file, with its predicted figures as comments."""
    job, cluster = selection.job, selection.job.base.cluster
    assert cluster is not None, "a job that is searched for has a cluster"
    lines = [
        f"chosen by ptrain select from {selection.counts.scored} candidates for {job.devices} "
        f"devices of {cluster.name}",
        f"predicted: peak {format_memory(row.peak_bytes)}{room_text(row.memory)}, traffic "
        f"{format_bytes(row.tiers.between)} between nodes and "
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
    """Return a ranking as plain data, with its first `top` rows (None: all rows)."""
    job, least = selection.job, selection.least
    return {
        "job": job.base.name,
        "devices": job.devices,
        "objective": selection.objective.value,
        "margin_bytes": job.margin_bytes,
        "where": [rule.text for rule in job.where.constraints],
        "written": list(fixed_settings(job.written)),
        "candidates": selection.counts.scored,
        "fitting": selection.counts.fitting,
        "untimed": selection.counts.untimed,
        "derived": selection.derived,
        "scored_as": _scored_as(job.stand_in),
        "time_unknown": selection.unknown or None,
        "ranking": list(_ranking_rows(selection, top)),
        "ideas": [row_record(selection, row) for row in best_of_ideas(selection)]
        if selection.best
        else [],
        "front": [row_record(selection, row) for row in selection.front],
        "lost": [
            {
                "name": lost.name,
                "why": why_lost(selection, lost),
                "best": None if lost.best is None else row_record(selection, lost.best),
                "about": None,
            }
            for lost in selection.lost
        ],
        "reasons": winner_reasons(selection),
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
    """Return the shape of the blocks that replaced the model's in the search; None without one."""
    if shape is None:
        return None
    names = ("heads", "kv_heads", "ffn")
    return {"family": shape.family.value} | {name: getattr(shape, name) for name in names}


def _ranking_rows(selection: PlacementRanking, top: int | None) -> Iterator[Record]:
    """Yield the rows of the ranking, each with its rank and the reason why it is not better."""
    for rank, row in enumerate(selection.ranking[:top], 1):
        why = losing_reason(row, selection.ranking[0], selection.ranked_by)
        yield {"rank": rank, **row_record(selection, row), "why": why}


def row_record(selection: PlacementRanking, row: Ranked) -> Record:
    """Return one row as plain data: the chosen settings, exact figures, and closed-form figures."""
    spec, demand = row.spec, selection.demand
    training: Record = {}
    if demand is not None:
        training = {"training_seconds": demand.seconds(row), "training_price": demand.money(row)}
    return {
        "placement": describe_settings(spec),
        "idea": placement_idea(spec),
        "alike": row.alike,
        "mesh": {factor.axis.value: factor.degree for factor in spec.factors},
        "words": list(words_of(selection.job, spec)),
        "front": row in selection.front,
        "fits": row.memory.fits,
        "tight": row.memory.is_tight,
        "headroom_bytes": row.memory.spare_bytes,
        "step_seconds": row.seconds,
        "time_unknown": row.why_untimed or None,
        "tokens_per_second": row.tokens_per_second,
        "mfu": row.mfu,
        "peak_bytes": row.peak_bytes,
        "peak_assumes": row.assumed or None,
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
    """Return a ranking as CSV, with its first `top` rows (None: all rows).

    The column `choice` is empty for rows of the ranking, `front` for other rows of the Pareto
    front, and else the name of a well-known placement, `least memory`, or a change that makes
    something fit.
    """
    rows = list(_csv_rows(selection, top))
    columns = dict.fromkeys(name for row in rows for name in row if name not in _NESTED)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        words = row.get("words")
        words_cell = {"words": shlex.join(map(str, words))} if isinstance(words, Iterable) else {}
        writer.writerow(row | words_cell)
    return text.getvalue()


def _csv_rows(selection: PlacementRanking, top: int | None) -> Iterator[Record]:
    """Yield the rows of the CSV file as plain data."""
    ranking = list(_ranking_rows(selection, top))
    yield from ({"rank": row.pop("rank"), "choice": "", **row} for row in ranking)
    for row in selection.front:
        if row not in selection.ranking[:top]:
            why = losing_reason(row, selection.ranking[0], selection.ranked_by)
            yield {"choice": "front", **row_record(selection, row), "why": why}
    for lost in selection.lost:
        figures = {} if lost.best is None else row_record(selection, lost.best)
        yield {"choice": lost.name, **figures, "why": why_lost(selection, lost)}
    if selection.least is not None:
        yield {"choice": "least memory", **row_record(selection, selection.least)}
    for remedy in selection.remedies:
        yield {"choice": remedy.change, **row_record(selection, remedy.fitting), "why": "fits"}
