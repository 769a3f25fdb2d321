"""The ranks of a calibration on this machine, so many at once and then so many. Torch-free."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from ptrain.calibration.options import CalibrationOptions, to_argv
from ptrain.calibration.write import MeasuredPart, base_of, busy_cores, conclude, require_writable
from ptrain.codec import decode
from ptrain.errors import refused
from ptrain.processor import cores, gpus
from ptrain.train.folder import RunFolder
from ptrain.train.launch import launch

_BUSY = 0.15  # of the cores, by others
_SENDING = 1.5  # times as long as one rank
_PROCESSORS = (1, 2, 4)
_ENDING = 2.0  # seconds in which ranks write, leave and are seen to have left


def calibrate(options: CalibrationOptions) -> int:
    """Measure, print and write; return the exit code. Raises SpecError for a file that cannot be
    used or a machine that is busy, RankFailed where a rank fails."""
    require_writable(options)
    base = base_of(options)
    if base is not None and options.device == "auto" and base.kind is not None:
        options = replace(options, device=base.kind)
    if not options.force:
        _require_quiet()
    folder = Path(tempfile.mkdtemp(prefix="ptrain-"))  # stays, with its logs, when a rank fails
    parts: list[MeasuredPart] = []
    numbers = options.ranks or _numbers(options)
    until = time.time() + options.seconds
    for place, number in enumerate(numbers):
        part = folder / str(number) / "part.json"
        (part.parent / "logs").mkdir(mode=0o700, parents=True)
        code = launch(
            to_argv(
                replace(options, part=part, until=_until(numbers[place:], until), cluster=None)
            ),
            num_ranks=number,
            folder=RunFolder(part.parent),
            module="ptrain.calibration",
        )
        if code:
            shutil.rmtree(folder)
            return code
        parts.append(decode(json.loads(part.read_text(encoding="utf-8")), MeasuredPart))
    shutil.rmtree(folder)
    return conclude(parts, options)


def _numbers(options: CalibrationOptions) -> tuple[int, ...]:
    """One rank for each GPU; of processors a few numbers."""
    number = gpus() if options.device != "cpu" else 0
    return (number,) if number else _PROCESSORS


def _until(numbers: tuple[int, ...], end: float) -> float:
    """When the first of the numbers of ranks that are left is to be done: one rank sends nothing,
    those that share cores need longer for the same, and every one needs time to start and to
    end."""
    weights = [max(1.0 if number == 1 else _SENDING, number / cores()) for number in numbers]
    now = time.time()
    return now + (end - now) * weights[0] / sum(weights) - _ENDING


def _require_quiet() -> None:
    busy, available = busy_cores(), cores()
    if busy > _BUSY * available:
        finding = (
            f"{busy:.1f} of {available} cores are busy with something else: nothing is measured"
        )
        raise refused("calibrate", finding, "wait until the machine is quiet, or --force")
