"""Tables as lists of columns, printed as plain text, and the labels of their rows.

This module lays out tables itself, because importing rich takes as long as deriving a small spec.

Also the heading of a spec in one line (model, ranks, placement, precision and batch), and remarks.
"""

from __future__ import annotations

import shlex
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from operator import attrgetter
from typing import NamedTuple, TypeVar, assert_never

import yaml

from ptrain.by_rank import distinct
from ptrain.cost import TIERS, Estimate, Footprint, Phase, Traffic, TrafficKey, lower_bytes
from ptrain.report.screen import command_line, screen_width
from ptrain.spec.dials import Compiled
from ptrain.spec.model import Attention, ExternalModel, HuggingFaceModel, ModelShape
from ptrain.spec.placement import Axis
from ptrain.spec.precision import Matmul
from ptrain.spec.spec import Spec
from ptrain.units import format_bytes, format_count, format_memory, with_noun

MISSING = "–"
NumberT = TypeVar("NumberT", bound=float)
Largest = Mapping[tuple[str, str], int]  # bytes by state and tier
_SIZES = attrgetter("state", *TIERS)
_BETWEEN = "  "
_SHORTEST = 24  # columns that a shortened name keeps at least
_WRAPPED = 18  # columns that a wrapped name keeps at least
_TWO_WIDE = ("W", "F")  # East Asian widths (Unicode) of letters that take two columns of a terminal


class Importance(IntEnum):
    """The importance of a column; a table that is too wide loses the least important ones."""

    PICTURE = 0  # bars: another column's figures, drawn
    DETAIL = 1  # follows from other columns, or explains them
    FIGURE = 2
    RESULT = 3  # the reason to read the table: a difference, a peak, whether it fits
    NAME = 4  # the subject of the row; it always stays


class TableColumn(NamedTuple):
    """A column of a table, with a cell for each row.

    Attributes:
        title: The title; empty for a column without one.
        importance: Decides which columns are left out if the table is too wide.
        cells: The text of each row.
        left: Align the cells to the left, for text; numbers are aligned to the right.
        wraps: Continue long names on the next line before a figure is left out.
    """

    title: str
    importance: Importance = Importance.FIGURE
    cells: Sequence[str] = ()
    left: bool = False
    wraps: bool = False

    @property
    def width(self) -> int:
        """The number of terminal columns of the widest cell or the title."""
        return max(map(_text_width, (self.title, *self.cells)))

    def shorten(self, width: int) -> TableColumn:
        """Return the column with title and cells shortened to `width` terminal columns."""
        title, *cells = (_shorten_cell(cell, width) for cell in (self.title, *self.cells))
        return self._replace(title=title, cells=cells)

    def padded_cells(self) -> list[str]:
        """Return the title and the cells, padded to the width of the widest."""
        cells, width = (self.title, *self.cells), self.width
        blanks = [" " * (width - _text_width(cell)) for cell in cells]
        pairs = zip(cells, blanks, strict=True)
        return [cell + blank if self.left else blank + cell for cell, blank in pairs]


def name_column(title: str, cells: Sequence[str] = ()) -> TableColumn:
    """Return the column that names the subject of each row."""
    return TableColumn(title, Importance.NAME, cells, left=True)


def difference_columns(
    title: str, before: str = "predicted", after: str = "measured"
) -> list[TableColumn]:
    """Return the empty columns of a table with two sides and their difference.

    Args:
        title: The title of the column of names.
        before: The title of the first side.
        after: The title of the second side.
    """
    return [
        name_column(title)._replace(wraps=True),
        TableColumn(before),
        TableColumn(after),
        TableColumn("difference", Importance.RESULT),
    ]


def make_columns(rows: Iterable[Sequence[str]], *heads: TableColumn) -> list[TableColumn]:
    """Return columns filled from rows.

    Args:
        rows: A cell for each of `heads`.
        heads: The columns without cells.
    """
    lines = list(rows)
    return [head._replace(cells=[row[at] for row in lines]) for at, head in enumerate(heads)]


