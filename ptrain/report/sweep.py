"""The screens of `ptrain predict` for several specs.

- A sweep has the fastest spec that fits, then a row for each spec. A rejected spec has a row too,
  and its reason is below the table.
- Two specs have their answers, then the figures that differ, with ratios.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ptrain.cost import PLACED, Estimate, Phase, State, busiest
from ptrain.errors import Fault
from ptrain.report.predict import (
    MODEL_STATES,
    MODEL_STATES_LABEL,
    Prediction,
    answer_line,
    model_state_bytes,
    sent_bytes,
)
from ptrain.report.step_time import device_name, job_pace, untimed_reason
from ptrain.report.table import (
    MISSING,
    Importance,
    TableColumn,
    axes_text,
    by_data_lines,
    largest_bytes,
    memory_text,
    name_column,
    render_table,
    text_or_dash,
    tier_labels,
    traffic_text,
)
from ptrain.selection.fit import HOST_UNKNOWN, usable_text
from ptrain.spec.batch import batch_lines
from ptrain.spec.load import MeshFollower, parse_override
from ptrain.spec.spec import Spec
from ptrain.spec.write import omitted_sections
from ptrain.units import format_count, format_seconds, group_by_key, leaves

_NAMED_POINTS = 6  # points listed for a key that followed the mesh; beyond that, a range


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One row of a sweep; a rejected point has faults and no prediction.

    Attributes:
        overrides: The overrides that the sweep chose for this point.
        follows: Keys that were changed to follow the mesh.
    """

    label: str
    overrides: tuple[str, ...] = ()
    follows: tuple[MeshFollower, ...] = ()
    prediction: Prediction | None = None
    faults: tuple[Fault, ...] = ()

    @property
    def refusal(self) -> str:
        """The reason why there is no prediction, on one line; empty if there is one."""
        texts = (
            ": ".join(part for part in (fault.place, fault.finding) if part)
            + (f" ({fault.remedy})" if fault.remedy else "")
            for fault in self.faults
        )
        return "; ".join(texts)

    @property
    def settings(self) -> dict[str, str]:
        """The settings of this point by key, including keys that follow the mesh."""
        follows = (follower.override for follower in self.follows)
        parsed = map(parse_override, (*self.overrides, *follows))
        return {".".join(override.route): override.text for override in parsed}


def step_seconds(exact: Estimate) -> float | None:
    """Return the predicted step time in seconds; None without rates."""
    return None if exact.step is None else exact.step.seconds


def device_pace(prediction: Prediction) -> float | None:
    """Return the tokens per second of one device; None if no time is predicted."""
    pace = job_pace(prediction.derivation)
    return None if pace is None else pace.tokens_per_second / prediction.spec.world_size


def num_collectives(exact: Estimate) -> int:
    """Return the number of collectives in a steady step, without copies between tiers."""
    return sum(
        row.calls
        for row in busiest(exact.traffic)
        if row.key.phase is not Phase.SETUP and not row.key.collective.is_copy
    )


_Figure = Callable[[Prediction], float | None]
_Cell = Callable[[Prediction | None], str]
_PAPER = ", paper"  # the end of titles
SORTS: Mapping[str, _Figure] = {
    "states": lambda prediction: model_state_bytes(prediction.derivation.exact),
    "peak": lambda prediction: prediction.fit.peak_bytes,
    "sent": lambda prediction: sent_bytes(prediction.derivation.exact),
    "calls": lambda prediction: num_collectives(prediction.derivation.exact),
    "time": lambda prediction: step_seconds(prediction.derivation.exact),
}


def sort_points(points: Sequence[SweepPoint], sort: str | None) -> list[SweepPoint]:
    """Return the points by a figure, ascending.

    Points without the figure come after the others, and rejected points come last.

    Args:
        points: The points of a sweep.
        sort: A key of SORTS; None keeps the order.
    """
    if sort is None:
        return list(points)
    figure = SORTS[sort]

    def place(point: SweepPoint) -> tuple[bool, bool, float]:
        value = None if point.prediction is None else figure(point.prediction)
        return point.prediction is None, value is None, value or 0

    return sorted(points, key=place)  # False sorts before True; sorted() is stable


