"""The spec's keys for activations, recompute, attention and loss: their meaning, and the resolved
spec."""

from __future__ import annotations

import pytest

from ptrain.errors import SpecError
from ptrain.spec.activations import (
    ATTENTION_ONLY,
    FULL,
    PLAIN,
    SELECTIVE,
    ActivationMode,
    Operators,
    Policy,
)
from ptrain.spec.load import load
from ptrain.spec.model import Attention
from ptrain.spec.placement import Tier
from ptrain.spec.spec import ActivationSpec, LossSpec

MODEL = {"preset": "llama-tiny"}  # of 4 blocks
BASE = {"model": MODEL, "mesh": {"dp_shard": 2}, "batch": {"global": 8, "sequence": 32}}
ZERO3 = {"placement": {"dp_shard": ["S*", "S", "S", "R"]}}
TP = {"mesh": {"tp": 2}, "placement": {"tp": ["S", "S", "S", "R"]}}
M, ON_HOST, ON_FILE = (
    ActivationMode(policy=FULL),
    ActivationMode(tier=Tier.HOST),
    ActivationMode(tier=Tier.FILE),
)
INPUTS_ON_HOST = ActivationMode(policy=FULL, tier=Tier.HOST)


def tuple_with(mode):
    return {"placement": {"dp_shard": ["S*", "S", "S", mode]}}


def load_spec(**changes):
    """Return the spec, and require that its resolved form loads to the same spec."""
    spec = load(BASE | ZERO3 | changes).spec
    assert load(spec.resolved).spec == spec
    return spec


def fault(**changes):
    with pytest.raises(SpecError) as caught:
        load(BASE | ZERO3 | changes)
    (found,) = caught.value.faults
    return found


@pytest.mark.parametrize(
    ("changes", "meant"),
    [
        ({}, ActivationSpec()),
        ({"activations": "R"}, ActivationSpec()),
        ({"activations": "M"}, ActivationSpec(default=M)),
        ({"activations": "O"}, ActivationSpec(default=ON_HOST)),
        ({"activations": "R@host"}, ActivationSpec(default=ON_HOST)),
        ({"activations": "S@host"}, ActivationSpec(default=ON_HOST)),
        ({"activations": "R@file"}, ActivationSpec(default=ON_FILE)),
        ({"activations": "S@file"}, ActivationSpec(default=ON_FILE)),
        ({"activations": "M@host"}, ActivationSpec(default=INPUTS_ON_HOST)),
        ({"activations": "O", "offload": {"tier": "file"}}, ActivationSpec(default=ON_FILE)),
        (tuple_with("M"), ActivationSpec(default=M)),
        (tuple_with("M@host"), ActivationSpec(default=INPUTS_ON_HOST)),
        (tuple_with("R@host"), ActivationSpec(default=ON_HOST)),
        (tuple_with("O") | {"offload": {"tier": "file"}}, ActivationSpec(default=ON_FILE)),
        (tuple_with("M") | {"activations": "M"}, ActivationSpec(default=M)),
        (tuple_with("M") | {"mesh": {"dp_shard": 1}}, ActivationSpec(default=M)),
        (TP | {"activations": "M"}, ActivationSpec(default=M)),
    ],
)
def test_a_mode_of_activations_is_the_ranks_wherever_it_is_written(changes, meant):
    assert load_spec(**changes).activations == meant


def test_m_of_a_data_axis_goes_with_s_of_tp():
    modes = {"dp_shard": ["S*", "S", "S", "M"], "tp": ["S", "S", "S", "S"]}
    spec = load_spec(mesh={"dp_shard": 2, "tp": 2}, placement=modes)
    assert spec.activations == ActivationSpec(default=M)
    assert [str(factor.placement.activations) for factor in spec.factors] == ["M", "S"]


