"""Activations in every mode on every mesh: recomputed or reloaded activations give the result of
one device to fp64 rounding, at the predicted cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import pytest
import torch

from ptrain.algebra.legality import require_runnable
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.verification.reference import Trajectory
from tests.gloo.activation_mode_runs import MATRIX
from tests.gloo.runs import train_on_rank
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"family": "llama", "kv_heads": 2},
    "gpt": {"family": "gpt"},
}
ATTENTIONS = ("sdpa", "eager", "sdpa-gqa")
STAGES, SLICES, ZERO3 = "S,S,S,R", "S,S,S,S", "S*,S,S,R"
PLACES: Mapping[str, Mapping[str, Any]] = {
    "one": {},
    "zero3": {"mesh": {"dp_shard": ZERO3}},
    "zero3-sub-blocks": {"mesh": {"dp_shard": ZERO3}, "unit": "sub-block", "prefetch": 2},
    "flat": {"mesh": {"dp_shard": "S*,R,S,R"}, "prefetch": 1},
    "ddp": {"mesh": {"dp_replicate": "R,R,R,R"}},
    "tp": {"mesh": {"tp": STAGES}},
    "tp-sp": {"mesh": {"tp": SLICES}},
    "tp-saved": {"mesh": {"tp": "S,S,S,S*"}},
    "pp-1f1b": {"mesh": {"pp": STAGES}, "pipeline": {"schedule": "1f1b"}},
    "3d": {
        "mesh": {"pp": STAGES, "dp_shard": ZERO3, "tp": SLICES},
        "pipeline": {"schedule": "1f1b"},
    },
}
MODES: Mapping[str, Mapping[str, Any]] = {
    "nothing": {},
    "full": {"activations": "M"},
    "second": {"activations": "M", "recompute": {"every": 2}},
    "selective": {"activations": "M", "recompute": "selective"},
    "attention": {"activations": "M", "recompute": "attention"},
    "kept": {"activations": "M", "recompute": {"keep": ["softmax", "norm", "collective"]}},
    "offload": {"activations": "O"},
    "files": {"activations": "R@file"},
    "inputs": {"activations": "M@host"},
    "mixed": {"activations": {"0": "M", "1": "O", "2": "R", "3": "M@file"}},
}
OF_PARTS = ("offload", "files")  # recomputed layers gather full inputs
# Of other attention than sdpa (eager saves scores and lets them go): these say it for all.
WITH_SCORES = ("nothing", "attention", "selective", "full", "mixed")
SAID_OF_SCORES = ("one", "zero3", "tp-sp", "pp-1f1b", "3d")
DROPPED = ("zero3", "flat", "ddp", "tp", "tp-sp", "tp-saved", "pp-1f1b", "3d")
DEFAULT = {
    ("one", "mixed", "gpt", "eager"),
    ("zero3", "selective", "llama", "sdpa"),
    ("pp-1f1b", "mixed", "llama", "sdpa"),
    ("tp-sp", "selective", "llama", "sdpa-gqa"),
}


def activation_spec(
    place: str, mode: str, model: str, attention: str = "sdpa", **more: Any
) -> Spec:
    given = {**PLACES[place]}
    axes = given.pop("mesh", {})
    mapping = {
        "name": f"{model}.{place}-{mode}-{attention}",
        "attention": attention,
        "model": {"layers": 4, "hidden": 24, "heads": 4, "ffn": 48, "vocab": 260}
        | MODELS[model]
        | more,
        "mesh": dict.fromkeys(axes, 2),
        "placement": axes,
        "batch": {"sequence": 16, "accumulate": 4 if "pp" in axes else 2, "micro": 2},
        "precision": {"compute": "fp64"},
        "optimizer": {"clip": 1.0},
    }
    return require_runnable(load(mapping | given | dict(MODES[mode])))


def cases() -> Iterator[Any]:
    for case in product(PLACES, MODES, MODELS, ATTENTIONS):
        place, mode, model, attention = case
        if "unit" in PLACES[place] and mode not in OF_PARTS:
            continue
        if attention != "sdpa" and not (mode in WITH_SCORES and place in SAID_OF_SCORES):
            continue
        if attention == "sdpa-gqa" and MODELS[model].get("kv_heads") is None:
            continue  # as many heads of keys as of queries: sdpa
        marks = () if case in DEFAULT else (pytest.mark.nightly,)
        yield pytest.param(*case, marks=marks, id=" ".join(case))


@pytest.mark.parametrize(("place", "mode", "model", "attention"), [*cases()])
def test_every_mode_on_every_mesh_is_exact_and_equals_one_device(
    ranks: Ranks, place: str, mode: str, model: str, attention: str
) -> None:
    assert not MATRIX.differences(ranks, activation_spec(place, mode, model, attention))


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(place, marks=() if place == "flat" else pytest.mark.nightly)
        for place in DROPPED
    ],
)
def test_recomputation_reuses_dropout_masks_and_equals_the_plain_run_to_the_bit(
    ranks: Ranks, place: str
) -> None:
    def trained(mode: str) -> Trajectory:
        spec = activation_spec(place, mode, "gpt", dropout=0.1)
        found = ranks.run(spec.world_size, train_on_rank, spec, 2)[0].trajectory
        assert found is not None
        return found

    plain = trained("nothing")
    for mode in ("full", "selective", "mixed"):
        again = trained(mode)
        assert again.losses == plain.losses
        assert all(
            torch.equal(again.parameters[name], plain.parameters[name]) for name in plain.parameters
        )