def sweep_table(points: Sequence[SweepPoint], *, explain: bool = False) -> str:
    """Return the fastest point that fits, a table with a row for each point, and remarks.

    Args:
        points: The points of a sweep; at least one has a prediction, and ratios are to the first
            one.
        explain: Add the figures of the paper.
    """
    named = [(point.label, point.prediction) for point in points if point.prediction]
    assert named, "a sweep of which nothing is left is refused as a whole"
    columns = [
        TableColumn(title, importance, [text(point.prediction) for point in points])
        for title, importance, text in _make_columns([prediction for _, prediction in named])
        if explain or not title.endswith(_PAPER)
    ]
    shown = [name_column("spec", [point.label for point in points]), *columns]
    return "\n".join([*_decision_lines(named), render_table(shown), *sweep_remarks(points)])


def _make_columns(predictions: Sequence[Prediction]) -> list[tuple[str, Importance, _Cell]]:
    """Return the title, importance and cell function of each column that has figures."""
    detail, figure, result = Importance.DETAIL, Importance.FIGURE, Importance.RESULT
    usable = {prediction.fit.usable_memory for prediction in predictions}
    room = f" (of {memory_text(*usable)})" if len(usable) == 1 and None not in usable else ""
    first, device, seconds = predictions[0], device_name(predictions[0].spec), SORTS["time"]
    has_host = any(one.fit.host_bytes for one in predictions)
    is_timed = any(seconds(one) is not None for one in predictions)
    host = ("host memory", figure, _make_cell(lambda one: memory_text(one.fit.host_needed_bytes)))
    paces = [
        ("step time", result, _make_cell(lambda one: text_or_dash(seconds(one), format_seconds))),
        ("tokens/s", figure, _make_cell(partial(_pace_cell, "tokens_per_second", format_count))),
        (
            f"tokens/s/{device}",
            figure,
            _make_cell(lambda one: text_or_dash(device_pace(one), format_count)),
        ),
        ("MFU", detail, _make_cell(partial(_pace_cell, "mfu_full", "{:.1%}".format))),
    ]
    states, ratio = MODEL_STATES_LABEL, partial(_ratio_cell, first)
    return [
        ("fits", result, _make_cell(fits_word, "rejected")),
        (f"peak{room}", result, _make_cell(lambda one: memory_text(one.fit.peak_bytes))),
        *([host] if has_host else []),
        *(paces if is_timed else []),
        (
            states,
            detail,
            _make_cell(lambda one: memory_text(model_state_bytes(one.derivation.exact))),
        ),
        (
            f"{states}{_PAPER}",
            detail,
            _make_cell(lambda one: memory_text(model_state_bytes(one.derivation.paper))),
        ),
        (
            "bytes/parameter",
            detail,
            _make_cell(
                lambda prediction: (
                    f"{(SORTS['states'](prediction) or 0) / prediction.num_parameters:.3g}"
                )
            ),
        ),
        ("states ratio", detail, _make_cell(partial(ratio, "states"))),
        ("traffic", figure, _make_cell(lambda one: traffic_text(sent_bytes(one.derivation.exact)))),
        (
            f"traffic{_PAPER}",
            detail,
            _make_cell(lambda one: traffic_text(sent_bytes(one.derivation.paper))),
        ),
        ("traffic ratio", detail, _make_cell(partial(ratio, "sent"))),
        ("calls", detail, _make_cell(lambda one: str(num_collectives(one.derivation.exact)))),
    ]


def _make_cell(text: Callable[[Prediction], str], rejected: str = MISSING) -> _Cell:
    """Return the function that writes a column's cell; rejected points get the text `rejected`."""
    return lambda prediction: text(prediction) if prediction else rejected


def _pace_cell(name: str, text: Callable[[float], str], prediction: Prediction) -> str:
    """Return a figure of the job's throughput, or a dash if it is not predicted."""
    return text_or_dash(getattr(job_pace(prediction.derivation), name, None), text)


def fits_word(prediction: Prediction) -> str:
    """Return `yes`, `tight` (fits with little to spare), `no`, `unknown`, or a dash.

    The dash is for a spec without a cluster.
    """
    if prediction.fit.fits is None:
        return MISSING if prediction.fit.device_memory is None else "unknown"
    if prediction.fit.is_tight:
        return "tight"
    return "yes" if prediction.fit.fits else "no"


