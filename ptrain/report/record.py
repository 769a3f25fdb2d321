"""The result record, a public contract (changed only by adding), and the verdict.

A verdict is a subtraction: `exact` and `measured` have the same types. Resident bytes, traffic and
operations are checked with tolerance 0, the peak within 2 %. A row that only one side has is a
failing check.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile, zip_longest

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
from ptrain.derivation.wire import WireRow, wire_rows
from ptrain.installed import versions
from ptrain.report.step_time import time_row
from ptrain.spec.rates import are_calibrated
from ptrain.spec.resolve_sections import tables
from ptrain.spec.spec import Spec
from ptrain.units import grouped
from ptrain.version import is_tested

PEAK_TOLERANCE = 0.02
_CHECKED = {
    "memory": "bytes per state and rank",
    "peak": "peak per phase and rank",
    "traffic": "calls, payload and bytes sent per kind of call",
    "step": "step time",
}
_KINDS_OF_REASONS = ("undefined", "unclaimed", "by_data", "assumed", "counted")
COUNTED_KINDS = ("memory", "peak", "traffic", "operations")  # of rows in each column
_COUNTS = ("calls", "payload_bytes", "sent_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One comparison; `tolerance` is relative. None stands for a row that one side lacks. `lower`:
    the prediction is a lower bound and, in `predicted`, an upper one; `counted`: what of the run
    the prediction was derived from, empty where it was made before the run."""

    name: str
    predicted: int | float | None
    measured: int | float | None
    tolerance: float
    holds: bool
    why: str = ""
    lower: int | None = field(default=None, metadata=RARE)
    counted: str = field(default="", metadata=RARE)


def compared_ranks(exact: Estimate, measured: Estimate) -> set[int]:
    """Return the ranks whose rows are compared: the one whose own account `measured` is, or all."""
    ranks = {row.rank for row in measured.memory}
    return ranks if len(ranks) == 1 else set(range(exact.world_size))


def compare(exact: Estimate, measured: Estimate) -> tuple[Check, ...]:
    """Checks per state and rank, per kind of call, per phase's peak, and per pass and rank of the
    operations where both columns count them: a run does not, a simulation does.

    Where `measured` is one rank's own account, only that rank is compared; a rank that is missing
    from an account of several fails. A figure that depends on data holds within its bounds. Of what
    `exact` says that it does not predict (`undefined`: activations, peak, traffic) there is no
    check, and none of a run's figures where `exact` assumes what data decides (`assumed`) but of
    how many calls there are; on fake ranks it is as assumed.
    """
    assumed = exact.assumed if measured.column is Column.MEASURED else {}
    untold = {*exact.undefined, *assumed}
    left_out = (State.ACTIVATIONS, State.TRANSIENT) if "activations" in untold else ()
    predicted, memory = (
        [row for row in rows if row.state not in left_out]
        for rows in (of_ranks(exact.memory, compared_ranks(exact, measured)), measured.memory)
    )
    ranks = compared_ranks(exact, measured)
    checks = [*_memory_checks(predicted, memory)]
    if "traffic" not in untold:
        checks += _traffic_checks(exact.traffic, measured.traffic, assumed)
    if "peak" not in untold:
        checks += _peak_checks(of_ranks(exact.peak, ranks), measured.peak)
    if exact.operations and measured.operations:
        checks += _operations_checks(of_ranks(exact.operations, ranks), measured.operations)
    return tuple(_with_source(check, exact.counted) for check in checks)


def _with_source(check: Check, counted: Mapping[str, str]) -> Check:
    """Return the check with what its prediction was derived from, where that is the run's: kinds of
    figures are the beginnings of names. How many calls there are a run does not decide."""
    name = check.name.removeprefix("memory ")
    kinds = () if name.endswith(" calls") else counted.items()
    source = next((why for kind, why in kinds if name.startswith(f"{kind} ")), "")
    return replace(check, counted=source) if source else check


