"""GPT: LayerNorm with bias, GELU, biases everywhere, learned positions, dropout, a tied head.

With ffn = 4 hidden it is the transformer on which P = 12LH² + biases, norms, embeddings, positions.
Legend of shape suffixes: B samples, T tokens, C hidden, H heads, D elements per head, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptrain.models.attention import attention_core
from ptrain.models.numerics import widen
from ptrain.spec.model import ModelShape

NORM_EPS = 1e-5


class LayerNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.bias = nn.Parameter(torch.zeros(hidden))

    def forward(self, x_BTC: Tensor) -> Tensor:
        # The weight is widened last, so that its gradient comes first whether or not it is a copy.
        bias_C, weight_C = widen(self.bias), widen(self.weight)
        y_BTC = F.layer_norm(widen(x_BTC), weight_C.shape, weight_C, bias_C, NORM_EPS)
        return y_BTC.to(x_BTC.dtype)


class Attention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.query = nn.Linear(shape.hidden, shape.hidden)
        self.key = nn.Linear(shape.hidden, shape.hidden)
        self.value = nn.Linear(shape.hidden, shape.hidden)
        self.core = attention_core(shape)
        self.output = nn.Linear(shape.hidden, shape.hidden)

    def forward(self, x_BTC: Tensor) -> Tensor:
        y_BHTD = self.core(
            self._by_heads(self.query(x_BTC)),
            self._by_heads(self.key(x_BTC)),
            self._by_heads(self.value(x_BTC)),
        )
        y: Tensor = self.output(y_BHTD.transpose(1, 2).flatten(2))
        return y

    def _by_heads(self, x_BTC: Tensor) -> Tensor:
        return x_BTC.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, ffn)
        self.down = nn.Linear(ffn, hidden)

    def forward(self, x_BTC: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x_BTC)))
        return y


class Block(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.dropout = shape.dropout
        self.attention_norm = LayerNorm(shape.hidden)
        self.attention = Attention(shape)
        self.mlp_norm = LayerNorm(shape.hidden)
        self.mlp = MLP(shape.hidden, shape.ffn)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self._drop(self.attention(self.attention_norm(x_BTC)))
        return x_BTC + self._drop(self.mlp(self.mlp_norm(x_BTC)))

    def _drop(self, x_BTC: Tensor) -> Tensor:
        return F.dropout(x_BTC, self.dropout, self.training) if self.dropout else x_BTC


class Positions(nn.Embedding):
    """Learned positions, added to what stands at them."""

    def forward(self, x_BTC: Tensor) -> Tensor:
        return x_BTC + self.weight[: x_BTC.shape[1]]


class Gpt(nn.Module):
    """`sequence` is the number of learned positions; shorter inputs are fine, longer are not."""

    def __init__(self, shape: ModelShape, *, sequence: int) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = Positions(sequence, shape.hidden)
        self.dropout = nn.Dropout(shape.dropout) if shape.dropout else nn.Identity()
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = LayerNorm(shape.hidden)
        self.head = None if shape.tied else nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.dropout(self.positions(self.embed(tokens_BT)))
        for block in self.blocks:
            x_BTC = block(x_BTC)
        x_BTC = self.norm(x_BTC)
        return self.logits(x_BTC)

    def logits(self, x_BTC: Tensor) -> Tensor:
        """Return the logits of normalized hidden states."""
        if self.head is None:
            return F.linear(x_BTC, self.embed.weight)
        logits_BTV: Tensor = self.head(x_BTC)
        return logits_BTV
