"""The JSON Schema of specs: editors complete keys and modes from it and show what they mean."""

from __future__ import annotations

import json
from typing import Any

from ptrain.spec.check import adapter
from ptrain.spec.grammar import SpecRaw

FILE = "ptrain.schema.json"


def schema() -> dict[str, Any]:
    """Draft 7, which every editor speaks; pydantic uses nothing newer than it."""
    generated = _tidy(adapter(SpecRaw).json_schema(by_alias=True))
    assert isinstance(generated, dict), "a schema is a mapping"
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "ptrain spec",
        **generated,
    }


def schema_text() -> str:
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def _tidy(node: object) -> object:
    """Without `null` for sections that are left out, and without titles that repeat the key.

    The rewrite walks keywords only: under `properties` and `$defs` the keys are the user's.
    """
    if isinstance(node, list):
        return [_tidy(inner) for inner in node]
    if not isinstance(node, dict):
        return node
    tidy: dict[str, object] = {}
    for key, value in node.items():
        if key in ("properties", "$defs"):
            tidy[key] = {name: _tidy(inner) for name, inner in value.items()}
        elif key != "title" and not (key == "default" and value in (None, [], {})):
            tidy[key] = value if key in ("const", "default", "description") else _tidy(value)
    return tidy
