"""The JSON Schema of specs, from which editors complete keys and modes, and the reference of all
keys with defaults and examples. Both are generated from the declarations of the grammar."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass
from typing import Any

from ptrain.spec.grammar import EXPERTS_TUPLE, ExpertTupleRaw, SpecRaw, TupleRaw
from ptrain.spec.leaf import Boolean, Choice, Leaf, Section, Size, is_required, one_of, section_keys
from ptrain.spec.names import load_table
from ptrain.spec.text import to_flow_yaml

FILE = "ptrain.schema.json"
Shape = dict[str, Any]


def schema() -> Shape:
    """Return the JSON Schema of specs, in draft 7, which all common editors support."""
    definitions: dict[str, Shape] = {}
    top = _section_schema(SpecRaw, definitions)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "ptrain spec",
        "$defs": {name: definitions[name] for name in sorted(definitions)},
        **top,
    }


def schema_text() -> str:
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def _section_schema(
    kind: type, definitions: dict[str, Shape], *, is_partial: bool = False
) -> Shape:
    """Return the schema of a section; the schemas of nested sections are added to `definitions`.

    Nested keys that may be left out do not accept `null` for it.
    """
    needed = [
        key
        for key, (spot, holds) in section_keys(kind).items()
        if is_required(spot) and not getattr(holds, "has_derived_default", False) and not is_partial
    ]
    return {
        "additionalProperties": False,
        "description": inspect.getdoc(kind),
        "properties": {
            key: _sort_keywords(
                _default_schema(holds, spot.default)
                | _key_schema(holds, definitions, null=kind is SpecRaw and not is_required(spot))
            )
            for key, (spot, holds) in section_keys(kind).items()
        },
        **({"required": needed} if needed else {}),
        "type": "object",
    }


def _key_schema(holds: Leaf | Section, definitions: dict[str, Shape], *, null: bool) -> Shape:
    """Return the schema of a key; `null` permits null for a section that is left out."""
    if isinstance(holds, Leaf):
        return {**holds.schema(), "description": holds.description}
    name = holds.kind.__name__
    if name not in definitions:
        definitions[name] = _section_schema(holds.kind, definitions, is_partial=holds.is_partial)
    nothing = [{"type": "null"}] if null or holds.accepts_null else []
    shape = one_of({"$ref": f"#/$defs/{name}"}, *nothing, *holds.other_schemas)
    return {**shape, "description": holds.description}


def _default_schema(holds: Leaf | Section, value: object) -> Shape:
    """Return the schema's `default` of a key, or {} if there is none or it depends on other
    keys."""
    if value in (None, MISSING) or not isinstance(holds, Leaf) or holds.has_derived_default:
        return {}
    return {"default": holds.dump(value)}


def _sort_keywords(node: Any) -> Any:
    """Return a schema with sorted keywords, so that its text does not depend on the leaves'
    order."""
    if isinstance(node, list):
        return [_sort_keywords(inner) for inner in node]
    return (
        {key: _sort_keywords(node[key]) for key in sorted(node)} if isinstance(node, dict) else node
    )


FOLLOWS, NONE, NEEDED = "follows", "–", "required"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRow:
    """A key of a spec.

    `default` is in file syntax: `follows` if it depends on other keys, and `required` if every
    spec, or the preset of its section, must set the key. `example` is an override, or "" for a
    section or a table of measurements.
    """

    place: str
    takes: str
    default: str
    about: str
    example: str = ""
    is_section: bool = False


_OF_TUPLES = "a strategy name, or a mode for each state"


def _load_examples() -> Mapping[str, str]:
    """Read the example values of specs/examples.yaml by dotted key."""
    return load_table("examples.yaml")


def iter_key_rows(kind: type = SpecRaw, above: str = "") -> Iterator[KeyRow]:
    """Yield every key in the order of the grammar, each section before its keys."""
    for key, (spot, holds) in section_keys(kind).items():
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
                about=holds.description,
                example=f"{place}={_load_examples()[place]}" if place in _load_examples() else "",
                is_section=True,
            )
            if not is_tuple:
                yield from iter_key_rows(holds.kind, f"{place}.")
        else:
            yield KeyRow(
                place=place,
                takes=_describe_supported(holds),
                default=_written_default(spot, holds),
                about=holds.description,
                example=_example_override(place, holds, spot.default),
            )


def _example_override(place: str, leaf: Leaf, default: object) -> str:
    """Return an override that differs from the default, or "" if the key has none."""
    if place in _load_examples():
        value = _load_examples()[place]
    elif isinstance(leaf, Choice):
        words = leaf.supported or leaf.words
        value = str(next(word for word in words if word != leaf.dump(default)))
    elif isinstance(leaf, Boolean) and leaf.supported is None:
        value = "false" if default is True else "true"
    elif isinstance(leaf, Size):
        value = leaf.example.replace(" ", "")
    else:
        return ""
    return f"{place}={value}"


def _describe_supported(leaf: Leaf) -> str:
    """Describe the accepted values, and those that are not supported yet."""
    if leaf.supported is None:
        return leaf.describe_values()
    works = [to_flow_yaml(value) for value in leaf.supported]
    planned = f"not supported yet: {leaf.describe_values()}"
    return f"{' or '.join(works)}; {planned}" if works else planned


def _written_default(spot: Field[Any], leaf: Leaf) -> str:
    if is_required(spot):
        return NEEDED
    if leaf.has_derived_default:
        return FOLLOWS
    value = leaf.dump(None if spot.default is MISSING else spot.default)
    return NONE if value is None else to_flow_yaml(value)