def time_checks(spec: Spec, step: StepTime | None, measured: float | None) -> Iterator[Check]:
    """Yield the check of a step's time on a calibrated machine, if the rates are those of the
    devices that ran it: it fails above the interval of published steps. A step that is faster than
    the interval holds, and the reason states so."""
    cluster, rates = spec.cluster, spec.cluster and spec.cluster.rates
    if (
        not cluster
        or not rates
        or not are_calibrated(tables(rates))
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


def verdict(checks: Sequence[Check]) -> str:
    """`holds` when every check does. No checks, no verdict: `fails`."""
    return "holds" if checks and all(check.holds for check in checks) else "fails"


def verdict_line(
    checks: Sequence[Check],
    *,
    torch: str,
    untold: Iterable[str] = (),
    assumed: Iterable[str] = (),
) -> str:
    """`verdict: holds (14 of 14)`, how many are bounds, which kinds of figures are not predicted,
    or assume what data decides, and whether exactness is claimed for this torch at all."""
    held = sum(check.holds for check in checks)
    missing = sorted({*untold} - {"step_seconds"})
    besides = f" · not predicted: {', '.join(missing)}" if missing else ""
    besides += f" · not judged, for they assume: {', '.join(sorted(assumed))}" if assumed else ""
    claim = "" if is_tested(torch) else f" · not claimed for torch {torch}"
    counted = sum(bool(check.counted) for check in checks)
    besides += f" · {counted} by the counts of the run" if counted else ""
    number = sum(check.lower is not None for check in checks)
    bounds = f" · {number} are bounds: sizes depend on data" if number else ""
    return f"verdict: {verdict(checks)} ({held} of {len(checks)}){bounds}{besides}{claim}"


def checks_line(checks: Sequence[Check], *, ranks: int) -> str:
    """Return how the verdict's checks come about, more of them than the table above has rows."""
    kinds = {check.name.partition(" ")[0] for check in checks}
    what = ", ".join(words for kind, words in _CHECKED.items() if kind in kinds)
    return f"{len(checks)} checks over {ranks} rank{'' if ranks == 1 else 's'}: {what}"


def _memory_checks(exact: Sequence[Footprint], measured: Sequence[Footprint]) -> Iterator[Check]:
    predicted_rows = {(row.state, row.rank): row for row in exact}
    measured_rows = {(row.state, row.rank): row for row in measured}
    for state, rank in sorted({*predicted_rows, *measured_rows}, key=lambda key: (key[1], key[0])):
        left, right = predicted_rows.get((state, rank)), measured_rows.get((state, rank))
        for tier in TIERS:
            sizes = [getattr(row, tier) if row else None for row in (left, right)]
            if tier == "device_bytes" or any(sizes):
                name = f"memory {state} rank {rank}" + _tier_suffix(tier)
                lower = left.lower_bytes if left and tier == "device_bytes" else None
                yield _check(name, sizes[0], sizes[1], tolerance=0.0, lower=lower)


def _tier_suffix(tier: str) -> str:
    return "" if tier == "device_bytes" else " " + tier.removesuffix("_bytes")


def exchange_of(key: TrafficKey) -> str:
    """Return how an estimate that assumes something names such calls: `traffic ep all_to_all`."""
    return f"traffic {'+'.join(key.axes)} {key.collective}"


def _traffic_checks(
    exact: Sequence[Traffic], measured: Sequence[Traffic], assumed: Container[str] = ()
) -> Iterator[Check]:
    """Several rows with one key are several ranks' accounts, different ones once: each must be
    right. Of those that are not, the first is named. Of an exchange whose bytes are `assumed` the
    calls are checked."""
    predicted_rows, measured_rows = (
        grouped((row.key, row) for row in rows) for rows in (exact, measured)
    )
    for key in sorted({*predicted_rows, *measured_rows}, key=traffic_name):
        for count in _COUNTS[:1] if exchange_of(key) in assumed else _COUNTS:
            left = sorted({getattr(row, count) for row in predicted_rows.get(key, [])})
            right = sorted({getattr(row, count) for row in measured_rows.get(key, [])})
            wrong = [pair for pair in zip_longest(left, right) if pair[0] != pair[1]]
            predicted, measured_row = (wrong or [(left[-1], right[-1])])[0]
            name = f"traffic {traffic_name(key)} {count.removesuffix('_bytes')}"
            yield _check(name, predicted, measured_row, tolerance=0.0)


def traffic_name(key: TrafficKey) -> str:
    """`dp_shard all_gather forward parameters`; a copy between tiers is the rank's `own`."""
    via = f" via {key.via}" if key.via else ""
    where = "own" if key.collective.is_copy else "+".join(key.axes) or "world"
    return f"{where} {key.collective} {key.phase} {key.state}{via}"


def _peak_checks(exact: Sequence[Peak], measured: Sequence[Peak]) -> Iterator[Check]:
    predicted_rows = {(row.rank, row.phase): row for row in exact}
    measured_rows = {(row.rank, row.phase): row.device_bytes for row in measured}
    for rank, phase in sorted({*predicted_rows, *measured_rows}):
        row = predicted_rows.get((rank, phase))
        yield _check(
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
            yield _check(f"operations {name} rank {rank}", left, right, tolerance=0.0)


def _check(
    name: str,
    predicted: int | None,
    measured: int | None,
    *,
    tolerance: float,
    lower: int | None = None,
) -> Check:
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


def record(
    name: str,
    estimates: Sequence[Estimate],
    *,
    checks: Sequence[Check] = (),
    device: str = "",
    step_seconds: Mapping[str, float] | None = None,
    rank: int | None = None,
) -> dict[str, object]:
    """One result as plain data, JSON-ready. `rank` None: rows of all ranks, figures are maxima.

    `verdict` is null where nothing was checked. A column that leaves something out says so under
    `undefined`, one whose figures are another device's under `unclaimed`, one whose figures are
    bounds under `by_data`: these rows have `lower_bytes` and `upper_bytes`; one that assumes what
    data decides under `assumed`, one that was derived from what a run counted under `counted`.
    """
    packages = versions()
    return {
        "spec": name,
        "world_size": max((estimate.world_size for estimate in estimates), default=1),
        "rank": "max" if rank is None else rank,
        "versions": packages,
        "device": device,
        **{kind: [*rows_of(kind, *estimates)] for kind in COUNTED_KINDS},
        "wire": encode(_wire(estimates)),
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
        "verdict": verdict(checks) if checks else None,
        "claimed": is_tested(packages["torch"]),
        **{kind: _reasons(estimates, kind) for kind in _KINDS_OF_REASONS},
        "notes": [note for estimate in estimates for note in estimate.notes],
        "warnings": [warning for estimate in estimates for warning in estimate.warnings],
    }


def _reasons(estimates: Sequence[Estimate], kind: str) -> dict[str, dict[str, str]]:
    """Return by column why some of its figures are what `kind` says; of columns that say it."""
    reasons = {str(estimate.column): dict(getattr(estimate, kind)) for estimate in estimates}
    return {column: why for column, why in reasons.items() if why}


def _wire(estimates: Sequence[Estimate]) -> tuple[WireRow, ...]:
    by_column = {estimate.column: estimate for estimate in estimates}
    exact = by_column.get(Column.COUNTED) or by_column.get(Column.EXACT)
    measured = by_column.get(Column.MEASURED)
    return wire_rows(exact, measured) if exact and measured else ()


def rows_of(kind: str, *estimates: Estimate) -> Iterator[dict[str, object]]:
    """Yield the rows of a kind, each with its column, which follows the words that name the row. A
    row with a lower bound repeats its figure as the upper one."""
    for estimate in estimates:
        for row in map(encode, getattr(estimate, kind)):
            words = dict(takewhile(lambda item: not isinstance(item[1], int), row.items()))
            bounds = {"upper_bytes": row["device_bytes"]} if "lower_bytes" in row else {}
            yield words | {"column": str(estimate.column)} | row | bounds
