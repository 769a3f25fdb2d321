"""Legal shapes with latent attention, and the axes on which they run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ptrain.algebra.legality import check, find_unsupported
from ptrain.derivation.estimate import token_operations
from ptrain.errors import Fault
from ptrain.facts.parameters import facts
from ptrain.spec.block import Bias, Positions
from ptrain.spec.load import load
from ptrain.spec.placement import Axis
from tests.pure.build import ODD_SHAPE, make_spec, tuple_of

SHAPE = replace(
    ODD_SHAPE,
    kv_heads=ODD_SHAPE.heads,
    kv_lora_rank=12,
    q_lora_rank=10,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=8,
)
OF_LATENT = "not available with latent attention (kv_lora_rank): "


def test_a_latent_shape_needs_no_heads_that_divide_the_stream():
    assert not check(make_spec({}, model=replace(SHAPE, heads=5, kv_heads=5)))


@pytest.mark.parametrize(
    ("changes", "place", "finding", "remedy"),
    [
        ({"kv_heads": 1}, "model.kv_heads",
         f"{OF_LATENT}every head has its own keys and values", "Remove `model.kv_heads`."),
        ({"own_head_dim": 10}, "model.head_dim",
         f"{OF_LATENT}use qk_nope_head_dim and qk_rope_head_dim instead",
         "Remove `model.head_dim`."),
        ({"rotary": 0.5}, "model.rotary",
         f"{OF_LATENT}qk_rope_head_dim sets the rotary dimensions", "Remove `model.rotary`."),
        ({"qk_norm": True}, "model.qk_norm",
         f"{OF_LATENT}the latent vectors are normalized instead", "Remove `model.qk_norm`."),
        ({"bias": Bias.QKV}, "model.bias",
         "not supported yet: bias qkv with latent attention (kv_lora_rank)",
         "Use `model.bias=none`."),
        ({"positions": Positions.NONE}, "model.positions",
         "latent attention uses rotary embeddings; got none", "Use `model.positions=rope`."),
        ({"qk_rope_head_dim": 3}, "model.qk_rope_head_dim",
         "3 is odd; rotary embeddings need an even number", "Use an even number."),
        ({"v_head_dim": 11}, "model.v_head_dim",
         "not supported yet: value heads of dimension 11 with query heads of dimension 10",
         "Use 10 or less."),
        ({"kv_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
         "model.q_lora_rank", "the model has no latent attention (kv_lora_rank is not set)",
         "Remove `model.q_lora_rank`, or set `model.kv_lora_rank`."),
    ],
)  # fmt: skip
def test_impossible_latent_attention_is_rejected(changes, place, finding, remedy):
    spec = make_spec({}, model=replace(SHAPE, **changes))
    assert check(spec) == (Fault(place=place, finding=finding, remedy=remedy),)


def test_latent_attention_waits_over_cp_and_in_the_naive_plan():
    over_cp = make_spec({Axis.CP: (2, tuple_of("R,R,R,S"))}, model=SHAPE)
    assert [fault.place for fault in find_unsupported(over_cp)] == ["model.kv_lora_rank"]
    options = "kv_lora_rank: 16, qk_nope_head_dim: 8, qk_rope_head_dim: 8, v_head_dim: 16"
    shape = f"{{layers: 2, hidden: 64, heads: 4, ffn: 64, vocab: 260, {options}}}"
    naive = load("tp", [f"model={shape}", "tensor.plan=naive", "mesh={tp: 2}"]).spec
    assert [fault.place for fault in find_unsupported(naive)] == ["tensor.plan"]


def test_a_token_of_deepseek_v3_makes_use_of_37_billion_parameters():
    """By its authors' count, without what is looked up (arXiv:2412.19437, section 4.2)."""
    shape = load("zero3", ["model.preset=deepseek-v3"]).spec.model
    per_token = token_operations(shape, facts(shape, 1), 1, is_causal=True) / 6
    looked_up = shape.vocab * shape.hidden
    assert (per_token + looked_up) / 1e9 == pytest.approx(37, abs=1)
