"""Models from outside ptrain on every axis: a cell is exact and equals one device, or is rejected
with the message in the list of limitations."""

from __future__ import annotations

import pytest

from tests.gloo.fidelity import COLUMNS, DEBTS, MATRIX, MODELS
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo
# One for each way in which a model is foreign; the others run at night.
BY_DEFAULT = {("llama", "pp-1f1b")}


@pytest.mark.parametrize(
    ("model", "column"),
    [
        pytest.param(
            model, column, marks=[] if (model, column) in BY_DEFAULT else pytest.mark.nightly
        )
        for model in MODELS
        for column in COLUMNS
    ],
)
def test_an_outside_model_is_exact_and_equals_one_device_or_is_rejected(
    ranks: Ranks, model: str, column: str
) -> None:
    if "hf" in MODELS[model]["model"]:
        pytest.importorskip("transformers")
    cell = MATRIX.run(ranks, model, column)
    assert not cell.failed
    assert bool(cell.refusal) == ((model, column) in DEBTS), cell.refusal
    assert DEBTS.get((model, column), "") in " ".join(cell.refusal.split())
