"""Activations (state A) of one rank: tensors that a block's forward saves for its backward.

The modes M and O of activations belong to the rank, not to an axis. R keeps the tensors that
autograd saves. M keeps the block's input, and the outputs of the operators that a policy selects,
and recomputes the rest. On the tiers host and file, the kept tensors are stored there and copied
back for use.
"""

import itertools
import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from ptrain.spec.leaf import (
    INVALID,
    MODE_MEANINGS,
    Boolean,
    Choice,
    Either,
    FreeMapping,
    Integer,
    Leaf,
    ModeText,
    Section,
    Shape,
    Size,
    Text,
    by_word,
    grammar_dataclass,
    reject,
    words_schema,
)
from ptrain.spec.model import ARGUMENTS, FOLDER, FORM, PATH
from ptrain.spec.placement import Distribution, Mode, Tier
from ptrain.word import MeantWord, words_of


class Operators(MeantWord):
    """A class of operators whose outputs a policy may keep."""

    # products of activations with weights; with eager attention also the products with scores
    MATMUL = "matmul", "matrix products"
    ATTENTION = "attention", "fused attention"
    SOFTMAX = "softmax", "softmax of eager attention"
    NORM = "norm", "normalization layers"
    COLLECTIVE = (
        "collective",
        "results of collectives, so that nothing is communicated twice",
    )


