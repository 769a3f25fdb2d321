"""Host time per operator in a step, for the models of `test_clock` with one operator per block and
pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ptrain.cost import Phase, Spent
from ptrain.derivation.estimate import derive
from ptrain.spec.activations import SELECTIVE, ActivationMode
from ptrain.spec.cluster import Hook
from ptrain.spec.load import load
from ptrain.spec.spec import ActivationSpec
from tests.pure.build import ZERO_2
from tests.pure.hand_made_paces import HandPace
from tests.pure.test_clock import (
    BEHIND,
    BLOCKS,
    COMPUTED,
    FORWARD,
    FRONT,
    spec,
    step_time,
    unit_seconds,
)


def test_host_time_is_added_on_cpus_and_overlapped_on_gpus():
    hooks = {Hook.FORWARD_OPERATOR: 3.0, Hook.BACKWARD_OPERATOR: 5.0}
    passes = BLOCKS + 2
    more = HandPace(overlaps=False, hooks=hooks)
    without = step_time(spec(), replace(more, hooks={}))
    assert step_time(spec(), more).seconds - without.seconds == passes * (3 + 5)
    assert (
        step_time(spec(), replace(more, overlaps=True)).seconds
        == step_time(spec(), HandPace()).seconds
    )


def test_recomputed_layers_take_more_host_time():
    hooks = {Hook.FORWARD_OPERATOR: 3.0, Hook.BACKWARD_OPERATOR: 5.0, Hook.SELECTED_OPERATOR: 11.0}
    pace = HandPace(overlaps=False, hooks=hooks)
    selected = spec(activations=ActivationSpec(default=ActivationMode(policy=SELECTIVE)))
    ends = 2 * (3 + 5)
    assert step_time(selected, pace).seconds == COMPUTED + BLOCKS * 2 * 11 + ends


def test_a_device_waits_for_its_host_where_that_takes_longer_for_the_whole_step():
    """Forward is issued in 6 x 20 s and computed in 48; backward in 6 x 5, and computed in 96."""
    hooks = {Hook.FORWARD_OPERATOR: 20.0, Hook.BACKWARD_OPERATOR: 5.0}
    time = step_time(spec(), HandPace(hooks=hooks))
    passes = BLOCKS + 2
    assert time.seconds == pytest.approx(passes * 25)
    forward = BLOCKS * FORWARD + FRONT[0] + BEHIND[0]
    assert time.of_phase(Phase.FORWARD) == pytest.approx(forward + passes * 25 - COMPUTED)
    assert time.seconds_in(Spent.COMPUTE) == COMPUTED
    (row,) = [
        row
        for row in time.rows
        if row.key.spent is Spent.LAUNCHES and row.key.phase is Phase.FORWARD
    ]
    assert row.moving == passes * 20


@pytest.mark.parametrize("number", [1, 2, 5])
def test_the_host_lags_equally_in_each_micro_batch(number):
    hooks = {Hook.FORWARD_OPERATOR: 30.0, Hook.BACKWARD_OPERATOR: 5.0}
    time = step_time(spec(accumulate=number), HandPace(hooks=hooks))
    assert time.seconds == pytest.approx(number * (BLOCKS + 2) * 35)


def test_the_host_issues_further_work_while_the_device_waits_for_others():
    """Exposed traffic exceeds the host's extra time."""
    network = unit_seconds(1000)
    hooks = {Hook.FORWARD_OPERATOR: 30.0, Hook.BACKWARD_OPERATOR: 5.0}
    times = [
        step_time(spec(ZERO_2), replace(network, hooks=known)).seconds for known in ({}, hooks)
    ]
    assert times[0] == times[1] > (BLOCKS + 2) * 35


def test_gpu_rates_without_host_times_are_reported():
    words = ["mesh.dp_replicate=1", "model.preset=gpt2-124m", "batch={micro: 1, sequence: 64}"]
    rows = "[[forward_operator, 1.0e-4], [backward_operator, 1.0e-4]]"
    hooks = "cluster.rates={{preset: h100, hooks: {}}}"
    silent, telling = (
        derive(load("ddp", [*words, "cluster.preset=h100-8", hooks.format(own)]).spec).exact.step
        for own in ("[]", rows)
    )
    assert silent is not None and telling is not None
    assert "host never limits" in silent.assumed[0] and not telling.assumed
    assert silent.seconds_in(Spent.LAUNCHES) == 0
    issuing = sum(row.moving for row in telling.rows if row.key.spent is Spent.LAUNCHES)
    assert telling.seconds == pytest.approx(issuing)
    assert telling.seconds > silent.seconds


def test_small_layers_are_bound_by_the_host_by_the_rates_of_data_sheets():
    """A step of 8 A100 with layers of 1024 features took 124.7 ms, of which the device works 50."""
    words = [
        "model={family: gpt, layers: 12, hidden: 1024, heads: 16, ffn: 4096, vocab: 51200}",
        "mesh.tp=8", "batch={global: 2, micro: 1, sequence: 1024}", "activations=M",
        "precision.layout=zero16", "cluster.preset=a100-8",
    ]  # fmt: skip
    time = derive(load("tp", words).spec).exact.step
    assert time is not None
    assert time.seconds_in(Spent.LAUNCHES) > time.seconds_in(Spent.COMPUTE)
    assert 0.09 < time.seconds < 0.15


def test_a_large_step_is_not_bound_by_the_host():
    time = derive(load("8b-zero3").spec).exact.step
    assert time is not None and time.seconds_in(Spent.LAUNCHES) == 0
