"""Activations that may be recomputed and offloaded, and the messages of rejections."""

from __future__ import annotations

import pytest

from ptrain.activations import rules
from ptrain.algebra.legality import check, find_unsupported
from ptrain.errors import SpecError
from ptrain.facts.model import ModelFacts
from ptrain.plan.lower import lower
from ptrain.spec.load import load
from ptrain.spec.pipeline import ScheduleName
from ptrain.spec.spec import require_file_tier

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
    found = (*check(made), *find_unsupported(made))
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
def test_activation_keys_apply_to_blocks_only(changes):
    assert refusals(**changes) == []


ONE_WAY = "activations need one mode for all axes, but are M on dp_replicate and O on"
TWICE = "splits backward passes into inputs and weights, and both would recompute blocks with"


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
                "Set `activations` once, at the top level of the spec.",
            ),
        ),
        (
            {"activations": {"2-5": "M"}},
            (
                "activations",
                "blocks 2-5, but the model has 4, from 0 to 3",
                'Use ranges within 0-3; "2-" ends at the last block.',
            ),
        ),
        (
            {"activations": {"0-3": "M", "4-": "R"}},
            (
                "activations",
                "blocks 4-, but the model has 4, from 0 to 3",
                'Use ranges within 0-3; "3-" ends at the last block.',
            ),
        ),
        (
            {"activations": {"7": "O"}},
            (
                "activations",
                "block 7, but the model has 4, from 0 to 3",
                'Use ranges within 0-3; "3-" ends at the last block.',
            ),
        ),
        (
            {"placement": {"dp_shard": ["S*", "S", "S", "S*"]}},
            (
                "placement.dp_shard",
                (
                    "(S*,S,S,S*) on dp_shard: activations of local samples cannot be sharded "
                    "over a data axis: use R (saved), M (recomputed) or O (offloaded). To shard "
                    "tokens, use cp (`mesh.cp=2`) [Theorem 3, gradient integrity]"
                ),
                "Use `placement.dp_shard=S*,S,S,R`.",
            ),
        ),
        (
            TP | {"placement": {"tp": ["S", "S", "S", "M"]}},
            (
                "placement.tp",
                (
                    "(S,S,S,M) on tp: activations on tp must be R, S (sharded by tokens) or S* "
                    "(saved as shards, all-gathered for backward); M and O are set for all axes "
                    "at the top level, `activations=M` [Definition 2]"
                ),
                "Use `placement.tp=S,S,S,R`.",
            ),
        ),
        (
            OTHER | {"activations": "M", "recompute": "attention"},
            (
                "recompute",
                (
                    "not supported yet: policy attention for custom models, whose attention "
                    "module is unknown"
                ),
                "Use `recompute.keep=[matmul]`, or `recompute=selective`.",
            ),
        ),
        (
            OTHER | {"recompute": {"budget": "1 GiB"}},
            (
                "recompute.budget",
                (
                    "not supported yet: recompute.budget for custom models, whose peak is known "
                    "only after a trace"
                ),
                (
                    "Use `activations=M` with `recompute=selective` or `recompute=full`; `ptrain "
                    "predict` derives each."
                ),
            ),
        ),
        (
            {"activations": "M", "unit": "sub-block"},
            (
                "unit",
                (
                    "not supported yet: unit=sub-block with recomputed blocks, whose parts would "
                    "be gathered again"
                ),
                "Use `unit=block`.",
            ),
        ),
        (
            TP | {"activations": "M", "tensor": {"plan": "naive"}},
            (
                "tensor.plan",
                "not supported yet: naive with recomputed or offloaded activations",
                "Use `tensor.plan=paired`, or `activations=R`.",
            ),
        ),
        (
            {"model": {"preset": "gpt-tiny", "dropout": 0.1}, "attention": "flex"},
            (
                "attention",
                "torch's flex_attention does not support dropout; the model has 0.1",
                "Use `attention=sdpa` or `attention=eager`, or `model.attention_dropout=0`.",
            ),
        ),
        (
            {"attention": "flex", "device": "cpu"},
            (
                "attention",
                "torch's flex_attention has no backward pass on CPUs",
                "Use `attention=sdpa` or `attention=eager`, or `device=cuda`.",
            ),
        ),
        (
            {"offload": {"path": "/tmp"}, "activations": "O"},
            (
                "offload.path",
                "/tmp has no effect: no state is in files",
                "Remove `offload.path`, or use `offload.tier=file`.",
            ),
        ),
    ],
)
def test_a_rejection_names_an_alternative(changes, refusal):
    assert refusals(**changes) == [refusal]


