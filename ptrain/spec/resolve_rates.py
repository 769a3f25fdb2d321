"""Resolution of a cluster's rates: those of a preset, and the tables that override it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ptrain.errors import SpecError
from ptrain.spec.check import validate
from ptrain.spec.names import file_of_preset, listing, missing, unusable
from ptrain.spec.rates import Rates, misshapen
from ptrain.spec.text import read

_FOLDER, _PLACE = "rates", "cluster.rates"

Add = Callable[[str, str, str], None]  # place, finding, remedy


def resolve_rates(written: Mapping[str, Any] | None, folder: Path, add: Add) -> Rates | None:
    """Return the preset's tables with those that are written beside it on top; a file is looked for
    in `folder` first. Tables of specs/rates that nothing overrides stay by their name, which
    `tables` reads."""
    if written is None:
        return None
    name = written.get("preset")
    if name is None:
        return _sound(written, add)
    path = listing(_FOLDER).get(name)
    if path is not None and written.keys() == {"preset"}:
        return Rates(preset=name)
    if path is None and Path(name).suffix in (".yaml", ".yml"):
        path = file_of_preset(name, folder)
    if path is None:
        add(f"{_PLACE}.preset", *missing(name, "table of rates", _FOLDER))
        return None
    try:
        values = _values(path)
    except SpecError as error:
        add(f"{_PLACE}.preset", *unusable(error))
        return None
    if "preset" in values:
        add(
            f"{_PLACE}.preset",
            f"{path.name} names another preset",
            "write the tables themselves",
        )
        return None
    return _sound({**values, **written, "preset": None}, add)


def _sound(values: Mapping[str, Any], add: Add) -> Rates | None:
    """The tables, if each row has a figure for each number of ranks at once."""
    faults = tuple(misshapen(values))
    for key, finding, remedy in faults:
        add(f"{_PLACE}.{key}", finding, remedy)
    return None if faults else Rates(**values)


def _values(path: Path) -> Mapping[str, Any]:
    """The fields of a file. Raises SpecError with all its faults."""
    tree = read(path)
    values, faults = validate(tree, Rates, is_partial=True)
    if faults or tree.faults:
        raise SpecError(*tree.faults.values(), *faults.values())
    fields: Mapping[str, Any] = values
    return fields


def tables(rates: Rates) -> Rates:
    """The rates themselves, where they are those of specs/rates by name."""
    return rates if rates.preset is None else _named(rates.preset)


@cache
def _named(name: str) -> Rates:
    values = _values(listing(_FOLDER)[name])
    assert not tuple(misshapen(values)), f"specs/rates/{name}.yaml: rows lack figures"
    return Rates(**values)
