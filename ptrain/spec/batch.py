"""The section `batch`: samples per step, tokens per sample, and the split into micro-batches and
data ranks. The section `context`: how attention reaches tokens on other ranks along cp.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple

from ptrain.spec.leaf import (
    Boolean,
    Choice,
    Either,
    FreeMapping,
    Integer,
    Text,
    grammar_dataclass,
    reject,
    section_dataclass,
)
from ptrain.spec.placement import S_STAR, TOKEN_AXES, Axis, Factor, R
from ptrain.units import parse_count
from ptrain.word import MeantWord, words_of

_MOST = 2**17
_PARTS = ("ulysses", "ring")


class ContextAttention(MeantWord):
    """An algorithm of attention over tokens that are sharded along cp."""

    # Liu et al. 2023; Llama 3, section 3.3.2; -; Jacobs et al. 2023
    RING = "ring", "ring attention; each rank holds contiguous tokens"
    ZIGZAG = (
        "zigzag",
        "ring attention; each rank holds an early and a late chunk, which balances causal "
        "attention",
    )
    ALL_GATHER = "all-gather", "keys and values are all-gathered and saved for backward"
    ULYSSES = "ulysses", "all-to-all: each rank computes some heads over all tokens"

    @property
    def is_balanced(self) -> bool:
        """True if each rank of the ring has an early and a late chunk, which balances causal
        attention."""
        return self is ContextAttention.ZIGZAG


@dataclass(frozen=True, slots=True, kw_only=True)
class Hybrid:
    """Ulysses over `ulysses` neighbouring ranks, combined with a zigzag ring over `ring` such
    groups (Fang and Zhao 2024, USP). `ulysses * ring` is the degree of cp."""

    ulysses: int
    ring: int

    @property
    def is_balanced(self) -> bool:
        """True if each rank of the ring has an early and a late chunk, which balances causal
        attention."""
        return self.ring > 1

    def __str__(self) -> str:
        return f"{{ulysses: {self.ulysses}, ring: {self.ring}}}"


@grammar_dataclass
class _HybridDegrees(FreeMapping):
    """A mapping with the two degrees of a hybrid."""

    def check(self, value: Any) -> object:
        degrees = super().check(value)
        if not isinstance(degrees, dict) or {*degrees} != {*_PARTS}:
            reject(
                "a mapping must have the keys `ulysses` and `ring`", "Use `{ulysses: 2, ring: 2}`."
            )
        return degrees

    def schema(self) -> dict[str, Any]:
        shape = super().schema()
        values = shape.pop("additionalProperties")
        properties = dict.fromkeys(_PARTS, values)
        required = {"required": [*_PARTS], "additionalProperties": False}
        return {**shape, "properties": properties, **required}


def _to_file_syntax(attention: ContextAttention | Hybrid) -> object:
    if isinstance(attention, Hybrid):
        return {"ulysses": attention.ulysses, "ring": attention.ring}
    return attention.value


@section_dataclass
class ContextSpec:
    """Context-parallel attention: how attention reaches tokens on other ranks along cp."""

    attention: Annotated[
        ContextAttention | Hybrid,
        Either(
            "How attention reaches the tokens of other ranks. Default without this section: "
            "all-gather if activations on cp are S*, otherwise zigzag, or ring if the tokens "
            "cannot be split into two chunks per rank.",
            "ring, zigzag, all-gather, ulysses or {ulysses: U, ring: R}",
            (
                Choice(
                    "",
                    words_of(ContextAttention),
                    slips={
                        "allgather": "all-gather",
                        "all_gather": "all-gather",
                        "gather": "all-gather",
                        "zig-zag": "zigzag",
                        "p2p": "ring",
                        "ring-attention": "ring",
                        "a2a": "ulysses",
                        "all-to-all": "ulysses",
                    },
                    read=ContextAttention,
                ),
                _HybridDegrees(
                    "ulysses over neighbouring ranks, a zigzag ring over such groups",
                    values=Integer("ranks", 1, _MOST),
                    read=lambda degrees: Hybrid(**degrees),
                ),
            ),
            write=_to_file_syntax,
        ),
    ]


MAX_SAMPLES = 2**31 - 1
AUTO = "auto"
PADDED = ", or `batch.pad=true`, which adds ignored targets"  # appended to other remedies


class Rounding(MeantWord):
    """The rounding of a global batch that is given in tokens."""

    POWER_OF_TWO = (
        "power-of-two",
        "round to the nearest power of two if the micro-batches divide it; otherwise as none",
    )
    NONE = (
        "none",
        "round to the nearest multiple of micro x accumulate x data-parallel ranks",
    )


class WrittenTokens(NamedTuple):
    """A global batch in tokens as it was written: `text` with its unit, `tokens`, and the number of
    full `samples` that they make up (at least 1)."""

    text: str
    tokens: int
    samples: int
    rounding: Rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The resolved batch: `global_samples == micro * accumulate * data_degree`.

    `sequence` is in tokens and includes `padding`, which is 0 unless `allows_padding`. `written` is
    the batch as written in tokens. While `micro_is_open`, `micro` is 1 and stands for `auto`;
    `micro_choice` gives the reason for the value that was chosen.
    """

    global_samples: int
    micro: int
    sequence: int
    accumulate: int
    written: WrittenTokens | None = field(default=None, compare=False)
    micro_is_open: bool = False
    micro_choice: str = field(default="", compare=False)
    allows_padding: bool = False
    padding: int = 0

    @property
    def unpadded_tokens(self) -> int:
        """The tokens of a sample without padding."""
        return self.sequence - self.padding

    @property
    def tokens(self) -> int:
        """The tokens of one step over the full mesh, without padding."""
        return self.global_samples * self.unpadded_tokens


