"""How models of transformers that say nothing of the tensor axis are cut over it, by model type."""

from __future__ import annotations

from collections.abc import Mapping

from ptrain.spec.role import Role

KNOWN_PLANS: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "transformer.h.*.attn.c_attn": Role.FUSED_COLUMN,
        "transformer.h.*.attn.split_size": Role.COUNT,
        "transformer.h.*.attn.c_proj": Role.ROW,
        "transformer.h.*.mlp.c_fc": Role.COLUMN,
        "transformer.h.*.mlp.c_proj": Role.ROW,
        "lm_head": Role.HEAD,
    },
}