def render_table(columns: Sequence[TableColumn], width: int | None = None) -> str:
    """Write a table as text, without frames and with two blanks between its columns.

    Args:
        columns: From left to right. If none has a title, the table has no line of titles.
        width: The width of the terminal, by default the screen's. The least important columns are
            left out until the table fits; among equally important columns the last one goes first.
            A line below the table names them. Long names are wrapped or shortened before a result
            is left out.

    Returns:
        The lines, without trailing blanks.

    Example:
        >>> columns = [name_column("state", ["theta"]), TableColumn("bytes", cells=["12 B"])]
        >>> print(render_table(columns))
        state  bytes
        theta   12 B
    """
    room = (width or screen_width()) + len(_BETWEEN)
    kept = list(columns)
    # Shrink in this order: leave out pictures and details; wrap names; leave out figures; shorten
    # the longest text; leave out results. Names stay, even if the table is still too wide.
    while (excess := sum(column.width + len(_BETWEEN) for column in kept) - room) > 0:
        least = min(reversed(kept), key=attrgetter("importance"))
        longest = max((column for column in kept if column.left), key=attrgetter("width"))
        shorter = max(longest.width - excess, _WRAPPED if longest.wraps else _SHORTEST)
        if longest.wraps and least.importance >= Importance.FIGURE and shorter < longest.width:
            kept = _wrap_names(kept, longest, shorter)
        elif least.importance >= Importance.RESULT and shorter < longest.width:
            kept = [longest.shorten(shorter) if column is longest else column for column in kept]
        elif least.importance is Importance.NAME:
            break
        else:
            kept = [column for column in kept if column is not least]
    lines = [
        _BETWEEN.join(cells).rstrip()
        for cells in zip(*map(TableColumn.padded_cells, kept), strict=True)
    ]
    if len(kept) < len(columns):
        stays = {column.title for column in kept}
        lost = [column.title for column in columns if column.title not in {"", *stays}]
        lines += [f"{with_noun(len(lost), 'column')} left out: {', '.join(lost)}"] if lost else []
    return "\n".join(lines if any(column.title for column in kept) else lines[1:])


