"""Llama: RMSNorm, grouped-query attention with RoPE, SwiGLU, no biases, a head of its own or tied.

Legend of shape suffixes: B samples, T tokens, C hidden, H heads, G key-value heads, D elements per
head, K = D / 2 rotation pairs, V vocabulary.

Note: query, key and value are three projections, so that every tensor saved for the backward pass
has a size that is one product of shape fields. A tied head reads the embedding's weight instead of
sharing a Parameter, so that `to_empty` cannot untie it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptrain.models.attention import attention_core
from ptrain.models.numerics import widen
from ptrain.spec.model import ModelShape

NORM_EPS = 1e-5


class RMSNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x_BTC: Tensor) -> Tensor:
        wide_BTC = widen(x_BTC)
        scale_BT1 = torch.rsqrt(wide_BTC.square().mean(-1, keepdim=True) + NORM_EPS)
        return (wide_BTC * scale_BT1).to(x_BTC.dtype) * self.weight


class Attention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        kv_hidden = shape.kv_heads * shape.head_dim
        self.query = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.key = nn.Linear(shape.hidden, kv_hidden, bias=False)
        self.value = nn.Linear(shape.hidden, kv_hidden, bias=False)
        self.core = attention_core(shape)
        self.output = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x_BTC: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        q_BTHD = rotate(self.query(x_BTC).unflatten(-1, (-1, self.head_dim)), cos_TK, sin_TK)
        k_BTGD = rotate(self.key(x_BTC).unflatten(-1, (-1, self.head_dim)), cos_TK, sin_TK)
        v_BTGD = self.value(x_BTC).unflatten(-1, (-1, self.head_dim))
        y_BHTD = self.core(q_BTHD.transpose(1, 2), k_BTGD.transpose(1, 2), v_BTGD.transpose(1, 2))
        y: Tensor = self.output(y_BHTD.transpose(1, 2).flatten(2))
        return y


class SwiGLU(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x_BTC)) * self.up(x_BTC))
        return y


class Block(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.hidden)
        self.attention = Attention(shape)
        self.mlp_norm = RMSNorm(shape.hidden)
        self.mlp = SwiGLU(shape.hidden, shape.ffn)

    def forward(self, x_BTC: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC), cos_TK, sin_TK)
        return x_BTC + self.mlp(self.mlp_norm(x_BTC))


class Llama(nn.Module):
    """`sequence` sizes the rotation tables; shorter inputs are fine, longer ones are not."""

    cos_TK: Tensor
    sin_TK: Tensor

    def __init__(self, shape: ModelShape, *, sequence: int) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden)
        self.head = None if shape.tied else nn.Linear(shape.hidden, shape.vocab, bias=False)
        for name in ("cos_TK", "sin_TK"):
            empty_TK = torch.empty(sequence, shape.head_dim // 2, dtype=torch.float32)
            self.register_buffer(name, empty_TK, persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Fill the rotation tables where they stand: computed in fp64, stored in their dtype."""
        num_tokens, num_pairs = self.cos_TK.shape
        positions_T = torch.arange(num_tokens, dtype=torch.float64, device=self.cos_TK.device)
        pairs_K = torch.arange(num_pairs, dtype=torch.float64, device=self.cos_TK.device)
        frequencies_K = self.shape.rope_base ** (-pairs_K / num_pairs)
        angles_TK = positions_T[:, None] * frequencies_K
        self.cos_TK.copy_(angles_TK.cos())
        self.sin_TK.copy_(angles_TK.sin())

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTC = block(x_BTC, self.cos_TK, self.sin_TK)
        x_BTC = self.norm(x_BTC)
        return self.logits(x_BTC)

    def logits(self, x_BTC: Tensor) -> Tensor:
        """Return the logits of normalized hidden states."""
        if self.head is None:
            return F.linear(x_BTC, self.embed.weight)
        logits_BTV: Tensor = self.head(x_BTC)
        return logits_BTV


def rotate(x_BTHD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """RoPE: pair (i, i + K) of every head turns by position · base^(-i/K). The tables may be of
    more tokens than there are."""
    num_tokens = x_BTHD.shape[1]
    cos_T1K, sin_T1K = cos_TK[:num_tokens, None], sin_TK[:num_tokens, None]
    left_BTHK, right_BTHK = widen(x_BTHD).chunk(2, dim=-1)
    turned = (
        left_BTHK * cos_T1K - right_BTHK * sin_T1K,
        right_BTHK * cos_T1K + left_BTHK * sin_T1K,
    )
    return torch.cat(turned, dim=-1).to(x_BTHD.dtype)
