"""The passes of a built-in model's stage: the committed tables of stages, evaluated
(`axes.pipeline.tables` writes them, as `models.tables` those of whole models).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from ptrain.axes.pipeline.schedule import Kind
from ptrain.axes.pipeline.stages import Stage
from ptrain.axes.tensor.costs import Cut
from ptrain.derivation import activations
from ptrain.derivation.activations import Monomial
from ptrain.derivation.passes import Passes, of_first_stage, of_later_stage
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec
from ptrain.timeline import Item

Units = tuple[tuple[str, ...], ...]

_PASSES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "input",
    Kind.WEIGHT: "weight",
}


def passes(spec: Spec, stage: Stage, stages: int, units: Units, cut: Cut | None) -> Passes:
    """Of a built-in model's stage, with the boundaries of its units; of one rank's part of it,
    where operators are `cut`."""
    shape, batch = spec.model, spec.batch
    assert isinstance(shape, ModelShape), "a built-in model"
    compute = spec.precision.effective.parameters
    name = activations.table_name(shape, compute, batch.micro)
    kind_of_cut = cut.kind if cut else None
    table = _table(name, kind_of_cut)
    dimensions = cut.dimensions if cut else activations.dimensions
    values = dimensions(shape, batch=batch.micro, sequence=batch.sequence)
    sizes = [size.bytes(values, compute.itemsize) for size in _sizes(name, kind_of_cut)]
    ends = {0: "first", stages - 1: "last"}
    place = table[ends.get(stage.index, "middle")]
    places = activations.places_of(units)
    numbers = [layer.rpartition(".")[2] for layer in stage.layers]
    items = {
        kind: tuple(_items(_of_layers(table, place[key], len(numbers)), sizes, order, places))
        for kind, key in _PASSES.items()
        if key in place
        for order in (numbers[::-1] if kind in (Kind.BACKWARD, Kind.INPUT) else numbers,)
    }
    tokens = batch.sequence
    if cut and cut.step.is_sequence:
        tokens //= cut.degree
    hidden = batch.micro * tokens * shape.hidden * compute.itemsize
    output = sizes[place["output"]]
    if stage.index == 0:
        return of_first_stage(items, output=output)
    return of_later_stage(items, output=output, hidden=hidden)


def _of_layers(table: dict[str, Any], listed: Sequence[int], layers: int) -> list[list[Any]]:
    """A pass of so many layers, layer by layer."""
    only, begin, block, end = (table["parts"][index] for index in listed)
    return [only] if layers == 1 else [begin, *([block] * (layers - 2)), end]


def _items(
    parts: Sequence[list[Any]],
    sizes: Sequence[int],
    order: Sequence[str],
    places: activations.Places,
) -> Iterator[Item]:
    made: dict[int, list[Any]] = {}
    items: list[Item] = []
    for part, number in zip(parts, order, strict=True):
        if id(part) not in made:
            made[id(part)] = list(activations.merged(part, sizes))
        activations.append(items, activations.instantiate(made[id(part)], number, places))
    yield from items


@cache
def _table(name: str, kind: str | None) -> dict[str, Any]:
    """Of a stage that is whole, or of one kind of cut."""
    path = f"tables/pp/{name}.json" if kind is None else f"tables/pp/tp/{name}.json"
    text = files("ptrain.derivation").joinpath(path).read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table if kind is None else table[kind]


@cache
def _sizes(name: str, kind: str | None) -> tuple[Monomial, ...]:
    return activations.monomials(_table(name, kind))
