"""Multi-head latent attention: queries, keys and values are made of few features that all heads
share, and one key that turns by its place is that of every head (DeepSeek-V2, arXiv:2405.04434,
equations 9 to 19).

Legend of shape suffixes: B samples, T tokens, C hidden, L latent features, H heads, D elements of a
head's query, R of them that turn, N that do not, V elements of a head's value, E both of N and V,
K rotation pairs.

Note: what turns stands in front within a head. A published model has it behind, and has a pair's
two elements side by side: its rows are put in this order, and the scores are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ptrain.models.attention import attention_core
from ptrain.models.norm import norm_of
from ptrain.models.rotary import rotate
from ptrain.spec.model import ModelShape


class LatentAttention(nn.Module):
    """Causal attention of the tokens to themselves; given what `block.SelfAttention` is given."""

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        assert shape.kv_lora_rank is not None, "keys and values are made of something"
        self.head_dim = shape.head_dim
        self.latent_and_turning = shape.kv_lora_rank, shape.qk_rope_head_dim
        self.key_and_value = shape.qk_nope_head_dim, shape.v_head_dim
        rank = shape.q_lora_rank
        self.query_down = None if rank is None else _linear(shape.hidden, rank)
        self.query_norm = None if rank is None else norm_of(shape, rank)
        self.query_up = _linear(rank or shape.hidden, shape.query_width)
        self.kv_down = _linear(shape.hidden, sum(self.latent_and_turning))
        self.kv_norm = norm_of(shape, shape.kv_lora_rank)
        self.kv_up = _linear(shape.kv_lora_rank, shape.heads * sum(self.key_and_value))
        self.core = attention_core(shape, layer)
        self.output = _linear(shape.value_width, shape.hidden)

    def forward(
        self,
        x_BTC: Tensor,
        cos_TK: Tensor,
        sin_TK: Tensor,
        mask_TT: Tensor | None = None,
    ) -> Tensor:
        q_BTHD = rotate(self._queries(x_BTC), cos_TK, sin_TK)
        latent_BTL, key_BTR = self.kv_down(x_BTC).split(self.latent_and_turning, -1)
        own_BTHE = self.kv_up(self.kv_norm(latent_BTL)).unflatten(-1, (-1, sum(self.key_and_value)))
        key_BTHN, v_BTHV = own_BTHE.split(self.key_and_value, -1)
        key_BT1R = rotate(key_BTR[:, :, None], cos_TK, sin_TK)
        k_BTHD = torch.cat((key_BT1R.expand(-1, -1, key_BTHN.shape[2], -1), key_BTHN), -1)
        y_BHTV = self.core(*(x.transpose(1, 2) for x in (q_BTHD, k_BTHD, v_BTHV)), mask_TT)
        y: Tensor = self.output(y_BHTV.transpose(1, 2).flatten(2))
        return y

    def _queries(self, x_BTC: Tensor) -> Tensor:
        if self.query_down is not None and self.query_norm is not None:
            x_BTC = self.query_norm(self.query_down(x_BTC))
        return self.query_up(x_BTC).unflatten(-1, (-1, self.head_dim))


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)
