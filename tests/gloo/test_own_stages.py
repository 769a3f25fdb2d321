"""A pipeline by hand, whose ranks have parameters of their own, beside one device."""

from __future__ import annotations

import pytest

from tests.gloo import own_stages
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo


def test_two_stages_by_hand_hold(ranks: Ranks) -> None:
    told = ranks.run(2, own_stages.verify_on_rank)
    assert told[0]["holds"], told[0]["text"]


@pytest.mark.nightly
def test_a_factor_that_several_degrees_have_names_none_of_them(ranks: Ranks) -> None:
    told = ranks.run(2, own_stages.verify_on_rank, "unscaled")
    root_cause = told[0]["culprit"]
    assert (root_cause["factor"], root_cause["certainty"]) == ("× 2", "fits")
    assert root_cause["place"].startswith("embed.weight")
    assert root_cause["axis"] == ""
    assert "not divided by all ranks (2)" in root_cause["sentence"]
    assert "not divided by the micro-batches (2)" in root_cause["sentence"]


@pytest.mark.nightly
def test_half_of_a_gradient_that_is_sent_back_is_located_by_the_stage_that_gets_it(
    ranks: Ranks,
) -> None:
    told = ranks.run(2, own_stages.verify_on_rank, "gradient")
    root_cause = told[0]["culprit"]
    assert (root_cause["place"], root_cause["ranks"]) == ("blocks.0", [0])
    assert (root_cause["axis"], root_cause["certainty"]) == ("", "located by trying")
    assert "returns its reference output, but the gradient of that output" in root_cause["sentence"]
