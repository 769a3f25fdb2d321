"""Specs of the pipeline axis and of its products with all other axes: models of four or eight tiny
layers."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from ptrain.algebra.legality import require_runnable
from ptrain.spec.load import load
from ptrain.spec.pipeline import ScheduleName
from ptrain.spec.spec import Spec

MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"family": "llama", "heads": 4, "kv_heads": 4, "tied": False},
    "gqa": {"family": "llama", "heads": 4, "kv_heads": 2, "tied": False},
    "llama-tied": {"family": "llama", "heads": 4, "kv_heads": 2, "tied": True},
    "gpt": {"family": "gpt", "heads": 4, "tied": False},
    "gpt-tied": {"family": "gpt", "heads": 4, "tied": True},
}
SIZES = {"layers": 4, "hidden": 24, "ffn": 48, "vocab": 259}
SCHEDULES = tuple(map(str, ScheduleName))
VEES = ("zbv", "dualpipev")
STAGE, REPLICA = "S,S,S,R", "R,R,R,R"
DATA = ("zero1", "zero2", "zero3")


def pipeline_spec(
    model: str = "llama",
    schedule: str | list[str] = "1f1b",
    *,
    mesh: Mapping[str, int],
    data: str = "zero3",
    activations: str = "R",
    pipeline: Mapping[str, Any] | None = None,
    shape: Mapping[str, Any] | None = None,
    batch: Mapping[str, int] | None = None,
    own: Mapping[str, Any] | None = None,
    **sections: Any,
) -> Spec:
    """Return a spec of the pipeline axis.

    `mesh` keeps its order of axes. `data` places dp_shard, `activations` applies to tp; `own` is a
    custom model."""
    placement = {"pp": STAGE, "dp_replicate": REPLICA, "dp_shard": data}
    placement["tp"] = f"S,S,S,{activations}"
    mapping: dict[str, Any] = {
        "name": f"{model}-{schedule if isinstance(schedule, str) else 'listed'}",
        "model": own or {**SIZES, **MODELS[model], **(shape or {})},
        "mesh": dict(mesh),
        "placement": {axis: placement[axis] for axis in mesh},
        "pipeline": {"schedule": schedule, **(pipeline or {})},
        "precision": {"layout": "fp32", "compute": "fp64"},
        "batch": {"accumulate": 4, "micro": 1, "sequence": 16, **(batch or {})},
        "optimizer": {"name": "adamw", "lr": 3e-3, "schedule": {"warmup": 2}, "clip": 1.0},
        "data": {"corpus": "python-docs", "tokenizer": "bytes"},
        "train": {"steps": 20, "seed": 0},
    }
    return require_runnable(load(mapping | sections))


def layer_count(ranks: int, schedule: str) -> int:
    """Return four layers, or one per stage if there are more stages."""
    return max(4, ranks * (1 if schedule in ("naive", "gpipe", "1f1b", "zero-bubble") else 2))


def factorizations(ranks: int) -> list[tuple[dict[str, int], str, str]]:
    """Yield (mesh, tuple of dp_shard, activations of tp) for every pp x dp_replicate x dp_shard x
    tp = `ranks` with pp >= 2: with ZeRO-1, 2 and 3 if states are sharded, and with token slices if
    operators are sharded."""
    found = []
    for pp, shard, tp in product(range(1, ranks + 1), repeat=3):
        if pp == 1 or ranks % (pp * shard * tp):
            continue
        degrees = {"pp": pp, "dp_replicate": ranks // pp // shard // tp, "dp_shard": shard}
        mesh = {axis: degree for axis, degree in (degrees | {"tp": tp}).items() if degree > 1}
        for data in DATA if shard > 1 else DATA[-1:]:
            found += [(mesh, data, activations) for activations in ("RS" if tp > 1 else "R")]
    return found
