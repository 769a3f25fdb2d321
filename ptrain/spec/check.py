"""Validation of a tree against the grammar: pydantic's errors as faults with places."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from ptrain.errors import Fault
from ptrain.spec import slips
from ptrain.spec.grammar import SpecRaw
from ptrain.spec.leaf import Choice, describe, nearest
from ptrain.spec.shorthand import mark_of
from ptrain.spec.text import Route, Tree


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """Made once per kind: it costs several milliseconds."""
    return TypeAdapter(kind)


def validate(tree: Tree, kind: Any = SpecRaw) -> tuple[Any, dict[Route, Fault]]:
    """The raw spec, or None, and the faults by route.

    With faults, what is at fault is left out and the rest is read again, so that the next
    stage can still look at the sections that are sound.
    """
    try:
        return adapter(kind).validate_python(tree.root), {}
    except ValidationError as error:
        rows = error.errors(include_url=False)
    faults = {_route(row): _fault(tree, row, kind) for row in rows}
    return (_rest(tree.root, rows) if kind is SpecRaw else None), faults


def _rest(root: object, rows: Sequence[Any]) -> SpecRaw | None:
    """What is left without the values at fault, and without mappings that need one of them."""
    broken: list[Route] = []
    for _ in range(3):
        broken += [_route(row)[:-1] if row["type"] == "missing" else _route(row) for row in rows]
        try:
            rest: SpecRaw = adapter(SpecRaw).validate_python(_without(root, broken))
            return rest
        except ValidationError as error:
            rows = error.errors(include_url=False)
    return None


# Stand-ins for sections that every spec needs: nothing is reported about a section at fault.
_NEEDED: dict[str, dict[str, object]] = {"model": {}, "mesh": {}, "batch": {"sequence": 1}}


def _without(root: object, routes: Iterable[Route]) -> dict[str, object]:
    pruned = copy.deepcopy(root)
    for route in routes:
        node: Any = pruned
        for key in route[:-1]:
            node = node.get(key) if isinstance(node, dict) else None
        if isinstance(node, dict) and route:
            node.pop(route[-1], None)
    assert isinstance(pruned, dict), "a spec is a mapping"
    sections = {name: pruned.get(name) for name in _NEEDED}
    filled = {n: _NEEDED[n] | (s if isinstance(s, dict) else {}) for n, s in sections.items()}
    return {**pruned, **filled}


def _route(row: Any) -> Route:
    return tuple(str(part) for part in row["loc"])


def _fault(tree: Tree, row: Any, kind: Any) -> Fault:
    route = _route(row)
    place = ".".join(route)
    match row["type"]:
        case "spec":
            context = row["ctx"]
            return mark_of(tree, route).fault(place, context["finding"], context["remedy"])
        case "missing":
            finding, remedy = _missing(route)
            return mark_of(tree, route[:-1], key=True).fault(place, finding, remedy)
        case "unexpected_keyword_argument":
            known = _keys(kind, route[:-1])
            other = slips.other_key(route[-1]) if len(route) == 1 else ""
            guess = other or slips.whole_part(route[-1], known) or nearest(route[-1], known)
            finding = f"unknown key {route[-1]!r}"
            remedy = f"did you mean {guess!r}?" if guess else f"known here: {', '.join(known)}"
            return mark_of(tree, route, key=True).fault(place, finding, remedy)
        case _:
            known = _keys(kind, route)
            finding = f"must be a mapping; got {describe(row['input'])}"
            remedy = _inner(kind, route, row["input"]) or f"its keys: {', '.join(known)}"
            if route == ("checkpoint",):
                remedy = slips.checkpointed(row["input"]) or remedy
            return mark_of(tree, route).fault(place, finding, remedy)


def _missing(route: Route) -> tuple[str, str]:
    if route[0] == "placement":
        return f"all 4 states are needed: missing {route[-1]!r}", f"add {route[-1]}: R, S or S*"
    section = f" in {'.'.join(route[:-1])}" if len(route) > 1 else ""
    examples = {
        "model": "model: {preset: llama-tiny}",
        "mesh": "mesh: {dp_shard: 2}",
        "batch": "batch: {global: 16, micro: 2, sequence: 128}",
        "sequence": "sequence: 128",
    }
    return f"the key {route[-1]!r} is missing{section}", f"write {examples[route[-1]]}"


def _keys(kind: Any, route: Route) -> tuple[str, ...]:
    """The keys of the section at `route`, as they are written."""
    found = _section(kind, route)
    if found is None:
        return ()
    return tuple(field.name.rstrip("_") for field in dataclasses.fields(found))


def _section(kind: Any, route: Route) -> Any:
    """The dataclass of the section at `route`, or None."""
    for name in route:
        hints = get_type_hints(kind)
        inner = [part for part in _union(hints.get(name)) if dataclasses.is_dataclass(part)]
        if not inner:
            return None
        kind = inner[0]
    return kind


def _inner(kind: Any, route: Route, value: object) -> str:
    """`precision=fp16`: the key of the section that takes the value which the section got."""
    found = _section(kind, route)
    hints = get_type_hints(found, include_extras=True) if found else {}
    for name, hint in hints.items():
        for leaf in getattr(hint, "__metadata__", ()):
            if isinstance(leaf, Choice) and isinstance(value, str) and value in leaf.words:
                return f"write {'.'.join((*route, name.rstrip('_')))}={value}"
    return ""


def _union(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) or (hint,)
