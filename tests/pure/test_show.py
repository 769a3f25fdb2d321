"""A plan as text says in plain words what each mode, tier, layout and dial will do."""

from __future__ import annotations

import pytest

from ptrain.derivation.estimate import derive
from ptrain.facts.model import ModelFacts
from ptrain.plan.lower import lower
from ptrain.plan.show import keep_text, show
from ptrain.spec.activations import FULL, Kept
from ptrain.spec.load import load
from ptrain.steps.step import Keep

MODEL = {"preset": "llama-tiny"}  # of 4 blocks
BASE = {
    "model": MODEL,
    "mesh": {"dp_shard": 2},
    "batch": {"global": 8, "micro": 2, "sequence": 32},
}
SGD_ON_MASTERS = {"optimizer": {"name": "sgd"}, "precision": {"layout": "zero16"}}
DDP, FULLY = "R,R,R,R", "S*,S,S,R"


def shown(placement: str, **changes: object) -> str:
    spec = load(BASE | {"placement": {"dp_shard": placement}} | changes).spec
    return show(spec, derive(spec).plan)


@pytest.mark.parametrize(
    ("placement", "changes", "words"),
    [
        (DDP, {}, "overlapping backward of the last micro-batch"),
        (DDP, {"overlap": "none"}, "after the last micro-batch's backward"),
        (DDP, {"bucket": "per-tensor"}, "gradients one by one"),
        (DDP, {"bucket": "whole"}, "all gradients in one bucket"),
        (FULLY, {"prefetch": 2}, "2 units prefetched"),
        (FULLY, {"prefetch": 0}, "no prefetch"),
        (FULLY, {"overlap": "none"}, "reductions awaited, nothing prefetched"),
        (FULLY, {"reshard": 2}, "resharded over 2 ranks after forward"),
        (FULLY, {"reshard": "non-root"}, "freed after forward (except the root), freed after back"),
        (FULLY, {"unit": "2 blocks"}, "blocks.0+blocks.1, blocks.2+blocks.3, the root"),
        ("M,S,S,R", {"precision": {"layout": "fsdp-mixed"}}, "Θ M (gathered units are cast"),
        (
            "M,O,S,R",
            {"precision": {"layout": "zero16"}},
            ("Θ cast by unit from the master weights in Ω"),
        ),
        ("R@host,S,S,R", {}, "Θ whole on the host and loaded for use"),
        ("S*@file,S,S,R", {}, "Θ cut over dp_shard in files and all-gathered for use"),
        ("R,O,O,R", {}, "Ω sharded over dp_shard on the host, updated on the host"),
        ("R,O,O,R", {"offload": {"update": "device"}}, "on the host, updated on the device"),
        ("R,S@file,S,R", {"offload": {"path": "/x"}}, "files in /x"),
        ("R,S*,S*,R", {}, "G sharded over dp_shard and all-gathered over dp_shard for the update"),
        ("S*,M,S,R", {"optimizer": {"name": "sgd"}}, "all-gathered for use, Ω none, G sharded"),
        ("R,S,S,R", {"optimizer": {"name": "sgd", "momentum": 0.9}}, "Ω sharded over dp_shard, G"),
        ("R,S,S,R", SGD_ON_MASTERS, "Ω sharded over dp_shard, G"),
        ("R,S,S,R", {"overlap": "backward"}, "reductions overlap backward"),
        ("R,S,S,R", {"gather_after_update": "next-forward"}, "all-gathered at their next use"),
        ("R,S,S,R", {"gather_after_update": "during-update"}, "while other units are updated"),
        ("R,R,M,R", {}, "G consumed: each unit is reduced and updated within backward"),
        ("R,R,M,R", {}, "gradients unit by unit, as soon as they are complete"),
        (
            "R,S,S,R",
            {"precision": {"layout": "fp16"}},
            ("overflowing gradients over dp_shard are skip"),
        ),
        (
            "R,S,S,R",
            {"precision": {"layout": "zero20"}},
            ("reduced in bf16 plus those of the micro-batch"),
        ),
        (
            "R,S*,S*,R",
            {"optimizer": {"name": "muon"}},
            ("adamw for all tensors except the matrices of blocks"),
        ),
    ],
)
def test_the_plan_says_what_happens(placement, changes, words):
    assert words in shown(placement, **changes)


def test_nothing_runs_beside_backward_where_a_unit_is_updated_within_it():
    """G is M over one axis and cut over the other."""
    words = ["placement.dp_replicate=R,S,M,R", "placement.dp_shard=R,S,S,R"]
    spec = load("hsdp", [*words, "optimizer.clip=null", "batch.micro=4"]).spec
    text = show(spec, derive(spec).plan)
    assert "G consumed" in text and "beside backward" not in text


def test_owners_broadcast_where_torch_spreads_the_update():
    spec = load("ddp-zero-redundancy").spec
    assert "whose owners update and broadcast parameters" in show(spec, derive(spec).plan)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"activations": "M"}, "recompute blocks 0-3; save inputs"),
        ({"activations": {"2": "M"}}, "recompute block 2; save inputs"),
        (
            {"activations": "M@host", "recompute": "selective"},
            (
                "recompute blocks 0-3; save inputs on the host and the results of matrix "
                "products and fused attention"
            ),
        ),
        (
            {"activations": "M", "recompute": "attention"},
            "recompute the scores and softmax of blocks 0-3; save inputs",
        ),
        (
            {"activations": "M", "recompute": {"keep": ["norm", "softmax", "collective"]}},
            "recompute blocks 0-3; save inputs and the results of softmax, norms and collectives",
        ),
        (
            {"activations": {"0-1": "M", "3": "O"}},
            (
                "recompute blocks 0-1; save inputs; offload the saved tensors of block 3 to the "
                "host and load them for backward"
            ),
        ),
        (
            {"activations": "S@file", "offload": {"path": "/x"}},
            (
                "offload the saved tensors of blocks 0-3 to files and load them for backward; "
                "files in /x"
            ),
        ),
        (
            {"activations": "M", "recompute": {"every": 3}, "model": MODEL | {"layers": 12}},
            "recompute every 3rd of blocks 0-9; save inputs",
        ),
        (
            {"activations": {"0-2": "M", "4": "M", "6-": "M"}, "model": MODEL | {"layers": 8}},
            "recompute blocks 0-2, 4, 6-7; save inputs",
        ),
        (
            {"loss": "chunked"},
            ("compute logits and loss for 1024 tokens at a time, again in backwar"),
        ),
        (
            {"loss": {"chunk": 1, "fused": True}},
            ("loss for 1 token at a time, with torch's linear_cro"),
        ),
    ],
)
def test_the_plan_says_what_blocks_keep_and_what_is_computed_in_slices(changes, words):
    spec = load(BASE | {"placement": {"dp_shard": FULLY}} | changes).spec
    assert words in show(spec, lower(spec, ModelFacts.of_units((("",),))))


def test_blocks_of_other_models_are_named_by_their_list():
    names = [f"encoder.{index}" for index in range(3)] + ["decoder.1", "decoder.3", "head"]
    step = Keep(blocks=tuple((name, Kept(policy=FULL)) for name in names))
    assert keep_text(step) == "recompute encoder.0-2, decoder.1, 3 and head; save inputs"