class Scope(StrEnum):
    """The part of a block that is recomputed."""

    BLOCK = "block"
    ATTENTION = "attention"  # scores, softmax and their product with the values: no projection


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The recomputation of a block with activations M. The outputs of the operators in `keep` are
    saved instead of recomputed."""

    scope: Scope = Scope.BLOCK
    keep: tuple[Operators, ...] = ()


FULL = Policy()
SELECTIVE = Policy(keep=(Operators.MATMUL, Operators.ATTENTION))
ATTENTION_ONLY = Policy(scope=Scope.ATTENTION)
# Ordered by the amount of recomputation, least first.
NAMED_POLICIES = {"selective": SELECTIVE, "attention": ATTENTION_ONLY, "full": FULL}


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationMode:
    """The activation mode of one block.

    Without a policy it is R, or O if `tier` is not the device. With a policy it is M, and `tier` is
    the tier of the block's input.
    """

    policy: Policy | None = None
    tier: Tier = Tier.DEVICE

    @property
    def is_plain(self) -> bool:
        """True if autograd saves its tensors unchanged on the device."""
        return self.policy is None and self.tier is Tier.DEVICE


PLAIN = ActivationMode()


def belongs_to_rank(mode: Mode) -> bool:
    """Return True if an activation mode describes the rank and not an axis.

    These are M, and replicated or sharded modes off the device, which equal O because each rank has
    different activations. S and S* on the device shard activations over an axis.
    """
    # R@host equals S@host here: no two ranks have the same activations to replicate or to shard.
    return mode.distribution is Distribution.MATERIALIZED or (
        mode.tier is not Tier.DEVICE and mode.distribution is not Distribution.GATHERED
    )


_SLIPS = {
    "true": "full",
    "on": "full",
    "all": "full",
    "block": "full",
    "false": "none",
    "off": "none",
    "core-attention": "attention",
    "core_attn": "attention",
    "selective_op": "selective",
    "op": "selective",
}
POLICIES = {
    "none": "nothing",
    "full": "each block, from its input",
    "selective": "cheap operators with large outputs: everything except matrix products and "
    "fused attention",
    "attention": "attention scores, softmax and the product with the values",
}
_OTHER_OPERATORS = {
    "mm": "matmul",
    "linear": "matmul",
    "matmuls": "matmul",
    "gemm": "matmul",
    "sdpa": "attention",
    "flash": "attention",
    "layernorm": "norm",
    "rmsnorm": "norm",
    "all-gather": "collective",
    "all_gather": "collective",
    "communication": "collective",
}


@grammar_dataclass
class WordList(Choice):
    """A list of words from a closed set; a single word means a list with that word."""

    def check(self, value: Any) -> object:
        values = value if isinstance(value, list) else [value]
        words = [super(WordList, self).check(text) for text in values]
        for word in words:
            if words.count(word) > 1:
                reject(f"{word} is listed twice", "Remove one of the two.")
        return words

    def schema(self) -> dict[str, Any]:
        word = super().schema()
        return {"anyOf": [{"type": "array", "items": word, "uniqueItems": True}, word]}


@grammar_dataclass
class RecomputeRaw:
    """Recomputation of blocks with activations M in backward."""

    policy: Annotated[
        str | None, Choice("Recompute policy. Default: full.", POLICIES, slips=_SLIPS)
    ] = None
    keep: Annotated[
        list[str] | None,
        WordList(
            "Operators of a block whose outputs are saved; all others are recomputed.",
            words_of(Operators),
            slips=_OTHER_OPERATORS,
        ),
    ] = None
    every: Annotated[
        int,
        Integer(
            "Apply activations M only to every n-th of these blocks, starting with the first.",
            1,
            10_000,
        ),
    ] = 1
    budget: Annotated[
        int | None,
        Size(
            "Peak memory per rank that may be used: the policy that recomputes least and fits "
            "is selected and printed.",
            example="2 GiB",
            low=2**10,
            high=2**50,
        ),
    ] = None


@grammar_dataclass
class LossRaw:
    """Computation of logits and loss."""

    kind: Annotated[
        str | None,
        Choice(
            "Named loss implementation.",
            {
                "cross-entropy": "all logits at once",
                "chunked": "logits of 1024 tokens at a time, recomputed in backward",
                "fused": "chunked, with torch's linear_cross_entropy",
                "vocab-parallel": "logits sharded over the vocabulary on tp",
            },
            slips={
                "ce": "cross-entropy",
                "cross_entropy": "cross-entropy",
                "chunk": "chunked",
                "linear_cross_entropy": "fused",
                "linear-cross-entropy": "fused",
                "liger": "fused",
                "loss-parallel": "vocab-parallel",
                "loss_parallel": "vocab-parallel",
            },
        ),
    ] = None
    chunk: Annotated[
        int | None,
        Integer("Number of tokens of a micro-batch whose logits exist at the same time.", 1, 10**9),
    ] = None
    fused: Annotated[
        bool | None, Boolean("Use torch's linear_cross_entropy if this torch has it.")
    ] = None
    target: Annotated[
        str | None,
        Text(
            "Function (output, batch) that returns the mean loss of a micro-batch from the "
            "model's output; runs only with --allow-import.",
            PATH,
            FORM,
        ),
    ] = None
    arguments: Annotated[dict[str, object] | None, ARGUMENTS] = None
    folder: Annotated[str | None, FOLDER] = None


KEPT_MEANINGS = MODE_MEANINGS | {
    "M@host": "recomputed, with block inputs in host memory",
    "M@file": "recomputed, with block inputs in a file (NVMe)",
}


@grammar_dataclass
class ActivationModeText(ModeText):
    """A mode of activations, which may also be M@host or M@file: recomputed from inputs off the
    device."""

    modes = KEPT_MEANINGS

    def suggest(self, value: Any) -> str:
        return super().suggest(_IN_WORDS.get(str(value).lower(), "") or value)


@grammar_dataclass
class ModesByBlock(FreeMapping):
    """Modes by block range, `{"0-7": M, "8-": R}`: from block 0, the last one included; a number
    alone is one block."""

    values: Leaf | None = ActivationModeText("")

    def convert(self, value: Any) -> Any:
        checked = super().convert(value)
        # A block in two ranges would have two modes, and the order of a mapping's keys must not
        # matter.
        ranges = (
            sorted((_parse_range(key), key) for key in checked) if checked is not INVALID else ()
        )
        for ((_, last), key), ((first, _), other) in itertools.pairwise(ranges):
            if last >= first:
                reject(
                    f"the block ranges {key!r} and {other!r} overlap",
                    "Give each block one mode. Blocks without a range are `R`.",
                )
        return checked

    def value_schemas(self) -> tuple[Shape, ...]:
        assert self.values is not None, "modes"
        blocks = {f"^{_BLOCKS}$": self.values.schema()}
        return ({"type": "object", "patternProperties": blocks, "additionalProperties": False},)


_IN_WORDS = {
    **dict.fromkeys(("recompute", "recomputed", "checkpoint", "checkpointing", "full"), "M"),
    **dict.fromkeys(("offload", "offloaded", "host", "cpu"), "O"),
    **dict.fromkeys(("keep", "none"), "R"),
}


def blocks_of(text: str) -> tuple[int, int | None]:
    """Return (first, last) of `0-7`, `3` or `8-`; last is None for an open range."""
    first, dash, last = text.partition("-")
    return int(first), int(last) if last else None if dash else int(first)


_BLOCKS = r"[0-9]{1,5}(-([0-9]{1,5})?)?"


def _parse_range(text: str) -> tuple[int, float]:
    """Return (first, last) of a block range, or raise RejectedValue if it is malformed."""
    if not re.fullmatch(_BLOCKS, text):
        reject(
            f"{text!r} is not a range of blocks",
            'Use `first-last`, counted from 0: `{"0-7": M, "8-": R}`.',
        )
    first, last = blocks_of(text)
    if last is not None and last < first:
        reject(f"the range {text!r} ends before it starts", f'Use `"{last}-{first}"`.')
    return first, math.inf if last is None else last


ACTIVATIONS = Either(
    "Activation checkpointing: what forward saves for backward, for all blocks or by block. "
    "Default: R (save everything).",
    "a mode (R, M or O; M@host), or modes by block",
    (ActivationModeText(""), ModesByBlock("")),
    hint=lambda value: (
        "" if isinstance(value, int | float) else ActivationModeText("").suggest(value)
    ),
)
RECOMPUTE = Section(
    RecomputeRaw,
    "What backward recomputes in blocks with activations M.",
    other_schemas=(words_schema(POLICIES),),
    alone=by_word("policy"),
)
LOSS = Section(
    LossRaw,
    "How the loss is computed.",
    other_schemas=(
        words_schema(
            {
                "cross-entropy": "all logits at once",
                "chunked": "a slice of the tokens at a time",
                "fused": "a slice of the tokens at a time, by torch's linear_cross_entropy",
                "vocab-parallel": "on slices of the vocabulary",
            }
        ),
    ),
    alone=by_word("kind"),
)
