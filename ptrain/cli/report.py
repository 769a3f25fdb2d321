"""The command `ptrain report`: write one HTML page about specs and runs.

This module imports torch only to simulate a rank.
"""

from __future__ import annotations

import json
import os
import shlex
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ptrain.charts.canvas import write_atomically
from ptrain.charts.figures import logged_rows
from ptrain.charts.page import Subject, report_page
from ptrain.cli.arguments import missing_spec, print_json
from ptrain.cli.predict import predict_spec
from ptrain.errors import PtrainError, SpecError, input_error
from ptrain.report.recorded import decode_record
from ptrain.report.screen import next_line, print_screen
from ptrain.spec.load import split_arguments
from ptrain.train import manifest
from ptrain.train.folder import RunFolder, display_path, require_free

_COLUMNS = "110"  # of tables within the page
_OPTION = "--out"


def run(args: Namespace) -> int:
    """Write the page and print its name and size; return 0."""
    sources, overrides = split_arguments(args.arguments)
    if not sources:
        raise missing_spec("report")
    if args.out.is_dir() or not args.out.parent.is_dir():
        raise input_error(
            _OPTION, f"{args.out} is not a file in an existing folder", "Use another path."
        )
    if overrides and all(map(_is_run, sources)):
        raise input_error(
            overrides[0], "overrides apply to specs, and no SPEC is given", "Remove it."
        )
    with _page_width():
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


@contextmanager
def _page_width() -> Iterator[None]:
    """Temporarily set the width of tables, which would otherwise follow the terminal."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = _COLUMNS
    try:
        yield
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before


def _is_run(source: str) -> bool:
    """Return True if a source is the folder of a run."""
    return RunFolder(Path(source)).resolved.is_file()


def _read_spec(source: str, overrides: list[str], args: Namespace) -> Subject:
    """Return a spec with its prediction, and its simulation if requested."""
    words = tuple(overrides)
    prediction = predict_spec(source, words, offer=True, allow_import=args.allow_import)
    subject = Subject(name=prediction.label, prediction=prediction)
    return _simulated(subject, args) if args.simulate else subject


def _read_run(source: str, args: Namespace) -> Subject:
    """Return a run: its prediction, metrics, record, checkpoints and failures.

    Raises:
        SpecError: If its record is damaged.
    """
    folder = RunFolder(Path(source))
    record = _read_record(folder, source)
    saved = [path.name for path in reversed(manifest.complete_checkpoints(folder.checkpoints))]
    prediction, why = None, ""
    try:
        prediction = predict_spec(
            str(folder.resolved), (), offer=record is None, allow_import=args.allow_import
        )
    except PtrainError as error:  # code that may not be imported, or an older version's spec
        why = str(error)
    name = display_path(folder.path)
    subject = Subject(
        name=f"{prediction.spec.name} ({name})" if prediction else name,
        prediction=prediction,
        why=why,
        is_run=True,
        record=decode_record(record) if record else None,
        torch=record["versions"]["torch"] if record else "",
        rows=logged_rows(folder.metrics),
        failures=_read_failures(folder),
        is_running=_is_locked(folder),
        steps=prediction.spec.train.steps if prediction else 0,
        checkpoints=saved,
        resume=_resume_command(folder) if saved and record is None else "",
    )
    return _simulated(subject, args) if args.simulate and prediction else subject


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


def _read_failures(folder: RunFolder) -> list[Mapping[str, str]]:
    """Return the failed attempts of a run; without the launcher's, the exceptions of its ranks."""
    if rows := logged_rows(folder.failures):
        return rows
    failures = []
    for file in sorted(folder.path.glob("logs/rank*.error.json")):
        message = json.loads(file.read_text(encoding="utf-8"))["message"]
        text = message["message"] if isinstance(message, dict) else message
        rank = file.name.partition(".")[0].removeprefix("rank")
        failures.append({"time": "unknown time", "error": f"rank {rank} raised {text}"})
    return failures[:1]


def _is_locked(folder: RunFolder) -> bool:
    """Return True if a training uses the folder."""
    try:
        require_free(folder.path)
    except SpecError:
        return True
    return False


def _resume_command(folder: RunFolder) -> str:
    """Return the command that continues a run."""
    path = display_path(folder.path)
    return shlex.join(["ptrain", "train", display_path(folder.resolved), "--resume", path])


def _simulated(subject: Subject, args: Namespace) -> Subject:
    """Return the subject with the simulated memory of the rank with the highest peak."""
    from ptrain.installed import require_torch

    require_torch()
    from ptrain.simulation.choice import choose_ranks
    from ptrain.simulation.execute import simulate

    assert subject.prediction is not None, "the caller checks that there is a prediction"
    spec = subject.prediction.spec
    rank = choose_ranks(spec, subject.prediction.derivation.exact)[-1]
    result = simulate(spec, rank, allow_import=args.allow_import)
    return replace(subject, simulated=result.estimate, course=result.memory_history)
