"""The table of all keys of a spec, made of its JSON Schema, which is made of the grammar."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from _tables import table

from ptrain.spec.axis import EXECUTED_AXES, Axis
from ptrain.spec.not_yet import ROWS
from ptrain.spec.schema import schema

Shape = Mapping[str, Any]
# Sections that a key per axis holds: the four states, which specs/README.md explains.
MODES_OF_AN_AXIS = ("TupleRaw", "ExpertTupleRaw")
_WORDS = {
    "string": "a text",
    "integer": "a whole number",
    "number": "a number",
    "array": "a list",
    "object": "a mapping",
    "null": "`null`",
}


# Of a key the values that are executed; of all others every value is.
EXECUTED = {
    **{".".join(row.route): tuple(v for v in row.executed if v is not None) for row in ROWS},
    **{
        f"{section}.{axis}": ()
        for section in ("mesh", "placement")
        for axis in set(Axis) - set(EXECUTED_AXES)
    },
}


def keys() -> str:
    """Every key of a spec by its dotted name: its values, its default, and what it means."""
    whole = schema()
    return table(["key", "values", "default", "meaning"], _rows(whole, whole["$defs"], ""))


def _rows(shape: Shape, sections: Mapping[str, Shape], before: str) -> Iterator[Sequence[str]]:
    needed = shape.get("required", ())
    for key, value in shape["properties"].items():
        section = _section(value)
        default = f"`{json.dumps(value['default'])}`" if "default" in value else ""
        yield (
            f"`{before}{key}`",
            _executed(f"{before}{key}", dict.fromkeys(_values(value))),
            "must be given" if key in needed else default.replace('"', ""),
            value["description"].replace("|", r"\|").replace("*", r"\*"),
        )
        if section and section not in MODES_OF_AN_AXIS:
            yield from _rows(sections[section], sections, f"{before}{key}.")


def _executed(key: str, values: Iterable[str]) -> str:
    """The values of a key, and of which it is true that nothing executes them yet."""
    if key not in EXECUTED:
        return ", ".join(values)
    works = [f"`{json.dumps(value)}`".replace('"', "") for value in EXECUTED[key]]
    others = [value for value in values if value not in works]
    return "; ".join([*([", ".join(works)] if works else []), f"not yet: {', '.join(others)}"])


def _section(value: Shape) -> str:
    """The name of the section that a key may hold, or nothing."""
    for shape in (value, *value.get("anyOf", ())):
        if "$ref" in shape:
            return str(shape["$ref"]).rpartition("/")[2]
    return ""


def _values(value: Shape) -> Iterator[str]:
    for choice in ("anyOf", "oneOf"):
        for shape in value.get(choice, ()):
            yield from _values(shape)
    if "$ref" in value:
        is_tuple = _section(value) in MODES_OF_AN_AXIS
        yield "the modes by state" if is_tuple else "its keys"
    elif "const" in value:
        yield f"`{value['const']}`"
    elif "enum" in value:
        yield from (f"`{word}`" for word in value["enum"])
    elif value.get("type") == "boolean":
        yield from ("`true`", "`false`")
    elif isinstance(value.get("type"), str):
        yield _WORDS[value["type"]] + _range(value)


def _range(value: Shape) -> str:
    least = value.get("minimum")
    return f" from {least}" if least is not None and value["type"] == "integer" else ""


TABLES = {"keys": keys}
