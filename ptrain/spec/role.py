"""Roles of modules in tensor parallelism: which operators are sharded, and along which dimension.

Roles follow Shoeybi et al. 2019 (Megatron-LM): a column operator is sharded by output features, and
the row operator after it by input features, so that a pair needs one sum in forward and one in
backward. Module names are dotted; `*` matches a block's index.
"""

from __future__ import annotations

import re
from functools import cache

from ptrain.word import Word


class Role(Word):
    """The part of a module in tensor, sequence or expert parallelism."""

    COLUMN = "column"  # sharded by output features
    FUSED_COLUMN = "fused column"  # several concatenated projections, each sharded by outputs
    TRANSPOSED_COLUMN = "transposed column"  # a weight stored as inputs x outputs
    ROW = "row"  # sharded by input features; outputs are partial sums
    TRANSPOSED_ROW = "transposed row"
    VOCABULARY = "vocabulary"  # an embedding, sharded by rows
    HEAD = "head"  # a column operator over the vocabulary
    WHOLE_INPUT = "whole input"  # a sub-block: the input of its column operators is gathered once
    # a sub-block of latent features: its input is full, and the input gradient a partial sum
    LATENT_INPUT = "latent input"
    LATENT = "latent"  # before its inner columns: replicated, gradients summed
    # a sub-block of experts: its input is full, and its output a partial sum
    EXPERTS = "experts"
    # a sub-block of experts that are not sharded: its input and output are the rank's tokens
    WHOLE_EXPERTS = "whole experts"
    INNER_COLUMN = "inner column"  # within these sub-blocks: sharded by output features
    INNER_ROW = "inner row"  # sharded by input features; outputs are partial sums of the sub-block
    SHARED = "shared"  # a replicated tensor, used on the rank's shard of the features
    NORM = "norm"  # a replicated tensor, used on the rank's shard of the tokens
    LAST_NORM = "last norm"  # a norm whose output is all-gathered for the head
    POSITIONS = "positions"  # an embedding of positions, added to the token embedding
    COUNT = "count"  # an integer attribute instead of a module: a number of features or heads
    BLOCK = "block"  # of a model that is not built in: holds only the rank's tokens
    FIRST_BLOCK = "first block"  # its input is sharded by tokens
    LAST_BLOCK = "last block"  # its output is all-gathered


Roles = tuple[tuple[str, Role], ...]
# The sizes of the concatenated outputs of a fused projection, by patterns of module names.
Fusions = tuple[tuple[str, tuple[int, ...]], ...]

COLUMNS = (Role.COLUMN, Role.FUSED_COLUMN, Role.TRANSPOSED_COLUMN)
ROWS = (Role.ROW, Role.TRANSPOSED_ROW)

# The roles that a user's plan may contain, with their meanings.
GIVEN = {
    Role.COLUMN: "a linear layer, sharded by output features",
    Role.FUSED_COLUMN: "a linear layer of several projections, each sharded by output features",
    Role.ROW: "a linear layer, sharded by input features; its outputs are summed over the ranks",
    Role.VOCABULARY: "an embedding, sharded by rows",
    Role.HEAD: "the linear layer to the vocabulary, sharded by output features",
    Role.WHOLE_INPUT: "a module whose column layers share one input; its gradient is summed once",
    Role.SHARED: "replicated, used between column and row layers; its gradients are summed",
    Role.NORM: "replicated, between the sub-blocks; takes the tokens of the rank if A is S or S*",
    Role.LAST_NORM: "the norm before the head; takes all tokens",
    Role.COUNT: "an integer attribute of a module, as its number of heads: the value of the rank",
    Role.EXPERTS: "the module of all experts of a layer; sharded over ep, replicated on tp",
}


def matches_pattern(pattern: str, name: str) -> bool:
    """Return True if the pattern matches a dotted module name."""
    return _compile_pattern(pattern).fullmatch(name) is not None


@cache
def _compile_pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"\d+"))


def in_any_block(name: str) -> str:
    """Return a module's name with `*` for each index, as plans write it."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
