"""A calibration with few points on two ranks."""

from __future__ import annotations

import pytest

from ptrain.cost import Collective
from ptrain.facts.model import Operator
from ptrain.rates.measured import pace_of
from ptrain.spec.cluster import Hook, OperatorKind
from ptrain.spec.load import load
from ptrain.spec.precision import LAYOUTS, DType
from tests import jobs

pytestmark = pytest.mark.gloo


def test_two_ranks_measure_all_parts_of_a_training(tmp_path):
    out = tmp_path / "here.yaml"
    words = ["--ranks", "2", "--out", str(out), "--brief", "--force", "--device", "cpu"]
    code, job = jobs.run_job(["calibrate", *words], cwd=tmp_path, is_forked=True)
    assert code == 0, job.error
    assert "ranks at the same time: 2" in job.output
    mapping: dict[str, object] = {
        "model": {"preset": "llama-tiny"},
        "mesh": {"dp_replicate": 2},
        "placement": "ddp",
        "batch": {"micro": 1, "sequence": 8},
        "cluster": {"preset": str(out)},
    }
    cluster = load(mapping).spec.cluster
    pace = pace_of(cluster, 2)
    assert pace is not None and cluster is not None and cluster.rates is not None
    assert len(cluster.rates.lateness) == 2, "behind a little, and behind a layer's passes"
    assert 0 <= pace.late_seconds(1.0) < 1
    dimensions = {kind: (2**12,) for kind in OperatorKind if kind.is_of_bytes}
    dimensions[OperatorKind.PRODUCT] = (1, 32, 32, 32)
    dimensions[OperatorKind.ATTENTION] = (2, 2, 32, 32, 16)
    dimensions[OperatorKind.ATTENTION_BACKWARD] = (2, 2, 32, 32, 16)
    for kind, sizes in dimensions.items():
        assert 0 < pace.operator_seconds(Operator(kind, DType.FP32, sizes)) < 1, kind
    for hook in Hook:
        assert 0 < pace.hook_seconds(hook) < 1, hook
    for collective in (
        *(Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER),
        *(Collective.ALL_TO_ALL, Collective.BROADCAST, Collective.SEND),
    ):
        assert 0 < pace.collective_seconds(collective, ranks=2, nodes=1, payload=1000) < 1
    for copy in Collective:
        assert not copy.is_copy or 0 < pace.copy_seconds(copy, 1000) < 1
    for name in ("adamw", "sgd"):
        assert 0 < pace.update_seconds(name, LAYOUTS["fp32"], elements=1000, tensors=2) < 1
    assert 0 < pace.clip_seconds(LAYOUTS["fp32"], elements=1000, tensors=2) < 1
