"""Flat units in every mode, tier, layout and option compute the result of one device; if only the
location of a state differs, the bits are identical."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from ptrain.algebra.legality import require_runnable
from ptrain.spec.load import load
from ptrain.spec.model import ExternalModel
from ptrain.spec.spec import Spec
from ptrain.verification.reference import Trajectory
from tests.gloo.cases import ODD
from tests.gloo.rows import ROWS
from tests.gloo.runs import train_on_rank
from tests.gloo.test_exact import failed_checks
from tests.ranks import Ranks
from tests.trajectories import FP64, one_device
from tests.trajectories import compare as compare_runs

pytestmark = pytest.mark.gloo

STEPS = 4
REPLICATE, SHARD = "dp_replicate", "dp_shard"
Placement = Mapping[str, str]


def odd_spec(placement: Placement, size: int, *, fp64: bool = True, **changes: Any) -> Spec:
    """Return a spec of the odd model, whose tensors no number of ranks divides."""
    axes = list(placement)
    mesh = {axes[0]: size} if len(axes) == 1 else {REPLICATE: 2, SHARD: size // 2}
    accumulate = changes.pop("accumulate", 1)
    mapping: dict[str, Any] = {
        "name": "flat",
        "model": dict(ODD),
        "mesh": mesh,
        "placement": dict(placement),
        "precision": {"layout": "fp32"} | ({"compute": "fp64"} if fp64 else {}),
        "batch": {"global": accumulate * size, "micro": 1, "sequence": 16},
        "optimizer": {"name": "adamw", "lr": 1e-3, "schedule": {"warmup": 2}, "clip": 1.0},
        "data": {"corpus": "python-docs", "tokenizer": "bytes"},
        "train": {"steps": STEPS, "seed": 0},
    }
    for key, value in changes.items():
        known = mapping.get(key)
        mapping[key] = {**known, **value} if isinstance(known, dict) else value
    return require_runnable(load(mapping))


def train_spec(ranks: Ranks, spec: Spec) -> Trajectory:
    trajectory = ranks.run(spec.world_size, train_on_rank, spec, STEPS)[0].trajectory
    assert trajectory is not None
    return trajectory


REFERENCES: dict[tuple[object, ...], Trajectory] = {}


def reference(spec: Spec) -> Trajectory:
    """Return the single-device trajectory, cached for all placements of the same training."""
    key = (spec.precision, spec.optimizer, spec.batch.global_samples)
    if key not in REFERENCES:
        REFERENCES[key] = one_device(spec, STEPS)
    return REFERENCES[key]


MASTER = {"precision": {"layout": "zero16"}}
NO_CLIP = {"optimizer": {"clip": None}}

CASES: dict[str, tuple[Placement, int, dict[str, Any]]] = {
    # tiers of each state
    "the paper's offload": ({SHARD: "O,O,S,R"}, 2, MASTER),
    "gradients to the host": ({SHARD: "R,O,O,R"}, 2, MASTER),
    "gradients to the host, K=3": ({SHARD: "R,O,O,R"}, 2, {"accumulate": 3}),
    "all to the host": ({SHARD: "O,O,O,R"}, 2, {}),
    "all to the host on 4": ({SHARD: "O,O,O,R"}, 4, {**MASTER, "accumulate": 3}),
    "streamed update": ({SHARD: "O,O,O,R"}, 2, {"offload": {"update": "device"}, **MASTER}),
    "whole on the host": ({SHARD: "R@host,R@host,R@host,R"}, 2, {"accumulate": 3}),
    "on files": ({SHARD: "S@file,S@file,S@file,R"}, 2, {"accumulate": 3, **MASTER}),
    "whole on files": ({SHARD: "R@file,R@file,R@file,R"}, 2, {"accumulate": 3}),
    "files, streamed": ({SHARD: "S@file,S@file,S,R"}, 2, {"offload": {"update": "device"}}),
    "both axes": ({REPLICATE: "R,O,R,R", SHARD: "S*,O,O,R"}, 4, {"accumulate": 3}),
    "replicas": ({REPLICATE: "R,O,S,R"}, 2, MASTER),
    # materialized parameters
    "materialized": ({SHARD: "M,S,S,R"}, 2, {"precision": {"layout": "zero20"}}),
    "materialized over two axes": ({REPLICATE: "R,S,S,R", SHARD: "M,S,S,R"}, 4, MASTER),
    "materialized from whole masters": ({SHARD: "M,R,S,R"}, 2, {**MASTER, "accumulate": 3}),
    "materialized from the host": ({SHARD: "M,O,S,R"}, 2, MASTER),
    "materialized from files": ({SHARD: "M,S@file,O,R"}, 2, MASTER),
    "materialized, streamed": ({SHARD: "M,S*@host,S,R"}, 2, MASTER),
    # layouts
    "zero20 whole": ({SHARD: "R,S,R,R"}, 2, {"precision": {"layout": "zero20"}, "accumulate": 3}),
    "zero20 cut": ({SHARD: "R,S,S,R"}, 2, {"precision": {"layout": "zero20"}, "accumulate": 3}),
    "zero20 host": ({SHARD: "R,O,O,R"}, 2, {"precision": {"layout": "zero20"}, "accumulate": 3}),
    "megatron18": ({REPLICATE: "R,R,R,R"}, 2, {"precision": {"layout": "megatron18"}}),
    # gathered for the update
    "gathered optimizer": ({SHARD: "R,S*,S,R"}, 2, MASTER),
    "gathered optimizer, host": ({SHARD: "S*,S*@host,O,R"}, 2, MASTER),
    "gathered gradients": ({SHARD: "S*,R,S*,R"}, 4, {"accumulate": 3}),
    "gathered both": ({REPLICATE: "R,S,S,R", SHARD: "S*,S*,S*,R"}, 4, {}),
    "whole matrices": ({SHARD: "R,R,S*,R"}, 2, {"optimizer": {"name": "muon"}}),
    "whole matrices of shards": (
        {SHARD: "S*,S*,S*,R"}, 2, {"optimizer": {"name": "muon"}, **MASTER},
    ),
    "whole matrices from the host": (
        {SHARD: "S*,S*@host,S*@host,R"}, 2, {"optimizer": {"name": "muon"}},
    ),
    # consumed gradients
    "consumed": ({REPLICATE: "R,R,M,R"}, 2, NO_CLIP),
    "consumed by shards": ({SHARD: "S*,S,M,R"}, 2, {**NO_CLIP, **MASTER}),
    "consumed, offloaded": ({SHARD: "O,O,M,R"}, 2, NO_CLIP),
    "consumed over two axes": ({REPLICATE: "R,R,M,R", SHARD: "S*,S,S,R"}, 4, NO_CLIP),
    # dials
    "prefetch": ({SHARD: "S*,R,S,R"}, 2, {"prefetch": 1, "accumulate": 3}),
    "prefetch 2 from files": ({SHARD: "S@file,O,S,R"}, 2, {"prefetch": 2}),
    "overlap": ({SHARD: "R,S,S,R"}, 2, {"overlap": "backward", "accumulate": 3}),
    "overlap of exchanges": (
        {SHARD: "R,S,S,R"}, 2, {"overlap": "backward", "reduce_scatter": "all_to_all"},
    ),
    "overlap whole": ({SHARD: "R,S,R,R"}, 2, {"overlap": "backward", "accumulate": 3}),
    "overlap to the host": ({SHARD: "R,O,O,R"}, 2, {"overlap": "backward", "accumulate": 3}),
    "gather during the update": ({SHARD: "R,S,S,R"}, 2, {"gather_after_update": "during-update"}),
    "gather during, to the host": (
        {SHARD: "R@host,O,S,R"}, 2, {"gather_after_update": "during-update"},
    ),
    "gather in the next forward": ({SHARD: "R,S,S,R"}, 2, {"gather_after_update": "next-forward"}),
    "next forward, both axes": (
        {REPLICATE: "R,S,R,R", SHARD: "S*,S,S,R"}, 4,
        {"gather_after_update": "next-forward", "accumulate": 3},
    ),
    "sub-blocks": ({SHARD: "O,O,O,R"}, 2, {"unit": "sub-block"}),
    "units of two blocks": ({SHARD: "O,O,O,R"}, 2, {"unit": "2 blocks", "prefetch": 1}),
}  # fmt: skip


@pytest.mark.parametrize("gradients", ["M", "S"])
def test_a_block_that_passes_an_input_on_is_updated_once(ranks: Ranks, gradients: str) -> None:
    placement = {SHARD: f"S*,S,{gradients},R"}
    spec = odd_spec(placement, 2, optimizer={"clip": None})
    spec = replace(spec, model=ExternalModel(target="tests.models_external:carriers"))
    assert not failed_checks(compare_runs(one_device(spec, STEPS), train_spec(ranks, spec), FP64))


def cases() -> list[Any]:
    """Yield the cases; by default those whose tuple is not a row of test_rows.py, which compares
    rows without some of these options, each tuple once."""
    seen = [*ROWS.values()]
    params = []
    for name, (placement, _, _) in CASES.items():
        marks = pytest.mark.nightly if placement in seen else ()
        seen.append(placement)
        params.append(pytest.param(name, marks=marks))
    return params


@pytest.mark.parametrize("name", cases())
def test_every_mode_tier_and_dial_equals_one_device(ranks: Ranks, name: str) -> None:
    placement, size, changes = CASES[name]
    spec = odd_spec(placement, size, **changes)
    assert not failed_checks(compare_runs(reference(spec), train_spec(ranks, spec), FP64))


# Where a state is only elsewhere, or moves at another time, no operation differs.
TWINS: dict[str, tuple[Placement, Placement, dict[str, Any]]] = {
    "offload": ({SHARD: "S*,S,S,R"}, {SHARD: "O,O,O,R"}, MASTER),
    "files": ({SHARD: "R,S,S,R"}, {SHARD: "R@file,S@file,S@file,R"}, MASTER),
    "made of masters": ({SHARD: "S*@host,S,S,R"}, {SHARD: "M,S,S,R"}, MASTER),
    "used up in backward": (
        {SHARD: "S*@host,S,S,R"},
        {SHARD: "S*@host,S,M,R"},
        {**MASTER, **NO_CLIP},
    ),
    "masters on the host": ({SHARD: "M,S,S,R"}, {SHARD: "M,O,S,R"}, MASTER),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=() if name in ("files", "masters on the host") else pytest.mark.nightly
        )
        for name in TWINS
    ],
)
def test_moving_a_state_to_another_tier_changes_no_bit(ranks: Ranks, name: str) -> None:
    here, there, changes = TWINS[name]
    _require_equal_bits(ranks, _single(here, changes), _single(there, changes))


DIALS = [
    {"prefetch": 1},
    {"overlap": "backward"},
    {"gather_after_update": "during-update"},
    {"gather_after_update": "next-forward"},
]


@pytest.mark.parametrize("dial", DIALS, ids=lambda dial: "-".join(map(str, dial.values())))
def test_the_time_of_a_collective_changes_no_bit(ranks: Ranks, dial: dict[str, Any]) -> None:
    placement = {REPLICATE: "R,S,R,R", SHARD: "S*,S,S,R"}
    _require_equal_bits(
        ranks, _single(placement, MASTER, size=4), _single(placement, {**MASTER, **dial}, size=4)
    )


def _single(placement: Placement, changes: dict[str, Any], *, size: int = 2) -> Spec:
    return odd_spec(placement, size, fp64=False, **changes)


RUNS: dict[str, Trajectory] = {}


def _require_equal_bits(ranks: Ranks, one: Spec, other: Spec) -> None:
    """Require equal bits of all runs; the first one is run once."""
    key = str(one)
    if key not in RUNS:
        RUNS[key] = train_spec(ranks, one)
    left, right = RUNS[key], train_spec(ranks, other)
    assert left.losses == right.losses
    for name, value in left.parameters.items():
        assert torch.equal(value, right.parameters[name]), name
