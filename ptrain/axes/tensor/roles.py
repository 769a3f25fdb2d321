"""What a module is to the tensor axis: which of its operators are cut, and along what.

Roles follow Shoeybi et al. 2019 (Megatron-LM): a column operator cuts its output features, the row
operator behind it its input features, so that a pair needs one sum forward and one backward. Names
are dotted, `*` stands for a block's index.
"""

from __future__ import annotations

from enum import StrEnum
from typing import assert_never

from ptrain.spec.model import Family, ModelShape


class Role(StrEnum):
    COLUMN = "column"  # output features cut
    ROW = "row"  # input features cut, the outputs are parts of a sum
    VOCABULARY = "vocabulary"  # an embedding, its rows cut
    HEAD = "head"  # a column operator over the vocabulary
    WHOLE_INPUT = "whole input"  # a sub-block: what its column operators share is made whole once
    NORM = "norm"  # a tensor that every rank has whole, used on the rank's slice of the tokens
    LAST_NORM = "last norm"  # the same, and what it gives to the head is made whole
    POSITIONS = "positions"  # an embedding of positions, added to that of the tokens


Roles = tuple[tuple[str, Role], ...]


def roles_of(shape: ModelShape) -> Roles:
    """Of the built-in families, in the order of a forward pass."""
    columns: dict[str, tuple[str, ...]] = {"attention": ("query", "key", "value")}
    positions: Roles = ()
    match shape.family:
        case Family.LLAMA:
            columns["mlp"] = ("gate", "up")
        case Family.GPT:
            columns["mlp"] = ("up",)
            positions = (("positions", Role.POSITIONS),)
        case family:
            assert_never(family)
    rows = {"attention": "output", "mlp": "down"}
    blocks = tuple(
        pair
        for part, names in columns.items()
        for pair in (
            (f"blocks.*.{part}_norm", Role.NORM),
            (f"blocks.*.{part}", Role.WHOLE_INPUT),
            *((f"blocks.*.{part}.{name}", Role.COLUMN) for name in names),
            (f"blocks.*.{part}.{rows[part]}", Role.ROW),
        )
    )
    head = () if shape.tied else (("head", Role.HEAD),)
    return (("embed", Role.VOCABULARY), *positions, *blocks, ("norm", Role.LAST_NORM), *head)
