"""Specs of the context axis and of its products with other axes: small models with an odd
vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ptrain.algebra.legality import require_runnable
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from tests.gloo.tensor_cases import MODELS, SIZES, training_keys

VARIANTS = ("ring", "zigzag", "all-gather", "ulysses")
HYBRID = "hybrid"  # of two Ulysses groups of two
ATTENTIONS = (*VARIANTS, HYBRID)
SAMPLES = ("dp_replicate", "dp_shard")


def context_spec(
    variant: str,
    model: str = "gqa",
    *,
    states: str = "R,R,R",
    degree: int | None = None,
    other: Mapping[str, str] | None = None,
    accumulate: int | None = None,
    shape: Mapping[str, Any] | None = None,
    own: Mapping[str, Any] | None = None,
    **sections: Any,
) -> Spec:
    """Return a spec of the context axis.

    `states` are the modes of Θ, Ω and G on cp. cp has as few ranks as the variant allows unless
    `degree` is given. `other` places the other axes, each of two ranks; `own` is a custom model.
    One of the models accumulates gradients by default."""
    accumulate = accumulate or (2 if model == "gqa" else 1)
    other = other or {}
    degree = degree or (4 if variant == HYBRID else 2)
    order = ("pp", *SAMPLES, "cp", "tp")
    axes = {**dict.fromkeys(other, 2), "cp": degree}
    slices = "S*" if variant == "all-gather" else "S"
    samples = accumulate * 2 ** sum(axis in SAMPLES for axis in other)
    mapping: dict[str, Any] = {
        "name": model,
        "model": own or {**SIZES, **MODELS[model], **(shape or {})},
        "mesh": {axis: axes[axis] for axis in order if axis in axes},
        "placement": {**other, "cp": f"{states},{slices}"},
        "context": {"attention": {"ulysses": 2, "ring": 2} if variant == HYBRID else variant},
        **training_keys(samples),
    }
    return require_runnable(load(mapping | sections))
