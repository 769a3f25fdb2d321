"""The result record, which is a public contract (fields are only added), and its verdict.

`exact` and `measured` are both `Estimate`s, so a verdict subtracts their rows. Resident bytes,
traffic and operations are checked with tolerance 0, the peak within 2 %. A row that only one side
has is a failing check.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile, zip_longest
from typing import Any

from ptrain.by_rank import of_ranks
from ptrain.codec import RARE, encode
from ptrain.cost import (
    OPERATIONS,
    TIERS,
    Column,
    Estimate,
    Footprint,
    Operations,
    Peak,
    State,
    StepTime,
    Traffic,
    TrafficKey,
)
from ptrain.derivation.interconnect import WireRow, wire_rows
from ptrain.installed import versions
from ptrain.report.step_time import time_row
from ptrain.spec.cluster import are_calibrated
from ptrain.spec.resolve_sections import expand_rates
from ptrain.spec.spec import Spec
from ptrain.units import group_by_key
from ptrain.version import is_tested
from ptrain.wording import NotebookOutput, data_frame

PEAK_TOLERANCE = 0.02
_CHECKED = {
    "memory": "bytes per state and rank",
    "peak": "peak per phase and rank",
    "traffic": "calls, payload and bytes sent per kind of call",
    "step": "step time",
}
_KINDS_OF_REASONS = ("undefined", "unclaimed", "by_data", "assumed", "counted")
COUNTED_KINDS = ("memory", "peak", "traffic", "operations")  # kinds of rows of an estimate
_COUNTS = ("calls", "payload_bytes", "sent_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The comparison of a predicted and a measured figure.

    Attributes:
        predicted: None if the prediction lacks the row.
        measured: None if the measurement lacks the row.
        tolerance: The allowed difference, relative to the prediction.
        lower: The lower bound of a figure that depends on data; `predicted` is then the upper
            bound.
        counted: The counts of the run that the prediction uses; empty if it was made before the
            run.
    """

    name: str
    predicted: int | float | None
    measured: int | float | None
    tolerance: float
    holds: bool
    why: str = ""
    lower: int | None = field(default=None, metadata=RARE)
    counted: str = field(default="", metadata=RARE)


class CheckTable(NotebookOutput):
    """A mixin for values with checks."""

    __slots__ = ()
    checks: tuple[Check, ...]

    def to_pandas(self) -> Any:
        """Return the checks as a pandas DataFrame.

        Raises:
            SpecError: pandas is not installed.
        """
        return data_frame([encode(check) for check in self.checks], "to_pandas")


def compared_ranks(exact: Estimate, measured: Estimate) -> set[int]:
    """Return the ranks whose rows are compared.

    Args:
        exact: The prediction of all ranks.
        measured: The measurement.

    Returns:
        One rank if `measured` has the account of one rank, else all ranks of the prediction.
    """
    ranks = {row.rank for row in measured.memory}
    return ranks if len(ranks) == 1 else set(range(exact.world_size))


def compare_estimates(exact: Estimate, measured: Estimate) -> tuple[Check, ...]:
    """Compare a prediction with a measurement or a simulation.

    Checks are per state and rank, per kind of call, per phase's peak and rank, and per pass and
    rank of operations. Operations are checked only if both sides count them: a simulation does, a
    run does not.

    Args:
        exact: The prediction. Figures that it lists as `undefined` are not checked. If it assumes
            figures that data decides (`assumed`), only the number of calls is checked against a
            run; fake ranks behave as assumed, so a simulation is checked in full.
        measured: If it has the rows of one rank, only that rank is compared. If it has several, a
            missing rank is a failing check.

    Returns:
        The checks. A figure with bounds holds if the measured one is within them.
    """
    assumed = exact.assumed if measured.column is Column.MEASURED else {}
    unpredicted = {*exact.undefined, *assumed}
    # Temporary tensors are derived together with activations.
    left_out = (State.ACTIVATIONS, State.TRANSIENT) if "activations" in unpredicted else ()
    predicted, memory = (
        [row for row in rows if row.state not in left_out]
        for rows in (of_ranks(exact.memory, compared_ranks(exact, measured)), measured.memory)
    )
    ranks = compared_ranks(exact, measured)
    checks = [*_memory_checks(predicted, memory)]
    if "traffic" not in unpredicted:
        checks += _traffic_checks(exact.traffic, measured.traffic, assumed)
    if "peak" not in unpredicted:
        checks += _peak_checks(of_ranks(exact.peak, ranks), measured.peak)
    if exact.operations and measured.operations:
        checks += _operations_checks(of_ranks(exact.operations, ranks), measured.operations)
    return tuple(_with_source(check, exact.counted) for check in checks)


