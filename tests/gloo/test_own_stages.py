"""A hand-written pipeline, whose ranks have different parameters, compared with one device."""

from __future__ import annotations

import pytest

from tests.gloo import own_stages
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo


def test_two_stages_by_hand_hold(ranks: Ranks) -> None:
    told = ranks.run(2, own_stages.verify_on_rank)
    assert told[0]["holds"], told[0]["text"]


@pytest.mark.nightly
def test_a_factor_that_matches_several_degrees_names_none(ranks: Ranks) -> None:
    told = ranks.run(2, own_stages.verify_on_rank, "unscaled")
    root_cause = told[0]["culprit"]
    assert (root_cause["factor"], root_cause["certainty"]) == ("× 2", "fits")
    assert root_cause["place"].startswith("embed.weight")
    assert root_cause["axis"] == ""
    assert "not divided by all ranks (2)" in root_cause["sentence"]
    assert "not divided by the micro-batches (2)" in root_cause["sentence"]


@pytest.mark.nightly
def test_a_halved_gradient_is_located_by_the_receiving_stage(
    ranks: Ranks,
) -> None:
    told = ranks.run(2, own_stages.verify_on_rank, "gradient")
    root_cause = told[0]["culprit"]
    assert (root_cause["place"], root_cause["ranks"]) == ("blocks.0", [0])
    assert (root_cause["axis"], root_cause["certainty"]) == ("", "located by trying")
    assert "returns its reference output, but the gradient of that output" in root_cause["sentence"]
