"""The declaration of a fault: its name, the spec in which it is planted, the change, and the
expected diagnosis."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ptrain.algebra.legality import require_runnable
from ptrain.interpreter.program import Program
from ptrain.report.finding import Subject
from ptrain.spec.load import load
from ptrain.spec.spec import Spec

MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"family": "llama", "heads": 4, "kv_heads": 2, "tied": False},
    "llama-tied": {"family": "llama", "heads": 4, "kv_heads": 2, "tied": True},
    "gpt": {"family": "gpt", "heads": 4, "tied": False},
    "experts": {
        "family": "llama",
        "heads": 4,
        "kv_heads": 2,
        "tied": False,
        "experts": 4,
        "experts_per_token": 2,
        "expert_ffn": 24,
    },
    "frozen": {"target": "tests.faults.models:partly_frozen"},
}
SIZES = {"layers": 2, "hidden": 32, "ffn": 48, "vocab": 259}
PLACEMENTS = {
    "dp_replicate": "ddp",
    "dp_shard": "zero2",
    "tp": "S,S,S,R",
    "pp": "S,S,S,R",
    "cp": "R,R,R,S",
    "ep": "ddp",
}
SAMPLES = ("dp_replicate", "dp_shard", "ep")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The spec that a fault is planted in. `placement` is of those axes of `mesh` that are not
    placed as usual; `sections` are top-level keys of a spec that override what stands here."""

    mesh: Mapping[str, int]
    placement: Mapping[str, str] = field(default_factory=dict)
    model: str = "llama"
    shape: Mapping[str, Any] = field(default_factory=dict)
    layout: str = "fp32"
    accumulate: int = 3  # no degree of a mesh, so that a factor has one meaning
    micro: int = 1
    sections: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        ranks = 1
        for degree in self.mesh.values():
            ranks *= degree
        return ranks

    def __str__(self) -> str:
        parts = [
            f"{axis}={degree} {self._placed(axis)}".replace("*", r"\*")
            for axis, degree in self.mesh.items()
        ]
        attention = self.sections.get("context", {}).get("attention", "")
        if isinstance(attention, Mapping):
            attention = " × ".join(f"{name} {degree}" for name, degree in attention.items())
        parts[-1] += f" {attention}" if attention else ""
        experts = self.sections.get("tensor", {}).get("experts", "")
        parts[-1] += f" {experts}" if experts else ""
        return f"{' × '.join(parts)} · {self.model} · {self.layout} · K={self.accumulate}"

    def spec(self) -> Spec:
        data = math.prod(self.mesh.get(axis, 1) for axis in SAMPLES)
        known = MODELS[self.model]
        model = known if "target" in known else {**SIZES, **known, **self.shape}
        mapping: dict[str, Any] = {
            "name": "fault",
            "model": dict(model),
            "mesh": dict(self.mesh),
            "placement": {axis: self._placed(axis) for axis in self.mesh},
            "precision": {"layout": self.layout},
            "batch": {
                "global": self.micro * self.accumulate * data,
                "micro": self.micro,
                "sequence": 16,
            },
            "optimizer": {"name": "adamw", "lr": 3e-3, "schedule": {"warmup": 4}, "clip": 1.0},
            "data": {"corpus": "python-docs", "tokenizer": "bytes"},
            "train": {"steps": 20, "seed": 0},
        }
        return require_runnable(load(mapping | dict(self.sections)))

    def _placed(self, axis: str) -> str:
        return self.placement.get(axis, PLACEMENTS[axis])


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`plant` sabotages a program that is ready to run, on every rank of its mesh. `subjects` are
    what may be named as the state that is wrong; `axis` the mesh axis that has to do with it (""
    where it is not one, or any); `factor` and `place` are patterns that must be found in the
    root cause's. `undetectable` says why nothing can notice it, where nothing can."""

    name: str
    setting: Setting
    plant: Callable[[Program], None]
    subjects: tuple[Subject, ...]
    axis: str = ""
    factor: str = ""
    place: str = ""
    undetectable: str = ""

    def __str__(self) -> str:
        return self.name
