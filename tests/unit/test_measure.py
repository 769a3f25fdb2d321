"""The meter measures one step of a model, merges the ranks' accounts, and keeps every rank's
traffic."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from ptrain.cost import Collective, Column, Estimate, Phase, State, Traffic, TrafficKey
from ptrain.errors import PtrainError
from ptrain.meters.measure import join_estimates, measure
from ptrain.report.record import compare_estimates

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
    return [
        each.name
        for each in compare_estimates(exact, join_estimates([*estimates]))
        if not each.holds
    ]


def test_equal_accounts_are_one_row_and_hold():
    assert join_estimates([OWN, OWN]).traffic == (ROW,)
    assert not failing(OWN, OWN)


def test_a_rank_that_sent_less_is_noticed_in_any_order():
    less = replace(OWN, traffic=(replace(ROW, sent_bytes=31),))
    name = ["traffic dp_shard all_gather forward parameters sent"]
    assert failing(OWN, less) == failing(less, OWN) == name


def test_a_rank_that_sent_nothing_is_noticed():
    assert len(failing(OWN, replace(OWN, traffic=()))) == 3


def test_a_call_of_one_rank_without_a_prediction_is_reported():
    other = replace(ROW, key=replace(KEY, phase=Phase.UPDATE), sent_bytes=0)
    assert len(failing(OWN, replace(OWN, traffic=(ROW, other)))) == 3


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _linear() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("model", ["zero3", None, nn.Linear])
def test_an_invalid_model_is_rejected_at_once(model):
    with pytest.raises(TypeError, match=r"measure takes a Program or an nn\.Module; got"):
        measure(model)


def test_a_second_step_inside_is_rejected():
    model, optimizer = _linear()
    with (
        pytest.raises(PtrainError, match="the optimizer starts a second step"),
        measure(model, optimizer=optimizer),
    ):
        _step(model, optimizer)
        _step(model, optimizer)
    for _ in range(2):  # nothing is left behind
        with measure(model, optimizer=optimizer) as measurement:
            _step(model, optimizer)
    sizes = {row.state: row.device_bytes for row in measurement.estimate().memory}
    assert sizes[State.OPTIMIZER] == 2 * 4 * (8 * 8 + 8) + 2 * 4


def test_accumulated_micro_batches_are_one_step():
    model, optimizer = _linear()
    with measure(model, optimizer=optimizer):
        model(torch.ones(2, 8)).sum().backward()
        _step(model, optimizer)


def test_optimizer_state_without_its_optimizer_is_other():
    model, optimizer = _linear()
    with measure(model) as measurement:
        _step(model, optimizer)
    sizes = {row.state: row.device_bytes for row in measurement.estimate().memory}
    assert (sizes[State.OPTIMIZER], sizes[State.OTHER]) == (0, 2 * 4 * (8 * 8 + 8) + 2 * 4)
