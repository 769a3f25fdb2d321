"""The reference of keys: what each key of a spec takes, what stands for it where it is left out,
and what it means, as the grammar declares it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass
from typing import Any

from ptrain.spec.grammar import EXPERTS_TUPLE, ExpertTupleRaw, SpecRaw, TupleRaw
from ptrain.spec.leaf import Leaf
from ptrain.spec.section import Section, is_required, keys
from ptrain.spec.text import flow

FOLLOWS, NONE, NEEDED = "follows", "–", "needed"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRow:
    """One key: `default` is a value as a file has it, `follows` where it depends on other keys,
    `needed` where every spec has the key, or the preset of its section."""

    place: str
    takes: str
    default: str
    about: str
    is_section: bool = False


_OF_TUPLES = "a strategy's name, or a mode of each state"


def reference(kind: type = SpecRaw, above: str = "") -> Iterator[KeyRow]:
    """Every key in the order of the grammar, a section before what is in it."""
    for key, (spot, holds) in keys(kind).items():
        place = f"{above}{key}"
        if isinstance(holds, Section):
            is_tuple = holds.kind is TupleRaw
            takes = _OF_TUPLES if is_tuple or holds.kind is ExpertTupleRaw else "its keys"
            if holds is EXPERTS_TUPLE:  # which no strategy is
                takes = "a mode of each state"
            yield KeyRow(
                place=place,
                takes=takes,
                default=NEEDED if is_required(spot) else NONE,
                about=holds.about,
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
            )


def _executed(leaf: Leaf) -> str:
    """What it takes, and of which of it it is true that nothing executes it yet."""
    if leaf.executed is None:
        return leaf.takes()
    works = [flow(value) for value in leaf.executed]
    return f"{' or '.join(works)}; not yet: {leaf.takes()}" if works else f"not yet: {leaf.takes()}"


def _default(spot: Field[Any], leaf: Leaf) -> str:
    if is_required(spot):
        return NEEDED
    if leaf.follows:
        return FOLLOWS
    value = leaf.say(None if spot.default is MISSING else spot.default)
    return NONE if value is None else flow(value)
