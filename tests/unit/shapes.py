"""Small shapes of both families, tied and untied, with no round sizes; their traces."""

from __future__ import annotations

from dataclasses import replace

import torch

from ptrain.models.initialize import build_model, cast_module
from ptrain.models.trace import to_timeline
from ptrain.models.units import unit_modules
from ptrain.spec.block import Activation, Bias, Norm, Positions
from ptrain.spec.dials import UnitSize
from ptrain.spec.model import Family, ModelShape
from ptrain.timeline import Timeline
from ptrain.traces.rank_part import RankPart
from tests.pure.build import ODD_SHAPE

SMALL_GPT = ModelShape(
    family=Family.GPT, layers=2, hidden=30, heads=3, kv_heads=3, ffn=120, vocab=61, tied=True
)
SHAPES = [
    ODD_SHAPE,
    replace(ODD_SHAPE, tied=True),
    replace(ODD_SHAPE, kv_heads=3, layers=1),
    SMALL_GPT,
    replace(SMALL_GPT, tied=False, ffn=77, layers=4),
    replace(SMALL_GPT, layers=1, heads=1, kv_heads=1),
]
LATENT = replace(
    ODD_SHAPE,
    kv_heads=ODD_SHAPE.heads,
    kv_lora_rank=11,
    q_lora_rank=13,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=7,
)
# Compositions of no family.
COMPOSED = [
    replace(
        ODD_SHAPE,
        norm=Norm.RMS_PLUS_ONE,
        activation=Activation.GEGLU,
        post_norm=True,
        qk_norm=True,
        own_head_dim=10,
        window=5,
        global_every=2,
        window_rope_base=100.0,
        embedding_scale=3.0,
        attention_soft_cap=2.0,
        logit_soft_cap=3.0,
        tied=True,
    ),
    replace(
        SMALL_GPT,
        parallel=True,
        tied=False,
        head_bias=True,
        positions=Positions.ROPE,
        rotary=0.5,
        own_head_dim=12,
    ),
    replace(ODD_SHAPE, bias=Bias.QKV, window=4, layers=2),
    replace(SMALL_GPT, kv_heads=1, qk_norm=True, activation=Activation.RELU2),
    replace(ODD_SHAPE, norm=Norm.LAYER_WITHOUT_BIAS, positions=Positions.NONE, layers=1),
    replace(
        ODD_SHAPE, experts=5, experts_per_token=2, expert_ffn=9, shared_experts=2, dense_layers=1
    ),
    replace(ODD_SHAPE, experts=3, capacity_factor=1.5, activation=Activation.RELU2, layers=2),
    replace(ODD_SHAPE, experts=4, expert_groups=2, bias_update_rate=0.1, dense_layers=2),
    LATENT,
    replace(LATENT, q_lora_rank=None, v_head_dim=10),
]


def trace_shape(
    shape: ModelShape,
    dtype: torch.dtype,
    unit: UnitSize | None = None,
    *,
    batch: int = 2,
    sequence: int = 16,
) -> Timeline:
    """Return what one micro-batch of a whole model allocates, traced."""
    model = build_model(shape, sequence=sequence)
    cast_module(model, dtype)
    part = RankPart(batch=batch, sequence=sequence)
    return to_timeline(part.traces(model, unit_modules(model, unit))[0])