@grammar_dataclass
class BatchRaw:
    """global = micro x accumulate x data degree, in samples of `sequence` tokens."""

    samples: Annotated[
        int | str | None,
        Either(
            "Samples per step over all ranks, or a number of tokens (`4M tokens`), which "
            "`batch.round` converts to samples. Default: micro x accumulate x data-parallel "
            "ranks.",
            f"an integer in 1..{MAX_SAMPLES} (samples), or tokens like 4M tokens",
            (Integer("", 1, MAX_SAMPLES), Text("", r"[0-9]{1,15}(\.[0-9]{1,6})? *[kKMBT]? tokens")),
            key="global",
            aka=("global_batch_size", "train_batch_size"),
        ),
    ] = None
    rounding: Annotated[
        str | None,
        Choice(
            "How a batch in tokens is rounded to samples. Default: power-of-two.",
            words_of(Rounding),
            slips={"pow2": "power-of-two", "power_of_two": "power-of-two", "false": "none"},
            key="round",
        ),
    ] = None
    micro: Annotated[
        int | str,
        Integer(
            "Samples per forward pass and rank; `auto` picks the largest number that is "
            "predicted to fit.",
            1,
            10**6,
            words=(AUTO,),
            aka=(
                "micro_batch_size",
                "batch_size",
                "per_device_train_batch_size",
                "train_micro_batch_size_per_gpu",
            ),
        ),
    ] = 1
    sequence: Annotated[
        int,
        Integer(
            "Tokens per sample. Required for token data; otherwise the default is 1.",
            1,
            10**8,
            has_derived_default=True,
            aka=(
                "seq_len",
                "seq_length",
                "sequence_length",
                "max_seq_len",
                "context_length",
                "block_size",
            ),
        ),
    ]
    pad: Annotated[
        bool,
        Boolean(
            "Pad samples with ignored targets until cp and tp can split them evenly.",
            aka=("pad_to_multiple_of", "padding"),
        ),
    ] = False
    accumulate: Annotated[
        int | None,
        Integer(
            "Micro-batches per step (gradient accumulation). Default: from the other batch keys.",
            1,
            10**6,
            aka=("gradient_accumulation_steps", "accumulation_steps", "grad_accum"),
        ),
    ] = None