def _ratio_cell(first: Prediction, name: str, prediction: Prediction) -> str:
    """Return the ratio of a figure to the first prediction's, or an empty text."""
    number, base = SORTS[name](prediction), SORTS[name](first)
    return f"{number / base:.3g}×" if number is not None and base else ""


def sweep_remarks(points: Sequence[SweepPoint]) -> Iterator[str]:
    """Yield remarks on points, below the table.

    Remarks are about rejected points, keys that followed the mesh, the batch, missing figures,
    bounds, reserved memory, and warnings.
    """
    rejected = group_by_key((point.refusal, point.label) for point in points if point.refusal)
    yield from (f"rejected: {', '.join(labels)}: {why}" for why, labels in rejected.items())
    yield from _follower_lines(points)
    named = [(point.label, point.prediction) for point in points if point.prediction]
    yield from _merged_sentences(named, _usable_lines)
    yield from _merged_sentences(
        named, lambda prediction: batch_lines(prediction.spec.batch, prediction.spec.data_degree)
    )
    yield from _merged_sentences(named, _missing_time)
    yield from _merged_sentences(named, _unknown_host)
    for label, prediction in named:
        if prediction.fit.peak_bytes is None:
            yield (
                f"peak unknown: {label}: {prediction.fit.why}. Run: {prediction.measuring_command}"
            )
    for label, prediction in named:
        for line in by_data_lines(prediction.derivation.exact):
            yield f"upper bounds: {label}: {line}"
    for _, prediction in named:
        if prediction.reserving is not None:
            yield from prediction.reserving.lines
    for label, prediction in named:
        for warning in prediction.derivation.exact.warnings:
            yield f"warning: {label}: {warning}"


def _decision_lines(named: Sequence[tuple[str, Prediction]]) -> Iterator[str]:
    """Yield the fastest point that fits, or a statement that none fits.

    Points are compared by the throughput of a device, since their batches and meshes may differ. If
    the points have different numbers of devices, the best one is called the most efficient, not the
    fastest.
    """
    if all(prediction.fit.fits is False for _, prediction in named):
        label, least = min(named, key=lambda entry: entry[1].fit.least_bytes)
        yield f"None fits: {label} needs the least memory, {memory_text(least.fit.least_bytes)}"
    if fastest := fastest_that_fits([prediction for _, prediction in named]):
        label = next(label for label, prediction in named if prediction is fastest)
        device, pace = device_name(fastest.spec), device_pace(fastest)
        sizes = {prediction.spec.world_size for _, prediction in named if prediction.fit.fits}
        best = "Fastest" if len(sizes) == 1 else "Most efficient"
        yield f"{best} that fits: {label}, {text_or_dash(pace, format_count)} tokens/s/{device}"


def fastest_that_fits(predictions: Sequence[Prediction]) -> Prediction | None:
    """Return the prediction with the highest throughput per device.

    Returns:
        None if fewer than two of the predictions that fit have a throughput.
    """
    # -number: of equally fast points the first wins.
    paced = [
        (pace, -number)
        for number, prediction in enumerate(predictions)
        if prediction.fit.fits and (pace := device_pace(prediction)) is not None
    ]
    return predictions[-max(paced)[1]] if len(paced) > 1 else None


def _follower_lines(points: Sequence[SweepPoint]) -> Iterator[str]:
    """Yield a line for each key that followed the mesh, with its values by point."""
    became = group_by_key(
        ((follower.key, follower.old_value), (follower.new_value, point.label))
        for point in points
        for follower in point.follows
    )
    for (key, before), pairs in became.items():
        labels, (section, _, name) = group_by_key(pairs), key.partition(".")
        yield (
            f"{section} follows the mesh: {name} {before} → {_values_by_point(labels)}; "
            f"{key}=N fixes it"
        )


def _values_by_point(labels: Mapping[int, Sequence[str]]) -> str:
    """Return each value with its points, or the range of values if there are many points."""
    if (points := sum(map(len, labels.values()))) > _NAMED_POINTS:
        return f"{min(labels)} … {max(labels)} at {points} points (--csv lists them)"
    return ", ".join(f"{number} ({', '.join(where)})" for number, where in labels.items())


