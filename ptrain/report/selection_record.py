"""A ranking as plain data, and as rows of CSV with the same columns."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Iterable, Iterator
from math import isfinite

from ptrain.codec import encode
from ptrain.report.selection import closed_seconds, described, written_texts
from ptrain.selection.known import reason
from ptrain.selection.ranking import Lost, PlacementRanking
from ptrain.selection.task import Ranked, Scored
from ptrain.selection.words import words_of
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec

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
