"""What the forward pass of a block leaves for its backward pass: the fourth state, A, of one rank.

M and O of activations belong to the rank, not to an axis. R keeps what autograd saves; M keeps the
block's input, and the results of some operators where a policy says so, and computes the rest
again; on the tiers host and file it is kept there and brought back for use.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from ptrain.spec.function import ARGUMENTS, FOLDER, FORM, PATH
from ptrain.spec.leaf import (
    Choice,
    Either,
    KeptText,
    ModesByBlock,
    Section,
    Size,
    Text,
    Truth,
    Whole,
    by_word,
    declared,
    refuse,
)
from ptrain.spec.placement import Distribution, Mode, Tier
from ptrain.word import MeantWord, words_of


class Operators(MeantWord):
    """Classes of operators whose results a policy may keep."""

    # of activations with weights, and of scores where attention is eager
    MATMUL = "matmul", "matrix products"
    ATTENTION = "attention", "fused attention"
    SOFTMAX = "softmax", "softmax of eager attention"
    NORM = "norm", "normalization layers"
    COLLECTIVE = (
        "collective",
        "results of collectives, so that nothing is communicated twice",
    )


class Scope(StrEnum):
    """What is computed again."""

    BLOCK = "block"
    ATTENTION = "attention"  # scores, softmax and their product with the values: no projection


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a block whose activations are M comes again; with `keep` the results of these operators
    are not computed twice."""

    scope: Scope = Scope.BLOCK
    keep: tuple[Operators, ...] = ()


FULL = Policy()
SELECTIVE = Policy(keep=(Operators.MATMUL, Operators.ATTENTION))
ATTENTION_ONLY = Policy(scope=Scope.ATTENTION)
# by what is recomputed, least first
NAMED_POLICIES = {"selective": SELECTIVE, "attention": ATTENTION_ONLY, "full": FULL}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One block's mode. `policy` None: R, or O where `tier` is not the device. With a policy, M;
    `tier` is then that of the block's input."""

    policy: Policy | None = None
    tier: Tier = Tier.DEVICE

    @property
    def is_plain(self) -> bool:
        """Whether autograd saves what it likes, where it stands."""
        return self.policy is None and self.tier is Tier.DEVICE


PLAIN = Kept()


def belongs_to_rank(mode: Mode) -> bool:
    """Return whether a mode of A says how the rank keeps it: M, or whole off the device (which is
    O, since each rank has its own). S and S* are slices over an axis."""
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


@declared
class Words(Choice):
    """A list of words of a closed set; one alone stands for a list of it."""

    def check(self, value: Any) -> object:
        values = value if isinstance(value, list) else [value]
        words = [super(Words, self).check(text) for text in values]
        for word in words:
            if words.count(word) > 1:
                refuse(f"{word} is listed twice", "Remove one of the two.")
        return words

    def schema(self) -> dict[str, Any]:
        word = super().schema()
        return {"anyOf": [{"type": "array", "items": word, "uniqueItems": True}, word]}


@declared
class RecomputeRaw:
    """How blocks whose activations are M come again for their backward passes."""

    policy: Annotated[
        str | None, Choice("Recompute policy. Default: full.", POLICIES, slips=_SLIPS)
    ] = None
    keep: Annotated[
        list[str] | None,
        Words(
            "Operators of a block whose outputs are saved; all others are recomputed.",
            words_of(Operators),
            slips=_OTHER_OPERATORS,
        ),
    ] = None
    every: Annotated[
        int,
        Whole(
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


@declared
class LossRaw:
    """How logits and loss are computed."""

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
        Whole("Number of tokens of a micro-batch whose logits exist at the same time.", 1, 10**9),
    ] = None
    fused: Annotated[
        bool | None, Truth("Use torch's linear_cross_entropy if this torch has it.")
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


def _words(words: Mapping[str, str]) -> tuple[dict[str, Any], ...]:
    return ({"oneOf": [{"const": word, "description": about} for word, about in words.items()]},)


ACTIVATIONS = Either(
    "Activation checkpointing: what forward saves for backward, for all blocks or by block. "
    "Default: R (save everything).",
    "a mode (R, M or O; M@host), or modes by block",
    (KeptText(""), ModesByBlock("")),
    hint=lambda value: "" if isinstance(value, int | float) else KeptText("").meant(value),
)
RECOMPUTE = Section(
    RecomputeRaw,
    "What backward recomputes in blocks with activations M.",
    also=_words(POLICIES),
    alone=by_word("policy"),
)
LOSS = Section(
    LossRaw,
    "How the loss is computed.",
    also=_words(
        {
            "cross-entropy": "all logits at once",
            "chunked": "a slice of the tokens at a time",
            "fused": "a slice of the tokens at a time, by torch's linear_cross_entropy",
            "vocab-parallel": "on slices of the vocabulary",
        }
    ),
    alone=by_word("kind"),
)
