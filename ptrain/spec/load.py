"""Loading of specs: a name, file or mapping with overrides becomes a resolved `Spec`, or one
SpecError with all faults.

    text -> tree with source marks -> overrides -> short forms expanded -> grammar -> Spec

Each stage reports all faults that it finds and drops the faulty values, so that the next stage can
still check the remaining sections. Keys that are not supported yet are rejected here.
`mesh.dp_shard=4` sets one key; `mesh.dp_shard=1,2,4` is a sweep over three values. The right side
is YAML, as in a file, and its faults are located at `command line: mesh.dp_shard=x`.
"""

from __future__ import annotations

import copy
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ptrain.errors import Fault, SpecError
from ptrain.spec import slips
from ptrain.spec.activations import KEPT_MEANINGS
from ptrain.spec.check import validate
from ptrain.spec.foreign import Conversion, find_conversion, without_devices
from ptrain.spec.foreign_files import read_tree
from ptrain.spec.grammar import SpecRaw
from ptrain.spec.leaf import Leaf, Route, describe, iter_keys
from ptrain.spec.names import find_spec, load_names
from ptrain.spec.placement import DATA_AXES, EXPERT_AXES
from ptrain.spec.resolve import resolve
from ptrain.spec.shorthand import EXPERTS, REST, expand_shorthands, route_of
from ptrain.spec.spec import Spec
from ptrain.spec.text import (
    COMMAND_LINE,
    Findings,
    SourceMark,
    Tree,
    parse_value,
    to_flow_yaml,
)
from ptrain.units import ceil_div

_OVERRIDE = re.compile(r"[\w-]+(\.[\w-]+)*=")
_CORPUS, _PATH, _SOURCES = (("data", key) for key in ("corpus", "path", "sources"))
_INSTEAD: dict[Route, tuple[Route, ...]] = {
    _CORPUS: (_PATH, _SOURCES),
    _PATH: (_CORPUS, _SOURCES),
    _SOURCES: (_CORPUS, _PATH),
    ("reshard",): (("sync", "reshard_after_forward"),),
    ("sync", "reshard_after_forward"): (("reshard",),),
}
_EXAMPLE = "Use `key=value`, for example `mesh.dp_shard=4`."


class Override(NamedTuple):
    """An override `a.b=c`: the route of the key, the text of the value, and the source for
    faults."""

    route: Route
    text: str
    source: str


def split_arguments(arguments: Iterable[str]) -> tuple[list[str], list[str]]:
    """Split the arguments of a command line, in any order, into specs and overrides.

    `mesh.dp_shard=4` is an override; `a/b=c.yaml` is a file.

    Returns:
        The lists (specs, overrides).

    Raises:
        SpecError: An argument starts with `=`.
    """
    sources: list[str] = []
    overrides: list[str] = []
    for argument in arguments:
        if argument.startswith("="):
            raise SpecError(
                SourceMark(source="command line").make_fault(
                    "",
                    f"there is a space before {argument[:60]!r}",
                    f"Remove the spaces around `=`. {_EXAMPLE}",
                )
            )
        (overrides if _OVERRIDE.match(argument) else sources).append(argument)
    return sources, overrides


def parse_override(argument: str) -> Override:
    """Parse an override `a.b=c`, with or without a leading `--`.

    Raises:
        SpecError: The argument has no `=`, or its left side is not a dotted key.
    """
    source = source_of(argument)
    key, equals, text = argument.removeprefix("--").partition("=")
    route = tuple(key.strip().split("."))
    if not equals:
        raise SpecError(
            SourceMark(source=source).make_fault(
                "", f"an override needs a value; got {argument[:60]!r}", _EXAMPLE
            )
        )
    if not all(re.fullmatch(r"[A-Za-z0-9_-]+", part) for part in route):
        raise SpecError(
            SourceMark(source=source).make_fault(
                "", f"an override must start with a key; got {key[:60]!r}", _EXAMPLE
            )
        )
    return Override(route=route, text=text, source=source)


