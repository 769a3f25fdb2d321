"""Specs with pp."""

from __future__ import annotations

import pytest

from ptrain.algebra.legality import check
from ptrain.spec.load import load
from ptrain.spec.spec import Spec

SHAPE = {"layers": 8, "hidden": 96, "heads": 6, "kv_heads": 3, "ffn": 240, "vocab": 259}
FULLY = "S*,S,S,R"
GPT = {**SHAPE, "family": "gpt", "kv_heads": 6}
MODELS = {
    "llama": SHAPE,
    "llama, tied": SHAPE | {"tied": True},
    "gpt": GPT,
    "gpt, untied": GPT | {"tied": False},
}
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
WHOLE = "R,R,R,R"
TUPLES = {"pp": "S,S,S,R", "dp_shard": FULLY, "dp_replicate": WHOLE, "ep": WHOLE, "tp": "S,S,S,R"}


def spec(mesh: dict[str, int], pipeline: dict[str, object] | None = None, **sections) -> Spec:
    """Return a spec, by default with 8 micro-batches of one sample; it may be illegal."""
    mapping = {
        "model": SHAPE,
        "mesh": mesh,
        "placement": {axis: TUPLES[axis] for axis in mesh},
        "batch": {"sequence": 32, "accumulate": 8},
        "pipeline": pipeline or {},
    }
    return load(mapping | sections).spec


def legal(*arguments, **sections) -> Spec:
    made = spec(*arguments, **sections)
    assert not check(made)
    return made
