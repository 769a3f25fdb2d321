"""`ptrain predict --timeline`: a step as a picture."""

from __future__ import annotations

from pathlib import Path

from ptrain.charts.canvas import painted, require_writable, write_whole
from ptrain.charts.step import step_sheet
from ptrain.derivation.estimate import Derivation, step_lanes
from ptrain.errors import refused
from ptrain.report.step_time import critical_path

_OPTION = "--timeline"


def require_drawable(path: Path) -> None:
    """Raises SpecError for a file that cannot be written, before anything is derived."""
    require_writable(path, _OPTION)


def draw_step(derivation: Derivation, path: Path) -> None:
    """Draw the lanes of a step. Raises SpecError where its time is not predicted."""
    step, spec = derivation.exact.step, derivation.spec
    if step is None:
        why = derivation.exact.undefined["step_seconds"]
        raise refused(_OPTION, f"no step time: {why}", "leave it out, or name such a cluster")
    sheet = step_sheet(spec.name, _note(derivation), step_lanes(derivation))
    write_whole(path, painted(sheet, require_writable(path, _OPTION)))


def _note(derivation: Derivation) -> str:
    step, spec = derivation.exact.step, derivation.spec
    assert step is not None
    number = spec.batch.accumulate
    is_short = derivation.plan.pipeline is None and number > 3
    alike = f"; of {number} micro-batches those between the first and the last once" * is_short
    return f"{critical_path(step)}{alike}"
