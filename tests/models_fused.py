"""Models with fused projections of unequal lengths, and code that counts heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models_from_outside import Block, Nested

GROUPED_PLAN = {
    "h.*.attn": "whole input",
    "h.*.attn.qkv": "fused column",
    "h.*.attn.queries": "count",
    "h.*.attn.keys": "count",
    "h.*.attn.proj": "row",
    "h.*.mlp": "whole input",
    "h.*.mlp.gate_up": "fused column",
    "h.*.mlp.down": "row",
    "head": "head",
}


class GroupedAttention(nn.Module):
    """Attention with queries and fewer keys and values in one projection, whose counts are
    attributes."""

    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.queries, self.keys = hidden, kv_heads * self.head_dim
        self.qkv = nn.Linear(hidden, self.queries + 2 * self.keys)
        self.proj = nn.Linear(hidden, hidden)

    def forward(self, x_BTC: Tensor) -> Tensor:
        parts = self.qkv(x_BTC).split([self.queries, self.keys, self.keys], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        y_BHTD = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y: Tensor = self.proj(y_BHTD.transpose(1, 2).flatten(2))
        return y


class GatedMLP(nn.Module):
    """Gate and up in one projection."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        gate, up = self.gate_up(x_BTC).chunk(2, dim=-1)
        y: Tensor = self.down(F.silu(gate) * up)
        return y


class ShiftingBlock(Block):
    """A block in which a token sees the previous one between the sub-blocks."""

    def forward(self, x_BTC: Tensor) -> Tensor:
        before_BTC = F.pad(x_BTC, (0, 0, 1, 0))[:, :-1]
        return super().forward(x_BTC + before_BTC)


def grouped(hidden: int = 32, layers: int = 2, heads: int = 4, kv_heads: int = 2) -> Nested:
    """Return a model with fused projections of unequal lengths."""
    blocks = [Block(hidden, GroupedAttention(hidden, heads, kv_heads)) for _ in range(layers)]
    for block in blocks:
        block.mlp = GatedMLP(hidden)
    model = Nested(hidden, blocks, tied=False)
    model.tp_plan = GROUPED_PLAN
    return model


def shifting(hidden: int = 32, layers: int = 2, heads: int = 4) -> Nested:
    """Return a model whose blocks mix tokens outside of attention."""
    blocks = [ShiftingBlock(hidden, GroupedAttention(hidden, heads, heads)) for _ in range(layers)]
    model = Nested(hidden, blocks, tied=False)
    plan = {name: word for name, word in GROUPED_PLAN.items() if "mlp" not in name}
    model.tp_plan = plan
    return model


def early(hidden: int = 32, heads: int = 4) -> Nested:
    """Return a model that drops the replicated input of a sub-block in its middle."""
    blocks = [Block(hidden, DroppingLate(hidden, heads))]
    model = Nested(hidden, blocks, tied=False)
    model.tp_plan = {"h.*.attn.up": "column", "h.*.attn.down": "row"}
    return model


class DroppingLate(nn.Module):
    """A sub-block that drops its input between column and row."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, heads * hidden), nn.Linear(heads * hidden, hidden)
        self.drop = nn.Dropout(0.1)

    def forward(self, x_BTC: Tensor) -> Tensor:
        y_BTF = torch.relu(self.up(x_BTC))
        dropped_BTC = self.drop(x_BTC)
        y: Tensor = self.down(y_BTF) + dropped_BTC
        return y
