"""What may be recomputed and offloaded, and what a refusal says."""

from __future__ import annotations

import pytest

from ptrain.activations import rules
from ptrain.algebra.legality import check, executed
from ptrain.errors import SpecError
from ptrain.facts.model import ModelFacts
from ptrain.plan.lower import lower
from ptrain.spec.file_tier import require_file_tier
from ptrain.spec.load import load
from ptrain.spec.pipeline import ScheduleName

MODEL = {"preset": "llama-tiny"}  # of 4 blocks
ZERO3 = {"mesh": {"dp_shard": 2}, "placement": {"dp_shard": ["S*", "S", "S", "R"]}}
TP = {"mesh": {"tp": 2}, "placement": {"tp": ["S", "S", "S", "R"]}}
PP = {"mesh": {"pp": 2}, "placement": {"pp": ["S", "S", "S", "R"]}}
OTHER = {"model": {"hf": "LlamaForCausalLM", "config": {"vocab_size": 259}}}
BASE = {"model": MODEL, "batch": {"global": 16, "sequence": 32}}
HALVES = [name for name in ScheduleName if name in ("zero-bubble", "zbv", "dualpipev")]


def spec(**changes):
    return load(BASE | ZERO3 | changes).spec


def refusals(**changes):
    made = spec(**changes)
    found = (*check(made), *executed(made))
    return [(fault.place, fault.finding, fault.remedy) for fault in found]


@pytest.mark.parametrize(
    "changes",
    [
        {"activations": "M"},
        {"activations": "O"},
        {"activations": "M@file"},
        {"activations": {"0-1": "M", "2-": "O"}},
        {"activations": {"3": "M"}},
        {"activations": "M", "recompute": "attention"},
        {"activations": "M", "recompute": {"keep": ["attention"]}, "attention": "eager"},
        {"activations": "M", "unit": "2 blocks"},
        {"activations": "O", "unit": "sub-block"},
        {"activations": "O", "offload": {"path": "/tmp", "tier": "file"}},
        TP | {"activations": "M", "loss": "chunked"},
        TP | {"activations": "S@file", "offload": {"path": "/tmp"}},
        PP | {"activations": "M"},
        PP | {"activations": "O", "pipeline": {"schedule": "interleaved"}},
        OTHER | {"activations": "M", "recompute": "selective"},
        {"recompute": {"budget": "1 GiB"}},
        {"mesh": {"dp_shard": 1}, "activations": "M", "unit": "sub-block"},
    ],
)
def test_what_blocks_keep_is_theirs_to_say(changes):
    assert refusals(**changes) == []


