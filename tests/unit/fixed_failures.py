"""Specs in which `exact` and `simulated` once differed, each minimal, with the cause."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MODEL: dict[str, Any] = {"layers": 1, "hidden": 8, "heads": 1, "ffn": 8, "vocab": 259}
STAGES: dict[str, Any] = {"mesh": {"pp": 2}, "placement": {"pp": "S,S,S,R"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedFailure:
    """A minimal spec: `spec` overrides a model of one block of 8 columns on one rank with 4
    tokens."""

    wrong: str
    rank: int = 0
    model: dict[str, Any] = field(default_factory=dict)
    batch: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)

    @property
    def written(self) -> dict[str, Any]:
        """The spec as it stands in a file."""
        return {
            "model": MODEL | self.model,
            "mesh": {},
            "placement": {},
            "batch": {"sequence": 4} | self.batch,
            **self.spec,
        }


SEEN = (
    FixedFailure(
        wrong="a scaled loss had a seed of 4 bytes: peak backward 78640 for 78636",
        spec={"precision": {"layout": "fp16"}},
    ),
    FixedFailure(
        wrong="buffers of fp64 parameters were fp32: other 172 for 304",
        spec={"precision": {"parameters": "fp64"}},
    ),
    FixedFailure(
        wrong="attention that is no kernel on a GPU has its scores there: activations 92880 for "
        "96720, operations backward 1384448 for 1368064",
        model={"hidden": 16},
        spec={
            "precision": {"parameters": "fp64"},
            "cluster": {"preset": "h100-8"},
            "device": "cuda",
        },
    ),
    FixedFailure(
        wrong="a loss in chunks computes its logits again where no module runs: "
        "operations again 16576 for 0, backward 41600 for 58176",
        spec={"loss": {"chunk": 2}},
    ),
    FixedFailure(
        wrong="a sequence of one token leaves 8 bytes less a sample: activations 3216 for 3200",
        batch={"sequence": 1, "micro": 2},
    ),
    FixedFailure(
        wrong="gradients in files on replicas within tp are copied in one call more: "
        "device_to_host 2 calls for 3, 9312 bytes for 9316",
        model={"heads": 2},
        spec={
            "mesh": {"dp_replicate": 2, "tp": 2},
            "placement": {"dp_replicate": "R,R,S@file,R", "tp": "S,S,S,R"},
        },
    ),
    FixedFailure(
        wrong="ptrain's SGD for 16-bit tensors on a CPU has a scalar: peak update 54636 for 54640",
        spec={"optimizer": {"name": "sgd", "clip": None}, "precision": {"master": "bf16"}},
    ),
    FixedFailure(
        wrong="a last stage keeps the scale that was cast to fp64: activations 42704 for 42712",
        rank=1,
        model={"layers": 2},
        batch={"accumulate": 2, "micro": 2},
        spec={**STAGES, "precision": {"layout": "fp16", "compute": "fp64"}},
    ),
    FixedFailure(
        wrong="torch's fused loss in halves of a backward pass: too few operations backward",
        model={"layers": 6},
        spec={
            "mesh": {"pp": 3},
            "placement": {"pp": "S,S,S,R"},
            "loss": {"kind": "fused"},
            "pipeline": {"schedule": "zbv"},
        },
    ),
    FixedFailure(
        wrong="a loss in chunks in halves: operations again 89600 for 179200",
        model={"layers": 4},
        spec={**STAGES, "loss": {"chunk": 2}, "pipeline": {"schedule": "zbv"}},
    ),
    FixedFailure(
        wrong="the norm of a stage's copy of the embedding: peak update 4844 for 4836",
        rank=1,
        model={"family": "gpt", "layers": 2, "hidden": 1},
        batch={"sequence": 1, "accumulate": 2},
        spec=STAGES,
    ),
    FixedFailure(
        wrong="whether gradients overflow, where nothing else comes: peak update 4 too few",
        spec={"precision": {"layout": "fp16", "compute": "fp64"}, "optimizer": {"clip": None}},
    ),
    FixedFailure(
        wrong="dropout within tp on GPUs: operations backward 168192 for 171264",
        model={"family": "gpt", "hidden": 12, "heads": 2, "dropout": 0.5},
        batch={"sequence": 16},
        spec={"mesh": {"tp": 2}, "placement": {"tp": "S,S,S,R"}, "device": "cuda"},
    ),
    FixedFailure(
        wrong="an embedding that is viewed before its unit gathers it, on fake ranks: peak forward "
        "3176 for 2136",
        model={"family": "gpt", "layers": 2, "hidden": 2, "heads": 2},
        batch={"accumulate": 2},
        spec={
            "mesh": {"pp": 2, "dp_shard": 4, "tp": 2},
            "placement": {"pp": "S,S,S,R", "dp_shard": "S*,S*,S*,R", "tp": "S,S,S,R"},
        },
    ),
    FixedFailure(
        wrong="the norm of a stage's copy of a cut embedding: peak update 130564 for 130556",
        rank=3,
        model={"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "tied": True},
        batch={"sequence": 8, "accumulate": 2},
        spec={"mesh": {"pp": 2, "tp": 2}, "placement": {"pp": "S,S,S,R", "tp": "S,S,S,S"}},
    ),
    FixedFailure(
        wrong="the flag of an overflow of bf16 gradients on the host had no tag there, though it "
        "is copied to the device: host_to_device 1 call for 2, 4 bytes for 8",
        spec={
            "mesh": {"dp_shard": 2},
            "placement": {"dp_shard": "R,O,O,R"},
            "precision": {"parameters": "fp16", "gradients": "bf16", "master": "fp32"},
        },
    ),
    FixedFailure(
        wrong="the scale of 1 of a check on the host had no tag there: peak update 9420 for 9416",
        spec={
            "mesh": {"dp_shard": 2},
            "placement": {"dp_shard": "R,O,S@file,R"},
            "precision": {"layout": "fp16"},
            "optimizer": {"clip": None},
        },
    ),
)