def expand_sweeps(overrides: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield one tuple of overrides per combination of swept values.

    A value `1,2,4` without brackets is a sweep; the last sweep varies fastest.
    """
    alternatives = []
    for argument in overrides:
        key, equals, text = argument.partition("=")
        parts = _split_at_commas(text)
        if not equals or len(parts) == 1 or _is_tuple(key, parts):
            alternatives.append([argument])
        else:
            alternatives.append([f"{key}={part.strip()}" for part in parts])
    return itertools.product(*alternatives)


def apply_override(tree: Tree, override: Override) -> list[Fault]:
    """Set the override's key in `tree`.

    Returns:
        A fault if a value on the way to the key is not a mapping; otherwise an empty list.

    Raises:
        SpecError: The right side is not valid YAML.
    """
    value = _parse_right_side(override)
    route = _resolve_data_axis(tree, override.route)
    node = tree.root
    for depth, key in enumerate(route[:-1]):
        assert isinstance(node, dict), "only mappings are entered"
        if route[: depth + 1] in map(route_of, EXPERT_AXES):
            expand_shorthands(tree)  # a tuple alone moves to `rest` before one of its modes is set
        if key not in node:
            tree.keys[route[: depth + 1]] = SourceMark(source=override.source)
        inner = node.setdefault(key, {})
        if not isinstance(inner, dict):
            expand_shorthands(tree)
            inner = node.setdefault(key, {})
        if not isinstance(inner, dict):
            place = ".".join(route[: depth + 1])
            return [
                SourceMark(source=override.source).make_fault(
                    ".".join(route),
                    f"{place} is {describe(inner)}, not a mapping",
                    f"Set `{place}` instead.",
                )
            ]
        node = inner
    assert isinstance(node, dict), "only mappings are entered"
    node[route[-1]] = value.root
    _remove_excluded(tree, route)
    _mark_as_override(tree, value, override, route)
    return []


def is_caused_by(fault: Fault, override: Override) -> bool:
    """Return True if a fault concerns an override.

    Args:
        fault: The fault.
        override: The override.

    Returns:
        True if the fault is about a section that contains the override's key, or if its text names
        the key or the value.
    """
    section = tuple(fault.place.split("."))
    if override.route[: len(section)] == section:
        return True
    said = f"{fault.finding} {fault.remedy}"
    word = override.text if override.text.isidentifier() and len(override.route) > 1 else ""
    known = [re.escape(name) for name in (".".join(override.route), word) if name]
    return re.search(rf"(?<![\w.])({'|'.join(known)})(?![\w-])", said) is not None


def _parse_right_side(override: Override) -> Tree:
    """Parse the right side; its faults are located at the override, which has no line number."""
    try:
        value = parse_value(override.text, override.source)
        faults = tuple(value.faults.values())
    except SpecError as error:
        faults = error.faults
    if faults:
        mark, place = SourceMark(source=override.source), ".".join(override.route)
        raise SpecError(*(mark.make_fault(place, fault.finding, fault.remedy) for fault in faults))
    return value


def _resolve_data_axis(tree: Tree, route: Route) -> Route:
    """Redirect `mesh.dp` to the data axis of the mesh, if the mesh has exactly one."""
    mesh = tree.root.get("mesh") if isinstance(tree.root, dict) else None
    if route != ("mesh", "dp") or not isinstance(mesh, dict) or "dp" in mesh:
        return route
    present = [axis.value for axis in DATA_AXES if axis in mesh]
    return ("mesh", present[0]) if len(present) == 1 else route


def _remove_excluded(tree: Tree, route: Route) -> None:
    """Remove the file's keys that exclude the key set on the command line."""
    for other in _INSTEAD.get(route, ()):
        mark = tree.values.get(other)  # a mapping from Python has none
        if mark is None or not mark.source.startswith(COMMAND_LINE):
            node = tree.value_at(other[:-1])
            if isinstance(node, dict):
                node.pop(other[-1], None)


def _mark_as_override(tree: Tree, value: Tree, override: Override, route: Route) -> None:
    """Mark the value at `route`, and all values inside it, as set on the command line."""
    mark = SourceMark(source=override.source)
    for table in (tree.keys, tree.values):
        for known in [known for known in table if known[: len(route)] == route]:
            del table[known]
        table.update(dict.fromkeys(((*route, *inner) for inner in ((), *value.values)), mark))


def _is_tuple(key: str, parts: list[str]) -> bool:
    """Return True if a value with commas is one placement tuple and not a sweep.

    `placement.dp_shard=S*,S,S,R` is a tuple, even if some modes are misspelled, because no strategy
    has the name of a mode. `placement=S*,S,S,R` is a tuple whose axis is missing.
    """
    route = key.removeprefix("--").split(".")
    is_whole = len(route) <= 2 or route[-1] in (EXPERTS, REST)
    is_placement = route[0] == "placement" and is_whole
    return is_placement and any(
        slips.normalize_mode(part.strip()) in KEPT_MEANINGS for part in parts
    )


def _split_at_commas(text: str) -> list[str]:
    """Split a text at its commas, except inside brackets and quotes."""
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
    """Return the source name for faults of a command-line argument."""
    return f"{COMMAND_LINE}{_escape_unprintable(argument)}"


def _escape_unprintable(argument: str) -> str:
    text = "".join(letter if letter.isprintable() else "?" for letter in argument)
    return text if len(text) <= 80 else text[:77] + "..."


@cache
def _unsupported_keys() -> tuple[tuple[Route, Leaf], ...]:
    """Return the keys that have values which are not supported yet, with their leaves."""
    leaves = ((route, holds) for route, _, holds in iter_keys(SpecRaw) if isinstance(holds, Leaf))
    return tuple((route, leaf) for route, leaf in leaves if leaf.supported is not None)


def find_unsupported(tree: Tree) -> dict[Route, Fault]:
    """Return the faults of values that are valid but not supported yet.

    Args:
        tree: The tree with short forms expanded.

    Returns:
        A fault per key, by route.
    """
    findings = Findings(tree=tree)
    for route, leaf in _unsupported_keys():
        name, value, executed = route[-1], tree.value_at(route), leaf.supported or ()
        if value is None or any(value == o and type(value) is type(o) for o in executed):
            continue
        words = " or ".join(map(to_flow_yaml, executed))
        shown = f" {to_flow_yaml(value)}" if isinstance(value, str | int | float) else ""
        finding = f"not supported yet: {name}{shown} is reserved{leaf.reason}"
        findings.add(
            route, finding, f"Supported: {name}={words}." if words else f"Remove `{name}`."
        )
    return findings.faults


Source = str | Path | Mapping[str, object] | None

# A fault in one of these sections makes findings about the key's section worthless.
_DEPENDS = {
    "mesh": ("mesh", "placement"),
    "placement": ("mesh", "placement"),
    "batch": ("batch", "mesh", "placement"),
    "activations": ("activations", "placement"),
    "recompute": ("recompute", "activations", "placement"),
    "attention": ("attention", "model"),
    "loss": ("loss", "mesh", "placement", "tensor"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A resolved spec that can locate faults in its source text."""

    spec: Spec
    locate: Callable[[Fault], Fault] = field(repr=False)

    def __str__(self) -> str:
        return str(self.spec)


def load(
    source: Source = None,
    overrides: Sequence[str] = (),
    *,
    world_size: int | None = None,
    without: Sequence[str] = (),
) -> Document:
    """Load a spec from a name, file or mapping and resolve its defaults.

    Args:
        source: A name that `ptrain specs` lists, the path of a YAML file, or a mapping with the
            keys of a file. None loads the default spec.
        overrides: Overrides as on the command line, `key=value` each.
        world_size: The number of ranks that were started. It resolves an `auto` mesh axis and is
            checked against the mesh.
        without: Dotted keys to load the spec without, as if they were not written.

    Returns:
        The document: its `spec`, and `locate`, which finds the place of a fault in the file.

    Raises:
        SpecError: The spec is wrong. The error holds every fault that was found.

    Example:
        >>> import ptrain
        >>> spec = ptrain.load("zero3", ["mesh.dp_shard=4"]).spec
        >>> spec.world_size
        4
    """
    tree, name, overrides = _read_tree(source, overrides)
    faults = dict(tree.faults)
    for number, argument in enumerate(overrides):
        try:
            hindrances = apply_override(tree, parse_override(argument))
        except SpecError as error:
            hindrances = list(error.faults)
        faults |= {("override", str(number), str(i)): fault for i, fault in enumerate(hindrances)}
    for place in without:
        _remove_key(tree, place)
    short = expand_shorthands(tree)
    # A fault of a short form replaces the syntax faults of its parts, which follow from it.
    faults = {route: known for route, known in faults.items() if route[:-1] not in short} | short
    raw, invalid = validate(tree)
    for route, fault in (find_unsupported(tree) | invalid).items():
        if not any(route[: len(known)] == known for known in faults):
            faults[route] = fault
    if raw is not None:
        try:
            spec = resolve(raw, tree, name, world_size)
        except SpecError as error:
            faults |= _drop_dependent_faults(error.faults, faults)
    if faults:
        raise SpecError(*_sort_faults(faults.values(), overrides))
    return Document(spec=spec, locate=lambda fault: _locate_fault(tree, fault, overrides))


def _remove_key(tree: Tree, place: str) -> None:
    *outer, last = place.split(".")
    section = tree.value_at(tuple(outer))
    if isinstance(section, dict):
        section.pop(last, None)


def read_expanded_tree(source: Source, overrides: Sequence[str]) -> Tree:
    """Return the tree of a file with overrides applied and short forms expanded.

    Faults of single keys are ignored; those keys keep the values that they had.
    """
    tree, _, overrides = _read_tree(source, overrides)
    for argument in overrides:
        apply_override(tree, parse_override(argument))
    expand_shorthands(tree)
    return tree


def expand(source: Source = None, overrides: Sequence[str] = ()) -> list[Document]:
    """Load one spec for each combination of the values of a sweep.

    Args:
        source: A name, path or mapping, as for `load`.
        overrides: Overrides as on the command line. A value with commas is a sweep.

    Returns:
        The documents in the order of the values; the last sweep varies fastest.

    Raises:
        SpecError: One of the specs is wrong.

    Example:
        >>> import ptrain
        >>> [document.spec.world_size for document in ptrain.expand("zero3", ["mesh.dp_shard=2,4"])]
        [2, 4]
    """
    return [load(source, chosen) for chosen in expand_sweeps(overrides)]


def _read_tree(source: Source, overrides: Sequence[str]) -> tuple[Tree, str, Sequence[str]]:
    """Return the tree of a source, the default for the spec's `name`, and the overrides that are
    left. A file of another tool is converted, with the number of devices of the overrides."""
    if isinstance(source, Mapping):
        return _from_mapping(source), "spec", overrides
    path = _resolve_path(load_names().default if source is None else source)
    stem = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in path.stem)
    name, tree = stem.strip(".")[:64] or "spec", read_tree(path)
    if conversion := find_conversion(path, tree, overrides):
        return conversion.tree, name, without_devices(overrides)
    return tree, name, overrides


def read_conversion(source: str | Path, overrides: Sequence[str]) -> Conversion | None:
    """Return the conversion of another tool's file, or None if the source is a spec.

    Raises:
        SpecError: The source cannot be read.
    """
    path = _resolve_path(source)
    tree = read_tree(path)
    return find_conversion(path, tree, overrides)


def _resolve_path(source: str | Path) -> Path:
    """Return the path of a spec. A built-in name takes precedence over a file with that name, which
    can be written as `./name`."""
    if isinstance(source, Path):
        return source
    is_file = "/" in source or source.endswith((".yaml", ".yml"))
    if not is_file:
        try:
            return find_spec(source)
        except SpecError:
            if not os.path.exists(source):  # also False for texts that cannot be a path
                raise
    return Path(source)


def _from_mapping(source: Mapping[str, object]) -> Tree:
    root = _to_yaml_types(source)
    assert isinstance(root, dict), "a mapping stays one"
    return Tree(root=root, source="")


def _to_yaml_types(value: object) -> object:
    """Convert tuples to lists, and keys and enums to text, as YAML would have read them."""
    match value:
        case Mapping():
            return {str(key): _to_yaml_types(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_to_yaml_types(inner) for inner in value]
        case str():
            return str(value)
        case _:
            return copy.deepcopy(value)


def _drop_dependent_faults(
    faults: Iterable[Fault], known: Mapping[Route, Fault]
) -> dict[Route, Fault]:
    """Return the faults that do not merely follow from a section that is already faulty."""
    broken = {fault.place.split(".")[0] for fault in known.values()}
    return {
        (*fault.place.split("."), fault.finding): fault  # one value may have several faults
        for fault in faults
        if not broken.intersection(_DEPENDS.get(top := fault.place.split(".")[0], (top,)))
    }


def _sort_faults(faults: Iterable[Fault], overrides: Sequence[str]) -> list[Fault]:
    """Return the file's faults by line, then the command line's faults in the order of its
    arguments."""
    spoken = {source_of(argument): number for number, argument in enumerate(overrides)}

    def order(fault: Fault) -> tuple[bool, int, int, int]:
        return fault.line == 0, spoken.get(fault.source, -1), fault.line, fault.column

    return sorted(faults, key=order)


def _locate_fault(tree: Tree, fault: Fault, overrides: Sequence[str]) -> Fault:
    """Return the fault with the position of its key in the file or on the command line.

    If the key is in the file, the overrides that contribute to the fault are added to the finding.
    """
    route = tuple(fault.place.split(".")) if fault.place else ()
    mark: SourceMark = tree.locate(route)
    involved = [
        override
        for override in overrides
        if mark.line and is_caused_by(fault, parse_override(override))
    ]
    spoken = f" (with {' '.join(involved)} from the command line)" if involved else ""
    return mark.make_fault(fault.place, f"{fault.finding}{spoken}", fault.remedy)


# Overrides that give the smallest batch of a mesh, micro x accumulate x data degree: one token is
# rounded up to it.
_LEAST = ("batch.global=1 tokens", "batch.round=none")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshFollower:
    """A key whose value must change with the mesh: its value before and after the change."""

    key: str
    old_value: int
    new_value: int

    @property
    def override(self) -> str:
        """The override that sets the new value."""
        return f"{self.key}={self.new_value}"


def find_mesh_followers(source: Source, overrides: Sequence[str]) -> tuple[MeshFollower, ...]:
    """Return the keys that must change to fit the mesh that the overrides set.

    Convergence determines the global batch, and accumulation fills the gap to it. The global batch
    therefore stays if it is a multiple of the smallest batch of the mesh; otherwise it grows to the
    next multiple. If `batch.accumulate` is set, the global batch becomes that smallest batch.
    Tokens are rounded when the spec is loaded, so they need no change.

    Returns:
        The changes of `batch.global`, and of `cluster.devices` if the mesh has more ranks. Keys
        that the overrides set are never changed.

    Raises:
        SpecError: The spec has faults that these changes do not fix.
    """
    pinned = {parse_override(override).route for override in overrides}
    batch = (
        ()
        if pinned & {("batch",), ("batch", "global")}
        else tuple(_batch_follower(source, overrides))
    )
    if pinned & {("cluster",), ("cluster", "devices")}:
        return batch
    spec = load(source, [*overrides, *(follower.override for follower in batch)]).spec
    cluster, ranks = spec.cluster, spec.world_size
    if cluster is None or cluster.devices >= ranks:
        return batch
    return (*batch, MeshFollower(key="cluster.devices", old_value=cluster.devices, new_value=ranks))


def _batch_follower(source: Source, overrides: Sequence[str]) -> Iterator[MeshFollower]:
    """Yield the change of the global batch, if the mesh needs one and the batch is given in
    samples."""
    tree = read_expanded_tree(source, overrides)
    samples = tree.value_at(("batch", "global"))
    if not isinstance(samples, int) or samples < 1:
        return
    least = load(source, [*overrides, *_LEAST]).spec.batch.global_samples
    is_fixed = tree.has_key("batch", "accumulate")
    grown = least if is_fixed else ceil_div(samples, least) * least
    if grown != samples:
        yield MeshFollower(key="batch.global", old_value=samples, new_value=grown)
