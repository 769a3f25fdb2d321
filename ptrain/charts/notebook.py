"""The HTML of predictions in notebooks: the answer, a picture of memory, and the printed text."""

from __future__ import annotations

from ptrain.charts.memory import sweep_sheet
from ptrain.charts.svg import svg_text
from ptrain.derivation.estimate import Derivation
from ptrain.report.predict import answer_line, prediction_of, prediction_screen
from ptrain.report.sweep import SweepPoint
from ptrain.wording import answer_html, to_html


@to_html.register(Derivation)
def derivation_html(derivation: Derivation) -> str:
    """Return the HTML of a prediction."""
    prediction = prediction_of(derivation)
    point = SweepPoint(label=prediction.label, prediction=prediction)
    picture = f'<div style="overflow-x:auto">{svg_text(sweep_sheet([point]))}</div>'
    return answer_html(answer_line(prediction), prediction_screen(prediction), pictures=picture)