@pytest.mark.parametrize(
    ("written", "of_4_blocks"),
    [
        ({"0-1": "M", "2-": "R"}, (M, M, PLAIN, PLAIN)),
        ({"2-": "O", "0": "M"}, (M, PLAIN, ON_HOST, ON_HOST)),
        ({"1": "M@host", "3-3": "O"}, (PLAIN, INPUTS_ON_HOST, PLAIN, ON_HOST)),
        ({"0-": "M"}, (M, M, M, M)),
        ({}, (PLAIN,) * 4),
    ],
)
def test_blocks_are_kept_each_in_its_way_and_those_between_are_r(written, of_4_blocks):
    assert load_spec(activations=written).activations.block_modes(4) == of_4_blocks


def test_of_blocks_that_are_m_every_nth_is_recomputed():
    spec = load_spec(activations={"1-": "M"}, recompute={"every": 2})
    assert spec.activations.block_modes(6) == (PLAIN, M, PLAIN, M, PLAIN, M)


@pytest.mark.parametrize(
    ("written", "policy", "resolved"),
    [
        ("full", FULL, "full"),
        ("selective", SELECTIVE, "selective"),
        ("attention", ATTENTION_ONLY, "attention"),
        ({}, FULL, "full"),
        ({"policy": "selective"}, SELECTIVE, "selective"),
        ({"keep": []}, FULL, "full"),
        ({"keep": ["attention", "matmul"]}, SELECTIVE, "selective"),
        ({"keep": "matmul"}, Policy(keep=(Operators.MATMUL,)), {"keep": ["matmul"]}),
        (
            {"keep": ["collective", "softmax", "norm"]},
            Policy(keep=(Operators.SOFTMAX, Operators.NORM, Operators.COLLECTIVE)),
            {"keep": ["softmax", "norm", "collective"]},
        ),
        ({"every": 3}, FULL, {"policy": "full", "every": 3}),
        ({"policy": "selective", "every": 2}, SELECTIVE, {"policy": "selective", "every": 2}),
    ],
)
def test_a_policy_names_the_recomputed_operators(written, policy, resolved):
    spec = load_spec(activations="M", recompute=written)
    assert spec.activations.default == ActivationMode(policy=policy)
    assert spec.resolved["recompute"] == resolved


def test_without_a_policy_a_block_is_recomputed_whole():
    assert load_spec(activations="M").resolved["recompute"] == "full"


def test_offloaded_activations_are_local_in_every_notation():
    spec = load_spec(**tuple_with("R@host"), activations="O")
    assert spec.activations == load_spec(**tuple_with("O")).activations


def test_a_budget_takes_the_place_of_a_strategys_policy():
    spec = load_spec(placement="checkpoint-selective", recompute={"budget": "2 GiB"})
    assert spec.activations == ActivationSpec(default=M, budget=2**31, is_open=True)


def test_a_budget_alone_leaves_the_policy_open():
    spec = load_spec(recompute={"budget": "2 GiB"})
    assert spec.activations == ActivationSpec(default=M, budget=2**31, is_open=True)
    with_modes = load_spec(activations={"0-1": "M", "2-": "O"}, recompute={"budget": "2 GiB"})
    assert with_modes.activations.is_open
    assert with_modes.activations.block_modes(3) == (M, M, ON_HOST)


@pytest.mark.parametrize("policy", ["selective", "attention", "full"])
def test_a_budget_with_its_policy_is_chosen(policy):
    spec = load_spec(activations="M", recompute={"budget": 2**31, "policy": policy, "every": 2})
    assert not spec.activations.is_open
    assert spec.resolved["recompute"] == {"budget": 2**31, "policy": policy, "every": 2}


def test_a_budget_may_need_nothing_recomputed():
    spec = load_spec(recompute={"budget": 2**31, "policy": "none"})
    assert spec.activations == ActivationSpec(budget=2**31)


