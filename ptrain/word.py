"""Members of closed sets of words, which serve as keys of many tables."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Self


class Word(StrEnum):
    """A member of a closed set of words.

    It is hashed as its text. `Enum.__hash__` is Python code that hashes the member's name, which is
    slow in the look-ups of tables.
    """

    __hash__ = str.__hash__


class MeantWord(Word):
    """A word with the meaning that the schema and the help print: `NAME = "word", "meaning"`."""

    meaning: str

    def __new__(cls, word: str, meaning: str = "") -> Self:
        member = str.__new__(cls, word)
        member._value_ = word
        member.meaning = meaning
        return member


def words_of(members: Iterable[MeantWord]) -> dict[str, str]:
    """Return the meaning of each word among these members."""
    return {member.value: member.meaning for member in members}
