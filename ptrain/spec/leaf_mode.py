"""The kinds of value that are modes (Definition 2), each with its meaning."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from typing import Any

from ptrain.spec import slips
from ptrain.spec.leaf import Free, Leaf, declared, describe, meanings, refuse
from ptrain.spec.placement import Mode

MODE_MEANINGS = {
    "R": "replicated: every rank of this axis holds the whole state",
    "S": "sharded: each rank holds a slice (parameters on a data axis: use S*)",
    "S*": "sharded with gathering: a slice is stored, the whole is gathered for use",
    "M": "materialized: made when needed and not kept (parameters: casts of the master copies; "
    "gradients: used up unit by unit; activations: recomputed)",
    "O": "offloaded: a slice in the host's memory, short for S@host",
    "R@host": "a whole copy in the host's memory",
    "S*@host": "a slice in the host's memory, gathered for use",
    "R@file": "a whole copy in a file (NVMe)",
    "S@file": "a slice in a file (NVMe)",
    "S*@file": "a slice in a file (NVMe), gathered for use",
    "S@host": "a slice in the host's memory, the long form of O",
}
KEPT_MEANINGS = MODE_MEANINGS | {
    "M@host": "recomputed, from inputs that lie in the host's memory",
    "M@file": "recomputed, from inputs that lie in a file (NVMe)",
}


@declared
class ModeText(Leaf):
    """A mode of Definition 2 with its tier."""

    def check(self, value: Any) -> object:
        if isinstance(value, Mode):
            return value
        mode = _parsed(value)
        if mode is None or str(mode) not in self.words():
            refuse(
                f"must be {self.takes()}; got {describe(value)}",
                self.meant(value) or slips.quote(value),
            )
        return mode

    def takes(self) -> str:
        return "a mode: R, S, S*, M or O, or with a tier (R@host, S@file)"

    def say(self, value: object) -> object:
        return str(value)

    def meant(self, value: object) -> str:
        """The question whether another mode was meant."""
        mode = slips.mode(value) if isinstance(value, str) else ""
        return f"did you mean {mode}?" if mode in self.words() else ""

    def words(self) -> Mapping[str, str]:
        """Return what may be written, each with its meaning."""
        return MODE_MEANINGS

    def schema(self) -> dict[str, Any]:
        return meanings(self.words())


@declared
class KeptText(ModeText):
    """A mode of A, which knows one more: the inputs of blocks that are recomputed may lie apart."""

    def words(self) -> Mapping[str, str]:
        return KEPT_MEANINGS

    def meant(self, value: object) -> str:
        word = _IN_WORDS.get(str(value).lower(), "")
        return super().meant(word or value)


@declared
class ModesByBlock(Free):
    """`{"0-7": M, "8-": R}`: blocks from 0, the last one included; a number alone is one block."""

    values: Leaf | None = KeptText("")

    def check(self, value: Any) -> object:
        checked = super().check(value)
        assert isinstance(checked, dict), "it was a mapping"
        ranges = sorted((_range(key), key) for key in checked)
        for ((_, last), key), ((first, _), other) in itertools.pairwise(ranges):
            if last >= first:
                refuse(
                    f"the blocks {key!r} and {other!r} overlap",
                    "give each block one mode; a block that no range has is R",
                )
        return checked

    def schema(self) -> dict[str, Any]:
        assert self.values is not None, "modes"
        return {
            "type": "object",
            "patternProperties": {f"^{_BLOCKS}$": self.values.schema()},
            "additionalProperties": False,
        }


_IN_WORDS = {
    "recompute": "M",
    "recomputed": "M",
    "checkpoint": "M",
    "checkpointing": "M",
    "full": "M",
    "offload": "O",
    "offloaded": "O",
    "host": "O",
    "cpu": "O",
    "keep": "R",
    "none": "R",
}


def _parsed(value: object) -> Mode | None:
    try:
        return Mode.parse(value) if isinstance(value, str) else None
    except ValueError:
        return None


def blocks_of(text: str) -> tuple[int, int | None]:
    """(first, last) of `0-7`, `3` and `8-`, whose last one is None: all that follow."""
    first, dash, last = text.partition("-")
    return int(first), int(last) if last else None if dash else int(first)


_BLOCKS = r"[0-9]{1,5}(-([0-9]{1,5})?)?"


def _range(text: str) -> tuple[int, float]:
    """(first, last) of a range that is written as it should be."""
    if not re.fullmatch(_BLOCKS, text):
        refuse(
            f"{text!r} is no range of blocks",
            'write first-last, counted from 0: {"0-7": M, "8-": R}',
        )
    first, last = blocks_of(text)
    if last is not None and last < first:
        refuse(f"{text!r} ends before it begins", f'write "{last}-{first}"')
    return first, math.inf if last is None else last
