"""A setting of a program's own optimizer is named once its update was repeated with one
device's."""

from __future__ import annotations

import pytest

from ptrain.report.finding import Certainty
from tests.faults.trials import tried
from tests.ranks import Ranks

pytestmark = [pytest.mark.gloo, pytest.mark.nightly]

PROVEN = {
    "weight decay missing on one rank": ("weight_decay 0 for 0.1", "weight_decay 0.1 for 0"),
    "other betas on one rank": (
        "betas (0.5, 0.9) for (0.9, 0.95)", "betas (0.9, 0.95) for (0.5, 0.9)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROVEN)
def test_a_setting_of_a_ranks_optimizer_is_proven_by_repeating_its_update(
    ranks: Ranks, name: str
) -> None:
    root_cause = tried(ranks, name).root_cause
    assert root_cause is not None
    factor, exchange = PROVEN[name]
    assert (root_cause.factor, root_cause.certainty) == (factor, Certainty.PROVEN)
    words = f"the update replayed with {exchange} matches the reference to "
    assert root_cause.tried.startswith(words)
