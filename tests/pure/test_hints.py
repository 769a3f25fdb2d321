"""What a fault guesses at: only words that are near to what was written."""

from __future__ import annotations

import pytest

from ptrain.errors import SpecError
from ptrain.spec.load import load
from ptrain.spec.names import names


def message(*overrides: str, source: str = "") -> str:
    with pytest.raises(SpecError) as caught:
        load(source or names().default, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        "precision.layout=fp8",
        "precision.parameters=fp8",
        "nope=1",
        "model.preset=nosuch",
        "placement=nosuch",
        "unit=0 blocks",
        "bucket=12 apples",
    ],
)
def test_a_word_that_is_far_from_all_others_is_not_guessed_at(override):
    assert "did you mean" not in message(override)


def test_a_spec_far_from_all_others_is_not_guessed_at():
    assert "did you mean" not in message(source="nosuch")


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("precision.layout=zero61", "zero16"),
        ("optimizer.nmae=adamw", "name"),
        ("overlap=on", "backward"),
        ("overlap=off", "none"),
        ("unit=sub_block", "sub-block"),
    ],
)
def test_a_near_word_is_asked_for(override, meant):
    assert f"did you mean '{meant}'?" in message(override)
