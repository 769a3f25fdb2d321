"""The command `ptrain why-oom RUN`: where a run ran out of memory, and what makes it fit.

This module imports no torch.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from ptrain.cli.arguments import print_json
from ptrain.cli.predict import predict_spec
from ptrain.codec import decode, encode
from ptrain.errors import PtrainError, input_error
from ptrain.report.memory_failure import MemoryFailure, memory_failure_table
from ptrain.report.predict import Prediction, advice_lines, answer_line, next_commands
from ptrain.report.screen import command_line, next_line, print_screen
from ptrain.train.folder import RunFolder, display_path, require_run


def run(args: Namespace) -> int:
    """Print the answer; return 0."""
    folder = require_run(Path(args.run))
    failures = read_memory_failures(folder)
    if not failures:
        raise input_error(
            "RUN",
            f"{display_path(folder.path)} has no record of a rank that ran out of memory",
            f"Run `{command_line('report', [display_path(folder.path)])}` to see how it ended.",
        )
    worst, prediction, reason = failures[0], None, ""
    try:
        prediction = _predict(folder, worst, args)
    except PtrainError as error:  # code that may not be imported, or an older version's spec
        reason = f"not predicted: {error}"
    if args.json:
        changes = prediction.advice.variants if prediction else ()
        print_json(
            {
                "run": str(folder.path),
                "failures": [encode(failure) for failure in failures],
                "answer": worst.sentence(),
                "predicted": answer_line(prediction) if prediction else None,
                "changes": [variant.overrides for variant in changes if variant.fit.fits],
            }
        )
        return 0
    report = command_line("report", [display_path(folder.path)], allow_import=args.allow_import)
    others = ", ".join(str(failure.rank) for failure in failures[1:])
    print_screen(
        worst.sentence(),
        worst.error,
        *([f"rank {others} too"] if others else []),
        "",
        memory_failure_table(worst, prediction),
        *([reason] if reason else []),
        *_prediction_lines(prediction),
        *(["", next_line(report)] if prediction is None or prediction.fit.fits else []),
    )
    return 0


def read_memory_failures(folder: RunFolder) -> list[MemoryFailure]:
    """Return the records of ranks that ran out of memory, by rank.

    Raises:
        SpecError: A record is damaged.
    """
    failures = []
    for file in sorted(folder.path.glob("logs/rank*.memory.json")):
        try:
            failures.append(decode(json.loads(file.read_text(encoding="utf-8")), MemoryFailure))
        except (OSError, ValueError) as error:
            finding = f"is damaged: {error}"
            raise input_error(str(file), finding, "Train again to write a new record.") from None
    return sorted(failures, key=lambda failure: failure.rank)


def _predict(folder: RunFolder, failure: MemoryFailure, args: Namespace) -> Prediction:
    """Return the prediction for the device that ran out of memory, with changes that fit."""
    size = failure.device_memory
    words = (f"cluster.device_memory={size}",) if size is not None else ()
    return predict_spec(str(folder.resolved), words, offer=True, allow_import=args.allow_import)


def _prediction_lines(prediction: Prediction | None) -> list[str]:
    """Return the prediction, the changes with which the spec fits, and the next command."""
    if prediction is None:
        return []
    lines = ["", f"Prediction: {answer_line(prediction)}", *advice_lines(prediction)]
    if prediction.fit.fits:
        lines.append(
            "The prediction fits, so something else used memory: another process on the device, "
            "code outside the model, or fragments of the allocator (`ptrain predict --reserved`)."
        )
        return lines
    return [*lines, "", next_line(next_commands(prediction)[0])]
