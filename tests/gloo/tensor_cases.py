"""Specs of the tensor axis and of its products: small models with an odd vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from ptrain.algebra.legality import require_runnable
from ptrain.spec.load import load
from ptrain.spec.spec import Spec

MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"family": "llama", "heads": 4, "kv_heads": 4, "tied": False},
    "gqa": {"family": "llama", "heads": 8, "kv_heads": 4, "tied": True},
    "gpt": {"family": "gpt", "heads": 4, "tied": True},
    "gpt-untied": {"family": "gpt", "heads": 4, "tied": False},
}
SIZES = {"layers": 2, "hidden": 64, "ffn": 104, "vocab": 259}
ACTIVATIONS = ("R", "S", "S*")
DATA = ("ddp", "zero1", "zero2", "zero3")


def training_keys(samples: int) -> dict[str, Any]:
    """Return the keys that make a matrix spec train in fp64 with the given number of samples per
    step, in micro-batches of one."""
    return {
        "precision": {"layout": "fp32", "compute": "fp64"},
        "batch": {"global": samples, "micro": 1, "sequence": 16},
        "optimizer": {"name": "adamw", "lr": 3e-3, "schedule": {"warmup": 2}, "clip": 1.0},
        "data": {"corpus": "python-docs", "tokenizer": "bytes"},
        "train": {"steps": 20, "seed": 0},
    }


def tensor_spec(
    model: str = "llama",
    *,
    activations: str = "R",
    degree: int = 2,
    data: Mapping[str, Any] | None = None,
    degrees: Mapping[str, int] | None = None,
    accumulate: int = 2,
    shape: Mapping[str, Any] | None = None,
    own: Mapping[str, Any] | None = None,
    **sections: Any,
) -> Spec:
    """Return a spec of the tensor axis. `data` places the data axes, `degrees` gives their sizes
    (default 2); `own` is a custom model."""
    placement = {**(data or {}), "tp": f"S,S,S,{activations}"}
    mesh = {axis: (degrees or {}).get(axis, 2) for axis in data or {}} | {"tp": degree}
    samples = accumulate
    for axis in data or {}:
        samples *= mesh[axis]
    mapping: dict[str, Any] = {
        "name": model,
        "model": own or {**SIZES, **MODELS[model], **(shape or {})},
        "mesh": mesh,
        "placement": placement,
        **training_keys(samples),
    }
    return require_runnable(load(mapping | sections))


def factorizations(ranks: int) -> list[tuple[dict[str, int], dict[str, str]]]:
    """Yield (degrees, data placement) for every dp_replicate x dp_shard x tp = `ranks`, with
    ZeRO-1, 2 and 3 if states are sharded."""
    found = []
    for tp, shard in product(range(1, ranks + 1), repeat=2):
        if ranks % (tp * shard):
            continue
        degrees = {"dp_replicate": ranks // tp // shard, "dp_shard": shard, "tp": tp}
        for name in DATA[1:] if shard > 1 else DATA[:1]:
            placed = {"dp_replicate": "ddp", "dp_shard": name}
            data = {axis: tuple_ for axis, tuple_ in placed.items() if degrees[axis] > 1}
            found.append((degrees, data))
    return found
