"""The reference of keys: what each key of a spec takes, what stands for it where it is left out,
and what it means, as the grammar declares it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass
from typing import Any

from ptrain.spec.check import is_required
from ptrain.spec.grammar import SpecRaw
from ptrain.spec.leaf import Choice, Either, Leaf, Section, keys

FOLLOWS, NONE, NEEDED = "follows", "–", "needed"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRow:
    """One key: `default` is a value as a file has it, `follows` where it depends on other keys,
    `needed` where every spec has the key. `words` are the values with a meaning of their own."""

    place: str
    takes: str
    default: str
    about: str
    words: tuple[tuple[str, str], ...] = ()
    is_section: bool = False


def reference(kind: type = SpecRaw, above: str = "") -> Iterator[KeyRow]:
    """Every key in the order of the grammar, a section before what is in it."""
    for key, (spot, holds) in keys(kind).items():
        place = f"{above}{key}"
        if isinstance(holds, Section):
            yield KeyRow(
                place=place,
                takes="a mapping",
                default=NEEDED if is_required(spot) else NONE,
                about=holds.about,
                is_section=True,
            )
            yield from reference(holds.kind, f"{place}.")
        else:
            yield KeyRow(
                place=place,
                takes=holds.takes(),
                default=_default(spot, holds),
                about=holds.about + (" (not yet)" if holds.executed == () else ""),
                words=tuple(_words(holds)),
            )


def _default(spot: Field[Any], leaf: Leaf) -> str:
    if is_required(spot):
        return NEEDED
    if leaf.follows:
        return FOLLOWS
    value = leaf.say(None if spot.default is MISSING else spot.default)
    return NONE if value is None else _yaml(value)


def _yaml(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case list():
            return f"[{', '.join(map(_yaml, value))}]"
        case _:
            return str(value)


def _words(leaf: Leaf) -> Iterator[tuple[str, str]]:
    if isinstance(leaf, Choice):
        yield from leaf.words.items()
    elif isinstance(leaf, Either):
        for option in leaf.options:
            yield from _words(option)