def _wrap_names(
    columns: Sequence[TableColumn], names: TableColumn, width: int
) -> list[TableColumn]:
    """Return the columns with wrapped names; continuation lines have empty figures.

    Args:
        columns: All columns of the table.
        names: The column to wrap, one of `columns`.
        width: The largest width of a name. Words are not broken.
    """
    wrapper = textwrap.TextWrapper(
        width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    parts = [wrapper.wrap(name) or [""] for name in names.cells]
    wrapped = []
    for column in columns:
        pairs = zip(column.cells, parts, strict=True)
        cells = [text for cell, part in pairs for text in (cell, *[""] * (len(part) - 1))]
        wrapped.append(column._replace(cells=cells))
    lines = [line for part in parts for line in part]
    at = columns.index(names)
    return [*wrapped[:at], names._replace(cells=lines, wraps=False), *wrapped[at + 1 :]]


def _shorten_cell(cell: str, width: int) -> str:
    """Return a cell shortened to a width, with an ellipsis."""
    if _text_width(cell) <= width:
        return cell
    while _text_width(cell) >= width:
        cell = cell[:-1]
    return f"{cell.rstrip()}…"


def _text_width(text: str) -> int:
    """Return the number of terminal columns of a text."""
    if text.isascii():
        return len(text)
    return sum(_letter_width(letter) for letter in text)


def _letter_width(letter: str) -> int:
    """Return the number of terminal columns of a character: 0 if it combines, 2 if it is wide."""
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in _TWO_WIDE else 1


def text_or_dash(number: NumberT | None, text: Callable[[NumberT], str]) -> str:
    """Return a formatted number, or a dash if it is None.

    Args:
        number: The number.
        text: Formats it.
    """
    return MISSING if number is None else text(number)


def memory_text(number: int | None) -> str:
    """Return memory with four digits, or a dash if it is None."""
    return text_or_dash(number, format_memory)


def traffic_text(number: int | None) -> str:
    """Return traffic with four digits, or a dash if it is None."""
    return text_or_dash(number, format_bytes)


def memory_span(lower: int | None, upper: int | None) -> str:
    """Return memory between two bounds as text.

    Args:
        lower: The lower bound in bytes; None: there are no bounds.
        upper: The upper bound, or the size.

    Returns:
        `1.2 MiB … 3.4 MiB`, or one size if the bounds are equal or there are none.
    """
    if lower is None or lower == upper:
        return memory_text(upper)
    return f"{memory_text(lower)} … {memory_text(upper)}"


def lower_bounds(rows: Sequence[Footprint]) -> Largest:
    """Return bytes by state and tier like `largest_bytes`, from lower bounds of device memory."""
    return largest_bytes([replace(row, device_bytes=lower_bytes(row)) for row in distinct(rows)])


def largest_bytes(rows: Sequence[Footprint]) -> Largest:
    """Return bytes by state and tier, each of the rank with the most."""
    most: dict[tuple[str, str], int] = {}
    for state, *sizes in set(map(_SIZES, distinct(rows))):  # few, because most ranks are equal
        for tier, number in zip(TIERS, sizes, strict=True):
            most[state, tier] = max(number, most.get((state, tier), 0))
    return most


def tier_labels(state: str) -> Iterable[tuple[str, str]]:
    """Yield each tier with the label of a state's row there: `optimizer on the host`."""
    return ((tier, f"{state}{_SUFFIXES[tier]}") for tier in TIERS)


_SUFFIXES = dict(zip(TIERS, ("", " on the host", " in files"), strict=True))


def moved_bytes(row: Traffic) -> int:
    """Return the bytes sent to other ranks, or copied between tiers of the rank."""
    return row.payload_bytes if row.key.collective.is_copy else row.sent_bytes


def traffic_label(key: TrafficKey) -> str:
    """Return a row's label: `all_gather dp_shard, forward (parameters)`; copies have no axes."""
    via = f" via {key.via}" if key.via else ""
    where = "" if key.collective.is_copy else f" {'+'.join(key.axes) or 'world'}"
    return f"{key.collective}{where}{via}, {key.phase} ({key.state})"


def traffic_order(key: TrafficKey) -> tuple[int, str]:
    """Return a sort key that orders traffic by phase, then by label."""
    return list(Phase).index(key.phase), traffic_label(key)


def heading(spec: Spec, num_parameters: int) -> str:
    """Return the heading of a spec: model, parameters, placement, precision and batch.

    Args:
        spec: The resolved spec.
        num_parameters: The number of elements of the model's parameters.

    Example:
        `zero3 · llama 0.92M · dp_shard 2 (S*,S,S,R) · fp32 · batch 16 = 2 micro × …`
    """
    return " · ".join(
        [
            spec.name,
            f"{model_name(spec)} {format_count(num_parameters)}",
            axes_text(spec),
            precision_text(spec),
            batch_text(spec),
        ]
    )


def by_data_lines(exact: Estimate) -> list[str]:
    """Return the reasons why figures are bounds, assume data, or use counts of a run.

    Args:
        exact: The prediction. If no figure depends on data, the result is empty.
    """
    reasons = (*exact.by_data.values(), *exact.assumed.values())
    lines = [f"sizes depend on data: {why}" for why in dict.fromkeys(reasons)]
    kinds = ", ".join(exact.counted)
    return lines + [f"counted: {kinds} {why}" for why in dict.fromkeys(exact.counted.values())]


def model_name(spec: Spec) -> str:
    """Return the name of the model: its preset, class or function; the family of a custom shape."""
    match spec.model:
        case ModelShape():
            return spec.model.preset or str(spec.model.tabulated or "transformer")
        case ExternalModel():
            return spec.model.target
        case HuggingFaceModel():
            return spec.model.hf
        case _:
            assert_never(spec.model)


def axes_text(spec: Spec) -> str:
    """Return the placement of all axes: `dp_replicate 2 (R,R,R,R) ⊗ dp_shard 2 (S*,S,S,R)`.

    Frozen parameters follow if they are placed differently, and the blocks' activations if the spec
    sets them separately: `A M, selective`, `A {0: M, 2-: O}`.
    """
    tuples = " ⊗ ".join(
        f"{factor.axis} {factor.degree} ({factor.placement})" for factor in spec.factors
    )
    frozen = ", ".join(f"{mode} on {axis}" for axis, mode in spec.frozen.modes_by_axis().items())
    frozen_text = [f"frozen {frozen}"] if frozen else []
    return " · ".join([tuples or "one device", *frozen_text, *_activations_text(spec)])


def _activations_text(spec: Spec) -> Iterator[str]:
    """Yield the placement of the blocks' activations, if the spec sets it separately."""
    activations, how = spec.resolved.get("activations"), spec.resolved.get("recompute", "full")
    if activations:
        policy = f", {_flow_yaml(how)}" if how != "full" else ""
        yield f"A {_flow_yaml(activations)}{policy}"


def _flow_yaml(value: object) -> str:
    """Return a value as YAML on one line."""
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False).split("\n")[0]