def _with_source(check: Check, counted: Mapping[str, str]) -> Check:
    """Return the check with the run's counts that its prediction uses, if there are any.

    The keys of `counted` are prefixes of check names. The number of calls never depends on the
    counts.
    """
    # Keys of `counted` are states for memory ("activations"), and otherwise prefixes such as "peak"
    # and "traffic ep all_to_all". Calls do not depend on the data that a run counts.
    name = check.name.removeprefix("memory ")
    kinds = () if name.endswith(" calls") else counted.items()
    source = next((why for kind, why in kinds if name.startswith(f"{kind} ")), "")
    return replace(check, counted=source) if source else check


def time_checks(spec: Spec, step: StepTime | None, measured: float | None) -> Iterator[Check]:
    """Yield the check of the step time, if the step ran on a calibrated machine.

    The check fails above the interval of published steps. A step below the interval passes, and
    `why` states it.

    Args:
        spec: The spec that ran. Its cluster's rates must be measured ones, of the kind of device
            that ran the step.
        step: The predicted step time; None or one without an interval gives no check.
        measured: The measured seconds of a step; None gives no check.
    """
    cluster, rates = spec.cluster, spec.cluster and spec.cluster.rates
    # Rates of another kind of device, or published ones, do not predict this machine's time.
    if (
        not cluster
        or not rates
        or not are_calibrated(expand_rates(rates))
        or (cluster.kind == "cuda") != spec.is_for_cuda
        or not step
        or not step.interval
        or not measured
    ):
        return
    low, high = step.interval
    side = "above" if measured > high else "below" if measured < low else ""
    yield Check(
        name="step time",
        predicted=step.seconds,
        measured=measured,
        tolerance=high / step.seconds - 1,
        holds=measured <= high,
        why=f"measured is {side} {low:.4g} to {high:.4g} s" if side else "",
    )


def verdict_word(checks: Sequence[Check]) -> str:
    """Return `holds` if there are checks and all of them hold, else `fails`."""
    return "holds" if checks and all(check.holds for check in checks) else "fails"


def verdict_line(
    checks: Sequence[Check],
    *,
    torch: str,
    untold: Iterable[str] = (),
    assumed: Iterable[str] = (),
) -> str:
    """Return the line of the verdict: `verdict: holds (14 of 14)`, with remarks.

    Args:
        torch: The torch version of the run; a remark states that exactness is not claimed for it.
        untold: Kinds of figures that are not predicted.
        assumed: Kinds of figures that assume data, and are therefore not judged.
    """
    holding = sum(check.holds for check in checks)
    missing = sorted({*untold} - {"step_seconds"})
    remarks = f" · not predicted: {', '.join(missing)}" if missing else ""
    remarks += f" · not judged, for they assume: {', '.join(sorted(assumed))}" if assumed else ""
    claim = "" if is_tested(torch) else f" · not claimed for torch {torch}"
    counted = sum(bool(check.counted) for check in checks)
    remarks += f" · {counted} by the counts of the run" if counted else ""
    number = sum(check.lower is not None for check in checks)
    bounds = f" · {number} are bounds: sizes depend on data" if number else ""
    return f"verdict: {verdict_word(checks)} ({holding} of {len(checks)}){bounds}{remarks}{claim}"


def checks_line(checks: Sequence[Check], *, ranks: int) -> str:
    """Return the number of checks and their kinds: there are more checks than rows in the table.

    Args:
        checks: The checks of a verdict.
        ranks: The number of ranks that were measured.
    """
    kinds = {check.name.partition(" ")[0] for check in checks}
    what = ", ".join(words for kind, words in _CHECKED.items() if kind in kinds)
    return f"{len(checks)} checks over {ranks} rank{'' if ranks == 1 else 's'}: {what}"


