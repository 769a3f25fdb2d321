"""Operators cut over tp, alone and with every data placement, compute what one device computes, and
cost what is predicted to the byte."""

from __future__ import annotations

from typing import Any

import pytest

from ptrain.derivation.estimate import derive
from ptrain.meters.measure import join_estimates
from ptrain.report.record import compare
from ptrain.spec.spec import Spec
from ptrain.verification.compare import FP64
from ptrain.verification.compare import compare as compare_runs
from ptrain.verification.reference import Trajectory, one_device
from tests.gloo.runs import train
from tests.gloo.tensor_cases import ACTIVATIONS, DATA, MODELS, factorizations, spec_of
from tests.gloo.test_exact import failing
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

STEPS, MEASURED = 20, 3
_REFERENCES: dict[str, Trajectory] = {}


def reference(spec: Spec) -> Trajectory:
    """One device knows nothing of the mesh but the batches that the data axes read."""
    key = repr((spec.model, spec.batch, spec.data_degree, spec.optimizer, spec.precision))
    if key not in _REFERENCES:
        _REFERENCES[key] = one_device(spec, STEPS)
    return _REFERENCES[key]


def differences(ranks: Ranks, spec: Spec) -> list[str]:
    reports = ranks.run(spec.world_size, train, spec, STEPS, MEASURED)
    measured = join_estimates([each.measured for each in reports if each.measured])
    bytes_ = compare(derive(spec).exact, measured)
    run = reports[0].trajectory
    assert run is not None
    return [*failing(bytes_), *failing(compare_runs(reference(spec), run, FP64))]


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("model", MODELS)
def test_a_cut_model_is_exact_and_equals_one_device(
    ranks: Ranks, model: str, activations: str, degree: int
) -> None:
    assert not differences(ranks, spec_of(model, activations=activations, degree=degree))


@pytest.mark.parametrize("tensor", [{"plan": "naive"}, {"loss_parallel": False}], ids=str)
def test_other_plans_are_exact_and_equal_one_device(ranks: Ranks, tensor: dict[str, Any]) -> None:
    assert not differences(ranks, spec_of(tensor=tensor, shape={"vocab": 260}))


@pytest.mark.parametrize("activations", ["R", "S"])
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("model", ["llama", "gpt"])
def test_tp_within_data_ranks_is_exact_and_equals_one_device(
    ranks: Ranks, model: str, data: str, activations: str
) -> None:
    axis = "dp_replicate" if data == "ddp" else "dp_shard"
    assert not differences(ranks, spec_of(model, activations=activations, data={axis: data}))


@pytest.mark.nightly
@pytest.mark.parametrize("data", DATA[1:])
@pytest.mark.parametrize("degrees", factorizations(4), ids=str)
def test_every_factorization_of_four_ranks(
    ranks: Ranks, degrees: dict[str, int], data: str
) -> None:
    placed = {"dp_replicate": "ddp", "dp_shard": data}
    data_axes = {axis: tuple_ for axis, tuple_ in placed.items() if degrees[axis] > 1}
    spec = spec_of(data=data_axes, degrees=degrees, degree=degrees["tp"])
    assert not differences(ranks, spec)
