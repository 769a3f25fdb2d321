"""A prediction as plain data that can be kept and compared: what all ranks have in common, and each
distinct set of rows with the ranks that have it. The order of rows is no figure and is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ptrain.cost import Estimate, Footprint, Operations, Peak, State, Traffic
from ptrain.derivation.estimate import derive
from ptrain.spec.spec import Spec

Data = dict[str, Any]
Progression = list[int]  # first rank, number of ranks, distance
Change = tuple[str, object, object]  # row, before, after
ABSENT = "–"
FIELDS = ("world", "undefined", "unclaimed", "notes", "warnings", "accounts")


def predictions(spec: Spec) -> Data:
    """Return both predictions of a legal spec."""
    derivation = derive(spec)
    return {"paper": as_data(derivation.paper), "exact": as_data(derivation.exact)}


def as_data(estimate: Estimate) -> Data:
    """Return every figure and sentence of an estimate, as JSON has them: bytes of memory by state
    and tier, bytes of peaks by phase, [calls, payload bytes, sent bytes] by kind of call, numbers
    of operations. Where the ranks' accounts differ, each rank's traffic is among its rows.

    Raises AssertionError for figures of a measurement, which no prediction has."""
    assert not estimate.wire and not estimate.blocked, "a prediction"
    rows: list[dict[str, Any]] = [{} for _ in range(estimate.world_size)]
    for row in (*estimate.memory, *estimate.peak, *estimate.operations):
        rows[row.rank].update(_figures(row))
    accounts = [_by_key(account) for account in estimate.accounts]
    for of_rank, account in zip(rows, estimate.account_of, strict=False):
        of_rank.update(accounts[account])
    ranks_of: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(rows):
        ranks_of.setdefault(repr(sorted(of_rank.items())), []).append(rank)
    return {
        "world": estimate.world_size,
        "traffic": _by_key(estimate.traffic),
        "accounts": len(accounts),
        "notes": list(estimate.notes),
        "warnings": list(estimate.warnings),
        # time changes with a cluster's rates, and has its own tests
        "undefined": {
            kind: why for kind, why in estimate.undefined.items() if kind != "step_seconds"
        },
        "unclaimed": dict(estimate.unclaimed),
        "ranks": [[progressions(ranks), rows[ranks[0]]] for ranks in ranks_of.values()],
    }


def _figures(row: Footprint | Peak | Operations) -> Iterator[tuple[str, int]]:
    match row:
        case Footprint(state=State() as state):
            yield f"memory {state} device", row.device_bytes
            yield f"memory {state} host", row.host_bytes
            yield f"memory {state} file", row.file_bytes
        case Peak():
            yield f"peak {row.phase}", row.device_bytes
        case Operations():
            yield "operations forward", row.forward
            yield "operations backward", row.backward
            yield "operations again", row.again


def _by_key(rows: Iterable[Traffic]) -> dict[str, list[list[int]]]:
    """Rows by kind of call; more than one where the accounts of the ranks differ."""
    by_key: dict[str, list[list[int]]] = {}
    for row in rows:
        key = row.key
        axes = " and ".join(key.axes) or "no axis"
        via = f" via {key.via}" if key.via else ""
        name = f"traffic {key.phase} {key.state} {key.collective} on {axes}{via}"
        by_key.setdefault(name, []).append([row.calls, row.payload_bytes, row.sent_bytes])
    return {name: sorted(figures) for name, figures in sorted(by_key.items())}


def progressions(ranks: Sequence[int]) -> list[Progression]:
    """Return ascending ranks as arithmetic progressions, one after the other."""
    runs: list[Progression] = []
    for rank in ranks:
        first, number, distance = runs[-1] if runs else (rank, 0, 0)
        if number == 1:
            runs[-1] = [first, 2, rank - first]
        elif number and rank == first + number * distance:
            runs[-1][1] += 1
        else:
            runs.append([rank, 1, 0])
    return runs


def ranks_in(runs: Iterable[Progression]) -> list[int]:
    """Return the ranks of progressions, ascending: the inverse of `progressions`."""
    return sorted(first + index * step for first, number, step in runs for index in range(number))


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    """Yield each row that is not what it was, with the ranks that it is of and both figures."""
    for column in dict.fromkeys([*before, *after]):
        old, new = before.get(column, {}), after.get(column, {})
        if old == new:
            continue
        for field in FIELDS:
            yield from _of_field(f"{column} {field}", old.get(field), new.get(field))
        yield from _of_field(column, old.get("traffic", {}), new.get("traffic", {}))
        yield from _of_ranks(column, old, new)


def _of_field(name: str, old: Any, new: Any) -> Iterator[Change]:
    if old == new:
        return
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            yield from _of_field(f"{name} {key}", old.get(key, ABSENT), new.get(key, ABSENT))
    else:
        yield name, old, new


def _of_ranks(column: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    """Ranks in which a row changes in the same way are listed together."""
    changed: dict[tuple[str, str], tuple[list[int], Change]] = {}
    before, after = _by_rank(old), _by_rank(new)
    for rank in sorted({*before, *after}):
        for name, was, now in _of_field(column, before.get(rank, {}), after.get(rank, {})):
            ranks, _ = changed.setdefault((name, f"{was} {now}"), ([], (name, was, now)))
            ranks.append(rank)
    for ranks, (name, was, now) in changed.values():
        yield f"{name}, {_written(ranks)}", was, now


def _by_rank(data: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    return {rank: rows for runs, rows in data.get("ranks", ()) for rank in ranks_in(runs)}


def _written(ranks: Sequence[int]) -> str:
    words = [
        str(first) if number == 1 else f"{first}–{first + (number - 1) * step}"
        + (f" by {step}" if step > 1 else "")
        for first, number, step in progressions(ranks)
    ]  # fmt: skip
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}"
