"""The specs of the matrix: strategies x layouts x K x N, with tensors whose sizes N does not
divide."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest

from ptrain.algebra.legality import require_runnable
from ptrain.spec.load import load
from ptrain.spec.spec import Spec

MICRO, SEQUENCE = 2, 24
ODD: Mapping[str, Any] = {
    "preset": "llama-tiny",
    "layers": 2,
    "hidden": 42,
    "heads": 3,
    "kv_heads": 1,
    "ffn": 101,
    "vocab": 259,
}
EXTERNAL: Mapping[str, Any] = {"target": "tests.models_external:necks"}
TIED: Mapping[str, Any] = {
    "preset": "gpt-tiny",
    "layers": 2,
    "hidden": 42,
    "heads": 3,
    "ffn": 101,
    "vocab": 259,
}
MODELS = {"odd": ODD, "external": EXTERNAL, "tied": TIED}

STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "ddp": {"dp_replicate": "ddp"},
    "zero1": {"dp_shard": "zero1"},
    "zero2": {"dp_shard": "zero2"},
    "zero3": {"dp_shard": "zero3"},
    "zero3-keep": {"dp_shard": "zero3"},
    "hsdp": {"dp_replicate": "ddp", "dp_shard": "zero3"},
}
SMALL_BUCKET = "32 KiB"
KEEP = ("every", False, True)  # what sets zero3-keep apart: no resharding after forward
LAYOUTS = ("fp32", "zero16")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A spec of the matrix.

    `placement` maps axes to tuples or strategies. `sync` is the accumulation policy as (gradients,
    after forward, after backward), None for the default. `bucket` is the size of DDP's buckets, or
    of the groups of blocks that form one flat unit; None for one bucket. `via` names how
    reduce-scatters are executed, `unit` the wrap unit, `layers` the number of layers if it differs
    from the model's."""

    name: str
    placement: tuple[tuple[str, Any], ...]
    size: int
    layout: str = "fp32"
    accumulate: int = 1
    fp64: bool = False
    model: str = "odd"
    sync: tuple[str, bool, bool] | None = None
    bucket: str | None = None
    via: str = "native"
    unit: str | None = None
    layers: int | None = None

    def __str__(self) -> str:
        parts = [self.name, self.layout, f"K{self.accumulate}", f"N{self.size}"]
        parts += ["fp64"] * self.fp64 + [self.model] * (self.model != "odd")
        if self.sync and self.sync != KEEP:
            parts.append(f"sync-{self.sync[0]}-{self.sync[1]:d}{self.sync[2]:d}")
        parts += [self.bucket.replace(" ", "")] if self.bucket else []
        parts += [self.via] if self.via != "native" else []
        parts += [self.unit.replace(" ", "")] if self.unit else []
        return "-".join(parts)

    @property
    def mesh(self) -> dict[str, int]:
        """Return the mesh: all ranks on one axis, or 2 x the rest on two axes."""
        axes = [axis for axis, _ in self.placement]
        if len(axes) == 1:
            return {axes[0]: self.size}
        return {"dp_replicate": 2, "dp_shard": self.size // 2}

    def spec(self) -> Spec:
        mapping: dict[str, Any] = {
            "name": re.sub(r"[^\w.-]+", "-", self.name),
            "model": dict(MODELS[self.model]) | ({"layers": self.layers} if self.layers else {}),
            "mesh": self.mesh,
            "placement": {axis: _placement_value(tuple_) for axis, tuple_ in self.placement},
            "precision": {"layout": self.layout} | ({"compute": "fp64"} if self.fp64 else {}),
            "batch": {
                "global": MICRO * self.accumulate * self.size,
                "micro": MICRO,
                "sequence": SEQUENCE,
            },
            # the loss of every case falls within six steps
            "optimizer": {"name": "adamw", "lr": 3e-3, "schedule": {"warmup": 4}, "clip": 1.0},
            "data": {"corpus": "python-docs", "tokenizer": "bytes"},
            "train": {"steps": 20, "seed": 0},
        }
        if self.via != "native":
            mapping["reduce_scatter"] = self.via
        if self.bucket:
            mapping["bucket"] = self.bucket
        else:  # which has room for all units of a small model
            mapping["unit"] = self.unit or "block"
        if self.sync:
            gradients, after_forward, after_backward = self.sync
            mapping["sync"] = {
                "gradients": gradients,
                "reshard_after_forward": after_forward,
                "reshard_after_backward": after_backward,
            }
        return require_runnable(load(mapping))


def strategy_case(strategy: str, size: int, **settings: Any) -> Case:
    """Return the case of a named strategy."""
    placement = tuple(STRATEGIES[strategy].items())
    if strategy == "zero3-keep":
        settings["sync"] = KEEP
    return Case(name=strategy, placement=placement, size=size, **settings)


def _placement_value(placement: object) -> object:
    return dict(placement) if isinstance(placement, tuple) else placement


def matrix() -> Iterator[Case]:
    """Yield every strategy x layout x K x N for the odd model, then cases for the external model, a
    gpt with a tied head, true reduce-scatters, and DDP with several buckets."""
    for strategy, layout, accumulate, size in product(STRATEGIES, LAYOUTS, (1, 4), (2, 4)):
        if strategy != "hsdp" or size == 4:
            yield strategy_case(strategy, size, layout=layout, accumulate=accumulate)
    for strategy, layout, accumulate in product(STRATEGIES, LAYOUTS, (1, 4)):
        yield strategy_case(strategy, 4, layout=layout, accumulate=accumulate, model="external")
    for strategy, layout in product(STRATEGIES, LAYOUTS):
        yield strategy_case(strategy, 4, layout=layout, accumulate=4, model="tied")
    for strategy in ("zero1", "zero2", "zero3", "hsdp"):
        yield strategy_case(strategy, 4, accumulate=4, via="all_to_all")
    for layout, accumulate in product(LAYOUTS, (1, 4)):
        yield strategy_case("ddp", 2, layout=layout, accumulate=accumulate, bucket=SMALL_BUCKET)


# Every strategy on four ranks, two of them with accumulation on two; the external model once.
# These run in their own dtypes, where bytes are compared too.
DEFAULT = frozenset(
    [
        strategy_case("ddp", 4, layout="zero16", accumulate=1),
        strategy_case("zero1", 2, layout="zero16", accumulate=4),
        strategy_case("zero1", 4, layout="fp32", accumulate=1),
        strategy_case("zero2", 4, layout="zero16", accumulate=1),
        strategy_case("zero3", 2, layout="zero16", accumulate=4),
        strategy_case("zero3", 4, layout="fp32", accumulate=1),
        strategy_case("zero3-keep", 4, layout="fp32", accumulate=1),
        strategy_case("hsdp", 4, layout="zero16", accumulate=1),
        strategy_case("zero2", 4, layout="zero16", accumulate=1, model="external"),
    ]
)
# In fp64 every strategy with sums over ranks and micro-batches, and every model: without
# accumulation the rows of test_rows.py are each strategy in fp64.
DEFAULT_IN_FP64 = frozenset(
    [
        strategy_case("ddp", 2, layout="zero16", accumulate=4),
        strategy_case("ddp", 2, layout="fp32", accumulate=4, bucket=SMALL_BUCKET),
        strategy_case("zero1", 4, accumulate=4, via="all_to_all"),
        strategy_case("zero2", 4, layout="fp32", accumulate=4, model="tied"),
        strategy_case("zero2", 4, layout="zero16", accumulate=1, model="external"),
        strategy_case("zero3", 2, layout="zero16", accumulate=4),
        strategy_case("zero3-keep", 2, layout="fp32", accumulate=4),
        strategy_case("hsdp", 4, layout="fp32", accumulate=4),
    ]
)
assert set(matrix()) >= DEFAULT | DEFAULT_IN_FP64


def parameters(*, fp64: bool = False) -> list[Any]:
    """Return the matrix as pytest parameters; cases outside the default subset are nightly."""
    default = DEFAULT_IN_FP64 if fp64 else DEFAULT
    return [
        pytest.param(
            replace(case, fp64=fp64),
            id=str(case),
            marks=() if case in default else (pytest.mark.nightly,),
        )
        for case in matrix()
    ]


SYNC_POLICIES = {  # units moved per gathered unit and step: (all-gathers, reduce-scatters)
    ("every", True, True): lambda k: (2 * k, k),  # 3K
    ("last", True, True): lambda k: (2 * k, 1),  # 2K + 1
    ("last", True, False): lambda k: (k + 1, 1),  # K + 2
    ("last", False, True): lambda k: (k, 1),  # K + 1
    ("last", False, False): lambda k: (1, 1),  # 2
}
