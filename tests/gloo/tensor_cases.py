"""Specs of the tensor axis and of its products: small, with an odd vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ptrain.algebra.legality import require
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


def spec_of(
    model: str = "llama",
    *,
    activations: str = "R",
    degree: int = 2,
    data: Mapping[str, Any] | None = None,
    degrees: Mapping[str, int] | None = None,
    accumulate: int = 2,
    shape: Mapping[str, Any] | None = None,
    **sections: Any,
) -> Spec:
    """`data` places the data axes, `degrees` are theirs (2 where nothing is said)."""
    placement = {**(data or {}), "tp": f"S,S,S,{activations}"}
    mesh = {axis: (degrees or {}).get(axis, 2) for axis in data or {}} | {"tp": degree}
    samples = accumulate
    for axis in data or {}:
        samples *= mesh[axis]
    mapping: dict[str, Any] = {
        "name": "tensor",
        "model": {**SIZES, **MODELS[model], **(shape or {})},
        "mesh": mesh,
        "placement": placement,
        "precision": {"layout": "fp32", "compute": "fp64"},
        "batch": {"global": samples, "micro": 1, "sequence": 16},
        "optimizer": {"name": "adamw", "lr": 3e-3, "schedule": {"warmup": 2}, "clip": 1.0},
        "data": {"corpus": "python-docs", "tokenizer": "bytes"},
        "train": {"steps": 20, "seed": 0},
    }
    return require(load(mapping | sections))


def factorizations(ranks: int) -> Iterator[dict[str, int]]:
    """dp_replicate x dp_shard x tp = `ranks`, tp above 1."""
    for tp in range(2, ranks + 1):
        if ranks % tp:
            continue
        for replicate in range(1, ranks // tp + 1):
            if (ranks // tp) % replicate == 0:
                yield {
                    "dp_replicate": replicate,
                    "dp_shard": ranks // tp // replicate,
                    "tp": tp,
                }
