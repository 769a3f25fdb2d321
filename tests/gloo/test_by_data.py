"""Models whose tensor sizes depend on data, on ranks: measurements lie within the predicted bounds,
other figures are exact, and experts without tokens on a rank have the gradients of the
single-device reference."""

from __future__ import annotations

from typing import Any

import pytest

from ptrain.algebra.legality import require_runnable
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from tests.gloo.fidelity import EXPERTS, GROUPED
from tests.gloo.matrix import run_spec
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

QWEN3 = GROUPED | {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8,
}  # fmt: skip
QWEN2 = GROUPED | {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}  # fmt: skip
BY_EXPERT = {"experts_implementation": "eager"}
MODELS: dict[str, dict[str, Any]] = {
    "experts in a list": {"target": "tests.models_routing:moe"},
    "a mask that indexes": {"target": "tests.models_routing:moe", "arguments": {"by": "mask"}},
    "mixtral": {"hf": "mixtral", "config": EXPERTS | BY_EXPERT},
    "qwen3_moe": {"hf": "qwen3_moe", "config": QWEN3 | BY_EXPERT},
    "qwen2_moe": {"hf": "qwen2_moe", "config": QWEN2 | BY_EXPERT},
}
COLUMNS: dict[str, dict[str, Any]] = {
    "ddp": {"mesh": {"dp_replicate": 2}, "placement": "ddp"},
    "zero2": {"mesh": {"dp_shard": 2}, "placement": "zero2"},
    "zero3": {"mesh": {"dp_shard": 2}, "placement": "zero3"},
}
BY_DEFAULT = ("experts in a list", "zero3")


def data_dependent_spec(model: dict[str, Any], column: str, **precision: str) -> Spec:
    written = {
        "name": f"by-data-{column}",
        "model": model,
        "batch": {"global": 8, "micro": 2, "sequence": 16},
        "precision": {"layout": "fp32"} | precision,
        "optimizer": {"name": "adamw", "lr": 1e-2, "clip": 1.0},
        **COLUMNS[column],
    }
    return require_runnable(load(written))


@pytest.mark.parametrize(
    ("name", "column"),
    [
        pytest.param(
            name, column, marks=[] if (name, column) == BY_DEFAULT else pytest.mark.nightly
        )
        for name in MODELS
        for column in COLUMNS
    ],
)
def test_data_dependent_sizes_lie_within_bounds_and_training_equals_one_device(
    ranks: Ranks, name: str, column: str
) -> None:
    if "hf" in MODELS[name]:
        pytest.importorskip("transformers")
    result = run_spec(ranks, data_dependent_spec(MODELS[name], column, compute="fp64"))
    assert not result.failed
    bounds = {check.name.rpartition(" rank")[0] for check in result.checks if check.lower}
    assert bounds == {"memory activations", "peak forward", "peak backward"}


@pytest.mark.nightly
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen2_moe"])
def test_grouped_products_are_exact(ranks: Ranks, name: str, column: str) -> None:
    """Return the figures of a spec without experts."""
    pytest.importorskip("transformers")
    config = {key: value for key, value in MODELS[name]["config"].items() if key not in BY_EXPERT}
    result = run_spec(ranks, data_dependent_spec({"hf": name, "config": config}, column))
    assert not result.failed
    of_experts = ("memory activations", "peak forward", "peak backward")
    checks = [check for check in result.checks if check.name.startswith(of_experts)]
    assert checks and not [check for check in checks if check.predicted != check.measured]
