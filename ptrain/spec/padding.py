"""How long samples must be to fall into slices of one size, and become where they are padded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ptrain.spec.axis import Axis, Factor
from ptrain.spec.batch import Batch
from ptrain.spec.context import ContextAttention, ContextSpec, Hybrid
from ptrain.spec.placement import S_STAR, R

PADDED = ", or batch.pad: true, which adds ignored targets"  # a remedy beside others


def token_multiple(factors: Sequence[Factor], attention: ContextAttention | Hybrid | None) -> int:
    """Return what the tokens of a sample must be a multiple of: of cp's chunks, and of tp's slices
    of what cp leaves a rank. Where no attention over cp is written it is the one that follows: two
    chunks a rank, but where keys and values are gathered."""
    ranks = chunks = slices = 1
    for factor in factors:
        if factor.axis is Axis.CP and factor.degree > 1:
            ranks = factor.degree
            is_balanced = factor.placement.activations != S_STAR
            if attention is not None:
                is_balanced = attention.is_balanced
            chunks = ranks * (2 if is_balanced else 1)
        if factor.axis is Axis.TP and factor.placement.activations != R:
            slices = factor.degree
    return math.lcm(chunks, ranks * slices)


def padded(batch: Batch, factors: Sequence[Factor], context: ContextSpec | None) -> Batch:
    """Return a batch of samples as long as the next such multiple, where it says that it pads."""
    if not batch.pads:
        return batch
    multiple = token_multiple(factors, context.attention if context else None)
    padding = -batch.sequence % multiple
    return replace(batch, sequence=batch.sequence + padding, padding=padding)
