"""The table of presets on specs/README.md: what each series counts, and what it is composed of."""

from __future__ import annotations

from collections.abc import Iterator

from _tables import table

from ptrain.facts.parameters import facts
from ptrain.spec.load import load
from ptrain.spec.model import ModelShape
from ptrain.spec.names import listing
from ptrain.spec.text import flow
from ptrain.spec.write import options_said

SEQUENCE = 2048  # of learned positions
_OF_SIZES = ("tied", "dropout", "rope_base", "head_dim", "embedding_scale", "attention_scale")


def presets() -> str:
    """A row for each series: models whose names are alike up to the last hyphen."""
    series: dict[str, list[str]] = {}
    for name in listing("models"):
        series.setdefault(name.rpartition("-")[0], []).append(name)
    rows = (_row(stem, names) for stem, names in series.items() if stem != "gpt")
    return table(("preset", "parameters", "composed of", "without torch"), rows)


def _row(stem: str, names: list[str]) -> Iterator[str]:
    shapes = {name.removeprefix(f"{stem}-"): _shape(name) for name in names}
    in_order = sorted(shapes, key=lambda size: _numel(shapes[size]))
    yield f"`{stem}-`"
    yield ", ".join(f"`{size}` {_billions(shapes[size])}" for size in in_order)
    smallest = shapes[in_order[0]]
    said = {key: value for key, value in options_said(smallest).items() if key not in _OF_SIZES}
    parts = [f"{key}: {flow(value)}" for key, value in said.items()]
    yield ", ".join([f"{smallest.family}", *parts])
    yield "yes" if smallest.tabulated else "traced"


def _shape(name: str) -> ModelShape:
    model = load("zero3", [f"model.preset={name}"]).spec.model
    assert isinstance(model, ModelShape), "a preset is a shape"
    return model


def _billions(shape: ModelShape) -> str:
    return f"{_numel(shape) / 1e9:.3g} B"


def _numel(shape: ModelShape) -> int:
    return facts(shape, SEQUENCE).numel


TABLES = {"presets": presets}
