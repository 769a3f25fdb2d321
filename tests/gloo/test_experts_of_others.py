"""Ranks with experts of their own, of models that are not built in: transformers' and a user's."""

from __future__ import annotations

from typing import Any

import pytest

from ptrain.algebra.legality import require
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from tests.gloo.expert_rank_runs import MATRIX
from tests.gloo.tensor_cases import training
from tests.ranks import Ranks

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("forked_traces")]

SIZES = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {
        "hf": "mixtral",
        "config": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2},
    },
}


def spec_of(model: str, placement: dict[str, str], **sections: Any) -> Spec:
    mesh = dict.fromkeys(placement, 2)
    samples = 2
    for axis in ("dp_replicate", "dp_shard", "ep"):
        samples *= mesh.get(axis, 1)
    mapping: dict[str, Any] = {
        "name": model,
        "model": MODELS[model],
        "mesh": mesh,
        "placement": placement,
        **training(samples),
    }
    return require(load(mapping | sections))


def test_one(ranks: Ranks) -> None:
    assert not MATRIX.differences(ranks, spec_of("mixtral", {"ep": "zero3"}))
