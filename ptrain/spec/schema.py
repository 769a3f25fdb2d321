"""The JSON Schema of specs: editors complete keys and modes from it and show what they mean."""

from __future__ import annotations

import inspect
import json
from dataclasses import MISSING
from typing import Any

from ptrain.spec.grammar import SpecRaw
from ptrain.spec.leaf import Leaf, one_of
from ptrain.spec.section import Section, is_required, keys

FILE = "ptrain.schema.json"
Shape = dict[str, Any]


def schema() -> Shape:
    """Draft 7, which every editor speaks; nothing here is newer than it."""
    definitions: dict[str, Shape] = {}
    top = _mapping(SpecRaw, definitions)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "ptrain spec",
        "$defs": {name: definitions[name] for name in sorted(definitions)},
        **top,
    }


def schema_text() -> str:
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def _mapping(kind: type, definitions: dict[str, Shape], *, is_partial: bool = False) -> Shape:
    """A section's schema, without `null` for what is left out; those of the sections in it join the
    definitions."""
    needed = [
        key
        for key, (spot, holds) in keys(kind).items()
        if is_required(spot) and not getattr(holds, "follows", False) and not is_partial
    ]
    return {
        "additionalProperties": False,
        "description": inspect.getdoc(kind),
        "properties": {
            key: _sorted(
                _default(holds, spot.default)
                | _value(holds, definitions, null=kind is SpecRaw and not is_required(spot))
            )
            for key, (spot, holds) in keys(kind).items()
        },
        **({"required": needed} if needed else {}),
        "type": "object",
    }


def _value(holds: Leaf | Section, definitions: dict[str, Shape], *, null: bool) -> Shape:
    """The schema of a key; `null` stands for a section that is left out."""
    if isinstance(holds, Leaf):
        return {**holds.schema(), "description": holds.about}
    name = holds.kind.__name__
    if name not in definitions:
        definitions[name] = _mapping(holds.kind, definitions, is_partial=holds.is_partial)
    nothing = [{"type": "null"}] if null or holds.null else []
    shape = one_of({"$ref": f"#/$defs/{name}"}, *nothing, *holds.also)
    return {**shape, "description": holds.about}


def _default(holds: Leaf | Section, value: object) -> Shape:
    """Return the default of a key; nothing where it is none, or follows from other keys."""
    if value in (None, MISSING) or not isinstance(holds, Leaf) or holds.follows:
        return {}
    return {"default": holds.say(value)}


def _sorted(node: Any) -> Any:
    """Keywords by the alphabet: the text does not depend on how a leaf writes its own."""
    if isinstance(node, list):
        return [_sorted(inner) for inner in node]
    return {key: _sorted(node[key]) for key in sorted(node)} if isinstance(node, dict) else node
