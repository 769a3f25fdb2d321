"""A failing spec is reduced while it fails and stays legal, until no single change is left."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import pytest

from ptrain.spec.load import load
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from ptrain.spec.text import parse_value
from tests.adversary.shrinking import Shrinking, command

LARGE: dict[str, Any] = {
    "model": {"layers": 4, "hidden": 24, "heads": 4, "ffn": 40, "vocab": 262, "tied": True},
    "mesh": {"pp": 2, "dp_shard": 4, "tp": 2},
    "placement": {
        "pp": "S,S,S,R",
        "dp_shard": {"parameters": "S*", "optimizer": "S", "gradients": "S", "activations": "R"},
        "tp": ["S", "S", "S", "R"],
    },
    "precision": {"layout": "fp16"},
    "batch": {"sequence": 16, "micro": 3, "accumulate": 4},
    "optimizer": {"lr": 0.5, "clip": 3.0},
    "pipeline": {"schedule": "gpipe", "split": [1, 3]},
    "log": {"every": 7},
}
FAILING: dict[str, Callable[[Spec], bool]] = {
    "whatever it is": lambda spec: True,
    "three samples at once": lambda spec: spec.batch.micro == 3,
    "two stages of gpipe": lambda spec: (
        spec.degree(Axis.PP) == 2 and spec.pipeline.schedule == "gpipe"
    ),
    "a sharded optimizer on shards": lambda spec: any(
        str(factor.placement.optimizer) == "S" and factor.axis == "dp_shard"
        for factor in spec.factors
    ),
    "a layout of 16 bits": lambda spec: spec.precision.layout.name == "fp16",
}
SMALLEST = {
    "whatever it is": {"mesh": {}, "placement": {}},
    "three samples at once": {"mesh": {}, "placement": {}},
    "two stages of gpipe": {"mesh": {"pp": 2}, "placement": {"pp": "S,S,S,R"}},
    "a sharded optimizer on shards": {
        "mesh": {"dp_shard": 2},
        "placement": {"dp_shard": "R,S,R,R"},
    },
    "a layout of 16 bits": {"mesh": {}, "placement": {}, "precision": {"layout": "fp16"}},
}


@pytest.mark.parametrize("name", FAILING)
def test_the_remainder_causes_the_failure(name):
    def fails(written: dict[str, Any]) -> bool:
        return FAILING[name](load(written).spec)

    small = Shrinking(LARGE, fails).smallest()
    assert fails(small)
    assert {key: small[key] for key in SMALLEST[name]} == SMALLEST[name]
    assert "log" not in small and "optimizer" not in small
    assert small["batch"]["sequence"] == 1 and small["model"]["ffn"] == 1
    assert ("micro" in small["batch"]) is (name == "three samples at once")


def test_no_more_specs_are_run_than_allowed():
    way = Shrinking(LARGE, lambda written: True, most=3)
    way.smallest()
    assert way.tries == 3


def test_a_strategys_policies_are_kept_when_its_tuples_are_written_out():
    written = {
        "model": {"preset": "llama-tiny", "hidden": 24, "ffn": 40, "heads": 4, "vocab": 262},
        "mesh": {"dp_shard": 2},
        "placement": "zero3-keep",
        "batch": {"sequence": 4},
    }

    def fails(smaller: dict[str, Any]) -> bool:
        return load(smaller).spec.sync.reshard_after_forward is False

    small = Shrinking(written, fails).smallest()
    assert small["sync"] == {"reshard_after_forward": False}


def test_the_command_has_the_whole_spec():
    text = command(LARGE, rank=5)
    echo, spec, *rest = shlex.split(text)
    assert (echo, rest) == ("echo", ["|", "ptrain", "simulate", "/dev/stdin", "--rank", "5"])
    tree = parse_value(spec, "the command")
    assert load(tree.root).spec == load(LARGE).spec
