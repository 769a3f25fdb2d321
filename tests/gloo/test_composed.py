"""Composed models on every axis have the predicted memory and traffic, and train like one device in
fp64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.gloo.fidelity import COLUMNS, MODELS, run_cell
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

SIZES = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 260}
COMPOSED: Mapping[str, Mapping[str, Any]] = {
    "sandwich": {
        "norm": "rms-plus-one",
        "activation": "geglu",
        "post_norm": True,
        "qk_norm": True,
        "head_dim": 16,
        "embedding_scale": 32**0.5,
        "tied": True,
        "window": 5,
        "global_every": 3,
        "window_rope_base": 100.0,
        "attention_soft_cap": 3.0,
        "logit_soft_cap": 2.0,
    },
    "parallel": {
        "family": "gpt",
        "tied": False,
        "head_bias": True,
        "parallel": True,
        "positions": "rope",
        "rotary": 0.5,
        "window": 7,
    },
    "biases of qkv": {"bias": "qkv", "rope_scaling": "linear", "rope_factor": 4.0},
    "grouped gpt": {"family": "gpt", "activation": "relu2"},
    "no positions": {"norm": "layer-without-bias", "positions": "none", "qk_norm": True},
}
BY_DEFAULT = ("sandwich", "zero3")  # over tp it takes five times as long


@pytest.mark.parametrize(
    ("name", "column"),
    [
        pytest.param(
            name, column, marks=[] if (name, column) == BY_DEFAULT else pytest.mark.nightly
        )
        for name in COMPOSED
        for column in COLUMNS
    ],
)
def test_a_composed_model_is_exact_and_equals_one_device(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, name: str, column: str
) -> None:
    monkeypatch.setitem(MODELS, name, {"model": SIZES | dict(COMPOSED[name])})
    outcome = run_cell(ranks, name, column)
    assert not outcome.refusal and outcome.checks
    assert not outcome.failed
