"""Specs with pp, read as if it ran: nothing executes it yet."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from unittest.mock import patch

from ptrain.algebra.legality import check
from ptrain.spec.load import load
from ptrain.spec.spec import Spec

SHAPE = {"layers": 8, "hidden": 96, "heads": 6, "kv_heads": 3, "ffn": 240, "vocab": 259}
FULLY = "S*,S,S,R"
TUPLES = {"pp": "S,S,S,R", "dp_shard": FULLY, "dp_replicate": "R,R,R,R", "tp": "S,S,S,R"}


def as_if_it_ran() -> AbstractContextManager[object]:
    """Nothing is refused as not yet executed."""
    return patch("ptrain.spec.load.refusals", lambda tree: {})


def read(mapping: Mapping[str, object]) -> Spec:
    with as_if_it_ran():
        return load(mapping).spec


def spec(mesh: dict[str, int], pipeline: dict[str, object] | None = None, **sections) -> Spec:
    """Of 8 micro-batches of one sample, if nothing else is said; not always a legal one."""
    mapping = {
        "model": SHAPE,
        "mesh": mesh,
        "placement": {axis: TUPLES[axis] for axis in mesh},
        "batch": {"sequence": 32, "accumulate": 8},
        "pipeline": pipeline or {},
    }
    return read(mapping | sections)


def legal(*arguments, **sections) -> Spec:
    made = spec(*arguments, **sections)
    assert not check(made)
    return made
