"""Partial sums that ranks of tp hold while layers with experts run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ptrain.facts.parameters import roles_of
from ptrain.verification.capture import is_gradient_addend, is_output_addend
from tests.pure.build import ODD_SHAPE

LATENT = replace(
    ODD_SHAPE, kv_heads=ODD_SHAPE.heads, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=2
)
EXPERTS = replace(ODD_SHAPE, experts=4, shared_experts=1, dense_layers=1, qk_norm=True)


@pytest.mark.parametrize(
    ("module", "gives", "gets"),
    [
        ("blocks.1", False, False),
        ("blocks.1.attention.query_norm", False, False),
        ("blocks.1.mlp", False, False),
        ("blocks.1.mlp.router", False, True),
        ("blocks.1.mlp.router.balance", False, True),
        ("blocks.1.mlp.experts", True, False),
        ("blocks.1.mlp.experts.up", False, False),
        ("blocks.1.mlp.experts.down", True, False),
        ("blocks.1.mlp.shared.down", True, False),
        ("blocks.0.mlp.down", False, False),  # a layer without them
    ],
)
def test_tensors_reduced_after_the_experts_are_partial_sums_before(module, gives, gets):
    roles = roles_of(EXPERTS)
    assert (is_output_addend(roles, module), is_gradient_addend(roles, module)) == (gives, gets)
    assert not is_output_addend((), module) and not is_gradient_addend((), module)


@pytest.mark.parametrize(
    ("module", "gets"),
    [
        ("blocks.1.attention", False),
        ("blocks.1.attention.query_down", True),
        ("blocks.1.attention.query_norm", True),
        ("blocks.1.attention.query_up", False),
        ("blocks.1.attention.kv_down", True),
        ("blocks.1.attention.kv_norm", True),
        ("blocks.1.attention.kv_up", False),
        ("blocks.1.attention.core", False),
        ("blocks.1.attention.output", False),
    ],
)
def test_the_gradient_of_a_tensor_shared_by_all_heads_is_a_partial_sum_on_each_rank(module, gets):
    roles = roles_of(LATENT)
    assert is_gradient_addend(roles, module) is gets and not is_output_addend(roles, module)
