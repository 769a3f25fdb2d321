"""The text of a plan explains each mode, tier, layout and option."""

from __future__ import annotations

import pytest

from ptrain.derivation.estimate import derive
from ptrain.facts.model import ModelFacts
from ptrain.plan.lower import lower
from ptrain.plan.show import format_plan, keep_text
from ptrain.spec.activations import FULL, ActivationMode
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


def text_of_plan(placement: str, **changes: object) -> str:
    spec = load(BASE | {"placement": {"dp_shard": placement}} | changes).spec
    return format_plan(spec, derive(spec).plan)


@pytest.mark.parametrize(
    ("placement", "changes", "words"),
    [
        (DDP, {}, "overlapped with the last micro-batch's backward"),
        (DDP, {"overlap": "none"}, "after the last micro-batch's backward"),
        (DDP, {"bucket": "per-tensor"}, "gradients one by one"),
        (DDP, {"bucket": "whole"}, "all gradients in one bucket"),
        (FULLY, {"prefetch": 2}, "prefetch 2 units"),
        (FULLY, {"prefetch": 0}, "no prefetch"),
        (FULLY, {"overlap": "none"}, "no overlap, no prefetch"),
        (FULLY, {"reshard": 2}, "kept in 2 shards after forward"),
        (
            FULLY,
            {"reshard": "non-root"},
            "resharded after forward (except the root unit) and after back",
        ),
        (FULLY, {"unit": "2 blocks"}, "blocks.0+blocks.1, blocks.2+blocks.3, the root"),
        ("M,S,S,R", {"precision": {"layout": "fsdp-mixed"}}, "Θ M (all-gathered as casts"),
        (
            "M,O,S,R",
            {"precision": {"layout": "zero16"}},
            "Θ made unit by unit from the masters in Ω",
        ),
        ("R@host,S,S,R", {}, "Θ replicated on the host, copied for use"),
        ("S*@file,S,S,R", {}, "Θ sharded over dp_shard in files, all-gathered for use"),
        ("R,O,O,R", {}, "Ω sharded over dp_shard on the host, updated on the host"),
        ("R,O,O,R", {"offload": {"update": "device"}}, "on the host, updated on the device"),
        ("R,S@file,S,R", {"offload": {"path": "/x"}}, "files in /x"),
        ("R,S*,S*,R", {}, "G sharded over dp_shard, all-gathered over dp_shard for the update"),
        ("S*,M,S,R", {"optimizer": {"name": "sgd"}}, "all-gathered for use, Ω none, G sharded"),
        ("R,S,S,R", {"optimizer": {"name": "sgd", "momentum": 0.9}}, "Ω sharded over dp_shard, G"),
        ("R,S,S,R", SGD_ON_MASTERS, "Ω sharded over dp_shard, G"),
        ("R,S,S,R", {"overlap": "backward"}, "reductions overlapped with backward"),
        ("R,S,S,R", {"gather_after_update": "next-forward"}, "all-gathered in the next forward"),
        ("R,S,S,R", {"gather_after_update": "during-update"}, "while other units are updated"),
        ("R,R,M,R", {}, "G freed: each unit is reduced and updated within backward"),
        ("R,R,M,R", {}, "gradients reduced unit by unit, during backward"),
        ("R,S,S,R", {"precision": {"layout": "fp16"}}, "gradients overflow over dp_shard is skip"),
        (
            "R,S,S,R",
            {"precision": {"layout": "zero20"}},
            "reduced in bf16 next to each micro-batch",
        ),
        ("R,S*,S*,R", {"optimizer": {"name": "muon"}}, "adamw for all but the blocks' matrices"),
    ],
)
def test_the_plan_explains_its_steps(placement, changes, words):
    assert words in text_of_plan(placement, **changes)


def test_a_unit_updated_within_backward_has_no_overlap():
    """G is M over one axis and cut over the other."""
    words = ["placement.dp_replicate=R,S,M,R", "placement.dp_shard=R,S,S,R"]
    spec = load("hsdp", [*words, "optimizer.clip=null", "batch.micro=4"]).spec
    text = format_plan(spec, derive(spec).plan)
    assert "G freed" in text and "overlapped with backward" not in text


def test_owners_broadcast_where_torch_spreads_the_update():
    spec = load("ddp-zero-redundancy").spec
    assert "which updates and broadcasts it" in format_plan(spec, derive(spec).plan)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"activations": "M"}, "recompute blocks 0-3, keeping inputs"),
        ({"activations": {"2": "M"}}, "recompute block 2, keeping inputs"),
        (
            {"activations": "M@host", "recompute": "selective"},
            "recompute blocks 0-3, keeping inputs on the host and the results of matrix products "
            "and fused attention",
        ),
        (
            {"activations": "M", "recompute": "attention"},
            "recompute the scores and softmax of blocks 0-3, keeping inputs",
        ),
        (
            {"activations": "M", "recompute": {"keep": ["norm", "softmax", "collective"]}},
            "recompute blocks 0-3, keeping inputs and the results of softmax, norms and "
            "collectives",
        ),
        (
            {"activations": {"0-1": "M", "3": "O"}},
            "recompute blocks 0-1, keeping inputs; offload the saved tensors of block 3 to the "
            "host, and bring them back for backward",
        ),
        (
            {"activations": "S@file", "offload": {"path": "/x"}},
            "offload the saved tensors of blocks 0-3 to files, and bring them back for backward; "
            "files in /x",
        ),
        (
            {"activations": "M", "recompute": {"every": 3}, "model": MODEL | {"layers": 12}},
            "recompute every 3rd of blocks 0-9, keeping inputs",
        ),
        (
            {"activations": {"0-2": "M", "4": "M", "6-": "M"}, "model": MODEL | {"layers": 8}},
            "recompute blocks 0-2, 4, 6-7, keeping inputs",
        ),
        ({"loss": "chunked"}, "compute logits and loss of 1024 tokens at a time, again in backwar"),
        ({"loss": {"chunk": 1, "fused": True}}, "loss of 1 token at a time, by torch's linear_cro"),
    ],
)
def test_the_plan_shows_activation_modes_and_sliced_computation(changes, words):
    spec = load(BASE | {"placement": {"dp_shard": FULLY}} | changes).spec
    assert words in format_plan(spec, lower(spec, ModelFacts.of_units((("",),))))


def test_blocks_of_other_models_are_named_by_their_list():
    names = [f"encoder.{index}" for index in range(3)] + ["decoder.1", "decoder.3", "head"]
    step = Keep(blocks=tuple((name, ActivationMode(policy=FULL)) for name in names))
    assert keep_text(step) == "recompute encoder.0-2, decoder.1, 3 and head, keeping inputs"
