"""Constraints of a search: `tp<=8`, `micro>=2`, `recompute=full`, `memory<=70 GB`, each about one
thing that a candidate's spec says or that it takes."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ptrain.errors import refused
from ptrain.selection.quantities import (
    FLAG,
    NAMES,
    QUANTITIES,
    RESULTS,
    Aspect,
    Value,
    known_names,
    value_of,
)
from ptrain.spec.spec import Spec
from ptrain.units import parse_bytes

_FORM = re.compile(r"\s*([\w.]+)\s*(<=|>=|!=|==|=|<|>)\s*(.+?)\s*")
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
}
_ORDERING = ("<=", ">=", "<", ">")


@dataclass(frozen=True, slots=True)
class Constraint:
    """One condition; `text` is how it was written. `is_of_spec`: a spec says it, by a number or by
    a mesh that does not name the axis, and only `auto` in its place says nothing."""

    text: str
    name: str
    compare: str
    bound: Value
    is_of_spec: bool = False

    @property
    def part(self) -> Aspect:
        return Aspect.RESULT if self.name in RESULTS else QUANTITIES[self.name].part

    @property
    def remedy(self) -> str:
        """Return what a user does to be without it."""
        return f"Use `{self.name}=auto`." if self.is_of_spec else f"Remove `{self.text}`."

    @property
    def change(self) -> str:
        """Return the same as what a job is with then."""
        return f"with {self.name}=auto" if self.is_of_spec else f"without {self.text}"

    def holds_of(self, value: Value) -> bool:
        """Return whether a value obeys it."""
        return _OPERATORS[self.compare](value, self.bound)

    def holds(self, spec: Spec) -> bool:
        """Return whether a spec that has the candidate's part obeys it."""
        return self.holds_of(QUANTITIES[self.name].of(spec))


def parse(text: str) -> Constraint:
    """Return the constraint that is written. Raises SpecError for what is none."""
    if (match := _FORM.fullmatch(text)) is None:
        raise refused(
            FLAG, f"{text!r} is not a constraint", "Use `NAME<=VALUE`, for example `tp<=8`."
        )
    name, compare, bound = match.groups()
    name = NAMES.get(name, name)
    if name in RESULTS:
        return Constraint(text, name, compare, _figure(name, bound, text))
    if name not in QUANTITIES:
        raise refused(FLAG, f"{name} is not a property of a candidate", known_names(name))
    quantity = QUANTITIES[name]
    if compare in _ORDERING and not quantity.has_order:
        raise refused(
            FLAG, f"{text}: {name} has no order", f"Use `{name}=VALUE` or `{name}!=VALUE`."
        )
    return Constraint(text, name, compare, value_of(quantity, name, bound, text))


def _figure(name: str, bound: str, text: str) -> float:
    try:
        return float(bound) if name == "time" else float(parse_bytes(bound))
    except ValueError:
        example = "`time<=2.5` (seconds)" if name == "time" else "`memory<=70 GB`"
        raise refused(
            FLAG, f"{text}: {bound} is not a valid value", f"Use, for example, {example}."
        ) from None


@dataclass(frozen=True, slots=True)
class Where:
    """All constraints of a search."""

    constraints: Sequence[Constraint] = ()

    @classmethod
    def of(cls, texts: Iterable[str]) -> Where:
        """Return those that are written."""
        return cls(tuple(map(parse, texts)))

    def admits(self, part: Aspect, spec: Spec) -> bool:
        """Return whether a spec obeys those about a part that it has."""
        return all(rule.holds(spec) for rule in self.constraints if rule.part is part)

    def asks(self, part: Aspect) -> bool:
        """Return whether there is one about a part."""
        return any(rule.part is part for rule in self.constraints)

    def bounds(self, name: str) -> Iterable[Constraint]:
        """Yield those about a figure."""
        return (rule for rule in self.constraints if rule.name == name)