@pytest.mark.parametrize(
    ("written", "kind"),
    [
        ("sdpa", Attention.SDPA),
        ("eager", Attention.EAGER),
        ("math", Attention.EAGER),
        ("flex", Attention.FLEX),
    ],
)
@pytest.mark.parametrize("model", [MODEL, {"hf": "LlamaForCausalLM"}], ids=["own", "hf"])
def test_attention_is_a_top_level_key_and_belongs_to_the_model(written, kind, model):
    spec = load_spec(attention=written, model=model)
    assert spec.model.attention is kind
    assert spec.resolved.get("attention", "sdpa") == kind.value
    assert "attention" not in spec.resolved["model"]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("cross-entropy", LossSpec()),
        ({}, LossSpec()),
        ("chunked", LossSpec(chunk=1024)),
        ("fused", LossSpec(chunk=1024, fused=True)),
        ({"chunk": 256}, LossSpec(chunk=256)),
        ({"chunk": 256, "fused": True}, LossSpec(chunk=256, fused=True)),
        ({"kind": "chunked", "chunk": 256}, LossSpec(chunk=256)),
        ({"fused": False}, LossSpec()),
    ],
)
def test_a_loss_by_name_or_by_its_tokens(written, meant):
    assert load_spec(loss=written).loss == meant


def test_a_vocab_parallel_loss_is_the_default_over_tp():
    spec = load_spec(loss="vocab-parallel", **TP)
    assert spec == load_spec(**TP)


@pytest.mark.parametrize("model", [{"target": "m:f"}, {"hf": "LlamaForCausalLM"}])
def test_blocks_of_another_model_may_be_named(model):
    assert (
        load_spec(model=model | {"blocks": "encoder.layers.*"}).model.blocks == "encoder.layers.*"
    )


SLICES = (
    "activations can only be sharded on a named axis, because its ranks must hold the same tokens"
)


@pytest.mark.parametrize(
    ("changes", "place", "finding", "remedy"),
    [
        (
            tuple_with("M") | {"activations": "O"},
            "activations",
            "O, but placement.dp_shard.activations is M",
            "Remove `activations`, or use `placement.dp_shard.activations=R`.",
        ),
        (
            tuple_with("O") | {"activations": {"0-1": "M", "2-": "O"}},
            "activations",
            "M and O, but placement.dp_shard.activations is O",
            "Remove `activations`, or use `placement.dp_shard.activations=R`.",
        ),
        (
            {"activations": "S"},
            "activations",
            f"S: {SLICES}",
            "Use `R`, `M` or `O`.",
        ),
        (
            {"activations": {"0-1": "S*"}},
            "activations",
            f"S* of blocks 0-1: {SLICES}",
            "Use `R`, `M` or `O`.",
        ),
        (
            {"activations": {"0-2": "M", "2-": "O"}},
            "activations",
            "the block ranges '0-2' and '2-' overlap",
            "Give each block one mode. Blocks without a range are `R`.",
        ),
        (
            {"activations": {"0-": "M", "3": "O"}},
            "activations",
            "the block ranges '0-' and '3' overlap",
            "Give each block one mode. Blocks without a range are `R`.",
        ),
        (
            {"activations": {"3-1": "M"}},
            "activations",
            "the range '3-1' ends before it starts",
            'Use `"1-3"`.',
        ),
        (
            {"activations": {"first": "M"}},
            "activations",
            "'first' is not a range of blocks",
            'Use `first-last`, counted from 0: `{"0-7": M, "8-": R}`.',
        ),
        (
            {"activations": "checkpoint"},
            "activations",
            "must be a mode (R, M or O; M@host), or modes by block; got the string 'checkpoint'",
            "Did you mean `M`?",
        ),
        (
            {"recompute": "selective"},
            "recompute",
            "recompute has no effect: no block has activations M, but R",
            (
                'Use `activations=M`, or `activations={"0-1": M}` for some blocks. Or remove '
                "`recompute`."
            ),
        ),
        (
            {"activations": "O", "recompute": {"every": 2}},
            "recompute",
            "recompute has no effect: no block has activations M, but O",
            (
                'Use `activations=M`, or `activations={"0-1": M}` for some blocks. Or remove '
                "`recompute`."
            ),
        ),
        (
            tuple_with("M") | {"recompute": "none"},
            "recompute",
            (
                "policy none contradicts activations M: activations would be neither saved nor "
                "recomputed"
            ),
            "Use `recompute=full`, `recompute=selective` or `placement.dp_shard.activations=R`.",
        ),
        (
            {"activations": "M", "recompute": {"policy": "full", "keep": ["matmul"]}},
            "recompute.keep",
            "`keep` and policy full both select what is saved",
            "Remove one of the two.",
        ),
        (
            {"activations": "M", "recompute": {"keep": ["matmul", "matmul"]}},
            "recompute.keep",
            "matmul is listed twice",
            "Remove one of the two.",
        ),
        (
            {"attention": "flash"},
            "attention",
            "not supported yet: attention flash is reserved; sdpa selects it where possible",
            "Supported: attention=sdpa or sdpa-gqa or eager or flex or math.",
        ),
        (
            {"attention": "eager", "model": {"target": "m:f"}},
            "attention",
            "eager has no effect: the function of `model.target` decides its attention",
            "Remove `attention`, or put it into `model.arguments`.",
        ),
        (
            {"loss": "vocab-parallel"},
            "loss",
            "vocab-parallel needs at least two tp ranks",
            "Use `loss=cross-entropy`, or use `mesh.tp=2` with `placement.tp=S,S,S,R`.",
        ),
        (
            TP | {"loss": "vocab-parallel", "tensor": {"loss_parallel": False}},
            "loss",
            "vocab-parallel contradicts tensor.loss_parallel: false",
            "Remove one of the two.",
        ),
        (
            {"loss": {"kind": "cross-entropy", "chunk": 8}},
            "loss.chunk",
            "cross-entropy computes all logits at once",
            "Remove `chunk`, or use `loss.kind=chunked`.",
        ),
        (
            {"loss": {"kind": "fused", "fused": False}},
            "loss.fused",
            "false contradicts kind fused",
            "Remove one of the two.",
        ),
        (
            {"model": MODEL | {"blocks": "blocks.*"}},
            "model.blocks",
            "`blocks` has no effect for built-in models",
            "Remove `model.blocks`, or set `model.target` or `model.hf`.",
        ),
    ],
)
def test_contradictions_are_rejected(changes, place, finding, remedy):
    found = fault(**changes)
    assert (found.place, found.finding, found.remedy) == (place, finding, remedy)


