"""The screen of `ptrain predict` for two specs: the answers, then the differences and ratios."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ptrain.cost import PLACED, State
from ptrain.report.heading import placement
from ptrain.report.predict import (
    MODEL_STATES,
    MODEL_STATES_LABEL,
    Prediction,
    answer_line,
    model_state_bytes,
    sent_bytes,
)
from ptrain.report.sweep import SweepPoint, remarks
from ptrain.report.table import (
    Importance,
    TableColumn,
    largest,
    name_column,
    on_tiers,
    render,
    size,
    traffic_size,
)
from ptrain.spec.spec import Spec
from ptrain.spec.write import unwritten

_UNSAID = "–"
_TRAFFIC = ("traffic", "copied between tiers")
_SHOWN_ELSEWHERE = ("name", "mesh", "placement")
_SAME_MODEL = "model.folder"  # wherever it lies
Figure = tuple[str, int | None, int | None]


def pair(first: Prediction, second: Prediction, *, explain: bool = False) -> str:
    """Return the answers for both, settings that differ as `before → after`, figures that differ
    with their ratio, and remarks. `explain` adds the figures of the paper."""
    sides, estimates = (first, second), ("paper", "exact") if explain else ("exact",)
    differing = [row for row in _figures(first, second, estimates) if row[1] != row[2]]
    names, before, after = zip(*differing, strict=True) if differing else ((), (), ())
    columns = [
        name_column("per rank and step", names),
        TableColumn(first.label, cells=[*map(_written, names, before)]),
        TableColumn(second.label, cells=[*map(_written, names, after)]),
        TableColumn("ratio", Importance.RESULT, [*map(ratio, before, after)]),
    ]
    points = [SweepPoint(label=side.label, prediction=side) for side in sides]
    answers = [f"{side.label}: {answer_line(side)}" for side in sides]
    lines = [f"{first.label} → {second.label}", *answers, "", *_settings(first.spec, second.spec)]
    return "\n".join([*lines, "", render(columns), *remarks(points)])


def _written(name: str, number: int | None) -> str:
    """Return memory in binary units, and traffic in decimal ones."""
    return (traffic_size if name.startswith(_TRAFFIC) else size)(number)


def ratio(before: int | None, after: int | None) -> str:
    """`8× less`, `1.5× more`; below 1 % `+2.1e-06`; empty where there is nothing to divide."""
    if not before or not after:
        return ""
    more = after > before
    if abs(after - before) < 0.01 * before:
        return f"{after / before - 1:+.1e}"
    return f"{max(before, after) / min(before, after):.3g}× {'more' if more else 'less'}"


def _figures(first: Prediction, second: Prediction, estimates: Sequence[str]) -> Iterator[Figure]:
    for column in estimates:
        left, right = getattr(first.derivation, column), getattr(second.derivation, column)
        states = State if column == "exact" else MODEL_STATES
        suffix = f", {column}" if len(estimates) > 1 else ""
        most, others = largest(left.memory), largest(right.memory)
        for state in states:
            for tier, label in on_tiers(state):
                yield f"{label}{suffix}", most.get((state, tier)), others.get((state, tier))
        for tier, label in on_tiers(MODEL_STATES_LABEL):
            sums = model_state_bytes(left, tier), model_state_bytes(right, tier)
            yield f"{label}{suffix}", *sums
        if column == "exact":
            yield f"peak{suffix}", first.fit.peak_bytes, second.fit.peak_bytes
        yield f"{_TRAFFIC[0]}{suffix}", sent_bytes(left), sent_bytes(right)
        yield f"{_TRAFFIC[1]}{suffix}", left.copied_bytes(), right.copied_bytes()


def _settings(before: Spec, after: Spec) -> Iterator[str]:
    """`parameters: R → S*`, `mesh: …`, and every other key that differs, dotted."""
    yield from _placements(before, after)
    left, right = (
        _flatten(spec.resolved) | {"sync.gradients": spec.sync.gradients.value}
        for spec in (before, after)
    )
    if before.batch.accumulate == after.batch.accumulate == 1:
        del left["sync.gradients"], right["sync.gradients"]  # one micro-batch is each and the last
    defaults = _flatten(unwritten())
    for key in dict.fromkeys((*left, *right)):
        values = left.get(key, _UNSAID), right.get(key, _UNSAID)
        is_default = _UNSAID in values and defaults.get(key) in values
        is_elsewhere = key.split(".")[0] in _SHOWN_ELSEWHERE or key == _SAME_MODEL
        if is_elsewhere or values[0] == values[1] or is_default:
            continue
        yield f"  {key}: {_word(values[0])} → {_word(values[1])}"


def _word(value: object) -> str:
    """As YAML writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _placements(before: Spec, after: Spec) -> Iterator[str]:
    """By state while the two have as many axes; else the two products whole."""
    pairs = list(zip(before.factors, after.factors, strict=False))
    if len(before.factors) != len(after.factors):
        yield f"  placement: {placement(before)} → {placement(after)}"
        return
    if _mesh(before) != _mesh(after):
        yield f"  mesh: {_mesh(before)} → {_mesh(after)}"
    for left, right in pairs:
        where = f" on {right.axis}" if len(pairs) > 1 else ""
        for state in PLACED:
            if left.placement[state] != right.placement[state]:
                yield f"  {state}: {left.placement[state]} → {right.placement[state]}{where}"


def _mesh(spec: Spec) -> str:
    return ", ".join(f"{factor.axis} {factor.degree}" for factor in spec.factors)


def _flatten(value: object, prefix: str = "") -> dict[str, object]:
    if not isinstance(value, Mapping):
        return {prefix: value}
    flat: dict[str, object] = {}
    for key, inner in value.items():
        flat |= _flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    return flat
