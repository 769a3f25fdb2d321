"""Equal blocks in a row are played once: what a block in their midst allocates, sends and leaves
behind is what the one before it did.

A wrap acts at a unit's boundaries, and on its neighbours: it gathers those ahead, and frees what
the last one left. So the first and the last few of a row are played by themselves, as many as the
wrap's `reach`, and of those between them one stands for all.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby

from ptrain.facts.model import UnitFacts
from ptrain.spec.activations import Kept
from ptrain.spec.dials import UnitKind
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec

Turns = tuple[tuple[int, int], ...]  # places of blocks, and how many each stands for


@dataclass(frozen=True, slots=True)
class Representatives:
    """Who is played: `turns` by block, `units` and their `times`."""

    turns: Turns
    units: tuple[UnitFacts, ...]
    times: tuple[int, ...]

    @property
    def modules(self) -> tuple[tuple[str, ...], ...]:
        """The modules of each unit that is played."""
        return tuple(unit.modules for unit in self.units)


def everyone(units: tuple[UnitFacts, ...], blocks: int) -> Representatives:
    """Every unit of so many blocks by itself."""
    return Representatives(tuple((place, 1) for place in range(blocks)), units, (1,) * len(units))


def represent(
    spec: Spec, units: tuple[UnitFacts, ...], blocks: Sequence[str], reach: int | None
) -> Representatives:
    """Return who is played of a built-in model or stage with these `blocks`, first to last.
    `reach`: how many units next to a unit its wrap acts on; None where that is not bounded."""
    kinds = alike(spec, blocks)
    if reach is None or kinds is None:
        return everyone(units, len(blocks))
    places = turns(kinds, reach + 1)
    times_of = {blocks[place]: times for place, times in places}
    gone = {*blocks} - times_of.keys()
    played = [(unit, _block(unit)) for unit in units]
    return Representatives(
        places,
        tuple(unit for unit, block in played if block not in gone),
        tuple(times_of.get(block, 1) for _, block in played if block not in gone),
    )


def alike(spec: Spec, blocks: Sequence[str]) -> tuple[Kept, ...] | None:
    """Return how the activations of these blocks are kept, where they are alike but for that: those
    of a built-in model, of which no unit has more than one. It is None where nobody says that they
    are."""
    is_within = spec.unit_size.kind in (UnitKind.BLOCK, UnitKind.SUB_BLOCK)
    if not isinstance(spec.model, ModelShape) or not is_within:
        return None
    kept = spec.activations.of(spec.model.layers)
    return tuple(kept[int(block.rpartition(".")[2])] for block in blocks)


def turns(kinds: Sequence[Hashable], apart: int) -> Turns:
    """Return the places that are played: the first and the last `apart` of each row of equal kinds,
    and one for those between."""
    places: list[tuple[int, int]] = []
    start = 0
    for _, row in groupby(kinds):
        number = len(list(row))
        between = number - 2 * apart
        if between < 2:
            places += [(start + place, 1) for place in range(number)]
        else:
            places += [(start + place, 1) for place in range(apart)]
            places.append((start + apart, between))
            places += [(start + place, 1) for place in range(number - apart, number)]
        start += number
    return tuple(places)


def _block(unit: UnitFacts) -> str:
    """The block that a unit of a built-in model is of: `blocks.7` of `blocks.7.attention`."""
    return ".".join(unit.modules[0].split(".")[:2])