ONE_WAY = "activations belong to the rank, not to an axis, but are M on dp_replicate and O on"
TWICE = "has backward passes in halves, for inputs and for weights, and each of them would compute"


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        (
            {
                "mesh": {"dp_replicate": 2, "dp_shard": 2},
                "placement": {
                    "dp_replicate": ["R", "R", "R", "M"],
                    "dp_shard": ["S*", "S", "S", "O"],
                },
            },
            (
                "placement.dp_shard",
                f"{ONE_WAY} dp_shard",
                "give activations once, at the top of the spec",
            ),
        ),
        (
            {"activations": {"2-5": "M"}},
            (
                "activations",
                "blocks 2-5, and the model has 4, from 0 to 3",
                'write ranges within 0-3; "2-" is to the last one',
            ),
        ),
        (
            {"activations": {"0-3": "M", "4-": "R"}},
            (
                "activations",
                "blocks 4-, and the model has 4, from 0 to 3",
                'write ranges within 0-3; "3-" is to the last one',
            ),
        ),
        (
            {"activations": {"7": "O"}},
            (
                "activations",
                "block 7, and the model has 4, from 0 to 3",
                'write ranges within 0-3; "3-" is to the last one',
            ),
        ),
        (
            {"placement": {"dp_shard": ["S*", "S", "S", "S*"]}},
            (
                "placement.dp_shard",
                "(S*,S,S,S*) on dp_shard: activations are those of a rank's own samples and cannot "
                "be spread over a data axis; they are kept (R), recomputed (M) or offloaded (O), "
                "and slices of the tokens are those of cp (mesh: {cp: 2}); it breaks Theorem 3 "
                "(gradient integrity)",
                "nearest legal: dp_shard: {parameters: S*, optimizer: S, gradients: S, "
                "activations: R}",
            ),
        ),
        (
            TP | {"placement": {"tp": ["S", "S", "S", "M"]}},
            (
                "placement.tp",
                "(S,S,S,M) on tp: activations on tp are R, S (a slice of the tokens) or S* (saved "
                "so, and gathered for backward); M and O belong to a rank, not to an axis: "
                "activations: M at the top of the spec; it breaks Definition 2",
                "nearest legal: tp: {parameters: S, optimizer: S, gradients: S, activations: R}",
            ),
        ),
        (
            OTHER | {"activations": "M", "recompute": "attention"},
            (
                "recompute",
                "not yet: attention, of a model that is not built in: which of its modules "
                "computes scores and softmax alone nobody says",
                "write recompute.keep=[matmul], or recompute=selective",
            ),
        ),
        (
            OTHER | {"recompute": {"budget": "1 GiB"}},
            (
                "recompute.budget",
                "not yet: a policy that follows from a budget, of a model that is not built in: "
                "its peak is known once it is traced with one",
                "write activations=M with recompute=selective or recompute=full; "
                "`ptrain predict` derives each",
            ),
        ),
        (
            {"activations": "M", "unit": "sub-block"},
            (
                "unit",
                "not yet: sub-block, with blocks that are computed again: their parts would be "
                "gathered once more for it",
                "write unit=block",
            ),
        ),
        (
            TP | {"activations": "M", "tensor": {"plan": "naive"}},
            (
                "tensor.plan",
                "not yet: naive, with blocks whose activations are recomputed or offloaded",
                "write tensor.plan=paired, or activations=R",
            ),
        ),
        (
            {"model": {"preset": "gpt-tiny", "dropout": 0.1}, "attention": "flex"},
            (
                "attention",
                "flex: torch's flex_attention drops nothing, and the model has dropout: 0.1",
                "write attention=sdpa or attention=eager, or model.attention_dropout=0",
            ),
        ),
        (
            {"attention": "flex", "device": "cpu"},
            (
                "attention",
                "flex: torch's flex_attention has no backward pass on a processor",
                "write attention=sdpa or attention=eager, or device=cuda",
            ),
        ),
        (
            {"offload": {"path": "/tmp"}, "activations": "O"},
            (
                "offload.path",
                "/tmp is for states in files, and none is",
                "remove path, or write offload.tier=file",
            ),
        ),
    ],
)
def test_what_is_refused_says_what_instead(changes, refusal):
    assert refusals(**changes) == [refusal]


@pytest.mark.parametrize("name", HALVES)
def test_a_block_is_not_recomputed_twice_by_a_backward_pass_in_halves(name):
    in_halves = PP | {"pipeline": {"schedule": str(name)}}
    remedy = "write a schedule with whole backward passes: 1f1b or interleaved; or activations=R"
    assert refusals(activations="M", **in_halves) == [
        ("pipeline.schedule", f"{name} {TWICE} blocks that are M again", remedy)
    ]
    assert refusals(activations="O", **in_halves) == [
        (
            "pipeline.schedule",
            f"not yet: with {name} both halves of a backward pass take what was saved, and what is "
            "offloaded is brought back once",
            remedy,
        )
    ]
    assert not refusals(**in_halves)


@pytest.mark.parametrize("rule", (*rules.RULES, *rules.NOT_YET), ids=lambda rule: rule.name)
def test_without_a_word_about_them_no_rule_speaks(rule):
    assert not list(rule.faults(spec()))


def test_blocks_of_another_model_are_counted_when_they_are_known():
    made = spec(**OTHER | {"activations": {"2-5": "M"}})
    assert not check(made)
    with pytest.raises(SpecError) as caught:
        lower(made, ModelFacts(units=(), blocks=("layers.0", "layers.1")))
    (fault,) = caught.value.faults
    assert fault.finding == "blocks 2-5, and the model has 2, from 0 to 1"
    assert fault.remedy == 'write ranges within 0-1; "1-" is to the last one'


def test_a_model_without_blocks_keeps_nothing_by_block():
    with pytest.raises(SpecError) as caught:
        lower(spec(**OTHER | {"activations": "M"}), ModelFacts.of_units((("",),)))
    (fault,) = caught.value.faults
    assert fault.finding == "they are kept by block, and no blocks are found in the model"
    assert fault.remedy == "name them: model.blocks=layers.*"


def test_a_budget_is_settled_before_anything_is_planned():
    with pytest.raises(SpecError, match=r"what it recomputes is not chosen yet"):
        lower(spec(recompute={"budget": "1 GiB"}), ModelFacts.of_units((("",),)))


def test_saved_tensors_in_files_need_a_folder_that_takes_them(tmp_path):
    offload = {"path": str(tmp_path / "none"), "tier": "file"}
    with pytest.raises(SpecError, match="no such folder"):
        require_file_tier(spec(activations="O", offload=offload))
