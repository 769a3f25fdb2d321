"""The rows of the data axis and the options varied around each: layouts, dials, K and N.

A setting is one legal spec. A row's settings cover every legal pair of values. They are drawn
greedily with a seed derived from the row's name, so a row has the same settings in every run."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

from ptrain.algebra.legality import require_runnable
from ptrain.errors import SpecError
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from tests.gloo.cases import ODD

Placement = Mapping[str, Any]
MICRO, SEQUENCE = 1, 16

REPLICATED, SHARDED = "dp_replicate", "dp_shard"
ROWS: dict[str, Placement] = {
    "ddp": {REPLICATED: "ddp"},
    "ddp-zero-redundancy": {REPLICATED: "ddp-zero-redundancy"},
    "zero1": {SHARDED: "zero1"},
    "zero2": {SHARDED: "zero2"},
    "zero3": {SHARDED: "zero3"},
    "hsdp": {REPLICATED: "ddp", SHARDED: "zero3"},
    "hsdp-full-optimizer": {REPLICATED: "R,S,R,R", SHARDED: "zero3"},
    "zero-offload": {SHARDED: "zero-offload"},
    "zero-offload-ds": {SHARDED: "zero-offload-ds"},
    "fsdp-offload": {SHARDED: "fsdp-offload"},
    "fsdp-mixed": {SHARDED: "fsdp-mixed"},
    "optimizer-in-backward": {REPLICATED: "optimizer-in-backward"},
    "muon": {SHARDED: "S*,S*,S*,R"},
    "nvme": {SHARDED: "S*@file,S@file,S,R"},
    "nvme-gradients": {SHARDED: "S@file,S@file,S@file,R"},
    "whole-copies-on-the-host": {SHARDED: "R@host,R@host,R@host,R"},
    "offload-on-replicas": {REPLICATED: "R,O,S,R"},
    "offload-on-both": {REPLICATED: "R,O,R,R", SHARDED: "S*,O,O,R"},
    "mixed-hsdp": {REPLICATED: "ddp", SHARDED: "M,S,S,R"},
    "materialized-from-the-host": {SHARDED: "M,O,S,R"},
    "gathered-update": {SHARDED: "R,S*,S*,R"},
    "backward-update-sharded": {SHARDED: "S*,S,M,R"},
    "backward-update-offloaded": {SHARDED: "O,O,M,R"},
}
BASE: Mapping[str, Mapping[str, Any]] = {
    "fsdp-mixed": {"layout": "fsdp-mixed"},
    "mixed-hsdp": {"layout": "fsdp-mixed"},
    "materialized-from-the-host": {"layout": "zero16"},
    "optimizer-in-backward": {"clip": None},
    "backward-update-sharded": {"clip": None},
    "backward-update-offloaded": {"clip": None},
    "muon": {"optimizer": "muon"},
}
DIALS: Mapping[str, tuple[Any, ...]] = {
    "size": (2, 4),
    "fp64": (True, False),
    "layout": (
        "fp32",
        "bf16",
        "fp16",
        "zero16",
        "megatron18",
        "zero20",
        "fsdp-mixed",
        "parameters=bf16 gradients=fp32 reduced=bf16 moments=bf16",
        "parameters=fp32 gradients=bf16 master=fp64 moments=fp32",
    ),
    "accumulate": (1, 3),
    "unit": ("block", "sub-block", "2 blocks", "model"),
    "sync": (None, ("last", True, True), ("last", False, False), ("every", False, True)),
    "reshard": (None, 2, "non-root"),
    "overlap": (None, "none", "backward"),
    "prefetch": (None, 0, 1, 2),
    "gather_after_update": ("blocking", "during-update", "next-forward"),
    "reduce_scatter": ("native", "all_to_all"),
    "bucket": (None, "per-tensor", "32 KiB", "whole"),
    "clip": (1.0, None),
    "optimizer": ("adamw", "sgd", "muon"),
    "update": (None, "device"),
}


@dataclass(frozen=True)
class Setting:
    """A row with a value for every dial."""

    row: str
    dials: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        usual = default_setting(self.row).values
        parts = [f"{name}={value}" for name, value in self.dials if usual[name] != value]
        return "-".join([self.row, *parts]).replace(" ", "")

    @property
    def values(self) -> dict[str, Any]:
        return dict(self.dials)

    @property
    def size(self) -> int:
        return self.values["size"]

    @property
    def fp64(self) -> bool:
        return self.values["fp64"]

    @cached_property
    def reference(self) -> tuple[object, ...]:
        """Return a key: settings with equal keys have equal single-device trajectories."""
        names = ("fp64", "layout", "clip", "optimizer")
        values = self.values
        return (*(values[name] for name in names), values["accumulate"] * values["size"])

    def mapping(self) -> dict[str, Any]:
        values = self.values
        placement = ROWS[self.row]
        size = values["size"]
        mesh = {axis: size if len(placement) == 1 else 2 for axis in placement}
        optimizer = {
            "name": values["optimizer"],
            # at 1e-1 one device alone turns 1e-16 into 1e-12 within 20 steps: too near to chaos
            "lr": 3e-2 if values["optimizer"] == "sgd" else 3e-3,
            "schedule": {"warmup": 2},
            "clip": values["clip"],
        }
        if values["optimizer"] == "sgd":
            optimizer["momentum"] = 0.9
        mapping: dict[str, Any] = {
            "name": re.sub(r"[^\w.-]+", "-", self.row)[:64],
            "model": {**ODD, "layers": 3},
            "mesh": mesh,
            "placement": dict(placement),
            "precision": _precision(values["layout"], fp64=values["fp64"]),
            "batch": {
                "global": MICRO * values["accumulate"] * size,
                "micro": MICRO,
                "sequence": SEQUENCE,
            },
            "optimizer": optimizer,
            "data": {"corpus": "python-docs", "tokenizer": "bytes"},
            "train": {"steps": 20, "seed": 0},
            "unit": values["unit"],
            "gather_after_update": values["gather_after_update"],
            "reduce_scatter": values["reduce_scatter"],
        }
        for name in ("reshard", "overlap", "prefetch", "bucket"):
            if values[name] is not None:
                mapping[name] = values[name]
        if values["update"]:
            mapping["offload"] = {"update": values["update"]}
        if values["sync"]:
            gradients, after_forward, after_backward = values["sync"]
            mapping["sync"] = {
                "gradients": gradients,
                "reshard_after_forward": after_forward,
                "reshard_after_backward": after_backward,
            }
        return mapping

    def spec(self) -> Spec:
        """Return the spec. Raises SpecError if the setting is illegal."""
        return require_runnable(load(self.mapping()))

    def is_legal(self) -> bool:
        if len(ROWS[self.row]) == 2 and self.size != 4:
            return False
        try:
            self.spec()
        except SpecError:
            return False
        return True

    def with_dials(self, **changed: Any) -> Setting:
        return Setting(self.row, tuple((self.values | changed).items()))


def _precision(layout: str, *, fp64: bool) -> dict[str, str]:
    """Return a layout name, or one dtype per state."""
    compute = {"compute": "fp64"} if fp64 else {}
    named = {"layout": layout} if "=" not in layout else {}
    return named | compute | dict(part.split("=") for part in layout.split() if "=" in part)


def default_setting(row: str) -> Setting:
    """Return the row with the default of every dial in the row's layout."""
    usual = {name: values[0] for name, values in DIALS.items()}
    size = 4 if len(ROWS[row]) == 2 else 2
    return Setting(row, tuple((usual | {"size": size} | BASE.get(row, {})).items()))


