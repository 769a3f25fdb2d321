"""The ranks' accounts as one: no rank's traffic is passed over."""

from __future__ import annotations

from dataclasses import replace

from ptrain.costs import Collective, Column, Estimate, Phase, State, Traffic, TrafficKey
from ptrain.meters.measure import join_estimates
from ptrain.report.record import compare

KEY = TrafficKey(
    axes=("dp_shard",),
    collective=Collective.ALL_GATHER,
    state=State.PARAMETERS,
    phase=Phase.FORWARD,
)
ROW = Traffic(key=KEY, calls=2, payload_bytes=64, sent_bytes=32)
OWN = Estimate(column=Column.MEASURED, world_size=2, traffic=(ROW,))


def failing(*estimates: Estimate) -> list[str]:
    exact = replace(OWN, column=Column.EXACT)
    return [each.name for each in compare(exact, join_estimates([*estimates])) if not each.holds]


def test_equal_accounts_are_one_row_and_hold():
    assert join_estimates([OWN, OWN]).traffic == (ROW,)
    assert not failing(OWN, OWN)


def test_a_rank_that_sent_less_is_noticed_in_any_order():
    less = replace(OWN, traffic=(replace(ROW, sent_bytes=31),))
    name = ["traffic dp_shard all_gather forward parameters sent"]
    assert failing(OWN, less) == failing(less, OWN) == name


def test_a_rank_that_sent_nothing_is_noticed():
    assert len(failing(OWN, replace(OWN, traffic=()))) == 3


def test_a_call_that_only_one_rank_made_and_nobody_predicted_is_noticed():
    other = replace(ROW, key=replace(KEY, phase=Phase.UPDATE), sent_bytes=0)
    assert len(failing(OWN, replace(OWN, traffic=(ROW, other)))) == 3