def _memory_checks(exact: Sequence[Footprint], measured: Sequence[Footprint]) -> Iterator[Check]:
    """Yield a check per rank, state and tier; the host and files are checked only if they hold
    bytes.
    """
    predicted_rows = {(row.state, row.rank): row for row in exact}
    measured_rows = {(row.state, row.rank): row for row in measured}
    # The union of both sides: a row that only one side has becomes a failing check.
    for state, rank in sorted({*predicted_rows, *measured_rows}, key=lambda key: (key[1], key[0])):
        left, right = predicted_rows.get((state, rank)), measured_rows.get((state, rank))
        for tier in TIERS:
            sizes = [getattr(row, tier) if row else None for row in (left, right)]
            if tier == "device_bytes" or any(sizes):
                name = f"memory {state} rank {rank}" + (
                    "" if tier == "device_bytes" else " " + tier.removesuffix("_bytes")
                )
                lower = left.lower_bytes if left and tier == "device_bytes" else None
                yield _make_check(name, sizes[0], sizes[1], tolerance=0.0, lower=lower)


def exchange_key(key: TrafficKey) -> str:
    """Return the key of such calls in `Estimate.assumed` and `counted`: `traffic ep all_to_all`."""
    return f"traffic {'+'.join(key.axes)} {key.collective}"


def _traffic_checks(
    exact: Sequence[Traffic], measured: Sequence[Traffic], assumed: Container[str] = ()
) -> Iterator[Check]:
    """Yield a check for each count of each kind of call.

    Rows with the same key are accounts of different ranks. They are compared in sorted order, equal
    accounts once; the check has the first pair that differs, or else the largest figures. For an
    exchange whose bytes are `assumed`, only the calls are checked.
    """
    predicted_rows, measured_rows = (
        group_by_key((row.key, row) for row in rows) for rows in (exact, measured)
    )
    for key in sorted({*predicted_rows, *measured_rows}, key=traffic_name):
        for count in _COUNTS[:1] if exchange_key(key) in assumed else _COUNTS:
            # Accounts of ranks have no common order, so the sets of their figures are compared.
            left = sorted({getattr(row, count) for row in predicted_rows.get(key, [])})
            right = sorted({getattr(row, count) for row in measured_rows.get(key, [])})
            wrong = [pair for pair in zip_longest(left, right) if pair[0] != pair[1]]
            predicted, measured_row = (wrong or [(left[-1], right[-1])])[0]
            name = f"traffic {traffic_name(key)} {count.removesuffix('_bytes')}"
            yield _make_check(name, predicted, measured_row, tolerance=0.0)


def traffic_name(key: TrafficKey) -> str:
    """Return the name of a traffic row: `dp_shard all_gather forward parameters`.

    A copy between tiers of one rank has `own` instead of axes.
    """
    via = f" via {key.via}" if key.via else ""
    where = "own" if key.collective.is_copy else "+".join(key.axes) or "world"
    return f"{where} {key.collective} {key.phase} {key.state}{via}"


def _peak_checks(exact: Sequence[Peak], measured: Sequence[Peak]) -> Iterator[Check]:
    predicted_rows = {(row.rank, row.phase): row for row in exact}
    measured_rows = {(row.rank, row.phase): row.device_bytes for row in measured}
    for rank, phase in sorted({*predicted_rows, *measured_rows}):
        row = predicted_rows.get((rank, phase))
        yield _make_check(
            f"peak {phase} rank {rank}",
            row.device_bytes if row else None,
            measured_rows.get((rank, phase)),
            tolerance=PEAK_TOLERANCE,
            lower=row.lower_bytes if row else None,
        )


def _operations_checks(
    exact: Sequence[Operations], measured: Sequence[Operations]
) -> Iterator[Check]:
    predicted_rows = {row.rank: row for row in exact}
    measured_rows = {row.rank: row for row in measured}
    for rank in sorted({*predicted_rows, *measured_rows}):
        rows = predicted_rows.get(rank), measured_rows.get(rank)
        for name in OPERATIONS:
            left, right = (getattr(row, name) if row else None for row in rows)
            yield _make_check(f"operations {name} rank {rank}", left, right, tolerance=0.0)


