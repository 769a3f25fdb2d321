"""Algorithm 1 of the paper: its thresholds, its three answers, and the cases without an answer."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ptrain.algebra.legality import require_runnable
from ptrain.errors import SpecError
from ptrain.plan.lower import built_in_facts
from ptrain.report.reasons import advice_lines, advice_record, parse_thresholds
from ptrain.selection.algorithm1 import (
    Advice,
    Requirements,
    Thresholds,
    algorithm1,
    requirements,
)
from ptrain.spec.load import load
from ptrain.spec.placement import Axis

GB = 10**9
SEVENTY_BILLION = Requirements(
    parameters=70 * GB,
    layer_parameters=855 * 10**6,
    device_memory=80 * GB,
    devices=8,
    devices_per_node=8,
    has_fast_links=True,
)


def advise(billions: float, devices: int, layer: float = 0.01, **changes: object) -> Advice:
    """Return the advice for a model and layer size in billions of parameters."""
    required = replace(
        SEVENTY_BILLION,
        parameters=round(billions * GB),
        layer_parameters=round(layer * GB),
        devices=devices,
        **changes,  # type: ignore[arg-type]
    )
    return algorithm1(required).advice


def test_70b_on_8_devices_of_80_gb_has_no_answer():
    answer = algorithm1(SEVENTY_BILLION)
    assert answer.advice is Advice.NONE and answer.degrees == () == answer.overrides
    text = "\n".join(advice_lines(answer))
    assert "line 2: 16P = 1043 GiB < 0.7 M_d = 52.15 GiB: no" in text
    assert "line 5: 16P/N = 130.4 GiB < 0.7 M_d = 52.15 GiB: no" in text
    assert "line 8: a layer = 1.593 GiB > 0.3 M_d = 22.35 GiB" in text
    assert "no answer: line 11" in text
    assert "130.4 GiB exceeds the device memory; more devices" in text
    close = "\n".join(advice_lines(algorithm1(replace(SEVENTY_BILLION, devices=16))))
    assert "65.19 GiB is less than the device memory; 9.313 GiB remain" in close


def test_states_below_seven_tenths_are_data_parallelism_and_at_it_no_more():
    assert advise(3.49, 8) is Advice.DATA_PARALLEL  # 55.84 of 56 GB
    assert advise(3.5, 8) is Advice.FULLY_SHARDED  # 56 is not below 56
    assert advise(3.5, 1) is Advice.NONE


def test_a_share_of_the_states_below_seven_tenths_is_zero_3_and_at_it_no_more():
    assert advise(27.9, 8) is Advice.FULLY_SHARDED
    assert advise(28, 8) is Advice.NONE
    assert advise(70, 20) is Advice.NONE and advise(70, 21) is Advice.FULLY_SHARDED


def test_tensor_parallelism_is_added_for_a_layer_above_three_tenths_on_fast_links_only():
    large = {"layer": 13.0}  # 26 GB of 24
    assert advise(70, 8, **large) is Advice.ADD_TENSOR
    assert advise(70, 8, layer=12.0) is Advice.NONE  # 24 is not above 24
    assert advise(70, 8, **large, has_fast_links=False) is Advice.NONE
    assert advise(70, 8, **large, devices_per_node=1) is Advice.NONE


def test_the_stages_between_and_pipelines_are_never_chosen():
    advices = {
        advise(billions, devices, layer)
        for billions in (0.1, 1, 7, 13, 70, 405)
        for devices in (1, 2, 8, 64, 512)
        for layer in (0.01, 1, 20)
    }
    assert advices == set(Advice)
    tuples = {
        str(placement)
        for layer in (0.01, 20)
        for billions in (1, 7, 70)
        for _, _, placement in algorithm1(
            replace(
                SEVENTY_BILLION,
                parameters=billions * GB,
                layer_parameters=round(layer * GB),
            )
        ).degrees
    }
    assert tuples == {"R,R,R,R", "S*,S,S,R", "S,S,S,R"}


def test_thresholds_are_arguments():
    assert algorithm1(SEVENTY_BILLION, Thresholds(states=1.0, layer=0.02)).advice is (
        Advice.ADD_TENSOR
    )
    answer = algorithm1(replace(SEVENTY_BILLION, devices=16), Thresholds(states=0.9))
    assert answer.advice is Advice.FULLY_SHARDED
    assert "16P/N = 65.19 GiB < 0.9 M_d = 67.06 GiB: yes" in "\n".join(advice_lines(answer))


def test_added_tp_states_the_nodes_and_the_rejected_share():
    answer = algorithm1(replace(SEVENTY_BILLION, devices=16), Thresholds(layer=0.02))
    assert [(axis, degree) for axis, degree, _ in answer.degrees] == [
        (Axis.DP_SHARD, 2),
        (Axis.TP, 8),
    ]
    assert "stays 65.19 GiB, which line 5 rejected" in "\n".join(advice_lines(answer))


@pytest.mark.parametrize(
    ("preset", "devices", "advice"),
    [
        ("llama3.2-1b", 8, Advice.DATA_PARALLEL),
        ("llama3-8b", 8, Advice.FULLY_SHARDED),
        ("llama-70e9", 8, Advice.NONE),
        ("llama-70e9", 64, Advice.FULLY_SHARDED),
    ],
)
def test_an_answer_for_a_preset_is_a_spec_that_is_legal(preset, devices, advice):
    cluster = ("cluster.preset=h100-64", f"model.preset={preset}", "batch.micro=1")
    base = load("70b-zero3", ["cluster.preset=h100-64", f"model.preset={preset}"]).spec
    assert base.cluster is not None
    answer = algorithm1(requirements(built_in_facts(base), base.cluster, devices))
    assert answer.advice is advice
    if answer.overrides:
        words = (*cluster, *answer.overrides, f"batch.global={devices}")
        assert require_runnable(load("70b-zero3", words)).world_size == devices


def test_a_layer_is_the_largest_block_and_a_laptop_is_not_fast():
    spec = load("zero3").spec
    assert spec.cluster is not None
    required = requirements(built_in_facts(spec), spec.cluster, 2)
    assert required.layer_parameters * 4 < required.parameters < 805_000
    assert not required.has_fast_links


@pytest.mark.parametrize("text", ["", "0.7", "0.7,0.3,0.1", "70,30", "a,b", "0,0.3", "nan,0.3"])
def test_thresholds_that_are_no_two_shares_are_rejected(text):
    with pytest.raises(SpecError, match="--thresholds"):
        parse_thresholds(text)


def test_thresholds_are_read_as_they_are_written():
    assert parse_thresholds("0.7,0.3") == Thresholds()
    assert parse_thresholds("0.85, 0.2") == Thresholds(states=0.85, layer=0.2)


def test_an_answer_is_plain_data_with_overrides_for_a_spec():
    none = json.loads(json.dumps(advice_record(algorithm1(SEVENTY_BILLION))))
    assert none["advice"] is None and none["overrides"] == []
    assert [condition["line"] for condition in none["conditions"]] == [2, 5, 8]
    assert not any(condition["is_true"] for condition in none["conditions"])
    sharded = advice_record(algorithm1(replace(SEVENTY_BILLION, devices=64)))
    assert sharded["advice"] == "ZeRO-3"
    assert sharded["overrides"] == ["mesh={dp_shard: 64}", "placement={dp_shard: [S*,S,S,R]}"]
