"""A comparison of records as text, as a table of GitHub's Markdown, and as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from ptrain.codec import encode
from ptrain.report.comparison import (
    ComparedFigure,
    ComparedTraining,
    ComparedVerdict,
    RecordComparison,
)
from ptrain.report.recorded import FigureKind, sources
from ptrain.report.table import TableColumn, difference_columns, make_columns, or_missing, render
from ptrain.units import counted, format_bytes, format_count, format_seconds

_BYTES = (FigureKind.MEMORY, FigureKind.PEAK, FigureKind.BYTES)
_NO_VERDICT = "no verdict"
Cells = tuple[str, str, str, str]


def as_text(comparison: RecordComparison, *, shows_all: bool) -> str:
    """Return a table for every training: verdicts, and the figures that differ."""
    blocks = [f"{comparison.base} → {comparison.head}"]
    for training in comparison.trainings:
        columns = _columns(training, shows_all=shows_all)
        lines = [render(columns), *_remarks(training, shows_all=shows_all)]
        blocks.append("\n".join(lines))
    blocks += ["\n".join(alone)] if (alone := [*_alone(comparison)]) else []
    return "\n\n".join(blocks)


def as_markdown(comparison: RecordComparison, *, shows_all: bool) -> str:
    """Return the same for a comment on a pull request."""
    blocks = [f"### {_escaped(comparison.base)} → {_escaped(comparison.head)}"]
    for training in comparison.trainings:
        columns = _columns(training, shows_all=shows_all)
        rows = zip(*((column.title, *column.cells) for column in columns), strict=True)
        head, *lines = map(_markdown_row, rows)
        blocks.append("\n".join([head, "| --- | ---: | ---: | ---: |", *lines]))
        blocks += [_quoted(remark) for remark in _remarks(training, shows_all=shows_all)]
    blocks += map(_escaped, _alone(comparison))
    return "\n\n".join(blocks)


def as_record(comparison: RecordComparison, failures: Sequence[str]) -> dict[str, object]:
    """Return all rows, equal ones too; bytes, seconds and counts as they are."""
    return {
        "base": comparison.base,
        "head": comparison.head,
        "trainings": [_training_record(training) for training in comparison.trainings],
        "only_base": list(comparison.only_base),
        "only_head": list(comparison.only_head),
        "exceeded": list(failures),
    }


def _training_record(training: ComparedTraining) -> dict[str, object]:
    return {
        "base": training.base.name,
        "head": training.head.name,
        "figures": [
            {
                "kind": str(row.group.kind),
                "source": row.group.source or None,
                "name": row.name,
                "base": _finite(row.base),
                "head": _finite(row.head),
                "difference": _finite(row.difference),
                "relative": row.relative,
            }
            for row in training.figures
        ],
        "verdicts": encode(training.verdicts),
        "culprits": {"base": training.base.culprit, "head": training.head.culprit},
        "only_base": encode(training.only_base),
        "only_head": encode(training.only_head),
    }


def _finite(value: int | float | None) -> int | float | str | None:
    """JSON has no word for what is not a number."""
    return value if value is None or math.isfinite(value) else str(value)


def _columns(training: ComparedTraining, *, shows_all: bool) -> list[TableColumn]:
    heads = difference_columns(training.title, "base", "head")
    return make_columns(_cells(training, shows_all=shows_all), *heads)


def _cells(training: ComparedTraining, *, shows_all: bool) -> Iterator[Cells]:
    for verdict in training.verdicts:
        yield _verdict_cells(verdict)
    for row in training.figures:
        if shows_all or not row.is_equal:
            yield row.label, _value(row, row.base), _value(row, row.head), _difference(row)


def _verdict_cells(verdict: ComparedVerdict) -> Cells:
    sides = verdict.base or _NO_VERDICT, verdict.head or _NO_VERDICT
    words = [side.partition(" (")[0] for side in sides]
    change = "" if words[0] == words[1] else f"{words[0]} → {words[1]}"
    return f"verdict: {verdict.about}", *sides, change


def _value(row: ComparedFigure, value: int | float | None) -> str:
    return or_missing(value, partial(_written, row.group.kind))


def _written(kind: FigureKind, value: int | float) -> str:
    if not math.isfinite(value):
        return str(value)
    if kind in _BYTES:
        return format_bytes(value)
    if kind is FigureKind.TIME:
        return format_seconds(value)
    if kind is FigureKind.LOSS:
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else format_count(value)


def _difference(row: ComparedFigure) -> str:
    """Return `+1.2 MB (+3.4%)`, or which side alone has the row or does not know it."""
    if not row.is_known:
        return f"not known at {'base' if row.base is None else 'head'}"
    if row.base is None or row.head is None:
        return f"only at {'base' if row.head is None else 'head'}"
    by = row.difference
    if not by:
        return "="
    sign = "-" if by < 0 else "+"
    share = "" if row.relative is None else f" ({_percent(row.relative)})"
    return f"{sign}{_written(row.group.kind, abs(by))}{share}"


def _percent(relative: float) -> str:
    return f"{relative:+.1%}" if abs(relative) >= 0.0005 else f"{100 * relative:+.1g}%"


def _remarks(training: ComparedTraining, *, shows_all: bool) -> Iterator[str]:
    equal = sum(row.is_equal for row in training.figures)
    if equal and not shows_all:
        more = " more" * (equal < len(training.figures))
        yield f"{equal}{more} {'is' if equal == 1 else 'are'} equal"
    for side, groups in (("base", training.only_base), ("head", training.only_head)):
        if groups:
            yield f"only {side} says: {sources(groups)}"
    for side, culprit in (("base", training.base.culprit), ("head", training.head.culprit)):
        if culprit:
            yield f"{side}: {culprit}"


def _alone(comparison: RecordComparison) -> Iterator[str]:
    for side, names in (("base", comparison.only_base), ("head", comparison.only_head)):
        if names:
            yield f"only {side} has {counted(len(names), 'record')} of {', '.join(names)}"


def _markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(_escaped, cells))} |"


def _escaped(text: str) -> str:
    """What Markdown and its HTML would take for their own is text, for names are the user's."""
    for letter in "\\|*`[]<>":
        text = text.replace(letter, f"\\{letter}")
    return " ".join(text.split())


def _quoted(remark: str) -> str:
    return "<br>".join(_escaped(line) for line in remark.splitlines())