def _make_check(
    name: str,
    predicted: int | None,
    measured: int | None,
    *,
    tolerance: float,
    lower: int | None = None,
) -> Check:
    """Return the check of one figure, with a reason if it fails or if it has bounds.

    Args:
        name: The name of the check.
        predicted: The predicted figure, or its upper bound; None if the prediction lacks the row.
        measured: The measured figure; None if the measurement lacks the row.
        tolerance: The allowed difference, relative to the prediction or to the bounds.
        lower: The lower bound of a figure that depends on data.
    """
    if predicted is None or measured is None:
        absent, present = ("predicted", "measured") if predicted is None else ("measured", "exact")
        holds, why = False, f"{present} has this row, {absent} has none"
    elif lower is not None:
        holds = lower * (1 - tolerance) <= measured <= predicted * (1 + tolerance)
        where = "within" if holds else "outside"
        why = f"measured is {where} the bounds {lower} and {predicted}: the size depends on data"
    else:
        holds = abs(measured - predicted) <= tolerance * abs(predicted)
        why = "" if holds else f"measured is {measured - predicted:+d} from the prediction"
    return Check(
        name=name,
        predicted=predicted,
        measured=measured,
        tolerance=tolerance,
        holds=holds,
        why=why,
        lower=lower,
    )


def result_record(
    name: str,
    estimates: Sequence[Estimate],
    *,
    checks: Sequence[Check] = (),
    device: str = "",
    step_seconds: Mapping[str, float] | None = None,
    rank: int | None = None,
) -> dict[str, object]:
    """Return the result of a command as plain data that JSON can hold.

    Keys are only added, never renamed. `undefined`, `unclaimed`, `by_data`, `assumed` and `counted`
    map a column to the reasons why it lacks figures, has another device's, has bounds, assumes
    data, or uses counts of the run. Rows with bounds have `lower_bytes` and `upper_bytes`.

    Args:
        name: The name of the spec.
        estimates: The columns, for example predicted and measured.
        checks: If there are none, the verdict is null.
        device: The device of the run; empty for a prediction.
        step_seconds: Further step times by column, in seconds.
        rank: The rank whose rows the record has; None: rows of all ranks, and figures are maxima.
    """
    packages = versions()
    return {
        "spec": name,
        "world_size": max((estimate.world_size for estimate in estimates), default=1),
        "rank": "max" if rank is None else rank,
        "versions": packages,
        "device": device,
        **{kind: [*rows_of(kind, *estimates)] for kind in COUNTED_KINDS},
        "wire": encode(_wire_rows(estimates)),
        "blocked_seconds": [encode(row) for estimate in estimates for row in estimate.blocked],
        "step_seconds": [
            *(
                time_row(estimate.column, estimate.step)
                for estimate in estimates
                if estimate.step is not None
            ),
            *({"column": column, "value": value} for column, value in (step_seconds or {}).items()),
        ],
        "checks": encode(checks),
        "verdict": verdict_word(checks) if checks else None,
        "claimed": is_tested(packages["torch"]),
        **{kind: _reasons_by_column(estimates, kind) for kind in _KINDS_OF_REASONS},
        "notes": [note for estimate in estimates for note in estimate.notes],
        "warnings": [warning for estimate in estimates for warning in estimate.warnings],
    }


def _reasons_by_column(estimates: Sequence[Estimate], kind: str) -> dict[str, dict[str, str]]:
    """Return the reasons of one kind by column, without columns that have none."""
    reasons = {str(estimate.column): dict(getattr(estimate, kind)) for estimate in estimates}
    return {column: why for column, why in reasons.items() if why}


def _wire_rows(estimates: Sequence[Estimate]) -> tuple[WireRow, ...]:
    """Return the rows that compare predicted and measured bytes on the wire; empty if a side is
    missing.
    """
    by_column = {estimate.column: estimate for estimate in estimates}
    exact = by_column.get(Column.COUNTED) or by_column.get(Column.EXACT)
    measured = by_column.get(Column.MEASURED)
    return wire_rows(exact, measured) if exact and measured else ()


def rows_of(kind: str, *estimates: Estimate) -> Iterator[dict[str, object]]:
    """Yield the rows of one kind as plain data, each with its column after the keys that identify
    it.

    A row with a lower bound repeats its figure as `upper_bytes`.
    """
    for estimate in estimates:
        for row in map(encode, getattr(estimate, kind)):
            # The keys before the first integer (state, phase, collective …) identify the row.
            words = dict(takewhile(lambda item: not isinstance(item[1], int), row.items()))
            bounds = {"upper_bytes": row["device_bytes"]} if "lower_bytes" in row else {}
            yield words | {"column": str(estimate.column)} | row | bounds
