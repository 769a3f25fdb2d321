"""The rows of `ptrain predict` for a sweep or several specs, as a table, CSV, JSON or a chart.

In a sweep, batch and cluster follow the mesh. An invalid point has a row with its reason. The
module also draws the timeline of a step.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ptrain.charts.canvas import ChartFile, chart_file
from ptrain.charts.memory import sweep_sheet
from ptrain.charts.schedule import timeline_sheet
from ptrain.cli.arguments import print_json
from ptrain.cli.progress import show_progress
from ptrain.codec import encode
from ptrain.derivation.estimate import Derivation
from ptrain.errors import Fault, PtrainError, SpecError, input_error
from ptrain.report.predict import Prediction, require_cuda
from ptrain.report.screen import command_line, next_line, print_screen
from ptrain.report.sweep import SweepPoint, as_csv, fastest_that_fits, sort_points, sweep_table
from ptrain.spec.load import expand_sweeps, find_mesh_followers

_OPTION = "--timeline"
_LISTS = "ptrain specs"
AsRecord = Callable[[Prediction], Mapping[str, object]]


class Predict(Protocol):
    """A function that predicts a source with overrides; the default label is the spec's name."""

    def __call__(
        self, source: str, words: tuple[str, ...], *, label: str = "", offer: bool = False
    ) -> Prediction: ...


def run_sweep(
    args: Namespace,
    sources: Sequence[str],
    overrides: list[str],
    *,
    predict: Predict,
    as_record: AsRecord,
) -> int:
    """Print a row for each point, and draw them if a file is named; return 0.

    Args:
        args: The options of the command.
        sources: The specs.
        overrides: The overrides, some of which list several values.
        predict: Predicts one point.
        as_record: Returns the result record of one point.

    Raises:
        SpecError: With the faults of all points, if no point is valid.
    """
    chart = chart_file(args.chart)
    choices = len(list(expand_sweeps(overrides))) * len(sources)
    points: list[SweepPoint] = []
    with show_progress("predicting") as step:
        for source in sources:
            for point in _predict_points(source, overrides, predict, is_named=len(sources) > 1):
                points.append(point)
                step(len(points), choices, f"predicting {point.label}")
    predictions = [point.prediction for point in points if point.prediction is not None]
    if not predictions:
        raise SpecError(*dict.fromkeys(fault for point in points for fault in point.faults))
    if args.reserved:
        require_cuda(predictions)
    points = sort_points(points, args.sort)
    chart_lines = [chart.draw(sweep_sheet(points))] if chart else []
    if args.json:
        print_json([_point_record(point, as_record) for point in points])
    elif args.csv:
        print(as_csv(points))
    else:
        chosen = fastest_that_fits(predictions) or predictions[0]
        words = command_line("predict", chosen.words, allow_import=args.allow_import)
        print_screen(
            sweep_table(points, explain=args.explain), *chart_lines, "", next_line(words, _LISTS)
        )
    return 0


def _predict_points(
    source: str, overrides: list[str], predict: Predict, *, is_named: bool
) -> Iterator[SweepPoint]:
    """Yield the points of one source: one for each combination of the values that overrides list.

    Faults of a single point are raised; in a sweep they are kept in the point.

    Args:
        source: The spec.
        overrides: The overrides, some of which list several values.
        predict: Predicts one point.
        is_named: Labels contain the source, because there are several.
    """
    choices = list(expand_sweeps(overrides))
    if len(choices) == 1:
        prediction = predict(source, choices[0])
        yield SweepPoint(label=prediction.label, prediction=prediction)
        return
    for choice in choices:
        swept = tuple(override for override in choice if override not in overrides)
        point = SweepPoint(label=" ".join([source] * is_named + [*swept]), overrides=swept)
        try:
            follows = find_mesh_followers(source, choice)
            words = (*choice, *(follower.override for follower in follows))
            prediction = predict(source, words, label=point.label)
        except PtrainError as error:
            yield replace(point, faults=_point_faults(error))
        else:
            yield replace(point, follows=follows, prediction=prediction)


def _point_faults(error: PtrainError) -> tuple[Fault, ...]:
    """Return the faults of a rejected point.

    Raises:
        PtrainError: If the error is not about the user's input.
    """
    if error.exit_code != PtrainError.exit_code:
        raise error  # a failed check or rank ends the command
    return error.faults if isinstance(error, SpecError) else (Fault(place="", finding=str(error)),)


def _point_record(point: SweepPoint, as_record: AsRecord) -> dict[str, object]:
    """Return the result record of a point with its settings; for a rejected point, its faults."""
    settings = {"overrides": point.settings, "refused": point.refusal or None}
    if point.prediction is None:
        return {"spec": point.label, **settings, "faults": encode(point.faults)}
    return {**as_record(point.prediction), **settings}


def step_file(path: Path) -> ChartFile | None:
    """Return the file for a timeline.

    Raises:
        SpecError: If the file cannot be written.
    """
    return chart_file(path, _OPTION)


def draw_step(derivation: Derivation, file: ChartFile) -> None:
    """Draw the timeline of a step: its lanes of computing, communication and copies.

    Args:
        derivation: A derivation with a step time.
        file: The file of the picture.

    Raises:
        SpecError: If no step time is predicted.
    """
    if derivation.exact.step is None:
        why = derivation.exact.undefined["step_seconds"]
        raise input_error(
            _OPTION,
            f"the step time is unknown: {why}",
            "Remove it, or set `cluster.preset=h100-8`.",
        )
    file.draw(timeline_sheet(derivation))
