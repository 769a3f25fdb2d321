"""Compare two records (`ptrain compare BASE HEAD`) within limits of growth.

The comparison is written as text, as a GitHub Markdown table, or as plain data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ptrain.codec import encode
from ptrain.errors import input_error
from ptrain.report.recorded import (
    MEASURED,
    FigureGroup,
    FigureKind,
    Figures,
    RecordedTraining,
    sources_text,
)
from ptrain.report.table import (
    TableColumn,
    difference_columns,
    make_columns,
    render_table,
    text_or_dash,
)
from ptrain.units import format_bytes, format_count, format_memory, format_seconds, with_noun

_LIMITED = tuple(kind for kind in FigureKind if kind not in (FigureKind.SIZE, FigureKind.TOKENS))
VERDICT = "verdict"
_LIMITS = f"one or more of {', '.join(f'{kind}=1%' for kind in _LIMITED)} and {VERDICT}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedFigure:
    """One row of the comparison.

    `base` or `head` is None if that side has no such row: this counts as 0 if `is_known`, else the
    side lacks the figure.
    """

    group: FigureGroup
    name: str
    base: int | float | None
    head: int | float | None
    is_known: bool = True

    @property
    def label(self) -> str:
        """The name, with its source if that is a measurement."""
        return f"{self.name}, {self.group.source}" if self.group.source == MEASURED else self.name

    @property
    def is_equal(self) -> bool:
        """True if both sides are known and equal; a missing row equals 0."""
        return self.is_known and (self.base or 0) == (self.head or 0)

    @property
    def difference(self) -> int | float | None:
        """Head minus base, where a missing side counts as 0; None if the figure is unknown."""
        return (self.head or 0) - (self.base or 0) if self.is_known else None

    @property
    def relative(self) -> float | None:
        """The difference as a share of base; None if base is 0 or the difference is not finite."""
        if self.difference is None or not self.base or not math.isfinite(self.difference):
            return None
        return self.difference / abs(self.base)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedVerdict:
    """The verdicts of both sides about one subject; empty for a side without one."""

    about: str
    base: str
    head: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTraining:
    """One training that both sides have.

    `only_base` and `only_head` are the groups of figures that only one side has.
    """

    base: RecordedTraining
    head: RecordedTraining
    figures: tuple[ComparedFigure, ...]
    verdicts: tuple[ComparedVerdict, ...]
    only_base: tuple[FigureGroup, ...]
    only_head: tuple[FigureGroup, ...]

    @property
    def title(self) -> str:
        """The name of the training, or `BASE → HEAD` if the names differ."""
        names = dict.fromkeys((self.base.name, self.head.name))
        return " → ".join(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordComparison:
    """The trainings that both sides have, and the names of trainings that only one side has."""

    base: str
    head: str
    trainings: tuple[ComparedTraining, ...]
    only_base: tuple[str, ...] = ()
    only_head: tuple[str, ...] = ()


def compare_records(
    base: Mapping[str, RecordedTraining],
    head: Mapping[str, RecordedTraining],
    *,
    names: tuple[str, str],
) -> RecordComparison:
    """Compare the trainings of two sides by name; two single trainings match whatever their names.

    Args:
        base: The trainings of the base, by name.
        head: The trainings of the head, by name.
        names: The names of the two sides, for titles and messages.

    Raises:
        SpecError: If the sides have no training or no figure in common.
    """
    # Two single records are compared even if their specs have different names.
    if len(base) == len(head) == 1:
        pairs = [(*base.values(), *head.values())]
        left: list[str] = []
        right: list[str] = []
    else:
        pairs = [(base[name], head[name]) for name in base if name in head]
        left, right = [n for n in base if n not in head], [n for n in head if n not in base]
    if not (trainings := [_compare_training(*pair) for pair in pairs]):
        raise input_error(
            " ".join(names),
            f"one side has {', '.join(base)}, the other {', '.join(head)}",
            "compare records of specs with the same names",
        )
    if not any(training.figures or training.verdicts for training in trainings):
        raise input_error(
            " ".join(names),
            "the two have no figure in common: they are records of different kinds",
            "compare two predictions, two runs, or two verifications",
        )
    return RecordComparison(
        base=names[0],
        head=names[1],
        trainings=tuple(trainings),
        only_base=tuple(left),
        only_head=tuple(right),
    )


def _compare_training(base: RecordedTraining, head: RecordedTraining) -> ComparedTraining:
    """Compare one training.

    Without a common figure other than a size, and without a common verdict, it has no rows.
    """
    both = [group for group in base.groups if group in head.groups]
    figures = [
        row
        for group in both
        for row in _compare_group(group, base.groups[group], head.groups[group])
    ]
    abouts = dict.fromkeys((*base.verdicts, *head.verdicts))
    has_verdict = any(about in base.verdicts and about in head.verdicts for about in abouts)
    # Sizes of the training are context: with nothing else in common there is nothing to compare.
    is_common = any(row.group.kind is not FigureKind.SIZE for row in figures) or has_verdict
    return ComparedTraining(
        base=base,
        head=head,
        figures=tuple(figures) if is_common else (),
        verdicts=tuple(
            ComparedVerdict(
                about=about, base=base.verdicts.get(about, ""), head=head.verdicts.get(about, "")
            )
            for about in abouts
        )
        if is_common
        else (),
        only_base=tuple(group for group in base.groups if group not in head.groups),
        only_head=tuple(group for group in head.groups if group not in base.groups),
    )


def _compare_group(group: FigureGroup, base: Figures, head: Figures) -> Iterator[ComparedFigure]:
    """Yield a row for each figure of a group that at least one side has."""
    for name in dict.fromkeys((*base, *head)):
        is_unknown = any(name in side and side[name] is None for side in (base, head))
        values = base.get(name), head.get(name)
        is_size_of_one = group.kind is FigureKind.SIZE and None in values  # older records lack some
        if values != (None, None) and not is_size_of_one:
            yield ComparedFigure(
                group=group, name=name, base=values[0], head=values[1], is_known=not is_unknown
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The allowed growth of a kind of figures, as a share of base.

    The kind is None for a limit that requires the verdict to hold.
    """

    kind: FigureKind | None
    growth: float = 0.0


