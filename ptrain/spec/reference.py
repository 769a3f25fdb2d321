"""The reference of keys: allowed values, default, meaning and an example of every key of a spec."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass
from functools import cache
from typing import Any

from ptrain.spec.grammar import EXPERTS_TUPLE, ExpertTupleRaw, SpecRaw, TupleRaw
from ptrain.spec.leaf import Choice, Leaf, Size, Truth
from ptrain.spec.names import root
from ptrain.spec.section import Section, is_required, keys
from ptrain.spec.text import flow, read

FOLLOWS, NONE, NEEDED = "follows", "–", "required"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRow:
    """One key of a spec.

    `default` is written as in a file. It is `follows` if it depends on other keys, and `required`
    if every spec, or the preset of its section, must set the key. `example` is an override, or ""
    for a section or a table of measurements.
    """

    place: str
    takes: str
    default: str
    about: str
    example: str = ""
    is_section: bool = False


_OF_TUPLES = "a strategy name, or a mode for each state"


@cache
def _examples() -> Mapping[str, str]:
    """Read the example values of specs/examples.yaml by dotted key."""
    rows = read(root() / "examples.yaml").root
    assert isinstance(rows, dict), "specs/examples.yaml is a mapping"
    return rows


def reference(kind: type = SpecRaw, above: str = "") -> Iterator[KeyRow]:
    """Yield every key in the order of the grammar, each section before its keys."""
    for key, (spot, holds) in keys(kind).items():
        place = f"{above}{key}"
        if isinstance(holds, Section):
            is_tuple = holds.kind is TupleRaw
            takes = _OF_TUPLES if is_tuple or holds.kind is ExpertTupleRaw else "section"
            if holds is EXPERTS_TUPLE:  # which no strategy is
                takes = "a mode for each state"
            yield KeyRow(
                place=place,
                takes=takes,
                default=NEEDED if is_required(spot) else NONE,
                about=holds.about,
                example=f"{place}={_examples()[place]}" if place in _examples() else "",
                is_section=True,
            )
            if not is_tuple:
                yield from reference(holds.kind, f"{place}.")
        else:
            yield KeyRow(
                place=place,
                takes=_executed(holds),
                default=_default(spot, holds),
                about=holds.about,
                example=_example(place, holds, spot.default),
            )


def _example(place: str, leaf: Leaf, default: object) -> str:
    """Return an override that differs from the default, or "" if the key has none."""
    if place in _examples():
        value = _examples()[place]
    elif isinstance(leaf, Choice):
        words = leaf.executed or leaf.words
        value = str(next(word for word in words if word != leaf.say(default)))
    elif isinstance(leaf, Truth) and leaf.executed is None:
        value = "false" if default is True else "true"
    elif isinstance(leaf, Size):
        value = leaf.example.replace(" ", "")
    else:
        return ""
    return f"{place}={value}"


def _executed(leaf: Leaf) -> str:
    """Describe the accepted values, and those that are not supported yet."""
    if leaf.executed is None:
        return leaf.takes()
    works = [flow(value) for value in leaf.executed]
    planned = f"not supported yet: {leaf.takes()}"
    return f"{' or '.join(works)}; {planned}" if works else planned


def _default(spot: Field[Any], leaf: Leaf) -> str:
    if is_required(spot):
        return NEEDED
    if leaf.follows:
        return FOLLOWS
    value = leaf.say(None if spot.default is MISSING else spot.default)
    return NONE if value is None else flow(value)
