"""The command `ptrain report`: write one HTML page about specs and runs.

This module imports torch only to simulate a rank.
"""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from ptrain.charts.canvas import write_atomically
from ptrain.charts.figures import logged_rows
from ptrain.charts.page import PageSubject, report_page
from ptrain.cli.arguments import missing_spec, print_json
from ptrain.cli.predict import predict_spec
from ptrain.cli.why_oom import explain_failure
from ptrain.errors import PtrainError, input_error
from ptrain.report.predict import Prediction
from ptrain.report.recorded import decode_record
from ptrain.report.screen import command_line, next_line, print_screen
from ptrain.spec.load import split_arguments
from ptrain.train import manifest
from ptrain.train.folder import RunFolder, display_path

_OPTION = "--out"


def run(args: Namespace) -> int:
    """Write the page and print its name and size; return 0."""
    sources, overrides = split_arguments(args.arguments)
    if not sources:
        raise missing_spec("report")
    if overrides and all(map(_is_run, sources)):
        raise input_error(
            overrides[0], "overrides apply to specs, and no SPEC is given", "Remove it."
        )
    if args.out.suffix not in ("", ".html", ".htm"):
        finding = f"a report is an HTML page; got {args.out.name}"
        raise input_error(_OPTION, finding, f"Use `{_OPTION} {args.out.stem}.html`.")
    subjects = [
        _read_run(source, args) if _is_run(source) else _read_spec(source, overrides, args)
        for source in sources
    ]
    content = report_page(subjects).encode()
    write_atomically(args.out, content, _OPTION)
    if args.json:
        print_json({"report": str(args.out), "bytes": len(content), "subjects": sources})
    else:
        size = f"{len(content) / 1000:.0f} kB"
        print_screen(
            f"report   {args.out} ({size})", "", next_line(shlex.join(["xdg-open", str(args.out)]))
        )
    return 0


def _is_run(source: str) -> bool:
    """Return True if a source is the folder of a run."""
    return RunFolder(Path(source)).resolved.is_file()


def _read_spec(source: str, overrides: list[str], args: Namespace) -> PageSubject:
    """Return a spec with its prediction, and its simulation if requested."""
    if Path(source).is_dir():
        finding = f"this folder is no run: it has no {RunFolder(Path(source)).resolved.name}"
        raise input_error(source, finding, "Use a run folder, a YAML file, or `ptrain specs`.")
    prediction = predict_spec(source, tuple(overrides), offer=True, allow_import=args.allow_import)
    subject = PageSubject(name=prediction.label, prediction=prediction)
    return _add_simulation(subject, args) if args.simulate else subject


def _read_run(source: str, args: Namespace) -> PageSubject:
    """Return a run: its prediction, metrics, record, checkpoints and failures.

    Raises:
        SpecError: If its record is damaged.
    """
    folder = RunFolder(Path(source))
    record = _read_record(folder, source)
    saved = [path.name for path in reversed(manifest.complete_checkpoints(folder.checkpoints))]
    prediction, reason = None, ""
    try:
        prediction = predict_spec(
            str(folder.resolved), (), offer=record is None, allow_import=args.allow_import
        )
    except PtrainError as error:  # code that may not be imported, or an older version's spec
        reason = str(error)
    name = display_path(folder.path)
    subject = PageSubject(
        name=f"{prediction.spec.name} ({name})" if prediction else name,
        prediction=prediction,
        reason=reason,
        is_run=True,
        record=decode_record(record) if record else None,
        torch=record["versions"]["torch"] if record else "",
        rows=logged_rows(folder.metrics),
        failures=[row for row in logged_rows(folder.failures) if str(row.get("error", "")).strip()],
        out_of_memory=_explain_failure(folder, prediction),
        steps=prediction.spec.train.steps if prediction else 0,
        checkpoints=saved,
        resume=command_line("train", [display_path(folder.resolved), "--resume", name])
        if saved and record is None
        else "",
    )
    return _add_simulation(subject, args) if args.simulate and prediction else subject


def _explain_failure(folder: RunFolder, prediction: Prediction | None) -> list[str]:
    """Return the explanation of a run that ran out of memory, or why its record is unreadable."""
    try:
        return explain_failure(folder, prediction)
    except PtrainError as error:
        return [str(error)]


def _read_record(folder: RunFolder, source: str) -> dict[str, Any] | None:
    """Return the result record of a run, None if it has not finished."""
    if not folder.summary.is_file():
        return None
    try:
        record: dict[str, Any] = json.loads(folder.summary.read_text(encoding="utf-8"))
        decode_record(record)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise input_error(
            source, f"its {folder.summary.name} is damaged: {error}", "Name another run."
        ) from None
    return record


def _add_simulation(subject: PageSubject, args: Namespace) -> PageSubject:
    """Return the subject with the simulated memory of the rank with the highest peak."""
    from ptrain.installed import require_torch

    require_torch()
    from ptrain.simulation.choice import choose_ranks
    from ptrain.simulation.execute import simulate

    assert subject.prediction is not None, "the caller checks that there is a prediction"
    spec = subject.prediction.spec
    rank = choose_ranks(spec, subject.prediction.derivation.exact)[-1]
    result = simulate(spec, rank, allow_import=args.allow_import)
    return replace(subject, simulation=result.estimate, course=result.memory_history)
