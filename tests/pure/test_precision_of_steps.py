"""The extra memory of a step by layout, equal to the figures that `ptrain simulate` counts for a
model of one block of 8 columns (recounted by `tests/unit/test_adversary.py`)."""

from __future__ import annotations

from typing import Any

import pytest

from ptrain.cost import Estimate, Phase, State
from ptrain.derivation.estimate import derive
from ptrain.spec.load import load

MODEL = {"layers": 1, "hidden": 8, "heads": 1, "ffn": 8, "vocab": 259}


def exact(axis: str, modes: str, precision: dict[str, str], **changes: Any) -> Estimate:
    spec = load(
        {
            "model": MODEL | changes,
            "mesh": {axis: 2} if axis else {},
            "placement": {axis: modes} if axis else {},
            "batch": {"sequence": 4},
            "precision": precision,
        }
    ).spec
    return derive(spec).exact


@pytest.mark.parametrize(
    ("axis", "modes", "size"),
    [
        ("", "", 74156),
        ("dp_replicate", "R,R,R,R", 81724),
        ("dp_shard", "S*,S,S,R", 52748),
        ("dp_shard", "R,S,S,R", 53976),
    ],
)
def test_backward_of_a_scaled_loss_begins_with_the_scale_and_allocates_no_seed(axis, modes, size):
    peaks = exact(axis, modes, {"layout": "fp16"}).peak
    assert max(row.device_bytes for row in peaks if row.phase is Phase.BACKWARD) == size


@pytest.mark.parametrize("precision", [{"parameters": "fp64"}, {"compute": "fp64"}])
@pytest.mark.parametrize(("family", "size"), [("llama", 304), ("gpt", 48)])
def test_buffers_and_the_loss_are_fp64_where_the_model_computes_in_it(precision, family, size):
    """5 tokens and targets of 8 bytes; cos and sin of 4 positions, 4 pairs; one scalar."""
    assert exact("", "", precision, family=family).bytes_of(State.OTHER) == size
