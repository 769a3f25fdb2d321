"""Answer the playground's questions about a spec, in Python in the browser.

Figures, texts and pictures are those of `ptrain predict`, `ptrain plan`, `ptrain select` and
`ptrain report`. Answers are plain data, because they pass through JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ptrain.charts.figures import mesh_sheet, plan_sheets
from ptrain.charts.memory import sweep_sheet
from ptrain.charts.sheet import NARROW, WIDE, Sheet
from ptrain.charts.svg import svg_text
from ptrain.cli.plan import as_text
from ptrain.cli.predict import as_record, predict_spec
from ptrain.errors import Fault, PtrainError, SpecError
from ptrain.report.predict import prediction_screen
from ptrain.report.screen import fold_line, screen_width
from ptrain.report.selection import TOP, selection_text
from ptrain.report.sweep import SweepPoint
from ptrain.selection.choose import select

_SPEC = "spec.yaml"
# `ptrain select spec.yaml …`: search everything that decides where bytes are
_SEARCHED = ("mesh=auto", "placement=auto", "batch.micro=auto")
Watch = Callable[[int, int], None]
# Faults whose fix is an option or an installation: the finding and the fix in the playground.
_HERE = {
    "torch": (
        "this spec is predicted from a trace of its model, which needs torch; a browser has none",
        "Run `ptrain predict` on the command line.",
    ),
    "--cluster": (
        "the cluster is missing, so device memory and links are unknown",
        "Add `cluster: {preset: h100-8}`.",
    ),
}


def answer(question: str, text: str, columns: int, width: float, watch: Watch) -> str:
    """Answer a question about a spec.

    Args:
        question: `predict` (with plan and pictures) or `select`.
        text: The YAML of the spec.
        columns: The width of the screen in letters.
        width: The width of the pictures in points (1/72 inch), as wide as the page.
        watch: Called with the numbers of derived and of wanted candidates.

    Returns:
        A JSON object; `faults` has the errors of the spec, each with its line.
    """
    os.environ["COLUMNS"] = str(columns)
    Path(_SPEC).write_text(text, encoding="utf-8")
    try:
        return json.dumps(_predict(width) if question == "predict" else _select(watch))
    except SpecError as error:
        faults = error.faults
    except PtrainError as error:
        faults = (Fault(place="", finding=str(error)),)
    return json.dumps({"faults": [_localize(fault)._asdict() for fault in faults]})


def _localize(fault: Fault) -> Fault:
    """Return a fault with a fix that the playground's user can apply."""
    finding, remedy = _HERE.get(fault.place, (fault.finding, fault.remedy))
    return fault._replace(finding=finding, remedy=remedy, place=fault.place.removeprefix("--"))


def _predict(width: float) -> dict[str, Any]:
    """Return all figures of the spec: its screens, the record, and the pictures as SVG."""
    prediction = predict_spec(_SPEC, (), offer=True, allow_import=False, is_quiet=True)
    derivation = prediction.derivation
    screen = prediction_screen(prediction)
    point = SweepPoint(label=prediction.label, prediction=prediction)
    width = min(max(width, NARROW), WIDE)
    return {
        "headline": screen.splitlines()[:2],
        "predict": _fold(screen),
        "plan": _fold(as_text(prediction.spec, derivation)),
        "pictures": {
            "memory": _draw_sheets([sweep_sheet([point], width)]),
            "placement": _draw_sheets([mesh_sheet(derivation, width)]),
            "sheets": _draw_sheets(plan_sheets(derivation.plan)),
        },
        "record": as_record(prediction),
    }


def _draw_sheets(sheets: Iterable[Sheet]) -> str:
    """Return sheets as elements of the page; names that users choose are escaped."""
    return "".join(svg_text(sheet, is_file=False) for sheet in sheets)


def _select(watch: Watch) -> dict[str, Any]:
    """Return the ranking of all placements of the spec's model on its cluster."""
    ranking = select(_SPEC, _SEARCHED, watch=watch)
    return {"select": _fold(selection_text(ranking, TOP))}


def _fold(text: str) -> str:
    """Break sentences at the width of the screen, as the command line does."""
    width = screen_width()
    return "\n".join(part for line in text.splitlines() for part in fold_line(line, width))
