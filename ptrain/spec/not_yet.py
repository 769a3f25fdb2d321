"""What the grammar knows and nothing executes yet: a table of keys with what works today."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ptrain.costs import PLACED
from ptrain.errors import Fault
from ptrain.spec.axis import DATA_AXES, Axis
from ptrain.spec.leaf import MODE_MEANINGS
from ptrain.spec.placement import S_STAR, Mode, R, S
from ptrain.spec.precision import EXECUTED_LAYOUTS
from ptrain.spec.shorthand import mark_of
from ptrain.spec.text import Route, Tree

EXECUTED_MODES = (R, S, S_STAR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A key and the values of it that are executed (None: the key left out)."""

    route: Route
    executed: tuple[object, ...] = (None,)


ROWS = (
    Row(route=("activations",), executed=("R", None)),
    Row(route=("recompute",), executed=("none", None)),
    Row(route=("pipeline",)),
    Row(route=("expert",)),
    Row(route=("attention",), executed=("sdpa", None)),
    Row(route=("loss",), executed=("cross-entropy", None)),
    Row(route=("unit",), executed=("block", None)),
    Row(route=("reshard",)),
    Row(route=("overlap",)),
    Row(route=("prefetch",)),
    Row(route=("gather_after_update",), executed=("blocking", None)),
    Row(route=("offload",)),
    Row(route=("compile",), executed=(False, None)),
    Row(route=("consistency_every",), executed=(0, None)),
    Row(route=("sync", "reshard_after_forward"), executed=(True, False, None)),
    Row(route=("precision", "layout"), executed=(*EXECUTED_LAYOUTS, None)),
    Row(route=("precision", "parameters")),
    Row(route=("precision", "gradients")),
    Row(route=("precision", "master")),
    Row(route=("precision", "moments")),
    Row(route=("optimizer", "name"), executed=("adamw", "sgd", None)),
    Row(route=("model", "hf")),
    Row(route=("model", "config")),
    Row(route=("model", "experts")),
    Row(route=("model", "experts_per_token")),
)
_REMEDIES: dict[Route, str] = {
    ("reshard",): "write sync: {reshard_after_forward: true} or false",
    ("model", "hf"): "give a preset, a shape, or target: package.module:function",
    ("model", "config"): "give a preset, a shape, or target: package.module:function",
}


def refusals(tree: Tree) -> dict[Route, Fault]:
    """Every key of the tree that is valid and not executed yet."""
    found: dict[Route, Fault] = {}
    for route, finding, remedy in (*_rows(tree), *_axes(tree), *_modes(tree), *_buckets(tree)):
        found[route] = mark_of(tree, route).fault(".".join(route), finding, remedy)
    return found


def _value(tree: Tree, route: Route) -> object:
    node = tree.root
    for key in route:
        node = node.get(key) if isinstance(node, dict) else None
    return node


_Finding = tuple[Route, str, str]


def _rows(tree: Tree) -> Iterator[_Finding]:
    for row in ROWS:
        value = _value(tree, row.route)
        if any(value == other and type(value) is type(other) for other in row.executed):
            continue
        words = [_yaml(word) for word in row.executed if word is not None]
        name = row.route[-1]
        works = f"what works today: {name}: {' or '.join(words)}" if words else f"remove {name}"
        shown = f" {_yaml(value)}" if isinstance(value, str | int | float) else ""
        finding = f"not yet: {name}{shown} is in the grammar, and nothing executes it"
        yield row.route, finding, _REMEDIES.get(row.route, works)


def _axes(tree: Tree) -> Iterator[_Finding]:
    for axis in Axis:
        route = ("mesh", axis.value)
        degree = _value(tree, route)
        if axis not in DATA_AXES and degree not in (None, 1):
            finding = f"not yet: the axis {axis} is in the grammar, and nothing executes it"
            yield route, finding, f"what works today: {' and '.join(DATA_AXES)}"


def _modes(tree: Tree) -> Iterator[_Finding]:
    for axis in Axis:
        for state in PLACED:
            route = ("placement", axis.value, state.value)
            text = _value(tree, route)
            if not isinstance(text, str) or text not in MODE_MEANINGS:
                continue
            if Mode.parse(text) not in EXECUTED_MODES:
                finding = f"not yet: the mode {text} is in the grammar, and nothing executes it"
                yield route, finding, "what works today: R, S, S* on the device"


def _buckets(tree: Tree) -> Iterator[_Finding]:
    value = _value(tree, ("bucket",))
    if value in ("per-tensor", "whole"):
        finding = f"not yet: bucket {value} is in the grammar, and nothing executes it"
        yield ("bucket",), finding, "what works today: a size like 25 MiB"


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
