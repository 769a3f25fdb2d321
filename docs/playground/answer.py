"""Answer the playground's questions about a spec, in Python in the browser.

Figures and texts are those of `ptrain predict`, `ptrain plan` and `ptrain select`. Answers are
plain data, because they pass through JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ptrain.charts.memory import STATE_COLOURS
from ptrain.cli.plan import _make_sheets, as_text
from ptrain.cli.predict import as_record, predict_spec
from ptrain.cost import PLACED, State
from ptrain.errors import Fault, PtrainError, SpecError
from ptrain.report.predict import Prediction, prediction_screen
from ptrain.report.screen import fold_line, screen_width
from ptrain.report.selection import TOP, selection_text
from ptrain.selection.choose import select
from ptrain.spec.placement import CUT, Distribution, Tier
from ptrain.spec.spec import Spec, indices_in_groups
from ptrain.units import format_memory

_SPEC = "spec.yaml"
_MOST_RANKS = 16  # that are drawn
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


def answer(question: str, text: str, columns: int, watch: Watch) -> str:
    """Answer a question about a spec.

    Args:
        question: `predict` (with plan, memory and placement) or `select`.
        text: The YAML of the spec.
        columns: The width of the screen in letters.
        watch: Called with the numbers of derived and of wanted candidates.

    Returns:
        A JSON object; `faults` has the errors of the spec, each with its line.
    """
    os.environ["COLUMNS"] = str(columns)
    Path(_SPEC).write_text(text, encoding="utf-8")
    try:
        return json.dumps(_predict() if question == "predict" else _select(watch))
    except SpecError as error:
        faults = error.faults
    except PtrainError as error:
        faults = (Fault(place="", finding=str(error)),)
    return json.dumps({"faults": [_localize(fault)._asdict() for fault in faults]})


def _localize(fault: Fault) -> Fault:
    """Return a fault with a fix that the playground's user can apply."""
    finding, remedy = _HERE.get(fault.place, (fault.finding, fault.remedy))
    return fault._replace(finding=finding, remedy=remedy, place=fault.place.removeprefix("--"))


def _predict() -> dict[str, Any]:
    """Return all figures of the spec: its screens, the record, and the data of the pictures."""
    prediction = predict_spec(_SPEC, (), offer=True, allow_import=False, is_quiet=True)
    spec, derivation = prediction.spec, prediction.derivation
    screen = prediction_screen(prediction)
    return {
        "headline": screen.splitlines()[:2],
        "predict": _fold(screen),
        "plan": _fold(as_text(spec, derivation)),
        "sheets": [asdict(sheet) for sheet in _make_sheets(spec, derivation.plan)],
        "memory": _memory(prediction),
        "placement": {"axes": _axes(spec), "states": [*_states(spec)]},
        "record": as_record(prediction),
    }


def _select(watch: Watch) -> dict[str, Any]:
    """Return the ranking of all placements of the spec's model on its cluster."""
    ranking = select(_SPEC, _SEARCHED, watch=watch)
    return {"select": _fold(selection_text(ranking, TOP))}


def _fold(text: str) -> str:
    """Break sentences at the width of the screen, as the command line does."""
    width = screen_width()
    return "\n".join(part for line in text.splitlines() for part in fold_line(line, width))


def _memory(prediction: Prediction) -> dict[str, Any]:
    """Return the bars of the memory picture: the largest size of each state, and its limits."""
    exact, fit = prediction.derivation.exact, prediction.fit
    sizes = {state: exact.bytes_of(state) for state in PLACED}
    peak = fit.peak_bytes or 0
    sizes[State.TRANSIENT] = max(0, peak - sum(sizes.values()))
    return {
        "parts": [
            {
                "name": "temporary" if state is State.TRANSIENT else str(state),
                "bytes": size,
                "text": format_memory(size),
                "colour": STATE_COLOURS[state],
            }
            for state, size in sizes.items()
        ],
        "peak": peak,
        "peak_text": format_memory(peak) if peak else "unknown",
        "usable": fit.usable_memory,
        "usable_text": format_memory(fit.usable_memory) if fit.usable_memory else "unknown",
        "fits": fit.fits,
    }


def _axes(spec: Spec) -> list[dict[str, Any]]:
    """Return the axes of the mesh, each with its modes and with the place of the first ranks."""
    return [
        {
            "axis": str(factor.axis),
            "degree": factor.degree,
            "modes": {str(state): str(factor.placement[state]) for state in PLACED},
            "places": indices_in_groups(spec, (factor.axis,))[:_MOST_RANKS],
        }
        for factor in spec.factors
    ]


def _states(spec: Spec) -> Iterator[dict[str, Any]]:
    """Yield the part of each state that each rank keeps: its start and size, from 0 to 1.

    Activations are left out: ranks along data axes have those of different samples.
    """
    ranks = min(spec.world_size, _MOST_RANKS)
    for state in PLACED[:3]:
        modes = {factor.axis: factor.placement[state] for factor in spec.factors}
        parts = [[0.0, 1.0] for _ in range(ranks)]
        for factor in spec.factors:
            if modes[factor.axis].distribution in CUT:
                places = indices_in_groups(spec, (factor.axis,))
                for part, place in zip(parts, places, strict=False):
                    part[1] /= factor.degree
                    part[0] += part[1] * place
        kinds = {mode.distribution for mode in modes.values()}
        yield {
            "state": str(state),
            "colour": STATE_COLOURS[state],
            "parts": [] if Distribution.MATERIALIZED in kinds else parts,
            "is_gathered": bool(kinds & {Distribution.GATHERED, Distribution.MATERIALIZED}),
            "is_offloaded": any(mode.tier is not Tier.DEVICE for mode in modes.values()),
        }