def written_tokens(text: str, sequence: int, rounding: Rounding) -> WrittenTokens:
    """Parse a text like `4M tokens` and convert it to samples of `sequence` tokens."""
    tokens = parse_count(text.removesuffix("tokens"))
    return WrittenTokens(
        text=text, tokens=tokens, samples=max(1, tokens // sequence), rounding=rounding
    )


def rounded_samples(written: WrittenTokens, step: int) -> int:
    """Round the written tokens to a multiple of `step` samples.

    Args:
        written: The batch in tokens.
        step: The samples of the smallest global batch.

    Returns:
        The nearest power of two if rounding permits it and `step` divides it; otherwise the nearest
        multiple of `step`, at least one.
    """
    power = nearest_power_of_two(written.samples)
    if written.rounding is Rounding.POWER_OF_TWO and power % step == 0:
        return power
    return max(1, (2 * written.samples + step) // (2 * step)) * step


def nearest_power_of_two(number: int) -> int:
    """Return the nearest power of two; of two equally near ones, the larger."""
    below: int = 2 ** (number.bit_length() - 1)
    return 2 * below if 2 * number >= 3 * below else below


def token_multiple(factors: Sequence[Factor], attention: ContextAttention | Hybrid | None) -> int:
    """Return the number that must divide the tokens of a sample.

    Args:
        factors: The factors of the mesh.
        attention: The attention over cp. None applies the default: two chunks per cp rank, or one
            if keys and values are all-gathered.

    Returns:
        The least common multiple of the cp chunks and of the tp shards of a cp rank's tokens.
    """
    ranks = chunks = slices = 1
    for factor in factors:
        if factor.axis in TOKEN_AXES and factor.degree > 1:
            ranks = factor.degree
            is_balanced = factor.placement.activations != S_STAR
            if attention is not None:
                is_balanced = attention.is_balanced
            # A balanced (zigzag) rank has an early and a late chunk, so that causal attention costs
            # all ranks the same.
            chunks = ranks * (2 if is_balanced else 1)
        if factor.axis is Axis.TP and factor.placement.activations != R:
            slices = factor.degree
    return math.lcm(chunks, ranks * slices)


def pad_samples(batch: Batch, factors: Sequence[Factor], context: ContextSpec | None) -> Batch:
    """Return the batch with samples padded to the required multiple, if it permits padding."""
    if not batch.allows_padding:
        return batch
    multiple = token_multiple(factors, context.attention if context else None)
    padding = -batch.sequence % multiple
    return replace(batch, sequence=batch.sequence + padding, padding=padding)


def batch_lines(batch: Batch, data_degree: int) -> list[str]:
    """Return lines about values that were chosen or rounded, and about padding; none for
    the rest."""
    lines = chosen_lines(batch, data_degree)
    if batch.padding:
        lines.append(
            f"batch.sequence: {batch.unpadded_tokens} tokens are padded to {batch.sequence}; "
            f"{batch.padding / batch.sequence:.1%} of the computation is padding"
        )
    return lines


def chosen_lines(batch: Batch, data_degree: int) -> list[str]:
    """Return lines about a batch given in tokens and a micro-batch given as `auto`.

    A resolved spec contains the chosen numbers, so it has no such lines.
    """
    lines = [] if batch.written is None else [_tokens_line(batch, batch.written, data_degree)]
    if batch.micro_choice:
        lines.append(f"batch.micro: auto is {batch.micro}, {batch.micro_choice}")
    return lines


def _tokens_line(batch: Batch, written: WrittenTokens, data_degree: int) -> str:
    """Return the line about a batch given in tokens: the number of samples, and the rounding."""
    samples, step = batch.global_samples, batch.micro * data_degree
    said = (
        f"batch.global: {written.text} are {written.samples} samples of {batch.unpadded_tokens}: "
    )
    if samples == written.samples:
        return f"{said}using {samples}"
    off = f"{samples / written.samples - 1:+.1%}"
    power = nearest_power_of_two(written.samples)
    is_power = written.rounding is Rounding.POWER_OF_TWO
    if is_power and samples == power:
        return (
            f"{said}rounded to {samples}, the nearest power of two ({off}); "
            "`batch.round=none` disables this"
        )
    if samples == step > written.samples:
        return (
            f"{said}rounded up to {samples}, the minimum for {data_degree} data-parallel "
            f"ranks ({off})"
        )
    no_power = (
        f"; {power} is not a multiple of {batch.micro} micro × {data_degree} data"
        if is_power
        else ""
    )
    return f"{said}rounded to {samples}, the nearest multiple of {step} ({off}){no_power}"
