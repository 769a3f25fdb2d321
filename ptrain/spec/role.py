"""What a module is to the tensor axis: which of its operators are cut, and along what.

Roles follow Shoeybi et al. 2019 (Megatron-LM): a column operator cuts its output features, the row
operator behind it its input features, so that a pair needs one sum forward and one backward. Names
are dotted, `*` stands for a block's index.
"""

from __future__ import annotations

import re
from functools import cache

from ptrain.word import Word


class Role(Word):
    COLUMN = "column"  # output features cut
    FUSED_COLUMN = "fused column"  # the same of several projections, one behind the other
    TRANSPOSED_COLUMN = "transposed column"  # of a weight that is stored inputs by outputs
    ROW = "row"  # input features cut, the outputs are parts of a sum
    TRANSPOSED_ROW = "transposed row"
    VOCABULARY = "vocabulary"  # an embedding, its rows cut
    HEAD = "head"  # a column operator over the vocabulary
    WHOLE_INPUT = "whole input"  # a sub-block: what its column operators share is made whole once
    # a sub-block of latent features: what it is given is whole, and its gradient an addend of each
    LATENT_INPUT = "latent input"
    LATENT = "latent"  # within it, in front of inner columns: whole on every rank, gradients summed
    # a sub-block of experts: what it is given is whole, and what it gives an addend of each rank's
    EXPERTS = "experts"
    # the same where a rank has whole ones: it is given its slice of the tokens, and gives that
    WHOLE_EXPERTS = "whole experts"
    INNER_COLUMN = "inner column"  # within either: output features cut, of all experts or of one
    INNER_ROW = "inner row"  # input features cut; its outputs are parts of the sub-block's sum
    SHARED = "shared"  # a tensor that every rank has whole, used on the rank's slice of features
    NORM = "norm"  # a tensor that every rank has whole, used on the rank's slice of the tokens
    LAST_NORM = "last norm"  # the same, and what it gives to the head is made whole
    POSITIONS = "positions"  # an embedding of positions, added to that of the tokens
    COUNT = "count"  # no module but an integer attribute: how many features or heads it has
    BLOCK = "block"  # of a model that is not built in: within it a rank has its tokens alone
    FIRST_BLOCK = "first block"  # what it is given becomes the rank's slice of the tokens
    LAST_BLOCK = "last block"  # what it gives is made whole


Roles = tuple[tuple[str, Role], ...]
# The lengths of what a fused projection gives, one behind the other, by patterns of module names.
Fusions = tuple[tuple[str, tuple[int, ...]], ...]

COLUMNS = (Role.COLUMN, Role.FUSED_COLUMN, Role.TRANSPOSED_COLUMN)
ROWS = (Role.ROW, Role.TRANSPOSED_ROW)

# What a plan of the user's own may say, and what each word means.
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


def fits(pattern: str, name: str) -> bool:
    """Return whether a dotted name is one that the pattern means."""
    return _expression(pattern).fullmatch(name) is not None


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"\d+"))


def in_any_block(name: str) -> str:
    """Return a module's name as a plan writes it, for all blocks."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
