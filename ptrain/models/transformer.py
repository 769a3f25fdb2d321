"""The built-in models: decoders of equal blocks, with rotary or learned positions and standard or
latent attention.

A block has attention and a feed-forward layer, each after a norm and added to the residual stream.
Multi-head latent attention follows DeepSeek-V2 (arXiv:2405.04434, equations 9 to 19).

Legend of shape suffixes: B samples, T tokens, C hidden or features, V vocabulary, H heads, G
key-value heads, D elements per head, K rotation pairs, L latent features; of latent attention R
elements of a head that rotate, N that do not, V elements of a head's value, E both of N and V.

Notes: a tied head reads the embedding's weight instead of sharing a Parameter, so that `to_empty`
cannot untie it. Query, key and value are three projections, so that the size of every tensor saved
for backward is one product of shape fields. Norms compute in at least fp32. In latent attention the
rotating elements come first within a head. Published models have them last, with the elements of a
pair adjacent, so their rows are reordered, which gives identical scores.

Sources: Su et al. 2021 (rotary positions); Llama 3.1's scaling as in Meta's llama-models,
`apply_scaling`; YaRN, Peng et al. 2023 (arXiv:2309.00071), section 3.2.
"""

from __future__ import annotations

import math
from typing import Any, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptrain.facts.parameters import LOCAL, tables_of
from ptrain.models.attention import attention_core, documents_of
from ptrain.models.moe import FeedForward, MoE
from ptrain.models.numerics import cap_values, widen
from ptrain.models.quantized import add_adapters
from ptrain.spec.block import Bias, Norm, Positions, RopeScaling
from ptrain.spec.model import ModelShape