def parse_limits(text: str) -> tuple[Limit, ...]:
    """Parse limits such as `peak=1%,bytes=0,verdict`.

    Raises:
        SpecError: If a part does not name a figure that can have a limit, or its share is invalid.
    """
    parsed = tuple(_parse_limit(part.strip()) for part in text.split(",") if part.strip())
    if not parsed:
        raise input_error("--fail-on", "no figure is named", f"Use {_LIMITS}, separated by commas.")
    return parsed


def _parse_limit(part: str) -> Limit:
    """Parse one limit, `peak=1%` or `verdict`."""
    name, equals, share = part.partition("=")
    if name == VERDICT and not equals:
        return Limit(kind=None)
    if name not in _LIMITED:
        raise input_error("--fail-on", f"{part!r} is not a figure with a limit", f"Use {_LIMITS}.")
    try:
        growth = float(share.removesuffix("%")) / 100
    except ValueError:
        growth = math.nan
    if not (0 <= growth < math.inf) or not (share.endswith("%") or growth == 0):
        raise input_error(
            "--fail-on",
            f"{part!r} is not a limit for {name}",
            f"Use {name}=1%, or {name}=0 to allow no growth.",
        )
    return Limit(kind=FigureKind(name), growth=growth)


def find_violations(comparison: RecordComparison, limits: Sequence[Limit]) -> list[str]:
    """Return a sentence for each violation of a limit, and for each training that HEAD lacks.

    Args:
        comparison: The compared records.
        limits: The limits, from `parse_limits`.

    Raises:
        SpecError: If neither side has a figure that a limit names, since the limit would check
            nothing.
    """
    sentences = [
        sentence
        for training in comparison.trainings
        for limit in limits
        for sentence in _violations(training, limit)
    ]
    for limit in limits:
        if not any(_covers(training, limit) for training in comparison.trainings):
            raise input_error(
                "--fail-on",
                f"{limit.kind or VERDICT}: neither BASE nor HEAD has this figure",
                "Remove it, or compare records that have it.",
            )
    return sentences + [f"{name}: HEAD has no record of it" for name in comparison.only_base]