def precision_text(spec: Spec) -> str:
    """Return the name of the precision layout, with remarks: all dtypes are float64, products have
    fp8 factors."""
    own = spec.precision
    products = f", {own.matmul} products" if own.matmul is not Matmul.NONE else ""
    return own.layout.name + (" in fp64" if own.compute_fp64 else "") + products


def batch_text(spec: Spec) -> str:
    """Return the batch as a product: `batch 16 = 2 micro × 4 accumulated × 2 data`."""
    samples = spec.batch
    product = f"{samples.micro} micro × {samples.accumulate} accumulated × {spec.data_degree} data"
    return f"batch {samples.global_samples} = {product}"


_ON_CUDA = "device=cuda"


def measuring_command(
    spec: Spec, exact: Estimate, words: Sequence[str], *, allow_import: bool = False
) -> str:
    """Return the shell command that measures the peak if `exact` does not predict it.

    Args:
        spec: The resolved spec.
        exact: The prediction; its `undefined` and `unclaimed` figures decide the flags.
        words: The arguments that load the spec: its name or file, and overrides.
        allow_import: Add `--allow-import`. It is also added if the spec names user functions.
    """
    if spec.compile is not Compiled.NONE:  # `ptrain simulate` rejects programs without a peak
        return command_line("train", words, allow_import=allow_import)
    on_gpu = needs_gpu(spec, exact)
    is_on_cuda = spec.device == "cuda" or _ON_CUDA in words
    overrides = [_ON_CUDA] if on_gpu and not is_on_cuda else []
    is_uneven = spec.degree(Axis.PP) > 1 or spec.degree(Axis.TP) > 1
    flags = [
        *(["--allow-import"] if allow_import or spec.user_functions else []),
        *(["--rank", "all-distinct"] if is_uneven else []),
        *(
            ["--rehearse"]
            if on_gpu or (not isinstance(spec.model, ModelShape) and "peak" in exact.undefined)
            else []
        ),
    ]
    return shlex.join(["ptrain", "simulate", *words, *overrides, *flags])


def needs_gpu(spec: Spec, exact: Estimate) -> bool:
    """Return True if only a GPU gives the peak.

    Fake ranks use a CPU's kernels, and flex_attention has no backward pass on a CPU.

    Args:
        spec: The resolved spec, for its attention.
        exact: The prediction; `unclaimed["peak"]` has the reason why its peak does not hold for a
            GPU.
    """
    model = spec.model
    is_flex = not isinstance(model, ExternalModel) and model.attention is Attention.FLEX
    return is_flex or "peak" in exact.unclaimed
