"""The smallest spec that still fails: keys reset to their defaults, axes removed with their tuples,
numbers and lists reduced, modes replaced by R. Each change is kept if the spec stays legal and
fails."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ptrain.cost import PLACED
from ptrain.errors import SpecError
from ptrain.spec.load import load
from ptrain.spec.shorthand import POLICIES
from ptrain.spec.text import to_flow_yaml
from tests.adversary.random_specs import TooLarge, Written, load_accepted

Route = tuple[str, ...]
Fails = Callable[[Written], bool]

MOST_TRIES = 200  # of which each that is legal is simulated


class Shrinking:
    """A failing spec that is being reduced; `tries` counts the specs that were run."""

    def __init__(self, written: Written, fails: Fails, most: int = MOST_TRIES) -> None:
        self.written = copy.deepcopy(written)
        self.tries = 0
        self._fails, self._most = fails, most
        self._known: set[str] = set()

    def smallest(self) -> Written:
        """Return a spec that no single change reduces to a smaller failing one."""
        self._take(_written_out(self.written))
        self._drop(list(_droppable(self.written)))
        while any(self._take(smaller) for smaller in _smaller(self.written)):
            pass
        return self.written

    def _drop(self, routes: Sequence[Route]) -> None:
        """Remove keys together if they do not matter, otherwise in halves."""
        if not routes or self._take(_remove_key(self.written, routes)) or len(routes) == 1:
            return
        half = len(routes) // 2
        self._drop(routes[:half])
        self._drop(routes[half:])

    def _take(self, smaller: Written) -> bool:
        """Continue with a spec if it is different, legal and failing."""
        text = to_flow_yaml(smaller)
        if text == to_flow_yaml(self.written) or text in self._known or self.tries >= self._most:
            return False
        self._known.add(text)
        if not is_legal(smaller):
            return False
        self.tries += 1
        if self._fails(smaller):
            self.written = smaller
            return True
        return False


def is_legal(written: Written) -> bool:
    """Return True if a spec is legal."""
    try:
        load_accepted(written)
    except (SpecError, TooLarge):
        return False
    return True


def command(written: Written, rank: int) -> str:
    """Return one line that simulates a rank of the spec."""
    return f"echo {shlex.quote(to_flow_yaml(written))} | ptrain simulate /dev/stdin --rank {rank}"


def lines(written: Written) -> str:
    """Return the spec as YAML, one section per line."""
    return "\n".join(f"{key}: {to_flow_yaml(value)}" for key, value in written.items())


# ---- the steps


def _written_out(written: Written) -> Written:
    """Return the spec with its tuples as text and separate strategy policies."""
    spec = load(copy.deepcopy(written)).spec
    plain = copy.deepcopy(written)
    placement: dict[str, Any] = {
        factor.axis.value: str(factor.placement) for factor in spec.factors
    }
    degrees = {factor.axis.value: factor.degree for factor in spec.factors}
    if isinstance(written.get("placement"), str):
        for section in POLICIES:
            if section in spec.resolved:
                plain[section] = copy.deepcopy(spec.resolved[section])
    return plain | {"mesh": degrees, "placement": placement}


def _droppable(node: Any, above: Route = ()) -> Iterator[Route]:
    """Yield the routes of keys, sections before their keys."""
    for key, inner in node.items():
        route = (*above, key)
        if route[0] in ("mesh", "placement"):
            continue
        if route[0] not in ("model", "batch") or len(route) > 1:
            yield route
        if isinstance(inner, dict) and len(inner) > 1:
            yield from _droppable(inner, route)


def _remove_key(written: Written, routes: Sequence[Route]) -> Written:
    smaller = copy.deepcopy(written)
    for *above, key in routes:
        node = smaller
        for name in above:
            node = node.get(name, {})
        if isinstance(node, dict):  # not a placement by its name
            node.pop(key, None)
    return smaller


def _smaller(written: Written) -> Iterator[Written]:
    """Yield specs that are one change smaller, large changes first."""
    sections = [(key,) for key in written if key not in ("model", "mesh", "placement", "batch")]
    for axis in written["mesh"]:
        factor = [("mesh", axis), ("placement", axis)]
        yield _remove_key(written, factor)
        yield from (_remove_key(written, [*factor, section]) for section in sections)
    for route in _droppable(written):
        yield _remove_key(written, [route])
    for route, value in _leaves(written):
        for other in _less(route, value):
            yield _set_key(written, route, other)


def _leaves(node: Any, above: Route = ()) -> Iterator[tuple[Route, Any]]:
    for key, inner in node.items():
        if isinstance(inner, dict):
            yield from _leaves(inner, (*above, key))
        else:
            yield (*above, key), inner


def _less(route: Route, value: Any) -> Iterator[Any]:
    """Yield smaller values, the smallest first."""
    match value:
        case bool() | None:
            return
        case int():
            yield from (other for other in (1, 2, value // 2, value - 1) if 0 < other < value)
        case float() if value != 1.0:
            yield 1.0
        case list():
            yield from (value[:index] + value[index + 1 :] for index in range(len(value)))
            for index, inner in enumerate(value):
                for other in _less(route, inner):
                    yield [*value[:index], other, *value[index + 1 :]]
        case str() if route[0] == "placement" and value.count(",") == len(PLACED) - 1:
            modes = value.split(",")
            for index in range(len(PLACED)):
                for mode in _simpler_modes(modes[index]):
                    yield ",".join([*modes[:index], mode, *modes[index + 1 :]])


def _simpler_modes(mode: str) -> tuple[str, ...]:
    """Return R, and the same distribution on the device."""
    head = mode.partition("@")[0].replace("O", "S")
    return tuple(other for other in ("R", head) if other != mode and mode != "R")


def _set_key(written: Written, route: Route, value: Any) -> Written:
    changed = copy.deepcopy(written)
    node = changed
    for name in route[:-1]:
        node = node[name]
    node[route[-1]] = value
    return changed
