"""The command `ptrain compare BASE HEAD`: compare two records, for example for a pull request.

This module does not import torch.
"""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from functools import partial
from pathlib import Path

from ptrain.cli.arguments import print_json
from ptrain.cli.predict import as_record as predicted_record
from ptrain.cli.predict import predict_spec
from ptrain.errors import VerdictFailed, input_error
from ptrain.report.comparison import (
    as_markdown,
    as_record,
    as_text,
    compare_records,
    find_violations,
    parse_limits,
)
from ptrain.report.recorded import RecordedTraining, read_trainings
from ptrain.report.screen import next_line, print_lines, print_screen
from ptrain.spec.load import split_arguments
from ptrain.spec.names import SPEC_FOLDERS, list_files
from ptrain.train.folder import RunFolder

_SPECS = (".yaml", ".yml")
_SIDES = "a run folder, a JSON file that a command printed, or a spec"


def run(args: Namespace) -> int:
    """Compare two sides; return 0, or 1 if a limit is exceeded."""
    sides, overrides = split_arguments(args.arguments)
    if len(sides) != 2:
        raise input_error(
            "ptrain compare",
            f"takes two records, BASE and HEAD; got {len(sides)}",
            f"Name two, each {_SIDES}.",
        )
    if args.markdown and args.json:
        raise input_error("--markdown", "cannot be combined with --json", "Remove one of them.")
    allowed = parse_limits(args.fail_on) if args.fail_on is not None else ()
    if overrides and all(_records_file(side) for side in sides):
        raise input_error(
            overrides[0],
            "overrides apply to specs, and neither BASE nor HEAD is a spec",
            "Remove it, or name a spec.",
        )
    read = partial(_read_side, words=tuple(overrides), allow_import=args.allow_import)
    comparison = compare_records(*map(read, sides), names=(sides[0], sides[1]))
    failures = find_violations(comparison, allowed) if allowed else []
    if args.json:
        print_json(as_record(comparison, failures))
    else:
        exceeding = ["", *(f"exceeded: {failure}" for failure in failures)] if failures else []
        if args.markdown:
            print_lines(as_markdown(comparison, shows_all=args.all), *exceeding)
        else:
            command = next_line(shlex.join([*args.typed, "--all"]), "ptrain compare --help")
            print_screen(as_text(comparison, shows_all=args.all), *exceeding, "", command)
    return VerdictFailed.exit_code if failures else 0


def _read_side(
    source: str, *, words: tuple[str, ...], allow_import: bool
) -> dict[str, RecordedTraining]:
    """Return the trainings of one side: read from its records, or predicted from a spec."""
    if (file := _records_file(source)) is not None:
        return read_trainings(_read_documents(file, source), source)
    prediction = predict_spec(source, words, allow_import=allow_import)
    return read_trainings([predicted_record(prediction)], source)


def _records_file(source: str) -> Path | None:
    """Return the file with the records of a side; None if the side is a spec.

    Raises:
        SpecError: If a folder is not a finished run, or a JSON file does not exist.
    """
    path = Path(source)
    if path.is_dir():
        summary = RunFolder(path).summary
        if summary.is_file():
            return summary
        if source not in list_files(*SPEC_FOLDERS):
            raise input_error(
                source,
                f"the folder has no {summary.name}, so it is not a finished run",
                f"Name {_SIDES}.",
            )
        return None
    if path.suffix == ".json" and not path.is_file():
        raise input_error(source, "no such file", f"Name {_SIDES}.")
    # A built-in spec's name wins over a file of the same name.
    is_spec = path.suffix in _SPECS or source in list_files(*SPEC_FOLDERS)
    # A pipe of the shell, `<(ptrain predict … --json)`, exists but is not a file.
    return path if path.exists() and not is_spec else None


def _read_documents(file: Path, place: str) -> list[object]:
    """Return the records of a file with one or more JSON documents; a list counts as its
    elements.
    """
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise input_error(place, f"cannot be read: {error}", f"Name {_SIDES}.") from None
    # raw_decode and not json.load: `--json` output of several commands may be in one file.
    decoder, documents = json.JSONDecoder(), []
    while text:
        try:
            document, end = decoder.raw_decode(text)
        except (ValueError, RecursionError) as error:
            raise input_error(
                place, f"is not JSON: {error}", "Name a file that a command printed with --json."
            ) from None
        documents += document if isinstance(document, list) else [document]
        text = text[end:].lstrip()
    return documents