def apply_rotary(x_BTHD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Apply rotary positions: rotate pair (i, i + K) of every head by position · base^(-i/K).

    Elements after the pairs stay unchanged. The tables may have rows for more tokens than there
    are.

    Args:
        x_BTHD: Queries or keys [B, T, H, D] with D of at least 2K.
        cos_TK: The cosines of the angles [T or more, K].
        sin_TK: Their sines [T or more, K].

    Returns:
        The rotated tensor, in the shape and dtype of `x_BTHD`; it is computed in at least fp32.
    """
    num_tokens, num_turned = x_BTHD.shape[1], 2 * cos_TK.shape[-1]
    cos_T1K, sin_T1K = cos_TK[:num_tokens, None], sin_TK[:num_tokens, None]
    if num_turned == x_BTHD.shape[-1]:
        left_BTHK, right_BTHK = widen(x_BTHD).chunk(2, dim=-1)
        behind: tuple[Tensor, ...] = ()
    else:
        turning_BTHD, rest_BTHD = widen(x_BTHD).tensor_split((num_turned,), dim=-1)
        left_BTHK, right_BTHK = turning_BTHD.chunk(2, dim=-1)
        behind = (rest_BTHD,)
    turned = (
        left_BTHK * cos_T1K - right_BTHK * sin_T1K,
        right_BTHK * cos_T1K + left_BTHK * sin_T1K,
    )
    return torch.cat((*turned, *behind), dim=-1).to(x_BTHD.dtype)


@torch.no_grad()
def fill_tables(
    shape: ModelShape,
    cos_TK: Tensor,
    sin_TK: Tensor,
    *,
    spans: tuple[tuple[int, int], ...] = (),
    is_local: bool,
) -> None:
    """Fill the tables of angles in place: computed in fp64, stored in the dtype of the tables.

    Args:
        shape: The model.
        cos_TK: Table of cosines.
        sin_TK: Table of sines.
        spans: Ranges of positions of the rows, end exclusive. Default: from 0.
        is_local: Whether the tables are for layers with a window.
    """
    where: Any = {"dtype": torch.float64, "device": cos_TK.device}
    spans = spans or ((0, cos_TK.shape[0]),)
    # In fp64, because an angle of 10^5 is off by up to 0.004 in fp32.
    positions_T = torch.cat([torch.arange(first, behind, **where) for first, behind in spans])
    angles_TK = positions_T[:, None] * _rotary_frequencies(shape, cos_TK.device, is_local=is_local)
    cos_TK.copy_(angles_TK.cos())
    sin_TK.copy_(angles_TK.sin())


def _rotary_frequencies(shape: ModelShape, device: torch.device, *, is_local: bool) -> Tensor:
    """Return the radians per token of each pair."""
    num_pairs = shape.rotary_dim // 2
    pairs_K = torch.arange(num_pairs, dtype=torch.float64, device=device)
    if is_local and shape.window_rope_base is not None:
        return shape.window_rope_base ** (-pairs_K / num_pairs)
    frequencies_K = shape.rope_base ** (-pairs_K / num_pairs)
    match shape.rope_scaling:
        case RopeScaling.NONE:
            return frequencies_K
        case RopeScaling.LINEAR:
            return frequencies_K / shape.rope_factor
        case RopeScaling.LLAMA3:
            return _lowered_where_slow(shape, frequencies_K)
        case RopeScaling.YARN:
            return _lowered_along_pairs(shape, frequencies_K)
        case kind:
            assert_never(kind)


def _lowered_where_slow(shape: ModelShape, frequencies_K: Tensor) -> Tensor:
    """Return frequencies scaled as in Llama 3.1, by the turns of a pair in the original context
    length.

    Below the low factor's turns they are divided by the factor, above the high factor's they are
    kept, and in between they are interpolated.
    """
    turns_K = shape.rope_original * frequencies_K / (2 * math.pi)
    span = shape.rope_high_factor - shape.rope_low_factor
    kept_K = ((turns_K - shape.rope_low_factor) / span).clamp(0.0, 1.0)
    return frequencies_K * (kept_K + (1.0 - kept_K) / shape.rope_factor)


def _lowered_along_pairs(shape: ModelShape, frequencies_K: Tensor) -> Tensor:
    """Return frequencies scaled as in YaRN: interpolated along the pairs' indices, not their turns.

    The ramp runs from the last pair with at least the high factor's turns to the first with at most
    the low factor's.
    """
    num_pairs = len(frequencies_K)

    def pair_of(turns: float) -> float:
        longest = shape.rope_original / (2 * math.pi * turns)
        return num_pairs * math.log(longest) / math.log(shape.rope_base)

    first = max(0, math.floor(pair_of(shape.rope_high_factor)))
    last = min(2 * num_pairs - 1, math.ceil(pair_of(shape.rope_low_factor)))
    pairs_K = torch.arange(num_pairs, dtype=torch.float64, device=frequencies_K.device)
    # 1e-3 avoids a division by 0 if the ramp has no length, as in YaRN's code.
    lowered_K = ((pairs_K - first) / max(last - first, 1e-3)).clamp(0.0, 1.0)
    return frequencies_K * (1.0 - lowered_K + lowered_K / shape.rope_factor)


class RMSNorm(nn.Module):
    """Root mean square norm, computed in at least fp32 and multiplied by the weight after the
    cast."""

    def __init__(self, features: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x_BTC: Tensor) -> Tensor:
        wide_BTC = widen(x_BTC)
        scale_BT1 = torch.rsqrt(wide_BTC.square().mean(-1, keepdim=True) + self.eps)
        return (wide_BTC * scale_BT1).to(x_BTC.dtype) * self.weight


class PlusOneRMSNorm(nn.Module):
    """Gemma's RMSNorm: multiplies by 1 + weight before the result is cast to the input's dtype."""

    def __init__(self, features: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(features))

    def forward(self, x_BTC: Tensor) -> Tensor:
        wide_BTC = widen(x_BTC)
        scale_BT1 = torch.rsqrt(wide_BTC.square().mean(-1, keepdim=True) + self.eps)
        return (wide_BTC * scale_BT1 * (1.0 + widen(self.weight))).to(x_BTC.dtype)


class LayerNorm(nn.Module):
    """Layer norm with an optional bias, computed in at least fp32."""

    def __init__(self, features: int, eps: float, *, has_bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features)) if has_bias else None

    def forward(self, x_BTC: Tensor) -> Tensor:
        # The weight is widened last, so that its gradient completes first, copied or not.
        bias_C = None if self.bias is None else widen(self.bias)
        weight_C = widen(self.weight)
        y_BTC = F.layer_norm(widen(x_BTC), weight_C.shape, weight_C, bias_C, self.eps)
        return y_BTC.to(x_BTC.dtype)


def norm_of(shape: ModelShape, features: int) -> nn.Module:
    """Return the model's kind of norm over `features` elements.

    Args:
        shape: The model, which decides the kind and the epsilon.
        features: The size of the last dimension of the norm's input.
    """
    match shape.norm:
        case Norm.RMS:
            return RMSNorm(features, shape.norm_eps)
        case Norm.RMS_PLUS_ONE:
            return PlusOneRMSNorm(features, shape.norm_eps)
        case Norm.LAYER:
            return LayerNorm(features, shape.norm_eps)
        case Norm.LAYER_WITHOUT_BIAS:
            return LayerNorm(features, shape.norm_eps, has_bias=False)
        case kind:
            assert_never(kind)


class LatentAttention(nn.Module):
    """Causal multi-head latent attention; `forward` takes the arguments of
    `SelfAttention.forward`."""

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        assert shape.kv_lora_rank is not None, "the model has latent attention"
        self.head_dim = shape.head_dim
        self.latent_and_turning = shape.kv_lora_rank, shape.qk_rope_head_dim
        self.key_and_value = shape.qk_nope_head_dim, shape.v_head_dim
        rank = shape.q_lora_rank
        self.query_down = None if rank is None else _make_linear(shape.hidden, rank)
        self.query_norm = None if rank is None else norm_of(shape, rank)
        self.query_up = _make_linear(rank or shape.hidden, shape.query_width)
        self.kv_down = _make_linear(shape.hidden, sum(self.latent_and_turning))
        self.kv_norm = norm_of(shape, shape.kv_lora_rank)
        self.kv_up = _make_linear(shape.kv_lora_rank, shape.heads * sum(self.key_and_value))
        self.core = attention_core(shape, layer)
        self.output = _make_linear(shape.value_width, shape.hidden)

    def forward(
        self,
        x_BTC: Tensor,
        cos_TK: Tensor,
        sin_TK: Tensor,
        mask_TT: Tensor | None = None,
    ) -> Tensor:
        q_BTHD = apply_rotary(self._project_queries(x_BTC), cos_TK, sin_TK)
        latent_BTL, key_BTR = self.kv_down(x_BTC).split(self.latent_and_turning, -1)
        own_BTHE = self.kv_up(self.kv_norm(latent_BTL)).unflatten(-1, (-1, sum(self.key_and_value)))
        key_BTHN, v_BTHV = own_BTHE.split(self.key_and_value, -1)
        # One rotated key for all heads, as in DeepSeek-V2.
        key_BT1R = apply_rotary(key_BTR[:, :, None], cos_TK, sin_TK)
        k_BTHD = torch.cat((key_BT1R.expand(-1, -1, key_BTHN.shape[2], -1), key_BTHN), -1)
        y_BHTV = self.core(*(x.transpose(1, 2) for x in (q_BTHD, k_BTHD, v_BTHV)), mask_TT)
        y: Tensor = self.output(y_BHTV.transpose(1, 2).flatten(2))
        return y

    def _project_queries(self, x_BTC: Tensor) -> Tensor:
        """Return the queries [B, T, H, D], by a low-rank projection if the model has one."""
        if self.query_down is not None and self.query_norm is not None:
            x_BTC = self.query_norm(self.query_down(x_BTC))
        return self.query_up(x_BTC).unflatten(-1, (-1, self.head_dim))


def _make_linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class SelfAttention(nn.Module):
    """Causal self-attention with optional query and key norms."""

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
        """Return the output of attention [B, T, C].

        Args:
            x_BTC: Normalized hidden states.
            cos_TK: Cosines of rotary angles; None without rotary positions.
            sin_TK: Sines of rotary angles.
            mask_TT: Additive mask of a window or of documents; None for plain causal attention.
        """
        heads = self._project_heads(x_BTC, cos_TK, sin_TK)
        y_BHTD = self.core(*heads, mask_TT)
        if cos_TK is None:
            del heads  # rotated ones stay alive until the output exists, as in committed traces
        y: Tensor = self.output(y_BHTD.transpose(1, 2).flatten(2))
        return y

    def _project_heads(
        self, x_BTC: Tensor, cos_TK: Tensor | None, sin_TK: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values with heads in dimension 1."""

        def placed(x_BTHD: Tensor, norm: nn.Module | None) -> Tensor:
            x_BTHD = x_BTHD if norm is None else norm(x_BTHD)
            return (
                x_BTHD if cos_TK is None or sin_TK is None else apply_rotary(x_BTHD, cos_TK, sin_TK)
            )

        return (
            placed(self._split_projection(self.query(x_BTC)), self.query_norm).transpose(1, 2),
            placed(self._split_projection(self.key(x_BTC)), self.key_norm).transpose(1, 2),
            self._split_projection(self.value(x_BTC)).transpose(1, 2),
        )

    def _split_projection(self, x_BTC: Tensor) -> Tensor:
        return x_BTC.unflatten(-1, (-1, self.head_dim))


class Block(nn.Module):
    """A decoder block: attention and feed-forward layer, sequential or parallel, with residual
    sums."""

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        self.dropout, self.residual_scale = shape.dropouts.hidden, shape.residual_scale
        self.attention_norm = norm_of(shape, shape.hidden)
        attention = LatentAttention if shape.is_latent else SelfAttention
        self.attention = attention(shape, layer)
        self.attention_post_norm = norm_of(shape, shape.hidden) if shape.post_norm else None
        self.mlp_norm = None if shape.parallel else norm_of(shape, shape.hidden)
        self.mlp = MoE(shape) if shape.has_experts(layer) else FeedForward(shape, shape.ffn)
        self.mlp_post_norm = norm_of(shape, shape.hidden) if shape.post_norm else None

    def forward(self, x_BTC: Tensor, *given: Tensor | None) -> Tensor:
        """Return the hidden states after the block.

        Args:
            x_BTC: Hidden states [B, T, C].
            given: The further arguments of attention: tables of rotary angles and a mask, if the
                model has them.

        Returns:
            Hidden states [B, T, C].
        """
        if self.mlp_norm is None:
            y_BTC = self.attention_norm(x_BTC)
            x_BTC = x_BTC + self._residual_term(
                self.attention(y_BTC, *given), self.attention_post_norm
            )
            return x_BTC + self._residual_term(self.mlp(y_BTC), self.mlp_post_norm)
        x_BTC = x_BTC + self._residual_term(
            self.attention(self.attention_norm(x_BTC), *given), self.attention_post_norm
        )
        return x_BTC + self._residual_term(self.mlp(self.mlp_norm(x_BTC)), self.mlp_post_norm)

    def _residual_term(self, x_BTC: Tensor, norm: nn.Module | None) -> Tensor:
        """Return the term that a sub-block's output adds to the residual stream."""
        if norm is not None:
            x_BTC = norm(x_BTC)
        if self.residual_scale is not None:
            x_BTC = x_BTC * self.residual_scale
        return F.dropout(x_BTC, self.dropout, self.training) if self.dropout else x_BTC


Spans = tuple[tuple[int, int], ...]  # first position, and the one after the last


class EmbeddingScale(nn.Module):
    """A multiplication of embeddings by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x_BTC: Tensor) -> Tensor:
        return x_BTC * self.factor


class LearnedPositions(nn.Embedding):
    """Learned position embeddings, added to the hidden states.

    `spans` are the positions of the tokens; if empty, they count from 0.
    """

    spans: Spans = ()

    def forward(self, x_BTC: Tensor) -> Tensor:
        spans = self.spans or ((0, x_BTC.shape[1]),)
        parts = [self.weight[first:behind] for first, behind in spans]
        return x_BTC + (parts[0] if len(parts) == 1 else torch.cat(parts))


class CappedHead(nn.Linear):
    """An output head that bounds logits by tanh, so that a loss that replaces the head's call has
    them too."""

    def __init__(self, hidden: int, vocab: int, cap: float, *, bias: bool, **where: Any) -> None:
        super().__init__(hidden, vocab, bias=bias, **where)
        self.cap = cap

    def forward(self, x_BTC: Tensor) -> Tensor:
        return cap_values(super().forward(x_BTC), self.cap)


class Transformer(nn.Module):
    """A decoder-only language model: int64 tokens [B, T] to logits [B, T, V].

    Args:
        shape: The model.
        sequence: Maximum number of tokens of a sample; sizes the tables of positions and windows.
    """

    def __init__(self, shape: ModelShape, *, sequence: int) -> None:
        super().__init__()
        self.shape = shape
        self.spans: Spans = ()  # positions of the tables' rows; empty: from 0
        scale, rate = shape.embedding_scale, shape.dropouts.embedding
        is_learned = shape.positions is Positions.LEARNED
        self.embed = nn.Embedding(shape.vocab_rows, shape.hidden)
        self.scale = nn.Identity() if scale is None else EmbeddingScale(scale)
        self.positions = LearnedPositions(sequence, shape.hidden) if is_learned else nn.Identity()
        self.dropout = nn.Dropout(rate) if rate else nn.Identity()
        self.documents = documents_of(shape)
        self.blocks = nn.ModuleList(Block(shape, layer) for layer in range(shape.layers))
        self.norm = norm_of(shape, shape.hidden)
        self.head = None if shape.tied else self.new_head()
        for name, sizes in tables_of(shape, sequence).items():
            # Not persistent: the tables follow from the shape, and depend on a rank's positions.
            self.register_buffer(name, torch.empty(*sizes, dtype=torch.float32), persistent=False)
        if shape.lora_rank is not None:
            add_adapters(self, shape)
        self.reset_buffers()

    def new_head(self, **where: Any) -> nn.Linear:
        """Return a linear layer to the vocabulary; `where` takes nn.Linear's `device` and
        `dtype`."""
        shape, cap = self.shape, self.shape.logit_soft_cap
        sizes = (shape.hidden, shape.vocab_rows)
        if cap is None:
            return nn.Linear(*sizes, bias=shape.head_bias, **where)
        return CappedHead(*sizes, cap, bias=shape.head_bias, **where)

    @torch.no_grad()
    def reset_buffers(self) -> None:
        """Fill the tables of angles and the window's mask in place."""
        # Buffers are looked up by name in each call, because `place_tokens` replaces them.
        own = dict(self.named_buffers(recurse=False))
        for prefix in ("", LOCAL):
            if (cos_TK := own.get(f"{prefix}cos_TK")) is not None:
                angles = cos_TK, own[f"{prefix}sin_TK"]
                fill_tables(self.shape, *angles, spans=self.spans, is_local=prefix == LOCAL)
        if (mask_TT := own.get(f"{LOCAL}TT")) is not None:
            assert self.shape.window is not None, "the model has a sliding window"
            ones_TT = torch.ones_like(mask_TT, dtype=torch.bool)
            hidden_TT = ones_TT.triu(1) | ones_TT.tril(-self.shape.window)
            mask_TT.zero_().masked_fill_(hidden_TT, float("-inf"))

    def place_tokens(self, spans: Spans) -> None:
        """Set the positions of all later inputs, and resize the tables of angles.

        The window's mask still covers full sequences.

        Args:
            spans: The positions of the input tokens, as pairs of the first position and the one
                after the last. The inputs have as many tokens as the spans together.
        """
        self.spans = spans
        num_tokens = sum(behind - first for first, behind in spans)
        for name, table in list(self.named_buffers(recurse=False)):
            if name.endswith("_TK"):
                rows = table.new_empty(num_tokens, *table.shape[1:])
                self.register_buffer(name, rows, persistent=False)
        if isinstance(self.positions, LearnedPositions):
            self.positions.spans = spans
        self.reset_buffers()

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.dropout(self.positions(self.scale(self.embed(tokens_BT))))
        documents = self.documents
        mask_B1TT = None if documents is None else documents(tokens_BT, x_BTC.dtype)
        tables = self._attention_tables(x_BTC, mask_B1TT)
        for layer, block in enumerate(self.blocks):
            x_BTC = block(x_BTC, *tables[self.shape.is_local(layer)])
        x_BTC = self.norm(x_BTC)
        return self.logits(x_BTC)

    def logits(self, x_BTC: Tensor) -> Tensor:
        """Return the logits of normalized hidden states.

        Args:
            x_BTC: Hidden states [B, T, C] after the final norm.

        Returns:
            Logits [B, T, V].
        """
        if self.head is None:
            return cap_values(F.linear(x_BTC, self.embed.weight), self.shape.logit_soft_cap)
        logits_BTV: Tensor = self.head(x_BTC)
        return logits_BTV

    def _attention_tables(
        self, x_BTC: Tensor, mask_B1TT: Tensor | None = None
    ) -> tuple[tuple[Tensor | None, ...], ...]:
        """Return the further arguments of blocks without a window and of blocks with one.

        Each mask is cast once, to the dtype of attention, and shared by all layers; `mask_B1TT` is
        the mask of documents.
        """
        own = dict(self.named_buffers(recurse=False))
        everywhere = (own["cos_TK"], own["sin_TK"]) if "cos_TK" in own else ()
        local = everywhere
        if f"{LOCAL}cos_TK" in own:
            local = (own[f"{LOCAL}cos_TK"], own[f"{LOCAL}sin_TK"])
        mask = mask_B1TT
        if f"{LOCAL}TT" in own:
            mask_TT = own[f"{LOCAL}TT"].to(x_BTC.dtype)
            mask = mask_TT if mask_B1TT is None else mask_TT + mask_B1TT
        return _with_mask(everywhere, mask_B1TT), _with_mask(local, mask)


def _with_mask(tables: tuple[Tensor, ...], mask: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return tables and mask as arguments; without tables they are None."""
    return tables if mask is None else (*(tables or (None, None)), mask)