def _merged_sentences(
    named: Sequence[tuple[str, Prediction]], sentences_of: Callable[[Prediction], Sequence[str]]
) -> Iterator[str]:
    """Yield each sentence once, with the points it is about unless it is about all of them."""
    labels_of = group_by_key(
        (text, label) for label, prediction in named for text in sentences_of(prediction)
    )
    for sentence, labels in labels_of.items():
        yield sentence if len(labels) == len(named) else f"{', '.join(labels)}: {sentence}"


def _usable_lines(prediction: Prediction) -> Sequence[str]:
    memory, reserve = prediction.fit.device_memory, prediction.fit.reserve_bytes
    return [usable_text(memory, reserve)] if memory and reserve else []


def _unknown_host(prediction: Prediction) -> Sequence[str]:
    fitting = prediction.fit
    is_why = fitting.fits is None and fitting.fits_device
    return [f"unknown whether it fits: {fitting.unknown}. {HOST_UNKNOWN[1]}"] if is_why else []


def _missing_time(prediction: Prediction) -> Sequence[str]:
    """Return the reason why no step time is predicted."""
    why = untimed_reason(prediction.derivation)
    return [f"no step time: {why}"] if why else []


def point_figures(point: SweepPoint) -> dict[str, object]:
    """Return the row as plain values: bytes, seconds, booleans, and None for a missing figure."""
    if (prediction := point.prediction) is None:
        return {"spec": point.label, "refused": point.refusal}
    paper, exact = prediction.derivation.paper, prediction.derivation.exact
    return {
        "spec": point.label,
        "refused": None,
        "parameters": prediction.num_parameters,
        "model_state_bytes_paper": model_state_bytes(paper),
        "model_state_bytes": model_state_bytes(exact),
        "peak_bytes": prediction.fit.peak_bytes,
        "device_memory": prediction.fit.device_memory,
        "reserve_bytes": prediction.fit.reserve_bytes,
        "host_bytes": prediction.fit.host_bytes,
        "fits": prediction.fit.fits,
        "tight": prediction.fit.is_tight,
        "step_seconds": step_seconds(exact),
        "device_tokens_per_second": device_pace(prediction),
        "sent_bytes_paper": sent_bytes(paper),
        "sent_bytes": sent_bytes(exact),
        "calls": num_collectives(exact),
    }


def as_csv(points: Sequence[SweepPoint]) -> str:
    """Return the points as CSV: a column for each key that the sweep sets, then the figures.

    Missing values are empty.
    """
    rows = [point.settings | point_figures(point) for point in points]
    names = dict.fromkeys(
        [
            *(key for point in points for key in point.settings),
            *(key for row in rows for key in row),
        ]
    )
    text = io.StringIO()
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _csv_value(value) for name, value in row.items()})
    return text.getvalue().removesuffix("\n")


def _csv_value(value: object) -> object:
    """Return a value as CSV writes it: lower-case booleans, and an empty text for None."""
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else value


_UNSET = "–"
_TRAFFIC = ("traffic", "copied between tiers")
_SHOWN_ELSEWHERE = ("name", "mesh", "placement")
_SAME_MODEL = "model.folder"  # wherever it lies
Figure = tuple[str, int | None, int | None]


def pair_screen(first: Prediction, second: Prediction, *, explain: bool = False) -> str:
    """Return the screen of two specs: answers, different settings and figures, and remarks.

    Args:
        first: The base of the ratios.
        second: The other spec.
        explain: Add the figures of the paper.
    """
    sides, estimates = (first, second), ("paper", "exact") if explain else ("exact",)
    differing = [row for row in _compared_figures(first, second, estimates) if row[1] != row[2]]
    names, before, after = zip(*differing, strict=True) if differing else ((), (), ())
    columns = [
        name_column("per rank and step", names),
        TableColumn(first.label, cells=[*map(_size_cell, names, before)]),
        TableColumn(second.label, cells=[*map(_size_cell, names, after)]),
        TableColumn("ratio", Importance.RESULT, [*map(ratio_text, before, after)]),
    ]
    points = [SweepPoint(label=side.label, prediction=side) for side in sides]
    answers = [f"{side.label}: {answer_line(side)}" for side in sides]
    lines = [f"{first.label} → {second.label}", *answers, "", *_settings(first.spec, second.spec)]
    return "\n".join([*lines, "", render_table(columns), *sweep_remarks(points)])


