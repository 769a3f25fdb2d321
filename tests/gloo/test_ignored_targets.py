"""Ignored targets in different numbers per rank: gradients equal those of one device, whose loss is
the mean over all counted targets, and bytes are exact."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from ptrain.spec.spec import Spec
from tests.gloo import context_cases, pipeline_cases, tensor_cases
from tests.gloo.context_runs import MATRIX
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

nightly = partial(pytest.param, marks=pytest.mark.nightly)

# Bytes that are frequent in text: between a third and a half of the targets, sample by sample.
IGNORED = tuple(b" etaoin")
DATA = {"data": {"ignored": [*IGNORED]}}

PADDED = {"batch": {"global": 4, "micro": 1, "sequence": 13, "pad": True}}

CONTEXT: tuple[dict[str, Any], ...] = (
    {"other": {"dp_replicate": "ddp"}},
    {"other": {"dp_shard": "zero3"}, "states": "S*,S,S"},
    {"other": {"tp": "S,S,S,S"}},
    {"other": {"pp": "S,S,S,R"}, "accumulate": 4, "shape": {"layers": 4}},
    {"loss": {"chunk": 4}},
    {"loss": "fused"},
    {"activations": "M"},
)


def ignoring_spec(spec: Spec) -> Spec:
    return replace(spec, data=replace(spec.data, ignored=IGNORED))


@pytest.mark.parametrize("variant", ["zigzag", nightly("all-gather"), nightly("ulysses")])
def test_ignored_targets_over_cp_equal_one_device(ranks: Ranks, variant: str) -> None:
    assert not MATRIX.differences(ranks, context_cases.context_spec(variant, **DATA))


@pytest.mark.parametrize("case", [nightly(case, id=str(case)) for case in CONTEXT])
def test_ignored_targets_over_cp_with_other_axes_equal_one_device(
    ranks: Ranks, case: dict[str, Any]
) -> None:
    assert not MATRIX.differences(ranks, context_cases.context_spec("zigzag", **case, **DATA))


@pytest.mark.nightly
@pytest.mark.parametrize("data", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("loss", ["cross-entropy", {"chunk": 4}])
def test_ignored_targets_over_data_ranks_and_tp_equal_one_device(
    ranks: Ranks, data: str, loss: Any
) -> None:
    placed = {"dp_shard": data}
    spec = tensor_cases.tensor_spec(data=placed, activations="S", loss=loss)
    assert not MATRIX.differences(ranks, ignoring_spec(spec))


@pytest.mark.nightly
@pytest.mark.parametrize("data", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("loss", ["cross-entropy", {"chunk": 4}, "fused"])
def test_ignored_targets_over_data_ranks_equal_one_device(
    ranks: Ranks, data: str, loss: Any
) -> None:
    axis = "dp_replicate" if data == "ddp" else "dp_shard"
    spec = tensor_cases.tensor_spec(data={axis: data}, degree=1, loss=loss)
    assert not MATRIX.differences(ranks, ignoring_spec(spec))


@pytest.mark.parametrize("schedule", ["1f1b", *map(nightly, ("gpipe", "zero-bubble", "zbv"))])
def test_ignored_targets_over_pp_equal_one_device(ranks: Ranks, schedule: str) -> None:
    mesh = {"pp": 2, "dp_shard": 2}
    spec = pipeline_cases.pipeline_spec(schedule=schedule, mesh=mesh, data="zero2")
    assert not MATRIX.differences(ranks, ignoring_spec(spec))


@pytest.mark.parametrize(
    ("variant", "model"),
    [
        nightly("ring", "gpt"),
        ("zigzag", "gqa"),
        nightly("zigzag", "gpt"),
        nightly("all-gather", "gqa"),
        nightly("ulysses", "gpt"),
    ],
)
def test_padded_samples_equal_one_device(ranks: Ranks, variant: str, model: str) -> None:
    spec = context_cases.context_spec(variant, model, **PADDED)
    assert spec.batch.padding in (1, 3)
    assert not MATRIX.differences(ranks, spec)


@pytest.mark.nightly
@pytest.mark.parametrize("case", [CONTEXT[1], CONTEXT[2], CONTEXT[4]], ids=str)
def test_padded_samples_with_other_axes_equal_one_device(
    ranks: Ranks, case: dict[str, Any]
) -> None:
    spec = context_cases.context_spec("zigzag", **case, **PADDED, **DATA)
    assert not MATRIX.differences(ranks, spec)


@pytest.mark.nightly
def test_samples_padded_only_for_tp_equal_one_device(ranks: Ranks) -> None:
    spec = tensor_cases.tensor_spec("gqa", activations="S", **PADDED)
    assert spec.batch.padding == 1
    assert not MATRIX.differences(ranks, spec)
