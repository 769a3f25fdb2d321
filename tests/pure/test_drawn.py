"""Random specs over modes, tiers, layouts and options: each round-trips, each rejection states
place and fix, and each legal one has a prediction and a plan."""

from __future__ import annotations

import random

import pytest

from ptrain.algebra.legality import check, find_unsupported
from ptrain.derivation.estimate import derive
from ptrain.plan.show import format_plan
from ptrain.spec.load import load
from ptrain.spec.precision import LAYOUTS
from ptrain.spec.spec import Spec

TIERS = ("", "@host", "@file")
CUT = [f"{mode}{tier}" for mode in ("R", "S*", "S") for tier in TIERS]
MODES = {
    "parameters": [mode for mode in CUT if mode != "S"] + ["M"],
    "optimizer": CUT,
    "gradients": [*CUT, "M"],
}
DIALS = {
    "unit": ["sub-block", "2 blocks", "model"],
    "overlap": ["none", "backward"],
    "prefetch": [0, 2],
    "gather_after_update": ["during-update", "next-forward"],
    "bucket": ["whole", "per-tensor", "32 KiB"],
    "reshard": [False, 2, "non-root"],
    "reduce_scatter": ["all_to_all"],
    "offload": [{"update": "device"}, {"path": "/nvme"}],
    "activations": ["M", "O", "M@host", "R@file", {"0": "M", "1-": "O"}, {"2": "M@file"}],
}
OFTEN = 0.1  # a dial is not at its default


def random_spec(seed: int) -> Spec:
    draw = random.Random(seed)
    axes = draw.choice([["dp_shard"], ["dp_replicate"], ["dp_replicate", "dp_shard"]])
    dials = {key: draw.choice(each) for key, each in DIALS.items() if draw.random() < OFTEN}
    return load(
        {
            "model": {
                "layers": 3,
                "hidden": 42,
                "heads": 3,
                "kv_heads": 1,
                "ffn": 101,
                "vocab": 259,
            },
            "mesh": {axis: draw.choice([2, 4]) for axis in axes},
            "placement": {
                axis: [*(draw.choice(modes) for modes in MODES.values()), "R"] for axis in axes
            },
            "batch": {"micro": 1, "sequence": 16, "accumulate": draw.choice([1, 3])},
            "precision": {"layout": draw.choice(list(LAYOUTS))}
            | ({"moments": "bf16"} if draw.random() < OFTEN else {}),
            "optimizer": {
                "name": draw.choice(["adamw", "adamw", "sgd", "muon"]),
                "clip": draw.choice([None, 1.0]),
            },
            **dials,
        }
    ).spec


@pytest.mark.parametrize("decade", range(20))
def test_a_drawn_spec_is_read_back_and_either_rejected_with_a_fix_or_predicted(decade):
    for seed in range(10 * decade, 10 * decade + 10):
        spec = random_spec(seed)
        assert load(spec.resolved).spec == spec
        faults = check(spec)
        assert all(fault.place and fault.finding and fault.remedy for fault in faults)
        if not faults:
            waits = find_unsupported(spec)
            assert all(fault.place == "unit" for fault in waits)  # parts of recomputed blocks
            if waits:
                continue
            derivation = derive(spec)
            assert derivation.exact.memory and derivation.exact.peak
            assert format_plan(spec, derivation.plan)


def test_many_random_specs_are_legal():
    assert sum(not check(random_spec(seed)) for seed in range(200)) > 50
