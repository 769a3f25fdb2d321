"""A model that its function builds on the meta device trains on ranks like on one device."""

from __future__ import annotations

import pytest

from ptrain.spec.load import load
from ptrain.verification.options import VerifyOptions
from tests.gloo.verify_runs import verify_spec
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo


@pytest.mark.parametrize(
    ("kind", "placement"),
    [
        ("titan", "zero3"),
        pytest.param("nanochat", "zero1", marks=pytest.mark.nightly),
        pytest.param("plain", "ddp", marks=pytest.mark.nightly),
    ],
)
def test_it_trains_as_on_one_device(ranks: Ranks, kind: str, placement: str) -> None:
    model = f"model={{target: 'tests.models_on_meta:build', arguments: {{kind: {kind}}}}}"
    words = (model, "mesh={dp_shard: 2}", "batch={global: 4, micro: 1, sequence: 16}")
    if placement == "ddp":
        words = (words[0], "mesh={dp: 2}", words[2])
    spec = load(placement, words).spec
    for verification in ranks.run(2, verify_spec, spec, VerifyOptions(steps=3)):
        failed = [f"{check.name}: {check.why}" for check in verification.checks if not check.holds]
        assert verification.holds, failed
