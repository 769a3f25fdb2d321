"""A word of a closed set, which many tables have for a key."""

from __future__ import annotations

from enum import StrEnum


class Word(StrEnum):
    """A member of a set of words. It is hashed as its text: `Enum` hashes a member's name, by a
    function of Python's own at each look-up of a table."""

    __hash__ = str.__hash__