def test_an_invalid_mode_causes_no_further_errors():
    assert fault(activations="Q", recompute="full").place == "activations"
    tuples = {"dp_shard": ["S*", "S", "S", "Q"]}
    assert fault(placement=tuples, recompute="full").place == "placement.dp_shard.activations"


@pytest.mark.parametrize(
    ("changes", "meant"),
    [
        ({"checkpoint": "full"}, "Did you mean `recompute=full` with `activations=M`?"),
        ({"checkpoint": "selective"}, "Did you mean `recompute=selective` with `activations=M`?"),
        ({"gradient_checkpointing": True}, "Use `activations: M`."),
        ({"activation-checkpointing": True}, "Use `activations: M`."),
        ({"offload_activations": True}, "Use `activations: O`."),
        ({"attn_implementation": "eager"}, "Use `attention: eager`."),
        ({"linear_cross_entropy": True}, "Use `loss: fused`."),
        ({"activations": "M", "recompute": True}, "Did you mean 'full'?"),
        ({"activations": "M", "recompute": "selectve"}, "Did you mean 'selective'?"),
        ({"activations": "M", "recompute": {"keep": ["mm"]}}, "Did you mean 'matmul'?"),
        ({"activations": {"0-1": "offload"}}, "Did you mean `O`?"),
        ({"activations": "m@cpu"}, "Did you mean `M@host`?"),
        ({"attention": "flash_attention_2"}, "Did you mean 'sdpa'?"),
        ({"loss": "linear_cross_entropy"}, "Did you mean 'fused'?"),
    ],
)
def test_other_words_are_understood(changes, meant):
    assert fault(**changes).remedy.startswith(meant)


@pytest.mark.parametrize("key", ["activations", "recompute", "attention", "loss", "sync"])
def test_a_list_is_no_value_of_theirs(key):
    assert fault(**{key: ["full"]}).finding.endswith("; got a list")
