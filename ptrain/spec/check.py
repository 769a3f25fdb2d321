"""Validation of a tree against the grammar: a raw section, or faults with places."""

from __future__ import annotations

from dataclasses import MISSING
from typing import Any

from ptrain.errors import Fault
from ptrain.spec import slips
from ptrain.spec.batch import BatchRaw
from ptrain.spec.grammar import MeshRaw, SpecRaw
from ptrain.spec.leaf import Choice, Leaf, Refused, describe, nearest
from ptrain.spec.model import ModelRaw
from ptrain.spec.names import listing
from ptrain.spec.section import Section, is_required, keys
from ptrain.spec.shorthand import mark_of
from ptrain.spec.suggest import (
    for_foreign,
    for_unknown,
    foreign_leaves,
    is_called,
    listed,
    of_any_section,
)
from ptrain.spec.text import COMMAND_LINE, Route, Tree, flow
from ptrain.spec.tuples import REST

# Stand-ins for what every spec needs: nothing more is reported of a section that is at fault.
_NEEDED: dict[Route, object] = {
    ("model",): ModelRaw(),
    ("mesh",): MeshRaw(),
    ("batch",): BatchRaw(sequence=1),
    ("batch", "sequence"): 1,
}
_EXAMPLES = {
    "model": "{preset: llama-tiny}",
    "mesh": "{dp_shard: 2}",
    "batch": "{global: 16, micro: 2, sequence: 128}",
    "sequence": "128",
    "target": "package.module:function",
    "attention": "zigzag",
}
_GIVEN_BY: dict[Route, Route] = {("batch", "sequence"): ("data", "target")}


def validate(
    tree: Tree, kind: type = SpecRaw, *, is_partial: bool = False
) -> tuple[Any, dict[Route, Fault]]:
    """Return the raw section and the faults by route.

    What is at fault is left out of the section, and so are mappings that need it, so that the next
    stage can still look at what is sound. The section is None where nothing of it is. One that
    `is_partial` is a mapping of the values that are written.
    """
    walk = _Walk(tree)
    raw = walk.section(kind, tree.root, (), is_partial=is_partial)
    return (None if raw is MISSING else raw), walk.faults


class _Walk:
    """Walks a tree once, along the grammar. MISSING stands for a value that is at fault."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.faults: dict[Route, Fault] = {}

    def section(
        self, kind: type, written: object, route: Route, *, is_partial: bool = False
    ) -> object:
        if not isinstance(written, dict):
            self._no_mapping(kind, written, route)
            return MISSING
        known = keys(kind)
        values: dict[str, object] = {}
        for key, (spot, holds) in known.items():
            inner = (*route, key)
            value: object = MISSING
            if key in written:
                value = self._value(holds, written[key], inner)
            elif is_required(spot) and not is_partial and not self._is_given(inner):
                finding, remedy = _missing(inner)
                mark = mark_of(self.tree, route, key=True)
                self.faults[inner] = mark.fault(".".join(inner), finding, remedy)
            values[spot.name] = _NEEDED.get(inner, value) if value is MISSING else value
        for key in written:
            if key not in known:
                self._unknown(key, kind, route, written[key])
        sound = {name: value for name, value in values.items() if value is not MISSING}
        if is_partial:
            return sound
        if any(spot.name not in sound for spot, _ in known.values() if is_required(spot)):
            return MISSING
        return kind(**sound)

    def _is_given(self, route: Route) -> bool:
        """Return whether another key makes this one unnecessary."""
        return route in _GIVEN_BY and self.tree.at(_GIVEN_BY[route]) is not None

    def _value(self, holds: Leaf | Section, value: object, route: Route) -> object:
        if isinstance(holds, Section):
            if value is None and holds.null:
                return None
            return self.section(holds.kind, value, route, is_partial=holds.is_partial)
        try:
            return holds.take(value)
        except Refused as error:
            self._fault(route, error.finding, error.remedy)
            return MISSING

    def _no_mapping(self, kind: type, value: object, route: Route) -> None:
        remedy = self._key_of(kind, value, route)
        if not remedy and route:
            remedy = self._of_other_tool(route, value)
        remedy = remedy or listed("its keys", kind, route)
        if route == ("checkpoint",):
            remedy = slips.checkpointed(value) or remedy
        self._fault(route, f"must be a mapping; got {describe(value)}", remedy)

    def _unknown(self, key: str, kind: type, route: Route, value: object) -> None:
        place, finding = (*route, key), f"unknown key {key!r}"
        waits, remedy = slips.UNSUPPORTED.get(place, ("", ""))
        if waits:
            finding += f"; not supported yet: {waits}"
        elif not is_called(key, kind, route):
            if isinstance(value, dict) and self._unknown_section(place, value):
                return
            remedy = self._of_other_tool(place, value)
        self._fault(place, finding, remedy or for_unknown(key, kind, route), key=True)

    def _unknown_section(self, route: Route, value: dict[str, object]) -> bool:
        """Report the keys of another tool's section; False if no tool has one of them."""
        leaves = foreign_leaves(route, value)
        remedies = {
            inner: self._of_other_tool(inner, leaf) or of_any_section(inner[-1])
            for inner, leaf in leaves
        }
        if not any(remedies.values()):
            return False
        for inner, remedy in remedies.items():
            self._fault(
                inner,
                f"unknown key {'.'.join(inner)!r}",
                remedy or "Remove it: no key stands for it.",
                key=True,
            )
        return True

    def _of_other_tool(self, route: Route, value: object) -> str:
        """Return the remedy for a key of another tool; "" if no tool has it."""
        return for_foreign(route, value, lambda key, text: self._said(key, text, route))

    def _key_of(self, kind: type, value: object, route: Route) -> str:
        """`precision=fp16`: the key of the section that takes the value which the section got."""
        if not isinstance(value, str):
            return ""
        known = keys(kind)
        for key, (_, holds) in known.items():
            if isinstance(holds, Choice) and (word := holds.word(value)):
                return f"Use `{self._said((*route, key), flow(word), route)}`."
        preset = nearest(value, tuple(listing(f"{route[-1]}s"))) if "preset" in known else ""
        return f"Use `{self._said((*route, 'preset'), flow(preset), route)}`." if preset else ""

    def _said(self, route: Route, text: str, at: Route) -> str:
        """Return a key with its value's text, in the syntax of the key at fault: that of the
        command line, or of a file."""
        if mark_of(self.tree, at, key=True).source.startswith(COMMAND_LINE):
            return f"{'.'.join(route)}={text}"
        section, *inner = route
        if not inner:
            return f"{section}: {text}"
        return f"{section}: {{{': {'.join(inner)}: {text}{'}' * len(inner)}"

    def _fault(self, route: Route, finding: str, remedy: str, *, key: bool = False) -> None:
        mark = mark_of(self.tree, route, key=key)
        self.faults[route] = mark.fault(".".join(route), finding, remedy)


def _missing(route: Route) -> tuple[str, str]:
    """Finding and remedy of a key that every spec, or every tuple, needs."""
    if route[0] == "placement" and route[-1] == REST:
        finding = "the placement of all non-expert tensors is missing"
        return finding, f"Add `{REST}`: a strategy name or four modes."
    if route[0] == "placement":
        return f"all four states are required; {route[-1]!r} is missing", (
            f"Add `{route[-1]}`: R, S or S*."
        )
    section = f" in {'.'.join(route[:-1])}" if len(route) > 1 else ""
    example = f"{'.'.join(route)}{'=' if section else ': '}{_EXAMPLES[route[-1]]}"
    return f"the required key {route[-1]!r} is missing{section}", f"Add `{example}`."
