"""What the grammar knows and nothing executes yet: a table of keys with what works today."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ptrain.errors import Fault
from ptrain.spec.axis import EXECUTED_AXES, Axis
from ptrain.spec.shorthand import mark_of
from ptrain.spec.text import Route, Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A key and the values of it that are executed (None: the key left out); `why` not the others,
    where there is more to say."""

    route: Route
    executed: tuple[object, ...] = (None,)
    why: str = ""


ROWS = (
    Row(
        route=("tensor", "asynchronous"),
        executed=(False, None),
        why=" (torch offers it on CUDA alone, and nothing here has been run there)",
    ),
    Row(route=("expert",)),
    Row(
        route=("attention",),
        executed=("sdpa", "eager", "flex", "math", None),
        why=" by itself (sdpa chooses it where it can)",
    ),
    Row(route=("compile",), executed=(False, None)),
    Row(route=("model", "experts")),
    Row(route=("model", "experts_per_token")),
)


def refusals(tree: Tree) -> dict[Route, Fault]:
    """Every key of the tree that is valid and not executed yet."""
    found: dict[Route, Fault] = {}
    for route, finding, remedy in (*_rows(tree), *_axes(tree)):
        found[route] = mark_of(tree, route).fault(".".join(route), finding, remedy)
    return found


_Finding = tuple[Route, str, str]


def _rows(tree: Tree) -> Iterator[_Finding]:
    for row in ROWS:
        value = tree.at(row.route)
        if any(value == other and type(value) is type(other) for other in row.executed):
            continue
        words = [_yaml(word) for word in row.executed if word is not None]
        name = row.route[-1]
        works = f"what works today: {name}: {' or '.join(words)}" if words else f"remove {name}"
        shown = f" {_yaml(value)}" if isinstance(value, str | int | float) else ""
        finding = f"not yet: {name}{shown} is in the grammar, and nothing executes it{row.why}"
        yield row.route, finding, works


def _axes(tree: Tree) -> Iterator[_Finding]:
    """An axis that is only named, with degree 1, says nothing; a tuple on it does."""
    for axis in Axis:
        degree = ("mesh", axis.value)
        tuple_ = ("placement", axis.value)
        if axis in EXECUTED_AXES:
            continue
        route = tuple_ if tree.at(degree) in (None, 1) else degree
        if tree.at(route) not in (None, 1):
            finding = f"not yet: the axis {axis} is in the grammar, and nothing executes it"
            yield route, finding, f"what works today: {', '.join(EXECUTED_AXES)}"


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