def _size_cell(name: str, number: int | None) -> str:
    """Return memory in binary units, traffic in decimal ones."""
    return (traffic_text if name.startswith(_TRAFFIC) else memory_text)(number)


def ratio_text(before: int | None, after: int | None) -> str:
    """Return a ratio in words.

    Args:
        before: The base of the ratio.
        after: The other figure.

    Returns:
        `8× less` or `1.5× more`; `+2.1e-06` for a difference below 1 %; empty if a figure is 0 or
        missing.
    """
    if not before or not after:
        return ""
    more = after > before
    if abs(after - before) < 0.01 * before:
        return f"{after / before - 1:+.1e}"
    return f"{max(before, after) / min(before, after):.3g}× {'more' if more else 'less'}"


def _compared_figures(
    first: Prediction, second: Prediction, estimates: Sequence[str]
) -> Iterator[Figure]:
    """Yield the name and both values of each figure."""
    for column in estimates:
        left, right = getattr(first.derivation, column), getattr(second.derivation, column)
        states = State if column == "exact" else MODEL_STATES
        suffix = f", {column}" if len(estimates) > 1 else ""
        most, others = largest_bytes(left.memory), largest_bytes(right.memory)
        for state in states:
            for tier, label in tier_labels(state):
                yield f"{label}{suffix}", most.get((state, tier)), others.get((state, tier))
        for tier, label in tier_labels(MODEL_STATES_LABEL):
            sums = model_state_bytes(left, tier), model_state_bytes(right, tier)
            yield f"{label}{suffix}", *sums
        if column == "exact":
            yield f"peak{suffix}", first.fit.peak_bytes, second.fit.peak_bytes
        yield f"{_TRAFFIC[0]}{suffix}", sent_bytes(left), sent_bytes(right)
        yield f"{_TRAFFIC[1]}{suffix}", left.copied_bytes(), right.copied_bytes()


def _settings(before: Spec, after: Spec) -> Iterator[str]:
    """Yield a line for each setting that differs, placements first."""
    yield from _placement_lines(before, after)
    left, right = (
        dict(leaves(spec.resolved)) | {"sync.gradients": spec.sync.gradients.value}
        for spec in (before, after)
    )
    if before.batch.accumulate == after.batch.accumulate == 1:
        # With one micro-batch, syncing on each and on the last are the same.
        del left["sync.gradients"], right["sync.gradients"]
    # A key that one side leaves out and the other sets to its default is not a difference.
    defaults = dict(leaves(omitted_sections()))
    for key in dict.fromkeys((*left, *right)):
        values = left.get(key, _UNSET), right.get(key, _UNSET)
        is_default = _UNSET in values and defaults.get(key) in values
        is_elsewhere = key.split(".")[0] in _SHOWN_ELSEWHERE or key == _SAME_MODEL
        if is_elsewhere or values[0] == values[1] or is_default:
            continue
        yield f"  {key}: {_yaml_scalar(values[0])} → {_yaml_scalar(values[1])}"


def _yaml_scalar(value: object) -> str:
    """Return a value as YAML writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _placement_lines(before: Spec, after: Spec) -> Iterator[str]:
    """Yield the modes that differ by state, or both placements if the axes differ in number."""
    pairs = list(zip(before.factors, after.factors, strict=False))
    if len(before.factors) != len(after.factors):
        yield f"  placement: {axes_text(before)} → {axes_text(after)}"
        return
    if _mesh_text(before) != _mesh_text(after):
        yield f"  mesh: {_mesh_text(before)} → {_mesh_text(after)}"
    for left, right in pairs:
        where = f" on {right.axis}" if len(pairs) > 1 else ""
        for state in PLACED:
            if left.placement[state] != right.placement[state]:
                yield f"  {state}: {left.placement[state]} → {right.placement[state]}{where}"


def _mesh_text(spec: Spec) -> str:
    return ", ".join(f"{factor.axis} {factor.degree}" for factor in spec.factors)
