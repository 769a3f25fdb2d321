"""A decoder's block, composed as its shape says: attention and a feed-forward part, each behind a
norm, added to the residual stream.

Legend of shape suffixes: B samples, T tokens, C hidden, H heads, G key-value heads, D elements per
head, K rotation pairs.

Note: query, key and value are three projections, so that every tensor saved for the backward pass
has a size that is one product of shape fields.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ptrain.models.attention import attention_core
from ptrain.models.feed_forward import FeedForward
from ptrain.models.latent import LatentAttention
from ptrain.models.moe import MoE
from ptrain.models.norm import norm_of
from ptrain.models.rotary import rotate
from ptrain.spec.block import Bias
from ptrain.spec.model import ModelShape


class SelfAttention(nn.Module):
    """Causal attention of the tokens to themselves; `cos_TK` and `sin_TK` turn queries and keys,
    `mask_TT` hides what a window does not reach."""

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        has_bias = shape.bias is not Bias.NONE
        self.query = nn.Linear(shape.hidden, shape.query_width, bias=has_bias)
        self.query_norm = norm_of(shape, shape.head_dim) if shape.qk_norm else None
        self.key = nn.Linear(shape.hidden, shape.kv_width, bias=has_bias)
        self.key_norm = norm_of(shape, shape.head_dim) if shape.qk_norm else None
        self.value = nn.Linear(shape.hidden, shape.kv_width, bias=has_bias)
        self.core = attention_core(shape, layer)
        self.output = nn.Linear(shape.query_width, shape.hidden, bias=shape.bias is Bias.ALL)

    def forward(
        self,
        x_BTC: Tensor,
        cos_TK: Tensor | None = None,
        sin_TK: Tensor | None = None,
        mask_TT: Tensor | None = None,
    ) -> Tensor:
        heads = self._heads(x_BTC, cos_TK, sin_TK)
        y_BHTD = self.core(*heads, mask_TT)
        if cos_TK is None:
            del heads  # the committed tables have turned ones live until the output is there
        y: Tensor = self.output(y_BHTD.transpose(1, 2).flatten(2))
        return y

    def _heads(
        self, x_BTC: Tensor, cos_TK: Tensor | None, sin_TK: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, heads first."""

        def placed(x_BTHD: Tensor, norm: nn.Module | None) -> Tensor:
            x_BTHD = x_BTHD if norm is None else norm(x_BTHD)
            if cos_TK is None or sin_TK is None:
                return x_BTHD
            return rotate(x_BTHD, cos_TK, sin_TK)

        return (
            placed(self._split(self.query(x_BTC)), self.query_norm).transpose(1, 2),
            placed(self._split(self.key(x_BTC)), self.key_norm).transpose(1, 2),
            self._split(self.value(x_BTC)).transpose(1, 2),
        )

    def _split(self, x_BTC: Tensor) -> Tensor:
        return x_BTC.unflatten(-1, (-1, self.head_dim))


class Block(nn.Module):
    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        self.dropout, self.residual_scale = shape.dropouts.hidden, shape.residual_scale
        self.attention_norm = norm_of(shape, shape.hidden)
        attention = LatentAttention if shape.is_latent else SelfAttention
        self.attention = attention(shape, layer)
        self.attention_post_norm = norm_of(shape, shape.hidden) if shape.post_norm else None
        self.mlp_norm = None if shape.parallel else norm_of(shape, shape.hidden)
        has_experts = shape.has_experts(layer)
        self.mlp = MoE(shape) if has_experts else FeedForward(shape, shape.ffn)
        self.mlp_post_norm = norm_of(shape, shape.hidden) if shape.post_norm else None

    def forward(self, x_BTC: Tensor, *given: Tensor | None) -> Tensor:
        """`given` is what `SelfAttention` takes beside the stream."""
        if self.mlp_norm is None:
            y_BTC = self.attention_norm(x_BTC)
            x_BTC = x_BTC + self._added(self.attention(y_BTC, *given), self.attention_post_norm)
            return x_BTC + self._added(self.mlp(y_BTC), self.mlp_post_norm)
        x_BTC = x_BTC + self._added(
            self.attention(self.attention_norm(x_BTC), *given), self.attention_post_norm
        )
        return x_BTC + self._added(self.mlp(self.mlp_norm(x_BTC)), self.mlp_post_norm)

    def _added(self, x_BTC: Tensor, norm: nn.Module | None) -> Tensor:
        """Return what a sub-block adds to the stream, of what it gave."""
        if norm is not None:
            x_BTC = norm(x_BTC)
        if self.residual_scale is not None:
            x_BTC = x_BTC * self.residual_scale
        return F.dropout(x_BTC, self.dropout, self.training) if self.dropout else x_BTC
