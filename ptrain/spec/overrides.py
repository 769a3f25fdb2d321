"""Dotlist overrides: `mesh.dp_shard=4` sets one key; `mesh.dp_shard=1,2,4` sweeps over three.

The right side is read by the same YAML rules as a file; what it sets is validated with the rest and
its faults stand at `command line: mesh.dp_shard=x`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ptrain.errors import Fault, SpecError
from ptrain.spec import slips
from ptrain.spec.axis import DATA_AXES, EXPERT_AXES
from ptrain.spec.leaf import describe
from ptrain.spec.leaf_mode import KEPT_MEANINGS
from ptrain.spec.shorthand import expand_shorthands
from ptrain.spec.text import COMMAND_LINE, Route, SourceMark, Tree, as_override, parse_value
from ptrain.spec.tuples import EXPERTS, REST, route_of

_OVERRIDE = re.compile(r"[\w-]+(\.[\w-]+)*=")
_CORPUS, _PATH, _SOURCES = (("data", key) for key in ("corpus", "path", "sources"))
_INSTEAD: dict[Route, tuple[Route, ...]] = {
    _CORPUS: (_PATH, _SOURCES),
    _PATH: (_CORPUS, _SOURCES),
    _SOURCES: (_CORPUS, _PATH),
    ("reshard",): (("sync", "reshard_after_forward"),),
    ("sync", "reshard_after_forward"): (("reshard",),),
}
_EXAMPLE = "write key=value, for example mesh.dp_shard=4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """One `a.b=c`: the route of the key and the text of the value."""

    route: Route
    text: str
    source: str


def split_arguments(arguments: Iterable[str]) -> tuple[list[str], list[str]]:
    """(specs, overrides) of a command line, which has them in any order. `mesh.dp_shard=4` is an
    override; `a/b=c.yaml` is a file."""
    sources: list[str] = []
    overrides: list[str] = []
    for argument in arguments:
        if argument.startswith("="):
            finding = f"there is a blank before {argument[:60]!r}"
            remedy = f"write it without spaces; {_EXAMPLE}"
            raise SpecError(SourceMark(source="command line").fault("", finding, remedy))
        (overrides if _OVERRIDE.match(argument) else sources).append(argument)
    return sources, overrides


def parse_override(argument: str) -> Override:
    """Raises SpecError for anything that is not `a.b=c`; a leading `--` is taken off."""
    source = source_of(argument)
    key, equals, text = argument.removeprefix("--").partition("=")
    route = tuple(key.strip().split("."))
    if not equals:
        finding = f"an override needs a value; got {argument[:60]!r}"
        raise SpecError(SourceMark(source=source).fault("", finding, _EXAMPLE))
    if not all(re.fullmatch(r"[A-Za-z0-9_-]+", part) for part in route):
        finding = f"an override begins with a dotted key; got {key[:60]!r}"
        raise SpecError(SourceMark(source=source).fault("", finding, _EXAMPLE))
    return Override(route=route, text=text, source=source)


def sweeps(overrides: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The product over all overrides whose value is a list `1,2,4` (without brackets)."""
    alternatives = []
    for argument in overrides:
        key, equals, text = argument.partition("=")
        parts = _split(text)
        if not equals or len(parts) == 1 or _is_tuple(key, parts):
            alternatives.append([argument])
        else:
            alternatives.append([f"{key}={part.strip()}" for part in parts])
    return itertools.product(*alternatives)


