"""Expert-parallel models of transformers and of users compute the result of one device at exactly
the predicted cost."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from ptrain.algebra.legality import require_runnable
from ptrain.derivation.estimate import derive
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.traces.facts import facts_of
from tests.gloo.expert_rank_runs import MATRIX
from tests.gloo.matrix import run_spec
from tests.gloo.tensor_cases import training_keys
from tests.gloo.test_expert_parallel import REST
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

SIZES = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
}
QWEN = SIZES | {"num_experts": 6, "moe_intermediate_size": 20, "pad_token_id": 32}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"hf": "mixtral", "config": SIZES | {"num_local_experts": 4}},
    "qwen2_moe": {"hf": "qwen2_moe", "config": QWEN | {"shared_expert_intermediate_size": 12}},
    "qwen3_moe": {"hf": "qwen3_moe", "config": QWEN | {"head_dim": 8, "mlp_only_layers": [1]}},
    "own": {"target": "tests.models_routing:planned"},
    "own-loop": {"target": "tests.models_routing:planned", "arguments": {"by": "loop"}},
}
EXACT = [name for name in MODELS if name != "own-loop"]
BESIDE: tuple[dict[str, str], ...] = (
    {"dp_replicate": "ddp"},
    {"dp_shard": "zero2"},
    {"dp_shard": "zero3"},
)
# where it is first run whole, in fp64 by code of transformers that fakes have no values for
REHEARSED: tuple[dict[str, str], ...] = ({"pp": "S,S,S,R"}, {"cp": "S*,S,S,S"})
KEPT: tuple[dict[str, Any], ...] = (
    {"activations": "M"},
    {"activations": "M", "recompute": "selective"},
    {"activations": "O"},
    {"loss": {"chunk": 4}},
    {"precision": {"layout": "bf16"}},
    {"precision": {"layout": "fp32"}},
)
BY_DEFAULT = (("mixtral", "zero3", {}), ("own", "zero2", {}))


def expert_parallel_spec(model: str, placement: dict[str, str], **sections: Any) -> Spec:
    """Return a spec with two ranks along each axis."""
    samples = 4 if "pp" in placement else 2
    for axis in ("dp_replicate", "dp_shard", "ep"):
        samples *= 2 if axis in placement else 1
    mapping: dict[str, Any] = {
        "name": model,
        "model": MODELS[model],
        "mesh": dict.fromkeys(placement, 2),
        "placement": placement,
        **training_keys(samples),
    }
    if "hf" in MODELS[model]:
        pytest.importorskip("transformers")
    return require_runnable(load(mapping | sections))


CASES = [
    *((model, rest, {}) for model, rest in product(EXACT, REST)),
    *(("mixtral", rest, beside) for rest, beside in product(("zero2", "zero3"), BESIDE)),
    *((model, "zero3", BESIDE[2]) for model in EXACT[1:]),
]


@pytest.mark.parametrize(
    ("model", "rest", "beside"),
    [
        pytest.param(*case, marks=[] if case in BY_DEFAULT else pytest.mark.nightly)
        for case in CASES
    ],
    ids=str,
)
def test_user_experts_on_ranks_are_exact_and_equal_one_device(
    ranks: Ranks, model: str, rest: str, beside: dict[str, str]
) -> None:
    assert not MATRIX.differences(ranks, expert_parallel_spec(model, beside | {"ep": REST[rest]}))


@pytest.mark.nightly
@pytest.mark.parametrize("beside", REHEARSED, ids=str)
@pytest.mark.parametrize("model", ["mixtral", "qwen2_moe"])
def test_user_experts_with_pp_and_cp_are_exact_and_equal_one_device(
    ranks: Ranks, model: str, beside: dict[str, str]
) -> None:
    assert not run_spec(ranks, expert_parallel_spec(model, beside | {"ep": REST["zero2"]})).failed


@pytest.mark.nightly
@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("model", ["mixtral", "own"])
def test_user_experts_with_other_options_are_exact_and_equal_one_device(
    ranks: Ranks, model: str, kept: dict[str, Any]
) -> None:
    assert not MATRIX.differences(ranks, expert_parallel_spec(model, {"ep": REST["zero3"]}, **kept))


@pytest.mark.nightly
@pytest.mark.parametrize("rest", ["ddp", "zero3"])
def test_data_dependent_experts_have_an_unknown_peak_and_exact_other_figures(
    ranks: Ranks, rest: str
) -> None:
    spec = expert_parallel_spec("own-loop", {"ep": REST[rest]})
    exact = derive(spec, facts_of(spec)).exact
    assert {"activations", "peak"} <= set(exact.undefined)
    assert "the rows of other ranks have no known bound" in exact.undefined["peak"]
    result = run_spec(ranks, spec)
    assert not result.failed
    assert any(check.name.startswith("traffic ep all_to_all") for check in result.checks)
