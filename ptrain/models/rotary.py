"""Rotary positions: the frequencies of a model's pairs, their tables, and the rotation.

Legend of shape suffixes: B samples, T tokens, H heads, D elements per head, K rotation pairs.
Sources: Su et al. 2021; Llama 3.1's scaling as in Meta's llama-models, `apply_scaling`; YaRN, Peng
et al. 2023 (arXiv:2309.00071), section 3.2.
"""

from __future__ import annotations

import math
from typing import Any, assert_never

import torch
from torch import Tensor

from ptrain.models.numerics import widen
from ptrain.spec.block import RopeScaling
from ptrain.spec.model import ModelShape


def rotate(x_BTHD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """RoPE: pair (i, i + K) of every head turns by position · base^(-i/K); what is behind the pairs
    stays. The tables may be of more tokens than there are."""
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
    """Fill the tables of a model's layers, with a window or without, where they stand: computed in
    fp64, stored in their dtype. They are of the positions in `spans`, or from 0."""
    where: Any = {"dtype": torch.float64, "device": cos_TK.device}
    spans = spans or ((0, cos_TK.shape[0]),)
    positions_T = torch.cat([torch.arange(first, behind, **where) for first, behind in spans])
    angles_TK = positions_T[:, None] * _frequencies(shape, cos_TK.device, is_local=is_local)
    cos_TK.copy_(angles_TK.cos())
    sin_TK.copy_(angles_TK.sin())


def _frequencies(shape: ModelShape, device: torch.device, *, is_local: bool) -> Tensor:
    """Radians a token, by pair."""
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
    """Divided by the factor where a pair turns less than the low factor's times in the original
    texts, not at all above the high one's, and in between in proportion."""
    turns_K = shape.rope_original * frequencies_K / (2 * math.pi)
    span = shape.rope_high_factor - shape.rope_low_factor
    kept_K = ((turns_K - shape.rope_low_factor) / span).clamp(0.0, 1.0)
    return frequencies_K * (kept_K + (1.0 - kept_K) / shape.rope_factor)


def _lowered_along_pairs(shape: ModelShape, frequencies_K: Tensor) -> Tensor:
    """The same with a ramp that is even in the pairs' numbers, not in their turns: from the last
    pair with at least the high factor's turns to the first with at most the low factor's."""
    num_pairs = len(frequencies_K)

    def pair_of(turns: float) -> float:
        longest = shape.rope_original / (2 * math.pi * turns)
        return num_pairs * math.log(longest) / math.log(shape.rope_base)

    first = max(0, math.floor(pair_of(shape.rope_high_factor)))
    last = min(2 * num_pairs - 1, math.ceil(pair_of(shape.rope_low_factor)))
    pairs_K = torch.arange(num_pairs, dtype=torch.float64, device=frequencies_K.device)
    lowered_K = ((pairs_K - first) / max(last - first, 1e-3)).clamp(0.0, 1.0)
    return frequencies_K * (1.0 - lowered_K + lowered_K / shape.rope_factor)
