"""Read a result record back, and return its figures by name for a comparison with another record.

A group is a kind of figure from one source (predicted or measured). A record without a group lacks
it. A row that is missing from a group is 0, unless the record marks it as unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ptrain.by_rank import distinct
from ptrain.codec import Malformed, decode
from ptrain.cost import Column, Estimate, Phase, State, TrafficKey, busiest
from ptrain.derivation.interconnect import WireRow
from ptrain.errors import input_error
from ptrain.report.finding import RootCause
from ptrain.report.record import COUNTED_KINDS, Check
from ptrain.report.table import largest_bytes, moved_bytes, tier_labels
from ptrain.units import group_by_key, sum_by_key


@dataclass(frozen=True, slots=True)
class DecodedRecord:
    """The decoded contents of a result record.

    Attributes:
        estimates: The columns of the record.
        wire: Bytes on the wire. A record has only their means over the ranks.
        step_seconds: The measured step time in seconds; None if no step was measured.
    """

    estimates: dict[Column, Estimate]
    checks: tuple[Check, ...]
    wire: tuple[WireRow, ...] = ()
    step_seconds: float | None = None

    @property
    def predicted(self) -> Estimate:
        """The prediction that the checks use: with the run's counts if there is one, else exact."""
        return self.estimates.get(Column.COUNTED) or self.estimates[Column.EXACT]


def decode_record(record: Mapping[str, Any]) -> DecodedRecord:
    """Return every column for which the record has rows.

    Args:
        record: The record as decoded JSON, of this version or an older one.

    Raises:
        ValueError: If a row is damaged.
    """
    rows = [row for kind in ("memory", "peak", "traffic") for row in record[kind]]
    columns = dict.fromkeys(Column(row["column"]) for row in rows)
    return DecodedRecord(
        estimates={column: _read_estimate(record, column) for column in columns},
        checks=decode(record["checks"], tuple[Check, ...]),
        wire=decode(record.get("wire", []), tuple[WireRow, ...]),
        step_seconds=next(
            (row["value"] for row in record["step_seconds"] if row["column"] == Column.MEASURED),
            None,
        ),
    )


def _read_estimate(record: Mapping[str, Any], column: Column) -> Estimate:
    """Return one column of a record as an estimate.

    Measured step times have no rows, and waiting times are measured only. Records of older versions
    lack operations, rows of time, and reasons.
    """
    plain: dict[str, Any] = {
        kind: [row for row in record.get(kind, ()) if row["column"] == column]
        for kind in COUNTED_KINDS
    }
    plain |= {
        kind: record.get(kind, {}).get(column, {})
        for kind in ("undefined", "by_data", "assumed", "counted")
    }
    # A measured step time is a single value; only predicted ones have rows.
    steps = (row for row in record["step_seconds"] if row["column"] == column and "rows" in row)
    is_measured = column is Column.MEASURED
    plain["blocked_seconds"] = record.get("blocked_seconds", []) if is_measured else []
    plain |= {"column": column, "world_size": record["world_size"], "step": next(steps, None)}
    try:
        estimate: Estimate = decode(plain, Estimate)
    except Malformed as error:
        place = f"{error.place} of the rows of column {column}"
        raise Malformed(place, error.finding) from None
    return estimate


_RECORD_KEYS = (
    "spec",
    "world_size",
    "memory",
    "peak",
    "traffic",
    "step_seconds",
    "checks",
    "verdict",
)
_COMMANDS = "predict, validate, verify, simulate or train, with --json, or a run folder's summary"
_DATA_SIZED = (State.ACTIVATIONS, State.TRANSIENT)  # unknown if activations are undefined

ONE_DEVICE, AS_PREDICTED = "trains like one device", "as predicted"
PREDICTED, MEASURED = "predicted", "measured"


class FigureKind(StrEnum):
    """The kind of a figure; its value is the word for it in a limit (`--fail-on peak=1%`)."""

    SIZE = "size"
    MEMORY = "memory"  # bytes per state of the rank that holds most
    PEAK = "peak"  # bytes per phase of the rank that holds most
    BYTES = "bytes"  # bytes per step, sent or copied between tiers of a rank
    CALLS = "calls"  # of collectives in a step
    TIME = "time"  # seconds of a step
    TOKENS = "tokens"  # a second
    LOSS = "loss"


@dataclass(frozen=True, slots=True)
class FigureGroup:
    """A kind of figures and its source: predicted, measured, or empty for losses and sizes."""

    kind: FigureKind
    source: str = ""