def apply(tree: Tree, override: Override) -> list[Fault]:
    """Set one key in the tree; returns what hinders."""
    value = _value(override)
    route = _data_axis(tree, override.route)
    node = tree.root
    for depth, key in enumerate(route[:-1]):
        assert isinstance(node, dict), "only mappings are entered"
        if route[: depth + 1] in map(route_of, EXPERT_AXES):
            expand_shorthands(tree)  # of a tuple alone, which is that of the rest
        if key not in node:
            tree.keys[route[: depth + 1]] = SourceMark(source=override.source)
        inner = node.setdefault(key, {})
        if not isinstance(inner, dict):
            expand_shorthands(tree)
            inner = node.setdefault(key, {})
        if not isinstance(inner, dict):
            place = ".".join(route[: depth + 1])
            finding = f"{place} is {describe(inner)}, not a mapping"
            remedy = f"set {place} itself"
            return [SourceMark(source=override.source).fault(".".join(route), finding, remedy)]
        node = inner
    assert isinstance(node, dict), "only mappings are entered"
    node[route[-1]] = value.root
    _displace(tree, route)
    _take_marks(tree, as_override(value, override.source), route)
    return []


def involves(fault: Fault, override: Override) -> bool:
    """Return whether the fault speaks of what the override sets: of its key, of the word it gives,
    or of the section that it is in."""
    section = tuple(fault.place.split("."))
    if override.route[: len(section)] == section:
        return True
    said = f"{fault.finding} {fault.remedy}"
    word = override.text if override.text.isidentifier() and len(override.route) > 1 else ""
    known = [re.escape(name) for name in (".".join(override.route), word) if name]
    return re.search(rf"(?<![\w.])({'|'.join(known)})(?![\w-])", said) is not None


def _value(override: Override) -> Tree:
    """The right side. Its faults are those of the override: there is no line to point at."""
    try:
        value = parse_value(override.text, override.source)
        faults = tuple(value.faults.values())
    except SpecError as error:
        faults = error.faults
    if faults:
        mark, place = SourceMark(source=override.source), ".".join(override.route)
        raise SpecError(*(mark.fault(place, fault.finding, fault.remedy) for fault in faults))
    return value


def _data_axis(tree: Tree, route: Route) -> Route:
    """`mesh.dp=4` sets the one data axis that the file has."""
    mesh = tree.root.get("mesh") if isinstance(tree.root, dict) else None
    if route != ("mesh", "dp") or not isinstance(mesh, dict) or "dp" in mesh:
        return route
    present = [axis.value for axis in DATA_AXES if axis in mesh]
    return ("mesh", present[0]) if len(present) == 1 else route


def _displace(tree: Tree, route: Route) -> None:
    """Of two keys that exclude each other the one on the command line replaces the file's."""
    for other in _INSTEAD.get(route, ()):
        mark = tree.values.get(other)  # a mapping from Python has none
        if mark is None or not mark.source.startswith(COMMAND_LINE):
            node = tree.at(other[:-1])
            if isinstance(node, dict):
                node.pop(other[-1], None)


def _take_marks(tree: Tree, value: Tree, route: Route) -> None:
    for known in [mark for mark in tree.values if mark[: len(route)] == route]:
        del tree.values[known]
        tree.keys.pop(known, None)
    mark = SourceMark(source=value.source)
    tree.keys[route] = tree.values[route] = mark
    for inner in value.values:
        tree.values[route + inner] = mark
        tree.keys[route + inner] = mark


def _is_tuple(key: str, parts: list[str]) -> bool:
    """`placement.dp_shard=S*,S,S,R` is one tuple, no sweep, and so is one with a slip in it: no
    strategy bears the name of a mode. `placement=S*,S,S,R` is one that misses its axis."""
    route = key.removeprefix("--").split(".")
    is_whole = len(route) <= 2 or route[-1] in (EXPERTS, REST)
    is_placement = route[0] == "placement" and is_whole
    return is_placement and any(slips.mode(part.strip()) in KEPT_MEANINGS for part in parts)


def _split(text: str) -> list[str]:
    """At commas outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def source_of(argument: str) -> str:
    """Return what a fault in the argument names as its source."""
    return f"{COMMAND_LINE}{_shown(argument)}"


def _shown(argument: str) -> str:
    text = "".join(letter if letter.isprintable() else "?" for letter in argument)
    return text if len(text) <= 80 else text[:77] + "..."
