"""Verification of the user's own models that drop out: nothing is dropped beside one device, and
what draws otherwise is refused by its name, not blamed on the ranks."""

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


def own(kind: str) -> dict[str, Any]:
    return {"target": "tests.models_sliced:dropping", "arguments": {"kind": kind}}


def over_data(model: dict[str, Any], **sections: Any) -> Spec:
    """Two data ranks of two micro-batches."""
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
        over_data(own("module")),
        nightly(context_spec("zigzag", own=own("module"))),
        nightly(context_spec("ring", own=own("flat"), other={"dp_shard": "zero3"})),
        nightly(over_data(own("channels"))),
        nightly(over_data({"target": "tests.models_foreign:dropping"}, mesh={"dp_shard": 2},
                          placement={"dp_shard": "zero3"})),
    ],
    ids=["ddp", "zigzag", "ring and zero3", "channels", "within attention"],
)  # fmt: skip
def test_what_torch_drops_is_switched_off_on_both_sides(ranks: Ranks, spec: Spec) -> None:
    result: Verification = ranks.run(spec.world_size, verify_spec, spec, REQUEST)[0]
    assert result.holds, [check for check in result.checks if not check.holds]
    assert NOTE in result.notes


@pytest.mark.parametrize("kind", ["itself", nightly("bound")])
def test_what_draws_by_itself_is_refused_by_its_name(ranks: Ranks, kind: str) -> None:
    words = "model.target: drop of tests.models_sliced:dropping draws random numbers by itself"
    with pytest.raises(RankError, match=words):
        ranks.run(2, verify_spec, over_data(own(kind)), REQUEST)
