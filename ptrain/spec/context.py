"""How attention reaches the tokens of other ranks along cp."""

from __future__ import annotations

from dataclasses import dataclass

from ptrain.word import Word


class ContextAttention(Word):
    RING = "ring"  # Liu et al. 2023: keys and values go round, contiguous slices of the tokens
    ZIGZAG = "zigzag"  # the same, each rank with an early and a late chunk (Llama 3, section 3.3.2)
    ALL_GATHER = "all-gather"  # keys and values of all ranks, kept until backward
    ULYSSES = "ulysses"  # Jacobs et al. 2023: all tokens of some of the heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Hybrid:
    """Ulysses over `ulysses` neighbouring ranks, and a zigzag ring over `ring` such groups (Fang
    and Zhao 2024, USP). `ulysses * ring` is the degree of cp."""

    ulysses: int
    ring: int
