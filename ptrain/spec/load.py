"""A spec's name, file or mapping -> the resolved `Spec`, or every fault at once.

    text -> tree with places -> overrides -> short forms written out -> grammar -> Spec

Each stage reports all that it finds. What is at fault is left out for the next stage, which may
still find more in the sections that are sound.

What the grammar knows and nothing executes yet.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from ptrain.errors import Fault, SpecError
from ptrain.spec.check import validate
from ptrain.spec.grammar import SpecRaw
from ptrain.spec.leaf import Leaf
from ptrain.spec.names import find_spec, names
from ptrain.spec.overrides import apply, involves, parse_override, source_of, sweeps
from ptrain.spec.resolve import resolve
from ptrain.spec.section import Section, keys
from ptrain.spec.shorthand import expand_shorthands, mark_of
from ptrain.spec.slips import parse_toml
from ptrain.spec.spec import Spec
from ptrain.spec.suggest import for_foreign_file
from ptrain.spec.text import MAX_BYTES, Route, SourceMark, Tree, flow, read


def refusals(tree: Tree) -> dict[Route, Fault]:
    """Every key of the tree that is valid and not executed yet."""
    faults: dict[Route, Fault] = {}
    for route, finding, remedy in _rows(tree):
        faults[route] = mark_of(tree, route).fault(".".join(route), finding, remedy)
    return faults


_Finding = tuple[Route, str, str]


def _rows(tree: Tree) -> Iterator[_Finding]:
    for route, leaf in _all_planned():
        value, executed = tree.at(route), leaf.executed or ()
        if value is None or any(value == o and type(value) is type(o) for o in executed):
            continue
        words = [flow(word) for word in executed]
        name = route[-1]
        works = f"what works today: {name}: {' or '.join(words)}" if words else f"remove {name}"
        shown = f" {flow(value)}" if isinstance(value, str | int | float) else ""
        finding = f"not yet: {name}{shown} is in the grammar, and nothing executes it{leaf.why}"
        yield route, finding, works


@cache
def _all_planned() -> tuple[tuple[Route, Leaf], ...]:
    """The keys of a whole spec, of which there are as many however often one is loaded."""
    return tuple(planned(SpecRaw))


def planned(kind: type, above: Route = ()) -> Iterator[tuple[Route, Leaf]]:
    """The keys with values that nothing executes yet."""
    for key, (_, holds) in keys(kind).items():
        route = (*above, key)
        if isinstance(holds, Section):
            yield from planned(holds.kind, route)
        elif holds.executed is not None:
            yield route, holds


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
    """A resolved spec that still knows where each key stood."""

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
    """Raises SpecError with all faults. Without a source the default spec is loaded, and any is
    loaded as if the keys in `without` were not written.

    `world_size`, the number of ranks that were started, solves an `auto` degree and is checked
    against the mesh.
    """
    tree, name = _tree(source)
    faults = dict(tree.faults)
    for number, argument in enumerate(overrides):
        try:
            hindrances = apply(tree, parse_override(argument))
        except SpecError as error:
            hindrances = list(error.faults)
        faults |= {("override", str(number), str(i)): fault for i, fault in enumerate(hindrances)}
    for place in without:
        _drop(tree, place)
    short = {tuple(fault.place.split(".")): fault for fault in expand_shorthands(tree)}
    faults = {route: known for route, known in faults.items() if route[:-1] not in short} | short
    raw, invalid = validate(tree)
    for route, fault in (refusals(tree) | invalid).items():
        if not any(route[: len(known)] == known for known in faults):
            faults[route] = fault
    if raw is not None:
        try:
            spec = resolve(raw, tree, name, world_size)
        except SpecError as error:
            faults |= _independent(error.faults, faults)
    if faults:
        raise SpecError(*_in_order(faults.values(), overrides))
    return Document(spec=spec, locate=lambda fault: _locate(tree, fault, overrides))


def _drop(tree: Tree, place: str) -> None:
    *outer, last = place.split(".")
    node = tree.root
    for key in outer:
        node = node.get(key) if isinstance(node, dict) else None
    if isinstance(node, dict):
        node.pop(last, None)


def written(source: Source, overrides: Sequence[str]) -> Tree:
    """Return what file and overrides say, short forms written out, as far as it is sound."""
    tree, _ = _tree(source)
    for argument in overrides:
        apply(tree, parse_override(argument))
    expand_shorthands(tree)
    return tree


def expand(source: Source = None, overrides: Sequence[str] = ()) -> list[Document]:
    """One document per element of the product of all sweeps (`mesh.dp_shard=1,2,4`)."""
    return [load(source, chosen) for chosen in sweeps(overrides)]


def _tree(source: Source) -> tuple[Tree, str]:
    """The tree and the name that a spec without `name` takes."""
    if isinstance(source, Mapping):
        return _from_mapping(source), "spec"
    path = _path(names().default if source is None else source)
    stem = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in path.stem)
    return _read_spec(path), stem.strip(".")[:64] or "spec"


def _read_spec(path: Path) -> Tree:
    """Read a spec's file. Raises SpecError for another tool's file too."""
    values = _toml(path)
    tree = Tree(root=values, source=str(path)) if values else read(path)
    answer = for_foreign_file(path, tree.root) if isinstance(tree.root, dict) else None
    if answer:
        raise SpecError(SourceMark(source=str(path)).fault("", *answer))
    return tree


def _toml(path: Path) -> dict[str, object]:
    """Return the values of a TOML file; none of any other file."""
    try:
        is_toml = path.suffix == ".toml" and path.stat().st_size <= MAX_BYTES
        return parse_toml(path.read_text(encoding="utf-8")) if is_toml else {}
    except (OSError, ValueError, RecursionError):
        return {}


def _path(source: str | Path) -> Path:
    """A built-in name wins over a file of the same name, which is written ./name."""
    if isinstance(source, Path):
        return source
    is_file = "/" in source or source.endswith((".yaml", ".yml"))
    if not is_file:
        try:
            return find_spec(source)
        except SpecError:
            if not os.path.exists(source):  # False, too, for what can be no path
                raise
    return Path(source)


def _from_mapping(source: Mapping[str, object]) -> Tree:
    root = _plain(source)
    assert isinstance(root, dict), "a mapping stays one"
    return Tree(root=root, source="")


def _plain(value: object) -> object:
    """Lists for tuples, text for keys and enums: what YAML would have given."""
    match value:
        case Mapping():
            return {str(key): _plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_plain(inner) for inner in value]
        case str():
            return str(value)
        case _:
            return copy.deepcopy(value)


def _independent(faults: Iterable[Fault], known: Mapping[Route, Fault]) -> dict[Route, Fault]:
    """The faults that do not merely follow from a section that is already at fault."""
    broken = {fault.place.split(".")[0] for fault in known.values()}
    return {
        (*fault.place.split("."), fault.finding): fault  # one value may have several faults
        for fault in faults
        if not broken.intersection(_DEPENDS.get(top := fault.place.split(".")[0], (top,)))
    }


def _in_order(faults: Iterable[Fault], overrides: Sequence[str]) -> list[Fault]:
    """The file's faults by line, then those of the command line as it was written."""
    spoken = {source_of(argument): number for number, argument in enumerate(overrides)}

    def order(fault: Fault) -> tuple[bool, int, int, int]:
        return fault.line == 0, spoken.get(fault.source, -1), fault.line, fault.column

    return sorted(faults, key=order)


def _locate(tree: Tree, fault: Fault, overrides: Sequence[str]) -> Fault:
    """The same fault with the place of its key in the file or on the command line. In the file, a
    fault may be one only with what the command line says, which is named then."""
    route = tuple(fault.place.split(".")) if fault.place else ()
    mark: SourceMark = mark_of(tree, route)
    involved = [
        override
        for override in overrides
        if mark.line and involves(fault, parse_override(override))
    ]
    spoken = f" (with {' '.join(involved)} from the command line)" if involved else ""
    return mark.fault(fault.place, f"{fault.finding}{spoken}", fault.remedy)
