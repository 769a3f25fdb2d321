"""The tables of a loss in chunks equal traces of other shapes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from ptrain.cost import Estimate
from ptrain.derivation.estimate import derive
from ptrain.derivation.layers import is_tabulated
from ptrain.models.objective import can_fuse
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.traces import facts

STAGES, SLICES = "S,S,S,R", "S,S,S,S"
PLACES: dict[str, dict[str, str]] = {
    "one": {},
    "zero3": {"dp_shard": "S*,S,S,R"},
    "tp": {"tp": STAGES},
    "tp-sp": {"tp": SLICES},
    "tp-saved": {"tp": "S,S,S,S*"},
    "tp-gathered": {"tp": STAGES},
    "tp-sp-gathered": {"tp": SLICES},
    "pp-1f1b": {"pp": STAGES},
    "3d": {"pp": STAGES, "dp_shard": "S*,S,S,R", "tp": SLICES},
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "kv_heads": 2},
    "llama-tied": {"family": "llama", "tied": True},
    "gpt": {"family": "gpt"},
    "gpt-tied": {"family": "gpt", "tied": True, "dropout": 0.1},
}
LAYOUTS = {"full": {"layout": "fp32"}, "bf16": {"layout": "bf16"}}
TOKENS = 32
MORE = 99  # than there are

# (place, model, layout, samples, tokens of a chunk, more of the spec)
DEFAULT = (
    ("zero3", "llama", "full", 2, 7, {}),
    ("tp-sp", "gpt-tied", "full", 2, 4, {}),
    ("pp-1f1b", "llama-tied", "bf16", 1, 5, {}),
    ("zero3", "gpt", "bf16", 2, 6, {"loss": {"chunk": 6, "fused": True}}),
)
# One layer on each stage, whose input belongs to the schedule.
FEW_LAYERS = {"family": "llama", "layers": 2, "hidden": 24, "heads": 4, "ffn": 40, "vocab": 70}
KEPT = (
    {"model": FEW_LAYERS},
    {"activations": "M"},
    {"activations": {"0": "M", "1-": "O"}},
    {"attention": "eager", "activations": "M", "recompute": "attention"},
)


def spec_of(
    place: str, model: str, layout: str, samples: int, chunk: int, more: dict[str, Any]
) -> Spec:
    axes = PLACES[place]
    mapping: dict[str, Any] = {
        "model": {"layers": 4, "hidden": 24, "heads": 4, "kv_heads": 4, "ffn": 40, "vocab": 70}
        | MODELS[model],
        "mesh": dict.fromkeys(axes, 2),
        "placement": dict(axes),
        "precision": LAYOUTS[layout],
        "batch": {"accumulate": 2, "micro": samples, "sequence": TOKENS // samples},
        "loss": {"chunk": chunk},
        "tensor": {"loss_parallel": "gathered" not in place},
    }
    if "tp" not in axes:
        del mapping["tensor"]
    if "pp" in axes:
        mapping["pipeline"] = {"schedule": "1f1b"}
    return load(mapping | more).spec


def nightly() -> Iterator[Any]:
    for place, model, layout, samples in product(PLACES, MODELS, LAYOUTS, (1, 2)):
        for chunk in (1, 7, 8, 11, 20, MORE):
            yield place, model, layout, samples, chunk, {}
        for chunk in (1, 5, 8, 20, MORE) if "tp" not in PLACES[place] else ():
            yield place, model, layout, samples, chunk, {"loss": {"chunk": chunk, "fused": True}}
        for more in KEPT if "pp" not in PLACES[place] else KEPT[:-1]:
            yield place, model, layout, samples, 6, more


def cases() -> Iterator[Any]:
    yield from DEFAULT
    for case in nightly():
        yield pytest.param(*case, marks=pytest.mark.nightly)


@pytest.mark.parametrize(("place", "model", "layout", "samples", "chunk", "more"), list(cases()))
def test_a_loss_in_chunks_is_predicted_as_traced(
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    model: str,
    layout: str,
    samples: int,
    chunk: int,
    more: dict[str, Any],
) -> None:
    spec = spec_of(place, model, layout, samples, chunk, more)
    if spec.loss.fused and not can_fuse():
        pytest.skip(f"torch {torch.__version__} has no linear_cross_entropy")
    assert is_tabulated(spec)
    monkeypatch.setattr(facts, "is_tabulated", lambda _: False)
    traced = facts.read_facts(spec)
    assert figures(derive(spec).exact) == figures(derive(spec, traced).exact)


def figures(estimate: Estimate) -> tuple[object, ...]:
    return estimate.memory, estimate.peak, sorted(map(str, estimate.traffic))
