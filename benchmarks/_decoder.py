"""A custom decoder whose tensors have the names of a llama's, so that it loads the same folder: for
`loading.py`."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        narrow = self.head_dim * kv_heads
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, narrow, bias=False)
        self.v_proj = nn.Linear(hidden, narrow, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        parts = (project(x_BTC) for project in projections)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        y_BHTD = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(y_BHTD.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, ffn, bias=False)
        self.up_proj = nn.Linear(hidden, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        y_BTC: Tensor = self.down_proj(F.silu(self.gate_proj(x_BTC)) * self.up_proj(x_BTC))
        return y_BTC


class Layer(nn.Module):
    def __init__(self, hidden: int, ffn: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden)
        self.self_attn = Attention(hidden, heads, kv_heads)
        self.post_attention_layernorm = nn.RMSNorm(hidden)
        self.mlp = FeedForward(hidden, ffn)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.self_attn(self.input_layernorm(x_BTC))
        y_BTC: Tensor = x_BTC + self.mlp(self.post_attention_layernorm(x_BTC))
        return y_BTC


class Base(nn.Module):
    def __init__(self, hidden: int, layers: nn.ModuleList, vocab: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.layers, self.norm = layers, nn.RMSNorm(hidden)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.embed_tokens(tokens_BT)
        for layer in self.layers:
            x_BTC = layer(x_BTC)
        y_BTC: Tensor = self.norm(x_BTC)
        return y_BTC


class Decoder(nn.Module):
    tp_plan: ClassVar[dict[str, str]] = {
        "model.embed_tokens": "vocabulary",
        "model.layers.*.self_attn": "whole input",
        **{f"model.layers.*.self_attn.{part}_proj": "column" for part in "qkv"},
        "model.layers.*.self_attn.o_proj": "row",
        "model.layers.*.mlp": "whole input",
        **{f"model.layers.*.mlp.{part}_proj": "column" for part in ("gate", "up")},
        "model.layers.*.mlp.down_proj": "row",
        "lm_head": "head",
    }

    def __init__(self, base: Base, hidden: int, vocab: int) -> None:
        super().__init__()
        self.model, self.lm_head = base, nn.Linear(hidden, vocab, bias=False)
        self.register_buffer("scale", torch.ones(hidden), persistent=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        logits_BTV: Tensor = self.lm_head(self.model(tokens_BT) * self.scale)
        return logits_BTV


def build(
    hidden: int, ffn: int, *, layers: int, vocab: int, heads: int = 16, kv_heads: int = 4
) -> nn.Module:
    """Return a decoder of one of these sizes with torch's initial values."""
    stack = nn.ModuleList(Layer(hidden, ffn, heads, kv_heads) for _ in range(layers))
    return Decoder(Base(hidden, stack, vocab), hidden, vocab)
