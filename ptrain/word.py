"""A word of a closed set, which many tables have for a key."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Self


class Word(StrEnum):
    """A member of a set of words. It is hashed as its text: `Enum` hashes a member's name, by a
    function of Python's own at each look-up of a table."""

    __hash__ = str.__hash__


class MeantWord(Word):
    """A word with its meaning, as the schema and the help have it: `NAME = "word", "meaning"`."""

    meaning: str

    def __new__(cls, word: str, meaning: str = "") -> Self:
        member = str.__new__(cls, word)
        member._value_ = word
        member.meaning = meaning
        return member


def words_of(members: Iterable[MeantWord]) -> dict[str, str]:
    """Return the words of a set, or of some of its members, each with its meaning."""
    return {member.value: member.meaning for member in members}
