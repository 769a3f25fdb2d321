"""A pipeline by hand, whose ranks have parameters of their own, beside one device."""

from __future__ import annotations

import pytest

from tests.gloo import own_stages
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo


def test_two_stages_by_hand_hold(ranks: Ranks) -> None:
    told = ranks.run(2, own_stages.told)
    assert told[0]["holds"], told[0]["text"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "factor", "place"),
    [("unscaled", "× 2", "embed.weight"), ("gradient", "× 0.5", "embed.weight, blocks.0")],
)
def test_a_factor_that_several_degrees_have_names_none_of_them(
    ranks: Ranks, fault: str, factor: str, place: str
) -> None:
    told = ranks.run(2, own_stages.told, fault)
    root_cause = told[0]["culprit"]
    assert (root_cause["factor"], root_cause["certainty"]) == (factor, "fits")
    assert root_cause["place"].startswith(place)
    assert root_cause["axis"] == ""
    assert "over ranks (2)" in root_cause["sentence"]
    assert "over micro-batches (2)" in root_cause["sentence"]