def _covers(training: ComparedTraining, limit: Limit) -> bool:
    """Return True if either side of a training has a figure or verdict that the limit is about."""
    if limit.kind is None:
        return bool(training.verdicts)
    groups = {*training.base.groups, *training.head.groups}
    return any(group.kind is limit.kind for group in groups)


def _violations(training: ComparedTraining, limit: Limit) -> Iterator[str]:
    """Yield a sentence for each figure or verdict of a training that violates the limit."""
    title = training.title
    if limit.kind is None:
        for verdict in training.verdicts:
            if not verdict.head.startswith("holds"):
                yield f"{title}: {verdict.about}: {verdict.head or 'HEAD has no verdict'}"
        return
    if not any(row.group.kind is limit.kind for row in training.figures):
        if _covers(training, limit):
            yield f"{title}: {limit.kind}: the two sides have no such figure in common"
        return
    for row in training.figures:
        if row.group.kind is limit.kind and _is_beyond(row, limit.growth):
            beyond = f"grew by more than {limit.growth:.4%}".replace(".0000%", "%")
            yield f"{title}: {row.label} {beyond if row.is_known else 'is not known at HEAD'}"


def _is_beyond(row: ComparedFigure, growth: float) -> bool:
    """Return True if a figure grew beyond its limit, is not a number, or is unknown only at HEAD.

    A figure that is unknown only at base is not beyond: HEAD has more information.
    """
    if not row.is_known:
        return row.head is None
    base, head = row.base or 0, row.head or 0
    return not head <= base + growth * abs(base)  # `not <=`, so that NaN is beyond any limit


_SIZES = {
    FigureKind.MEMORY: format_memory,
    FigureKind.PEAK: format_memory,
    FigureKind.BYTES: format_bytes,
}
_NO_VERDICT = "no verdict"
Cells = tuple[str, str, str, str]


def as_text(comparison: RecordComparison, *, shows_all: bool) -> str:
    """Return a table for each training, with verdicts and the figures that differ.

    Args:
        comparison: The compared records.
        shows_all: Include equal figures.
    """
    blocks = [f"{comparison.base} → {comparison.head}"]
    for training in comparison.trainings:
        columns = _difference_table(training, shows_all=shows_all)
        lines = [render_table(columns), *_remark_lines(training, shows_all=shows_all)]
        blocks.append("\n".join(lines))
    blocks += ["\n".join(alone)] if (alone := [*_unmatched_lines(comparison)]) else []
    return "\n\n".join(blocks)


def as_markdown(comparison: RecordComparison, *, shows_all: bool) -> str:
    """Return the tables of `as_text` as Markdown, for a comment on a pull request.

    Args:
        comparison: The compared records.
        shows_all: Include equal figures.
    """
    blocks = [f"### {_escape_markdown(comparison.base)} → {_escape_markdown(comparison.head)}"]
    for training in comparison.trainings:
        columns = _difference_table(training, shows_all=shows_all)
        rows = zip(*((column.title, *column.cells) for column in columns), strict=True)
        head, *lines = (f"| {' | '.join(map(_escape_markdown, cells))} |" for cells in rows)
        blocks.append("\n".join([head, "| --- | ---: | ---: | ---: |", *lines]))
        blocks += [
            "<br>".join(_escape_markdown(line) for line in remark.splitlines())
            for remark in _remark_lines(training, shows_all=shows_all)
        ]
    blocks += map(_escape_markdown, _unmatched_lines(comparison))
    return "\n\n".join(blocks)


def as_record(comparison: RecordComparison, failures: Sequence[str]) -> dict[str, object]:
    """Return all rows as plain data, equal ones included, in bytes, seconds and counts.

    Args:
        comparison: The compared records.
        failures: The sentences of `find_violations`.
    """
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
                "base": _json_number(row.base),
                "head": _json_number(row.head),
                "difference": _json_number(row.difference),
                "relative": row.relative,
            }
            for row in training.figures
        ],
        "verdicts": encode(training.verdicts),
        "culprits": {"base": training.base.root_cause, "head": training.head.root_cause},
        "only_base": encode(training.only_base),
        "only_head": encode(training.only_head),
    }