Figures = Mapping[str, int | float | None]  # None: the figure exists but is unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTraining:
    """The figures of one training, read from one record or two.

    Attributes:
        groups: The figures of each group, by name.
        verdicts: The verdict and the number of passed checks, by subject: `trains like one device`
            or `as predicted`.
        root_cause: The root cause in words; empty if there is none.
    """

    name: str
    groups: Mapping[FigureGroup, Figures]
    verdicts: Mapping[str, str]
    root_cause: str = ""

    @property
    def is_verified(self) -> bool:
        """True if the training has the verdict of a verification."""
        return ONE_DEVICE in self.verdicts


def read_trainings(records: Sequence[object], place: str) -> dict[str, RecordedTraining]:
    """Return the trainings of one side of a comparison, by name.

    A verification and a prediction or run with the same name are merged into one training. Other
    records with the same name are numbered.

    Args:
        records: The decoded records of one side.
        place: The name of the side, for error messages.

    Raises:
        SpecError: If a value is not a result record, or there is none.
    """
    trainings: dict[str, RecordedTraining] = {}
    kinds: dict[
        str, set[bool]
    ] = {}  # by name: True if there is a verification, False if another record
    for record in records:
        training = _parse_record(record, place)
        # A name may have one verification and one other record; a second of a kind gets a number.
        name, number = training.name, 1
        while training.is_verified in kinds.setdefault(name, set()):
            number += 1
            name = f"{training.name} ({number})"
        kinds[name].add(training.is_verified)
        trainings[name] = (
            _merge_records(trainings[name], training) if name in trainings else training
        )
    if not trainings:
        raise input_error(
            place, "holds no record", f"Use a record that a command printed: {_COMMANDS}."
        )
    return trainings


def _merge_records(first: RecordedTraining, second: RecordedTraining) -> RecordedTraining:
    """Return two records of one training as one; the first takes precedence."""
    return RecordedTraining(
        name=first.name,
        groups={**second.groups, **first.groups},
        verdicts={**first.verdicts, **second.verdicts},
        root_cause=first.root_cause or second.root_cause,
    )


def _parse_record(record: object, place: str) -> RecordedTraining:
    """Return the figures of a record.

    Raises:
        SpecError: If the value is not a record, is damaged, or is the record of a rejected spec.
    """
    if not isinstance(record, Mapping):
        raise _not_a_record(place, f"a record is a mapping; here is {record!r:.40}")
    if "error" in record and "exit_code" in record:
        raise input_error(
            place,
            f"the command that wrote it was refused: {record['error']}",
            "repeat the command once that is right",
        )
    if record.get("refused"):
        raise input_error(
            place,
            f"{record.get('spec')} was refused there: {record['refused']}",
            "Remove this point, or fix it.",
        )
    if missing := [key for key in _RECORD_KEYS if key not in record]:
        raise _not_a_record(place, f"it lacks {', '.join(missing)}")
    try:
        return _read_figures(record)
    # The file may come from any source, so every error of decoding is an error of the input.
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        kind = "" if isinstance(error, Malformed) else f"{type(error).__name__} "
        raise _not_a_record(place, f"it is damaged: {kind}{error}") from None


def _not_a_record(place: str, finding: str) -> Exception:
    """Return the error for a value that is not a result record."""
    return input_error(place, f"is no result record: {finding}", f"Use the record of {_COMMANDS}.")


def _read_figures(record: Mapping[str, Any]) -> RecordedTraining:
    """Decode a record and collect its figures, verdicts and root cause."""
    reading = decode_record(record)
    groups = {
        group: figures for group, figures in _figure_groups(record, reading) if figures is not None
    }
    for figures in groups.values():
        _require_numbers(figures)
    is_verification = "num_departures" in record
    verdicts = {}
    if record["verdict"] is not None:
        holding = sum(check.holds for check in reading.checks)
        about = ONE_DEVICE if is_verification else AS_PREDICTED
        verdicts[about] = f"{record['verdict']} ({holding} of {len(reading.checks)})"
    root_cause = record.get("culprit")
    return RecordedTraining(
        name=str(record["spec"]),
        groups=groups,
        verdicts=verdicts,
        root_cause=str(decode(root_cause, RootCause)) if root_cause else "",
    )