def pairwise_settings(row: str) -> Iterator[Setting]:
    """Return settings that cover every legal pair of values of two dials.

    Each setting starts from a missing pair with the row's defaults, then takes other values as long
    as it stays legal. Pairs that are illegal with the defaults are left to the tests of the
    rules."""
    draw = random.Random(row)
    missing = [
        ((one, first), (other, second))
        for one, other in combinations(DIALS, 2)
        for first in DIALS[one]
        for second in DIALS[other]
    ]
    draw.shuffle(missing)
    open_pairs = dict.fromkeys(missing)
    while open_pairs:
        pair = next(iter(open_pairs))
        setting = default_setting(row).with_dials(**dict(pair))
        del open_pairs[pair]
        if not setting.is_legal():
            continue
        chosen = dict(pair)
        for name in draw.sample([name for name in DIALS if name not in chosen], len(DIALS) - 2):
            values = draw.sample(DIALS[name], len(DIALS[name]))
            values.sort(key=lambda value: -_new_pairs(open_pairs, chosen, name, value))
            for value in values:
                other = setting.with_dials(**{name: value})
                if other.is_legal():
                    setting, chosen[name] = other, value
                    break
        for seen in combinations(setting.dials, 2):
            open_pairs.pop(seen, None)
        yield setting


def _new_pairs(
    open_pairs: Mapping[Any, None], chosen: Mapping[str, Any], name: str, value: Any
) -> int:
    """Return the number of missing pairs that a value would add to the chosen ones."""
    mine = (name, value)
    return sum(
        (mine, other) in open_pairs or (other, mine) in open_pairs for other in chosen.items()
    )