GROUPED = {"attention": "sdpa-gqa", "model": MODEL | {"kv_heads": 1}}
NO_KERNEL = "sdpa-gqa: torch has no kernel for fewer heads of keys with"


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({}, []),
        ({"device": "cuda", "precision": {"layout": "bf16"}}, []),
        ({"device": "cuda"}, ["fp32 on GPUs"]),
        (
            {"model": MODEL | {"kv_heads": 1, "window": 8}},
            ["masks of windows or documents"],
        ),
        ({"model": MODEL | {"kv_heads": 1, "attention_soft_cap": 50}}, ["capped scores"]),
    ],
)
def test_grouped_attention_is_rejected_where_torch_would_hold_the_scores(changes, reasons):
    assert refusals(**GROUPED | changes) == [
        ("attention", f"{NO_KERNEL} {reason}", "Use `attention=sdpa`.") for reason in reasons
    ]


def test_grouped_attention_is_torchs_where_no_heads_are_shared():
    assert (
        spec(attention="sdpa-gqa", model={"preset": "gpt-tiny"}).resolved.get("attention", "sdpa")
        == "sdpa"
    )
    assert spec(**GROUPED).resolved["attention"] == "sdpa-gqa"


def test_a_class_of_transformers_decides_by_itself_if_it_copies_keys():
    ((_, finding, remedy),) = refusals(**OTHER | {"attention": "sdpa-gqa"})
    assert finding.startswith("sdpa-gqa is of built-in models; LlamaForCausalLM decides")
    assert remedy == "Use `attention=sdpa`."


@pytest.mark.parametrize("name", HALVES)
def test_a_block_is_not_recomputed_twice_by_a_backward_pass_in_halves(name):
    in_halves = PP | {"pipeline": {"schedule": str(name)}}
    remedy = (
        "Use a schedule with full backward passes, `pipeline.schedule=1f1b` or "
        "`pipeline.schedule=interleaved`, or `activations=R`."
    )
    assert refusals(activations="M", **in_halves) == [
        ("pipeline.schedule", f"{name} {TWICE} activations M", remedy)
    ]
    assert refusals(activations="O", **in_halves) == [
        (
            "pipeline.schedule",
            f"not supported yet: offloaded activations with {name}, whose two backward halves "
            "would both load them",
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
    assert fault.finding == "blocks 2-5, but the model has 2, from 0 to 1"
    assert fault.remedy == 'Use ranges within 0-1; "1-" ends at the last block.'


def test_a_model_without_blocks_keeps_nothing_by_block():
    with pytest.raises(SpecError) as caught:
        lower(spec(**OTHER | {"activations": "M"}), ModelFacts.of_units((("",),)))
    (fault,) = caught.value.faults
    assert fault.finding == "modes by block need blocks, and none were found in the model"
    assert fault.remedy == "Set `model.blocks`, for example `model.blocks=layers.*`."


def test_a_budget_is_settled_before_anything_is_planned():
    with pytest.raises(SpecError, match="the recompute policy is not selected yet"):
        lower(spec(recompute={"budget": "1 GiB"}), ModelFacts.of_units((("",),)))


def test_saved_tensors_in_files_need_a_folder_that_takes_them(tmp_path):
    offload = {"path": str(tmp_path / "none"), "tier": "file"}
    with pytest.raises(SpecError, match="no such folder"):
        require_file_tier(spec(activations="O", offload=offload))
