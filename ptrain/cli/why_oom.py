"""The command `ptrain why-oom RUN`: explain why a run ran out of memory.

It compares the record of the failure with the prediction, and finds changes that need less memory.
This module imports no torch, except for a model that must be traced.
"""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from math import inf
from pathlib import Path

from ptrain.charts.figures import logged_rows
from ptrain.cli.arguments import print_json
from ptrain.cli.predict import as_change, predict_spec
from ptrain.codec import decode, encode
from ptrain.errors import PtrainError, input_error
from ptrain.report.out_of_memory import (
    OutOfMemory,
    failure_headline,
    fragmentation_line,
    live_table,
    request_line,
)
from ptrain.report.predict import Prediction, advice_lines, answer_line
from ptrain.report.screen import command_line, next_line, print_screen
from ptrain.report.table import memory_text
from ptrain.selection.preflight import FitAdvice
from ptrain.train.folder import RunFolder, display_path, require_run


def run(args: Namespace) -> int:
    """Print the failure, the live bytes and the changes that fit; return 0."""
    folder = require_run(Path(args.run))
    failures = read_failures(folder)
    if not failures:
        raise input_error("RUN", *_explain_absence(folder))
    failure, prediction, reason = failures[0], None, ""
    try:
        prediction = predict_spec(
            str(folder.resolved), (), offer=True, allow_import=args.allow_import, is_quiet=args.json
        )
    except PtrainError as error:  # code that may not be imported, or an older version's spec
        reason = str(error)
    smaller = find_smaller(folder, failure, prediction) if prediction else None
    changes = smaller.advice.variants if smaller else ()
    if args.json:
        fitting = [as_change(variant) for variant in changes]
        record = {"run": str(folder.path), "failures": encode(failures), "changes": fitting}
        print_json(record | ({"reason": reason} if reason else {}))
        return 0
    more = ", ".join(str(other.rank) for other in failures[1:])
    print_screen(
        failure_headline(failure),
        *failure_lines(failure, prediction, smaller),
        *([f"Later, rank {more} ran out of memory, too."] if more else []),
        *([f"Not predicted: {reason}"] if reason else []),
        "",
        next_line(
            *train_commands(folder, smaller),
            shlex.join(["ptrain", "predict", display_path(folder.resolved)]),
        ),
    )
    return 0


def read_failures(folder: RunFolder) -> list[OutOfMemory]:
    """Return the records of the ranks that ran out of memory in the last attempt, first one first.

    Raises:
        SpecError: If a record is damaged.
    """
    failures = []
    for file in folder.memory_failures():
        try:
            failures.append(decode(json.loads(file.read_text(encoding="utf-8")), OutOfMemory))
        except (OSError, ValueError) as error:
            finding = f"{display_path(file)} is damaged: {error}"
            raise input_error("RUN", finding, "Remove this file.") from None
    return sorted(failures, key=lambda failure: failure.time)


def find_smaller(
    folder: RunFolder, failure: OutOfMemory, prediction: Prediction
) -> Prediction | None:
    """Return a prediction whose advice has changes that need less memory than the run.

    If the run was predicted to fit, its peak must fall by the size of the failed allocation. It
    must also be below the memory that the rank had, if its allocator counted it.

    Args:
        folder: The run folder.
        failure: The record of the failure.
        prediction: The prediction of the run, with advice if it does not fit.

    Returns:
        The prediction, None if the peak is unknown or smaller than the failed allocation.
    """
    fitting, limit = prediction.fit, inf
    if fitting.peak_bytes is None:
        return None
    if fitting.fits is not False:
        limit = fitting.peak_bytes - max(failure.requested_bytes or 0, 1)
    if failure.reserved_bytes is not None and failure.free_bytes is not None:
        limit = min(limit, failure.reserved_bytes + failure.free_bytes)
    if limit >= (fitting.usable_memory or inf):
        return prediction
    if limit <= 0:
        return None
    words = (f"cluster.device_memory={limit}", "cluster.reserve=0")
    return predict_spec(
        str(folder.resolved), words, offer=True, allow_import=prediction.allow_import, is_quiet=True
    )


def explain_failure(folder: RunFolder, prediction: Prediction | None) -> list[str]:
    """Return the explanation of a run that ran out of memory, its headline first.

    Args:
        folder: The run folder.
        prediction: The prediction of the run; None if it could not be predicted.

    Returns:
        The lines; [] for other runs.
    """
    if not (failures := read_failures(folder)):
        return []
    smaller = find_smaller(folder, failures[0], prediction) if prediction else None
    lines = [failure_headline(failures[0]), *failure_lines(failures[0], prediction, smaller)]
    commands = train_commands(folder, smaller)
    return [*lines, *(["", "Paste one of these commands:", *commands] if commands else [])]


def train_commands(folder: RunFolder, smaller: Prediction | None) -> list[str]:
    """Return a command for each change that fits, the fastest one first.

    Args:
        folder: The run folder.
        smaller: The prediction with the changes, from `find_smaller`.
    """
    return [
        command_line(
            "train",
            [display_path(folder.resolved), *variant.overrides],
            allow_import=smaller.allow_import,
        )
        for variant in (smaller.advice.variants if smaller else ())
        if smaller and variant.fit.fits
    ]


def failure_lines(
    failure: OutOfMemory, prediction: Prediction | None, smaller: Prediction | None
) -> list[str]:
    """Return the request, the prediction, the table of live bytes, and the changes that fit.

    Args:
        failure: The record of the failure.
        prediction: The prediction of the run; None if it could not be predicted.
        smaller: The prediction whose advice is offered, from `find_smaller`.
    """
    lines = [line for line in (request_line(failure), fragmentation_line(failure)) if line]
    if prediction is None:
        return lines
    lines += [f"Prediction: {answer_line(prediction)}", ""]
    lines.append(live_table(failure, prediction.derivation.exact))
    if smaller is None:
        return [*lines, "", "No change is known: the peak is unknown or below the request."]
    if smaller is not prediction:
        usable = memory_text(smaller.fit.usable_memory)
        lines += [
            "",
            f"These changes keep the predicted peak below {usable}: less than the memory that the",
            "rank had, if it is known, and than the predicted peak without the failed allocation.",
        ]
    advice: FitAdvice = smaller.advice
    return [*lines, *advice_lines(smaller)] if advice.variants else [*lines, "", "No change fits."]


def _explain_absence(folder: RunFolder) -> tuple[str, str]:
    """Return the finding and the remedy for a run without a record of a failed allocation."""
    name = display_path(folder.path)
    failed = [str(row.get("error", "")) for row in logged_rows(folder.failures)]
    report = f"Use `ptrain report {shlex.quote(name)}` to see how it ended."
    if failed and "SIGKILL" in failed[-1].partition("\n")[0]:
        finding = (
            f"{name} has no record: a rank was killed, perhaps by the kernel because the "
            "host's memory ran out"
        )
        return finding, report
    return f"{name} did not run out of memory", report
