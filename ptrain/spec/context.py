"""The section `context`: how attention reaches tokens on other ranks along cp."""

from dataclasses import dataclass
from typing import Annotated, Any

from ptrain.spec.leaf import (
    Choice,
    Either,
    FreeMapping,
    Integer,
    grammar_dataclass,
    reject,
    section_dataclass,
)
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
