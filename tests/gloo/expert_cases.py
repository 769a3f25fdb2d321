"""Specs of models with experts: small, with an odd vocabulary and odd numbers of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ptrain.algebra.legality import require_runnable
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from tests.gloo.tensor_cases import training_keys

SIZES = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 259}
LATENT = {
    "kv_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "top-1": {"experts": 4},
    "top-2": {"experts": 4, "experts_per_token": 2, "shared_experts": 1, "expert_ffn": 24},
    "capacity": {"experts": 3, "experts_per_token": 2, "capacity_factor": 1.0},
    "capacity-top-1": {"experts": 4, "capacity_factor": 1.25, "shared_experts": 2},
    "balanced": {"experts": 4, "experts_per_token": 2, "aux_loss": 0.5, "z_loss": 0.1},
    "deep": {
        "experts": 6,
        "experts_per_token": 2,
        "expert_groups": 3,
        "groups_per_token": 2,
        "bias_update_rate": 0.05,
        "shared_experts": 1,
        "expert_ffn": 20,
        "dense_layers": 1,
        "router": "sigmoid",
        "router_scale": 2.5,
        "qk_norm": True,
        "tied": True,
    },
    "latent": {
        "experts": 4,
        "experts_per_token": 2,
        "expert_ffn": 20,
        "capacity_factor": 1.25,
        "dense_layers": 1,
        "router": "sigmoid",
        "bias_update_rate": 0.05,
        **LATENT,
    },
}
SAMPLES = ("dp_replicate", "dp_shard", "ep")


def expert_spec(
    model: str,
    placement: Mapping[str, str] | None = None,
    *,
    degrees: Mapping[str, int] | None = None,
    accumulate: int = 2,
    shape: Mapping[str, Any] | None = None,
    **sections: Any,
) -> Spec:
    """Return a spec of a model with experts.

    `placement` places axes of two ranks each unless `degrees` is given. The model has two layers
    per stage, one of them dense if the family has dense layers."""
    placement = placement or {"dp_shard": "zero3"}
    order = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
    mesh = {axis: (degrees or {}).get(axis, 2) for axis in order if axis in placement}
    samples = accumulate
    for axis in SAMPLES:
        samples *= mesh.get(axis, 1)
    layers = {"layers": 4} if "pp" in placement else {}
    mapping: dict[str, Any] = {
        "name": model,
        "model": {**SIZES, **layers, **MODELS[model], **(shape or {})},
        "mesh": mesh,
        "placement": dict(placement),
        **training_keys(samples),
    }
    return require_runnable(load(mapping | sections))