def _require_numbers(figures: Figures) -> None:
    """Check that every figure is a number or None; a record file may have been written by hand.

    Raises:
        TypeError: If a figure is not a number.
        OverflowError: If an integer is too large for a float.
    """
    for name, value in figures.items():
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise TypeError(f"{name} is {value!r:.40}")
        float(value or 0)  # an integer beyond the range of a float raises OverflowError


def _figure_groups(
    record: Mapping[str, Any], reading: DecodedRecord
) -> Iterator[tuple[FigureGroup, Figures | None]]:
    """Yield each group of figures of a record; None if the record has no such figures."""
    estimates = reading.estimates
    predicted = estimates.get(Column.COUNTED) or estimates.get(Column.EXACT)
    tokens = record.get("tokens_per_step")
    if predicted is not None:
        yield FigureGroup(FigureKind.SIZE), _training_sizes(record)
    for source, estimate in (
        (PREDICTED, predicted),
        (MEASURED, estimates.get(Column.MEASURED) or estimates.get(Column.SIMULATED)),
    ):
        if estimate is not None:
            for kind, figures in _estimate_groups(estimate):
                yield FigureGroup(kind, source), figures
    step = predicted.step if predicted else None
    seconds = {PREDICTED: step.seconds if step else None, MEASURED: reading.step_seconds}
    for source, value in seconds.items():
        yield (
            FigureGroup(FigureKind.TIME, source),
            None if value is None else {"seconds a step": value},
        )
        pace = {"tokens/s": tokens / value} if tokens and value else None
        yield FigureGroup(FigureKind.TOKENS, source), pace
    run = record.get("run", {})
    losses = {"loss at the end": run.get("loss"), "held-out loss": run.get("held_out_loss")}
    known = {name: loss for name, loss in losses.items() if loss is not None}
    yield FigureGroup(FigureKind.LOSS), known or None


def _training_sizes(record: Mapping[str, Any]) -> Figures:
    """Return the sizes of the training: ranks, parameters, and tokens per step."""
    sizes = {"ranks": record["world_size"]}
    if "parameters" in record:
        sizes["parameters of the model"] = record["parameters"]
    if record.get("tokens_per_step"):
        sizes["tokens a step"] = record["tokens_per_step"]
    return sizes


def _estimate_groups(estimate: Estimate) -> Iterator[tuple[FigureKind, Figures]]:
    """Yield the figures of an estimate by kind, without kinds that it leaves undefined."""
    yield FigureKind.MEMORY, _memory_figures(estimate)
    if "peak" not in estimate.undefined:
        peaks = group_by_key(
            (f"peak in {row.phase}", row.device_bytes) for row in distinct(estimate.peak)
        )
        yield FigureKind.PEAK, {label: max(sizes) for label, sizes in peaks.items()}
    if "traffic" not in estimate.undefined:
        yield FigureKind.BYTES, _traffic_figures(estimate, is_bytes=True)
        yield FigureKind.CALLS, _traffic_figures(estimate, is_bytes=False)


def _memory_figures(estimate: Estimate) -> Figures:
    """Return bytes by state and tier of the rank with the most; None for states of unknown size."""
    most = largest_bytes(estimate.memory)
    # Rows of 0 bytes are left out: a missing row counts as 0 in a comparison.
    figures: dict[str, int | None] = {
        label: size
        for state in State
        for tier, label in tier_labels(state)
        if (size := most.get((state, tier)))
    }
    unknown = _DATA_SIZED if "activations" in estimate.undefined else ()
    return figures | dict.fromkeys(map(str, unknown))


def _traffic_figures(estimate: Estimate, *, is_bytes: bool) -> Figures:
    """Return the bytes or calls of a step by collective and axes; set-up traffic is separate."""

    def label(key: TrafficKey) -> str:
        over = "" if key.collective.is_copy else f" over {'+'.join(key.axes) or 'world'}"
        via = f" via {key.via}" if key.via else ""
        at_start = " at the start" if key.phase is Phase.SETUP else ""
        return f"{key.collective}{over}{via}{at_start}, {'bytes' if is_bytes else 'calls'}"

    rows = busiest(estimate.traffic)
    return sum_by_key((label(row.key), moved_bytes(row) if is_bytes else row.calls) for row in rows)


def sources_text(groups: Iterable[FigureGroup]) -> str:
    """Return groups as text, by source: `measured memory, peak; loss`."""
    by_source = group_by_key((group.source, group.kind) for group in groups)
    return "; ".join(f"{source} {', '.join(kinds)}".strip() for source, kinds in by_source.items())