def _json_number(value: int | float | None) -> int | float | str | None:
    """Return a value for JSON, which has no number for infinity or NaN: these become text."""
    return value if value is None or math.isfinite(value) else str(value)


def _difference_table(training: ComparedTraining, *, shows_all: bool) -> list[TableColumn]:
    heads = difference_columns(training.title, "base", "head")
    return make_columns(_row_cells(training, shows_all=shows_all), *heads)


def _row_cells(training: ComparedTraining, *, shows_all: bool) -> Iterator[Cells]:
    for verdict in training.verdicts:
        yield _verdict_cells(verdict)
    for row in training.figures:
        if shows_all or not row.is_equal:
            yield (
                row.label,
                _value_text(row, row.base),
                _value_text(row, row.head),
                _difference_text(row),
            )


def _verdict_cells(verdict: ComparedVerdict) -> Cells:
    """Return the row of a verdict: both verdicts with their counts, and the change of the word."""
    sides = verdict.base or _NO_VERDICT, verdict.head or _NO_VERDICT
    # Without the counts in `holds (14 of 14)`: more checks are not a change of the verdict.
    words = [side.partition(" (")[0] for side in sides]
    change = "" if words[0] == words[1] else f"{words[0]} → {words[1]}"
    return f"verdict: {verdict.about}", *sides, change


def _value_text(row: ComparedFigure, value: int | float | None) -> str:
    return text_or_dash(value, partial(_format_figure, row.group.kind))


def _format_figure(kind: FigureKind, value: int | float) -> str:
    """Return a figure in the unit of its kind."""
    if not math.isfinite(value):
        return str(value)
    if kind in _SIZES:
        return _SIZES[kind](value)
    if kind is FigureKind.TIME:
        return format_seconds(value)
    if kind is FigureKind.LOSS:
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else format_count(value)


def _difference_text(row: ComparedFigure) -> str:
    """Return `+1.2 MB (+3.4%)`, or the side that alone has the row or lacks its figure."""
    if not row.is_known:
        return f"unknown at {'base' if row.base is None else 'head'}"
    if row.base is None or row.head is None:
        return f"only at {'base' if row.head is None else 'head'}"
    if not (by := row.difference):
        return "="
    sign = "-" if by < 0 else "+"
    share = "" if row.relative is None else f" ({_percent_text(row.relative)})"
    return f"{sign}{_format_figure(row.group.kind, abs(by))}{share}"


def _percent_text(relative: float) -> str:
    """Return a relative change with a sign; tiny ones with one significant digit."""
    # From 0.0005 on, one digit after the point is not 0.0 %.
    return f"{relative:+.1%}" if abs(relative) >= 0.0005 else f"{100 * relative:+.1g}%"


def _remark_lines(training: ComparedTraining, *, shows_all: bool) -> Iterator[str]:
    """Yield remarks below a table: the number of equal rows, one-sided groups, and root causes."""
    equal = sum(row.is_equal for row in training.figures)
    if equal and not shows_all:
        more = " more" * (equal < len(training.figures))
        yield f"{equal}{more} {'is' if equal == 1 else 'are'} equal"
    for side, groups in (("base", training.only_base), ("head", training.only_head)):
        if groups:
            yield f"only in {side}: {sources_text(groups)}"
    for side, root_cause in (
        ("base", training.base.root_cause),
        ("head", training.head.root_cause),
    ):
        if root_cause:
            yield f"{side}: {root_cause}"


def _unmatched_lines(comparison: RecordComparison) -> Iterator[str]:
    """Yield a line for the trainings that only one side has."""
    for side, names in (("base", comparison.only_base), ("head", comparison.only_head)):
        if names:
            yield f"only {side} has {with_noun(len(names), 'record')} of {', '.join(names)}"


def _escape_markdown(text: str) -> str:
    """Return text with Markdown and HTML characters escaped, because users choose the names."""
    for letter in "\\|*`[]<>":  # the backslash first, so that it does not escape later ones
        text = text.replace(letter, f"\\{letter}")
    return " ".join(text.split())
