"""The ranks of a calibration on this machine, so many at once and then so many. Torch-free."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from ptrain.calibration.machine import MeasuredPart, busy_cores, gpus, read_part
from ptrain.calibration.options import CalibrationOptions, to_argv
from ptrain.calibration.write import base_of, conclude, require_writable
from ptrain.errors import refused
from ptrain.train import environment
from ptrain.train.folder import RunFolder
from ptrain.train.launch import launch

_BUSY = 0.15  # of the cores, by others
_PROCESSORS = (1, 2, 4)


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
    for number, seconds in zip(numbers, _shares(numbers, options.seconds), strict=True):
        part = folder / str(number) / "part.json"
        (part.parent / "logs").mkdir(mode=0o700, parents=True)
        code = launch(
            to_argv(replace(options, part=part, seconds=seconds, cluster=None)),
            num_ranks=number,
            folder=RunFolder(part.parent),
            module="ptrain.calibration",
        )
        if code:
            shutil.rmtree(folder)
            return code
        parts.append(read_part(part))
    shutil.rmtree(folder)
    return conclude(parts, options)


def _numbers(options: CalibrationOptions) -> tuple[int, ...]:
    """One rank for each GPU; of processors a few numbers."""
    number = gpus() if options.device != "cpu" else 0
    return (number,) if number else _PROCESSORS


def _shares(numbers: tuple[int, ...], seconds: float) -> list[float]:
    """Ranks that share cores need longer for the same."""
    weights = [max(1.0, number / environment.cores()) for number in numbers]
    return [seconds * weight / sum(weights) for weight in weights]


def _require_quiet() -> None:
    busy, cores = busy_cores(), environment.cores()
    if busy > _BUSY * cores:
        finding = f"{busy:.1f} of {cores} cores are busy with something else: nothing is measured"
        raise refused("calibrate", finding, "wait until the machine is quiet, or --force")
