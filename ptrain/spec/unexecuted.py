"""What the grammar knows and nothing executes yet."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from ptrain.errors import Fault
from ptrain.spec.grammar import SpecRaw
from ptrain.spec.leaf import Leaf
from ptrain.spec.section import Section, keys
from ptrain.spec.shorthand import mark_of
from ptrain.spec.text import Route, Tree, flow


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
