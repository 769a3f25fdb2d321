"""Verification of user models with dropout: torch's dropout is switched off, and other random draws
are rejected by name."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from ptrain.algebra.legality import require_runnable
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.verification.options import VerifyOptions
from ptrain.verification.protocol import Verification
from ptrain.verification.references import NOTE
from tests.gloo.context_cases import context_spec
from tests.gloo.verify_runs import verify_spec
from tests.ranks import RankError, Ranks

pytestmark = pytest.mark.gloo

nightly = partial(pytest.param, marks=pytest.mark.nightly)

REQUEST = VerifyOptions(steps=3)


def user_spec(kind: str) -> dict[str, Any]:
    return {"target": "tests.models_sliced:dropping", "arguments": {"kind": kind}}


def data_parallel_spec(model: dict[str, Any], **sections: Any) -> Spec:
    """Return a spec of two data ranks with two micro-batches each."""
    mapping = {
        "model": model,
        "mesh": {"dp_replicate": 2},
        "placement": {"dp_replicate": "ddp"},
        "batch": {"global": 8, "micro": 2, "sequence": 16},
    }
    return require_runnable(load(mapping | sections))


@pytest.mark.parametrize(
    "spec",
    [
        data_parallel_spec(user_spec("module")),
        nightly(context_spec("zigzag", own=user_spec("module"))),
        nightly(context_spec("ring", own=user_spec("flat"), other={"dp_shard": "zero3"})),
        nightly(data_parallel_spec(user_spec("channels"))),
        nightly(data_parallel_spec({"target": "tests.models_from_outside:dropping"},
                                   mesh={"dp_shard": 2}, placement={"dp_shard": "zero3"})),
    ],
    ids=["ddp", "zigzag", "ring and zero3", "channels", "within attention"],
)  # fmt: skip
def test_torch_dropout_is_switched_off_on_both_sides(ranks: Ranks, spec: Spec) -> None:
    result: Verification = ranks.run(spec.world_size, verify_spec, spec, REQUEST)[0]
    assert result.holds, [check for check in result.checks if not check.holds]
    assert NOTE in result.notes


@pytest.mark.parametrize("kind", ["itself", nightly("bound")])
def test_other_random_draws_are_rejected_by_name(ranks: Ranks, kind: str) -> None:
    words = "model.target: drop of tests.models_sliced:dropping draws random numbers by itself"
    with pytest.raises(RankError, match=words):
        ranks.run(2, verify_spec, data_parallel_spec(user_spec(kind)), REQUEST)
