"""Constraints of a search: `tp<=8`, `micro>=2`, `recompute=full`, `memory<=70 GB`, each about one
thing that a candidate's spec says or that it takes."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum, auto
from typing import Any

from ptrain.errors import refused
from ptrain.spec.activations import FULL, SELECTIVE
from ptrain.spec.axis import DATA_AXES, EXECUTED_AXES, Axis
from ptrain.spec.placement import Tier
from ptrain.spec.spec import Spec
from ptrain.units import parse_bytes

_FLAG = "--where"
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


class Aspect(Enum):
    """What of a candidate says it."""

    WITHIN = auto()
    PIPELINE = auto()
    RANKS = auto()
    DATA = auto()
    BATCH = auto()
    KEPT = auto()
    RESULT = auto()


Value = int | float | str


def recompute_of(spec: Spec) -> str:
    """Return how blocks keep their activations, in the grammar's words."""
    kept = spec.activations.default
    if kept.tier is not Tier.DEVICE:
        return "offload"
    return {None: "none", FULL: "full", SELECTIVE: "selective"}.get(kept.policy, "keep")


def _placement(axis: Axis) -> Callable[[Spec], Value]:
    def value(spec: Spec) -> Value:
        modes = (str(f.placement).replace("O", "S@host") for f in spec.factors if f.axis is axis)
        return next(modes, "")

    return value


def _degree(axis: Axis) -> Callable[[Spec], Value]:
    return lambda spec: spec.degree(axis)


def _part(axis: Axis, of_data: Aspect) -> Aspect:
    if axis is Axis.PP:
        return Aspect.PIPELINE
    return of_data if axis in DATA_AXES else Aspect.WITHIN


_OF_AXES = {
    **{f"mesh.{axis}": (_part(axis, Aspect.RANKS), _degree(axis)) for axis in EXECUTED_AXES},
    **{f"placement.{axis}": (_part(axis, Aspect.DATA), _placement(axis)) for axis in EXECUTED_AXES},
}
_QUANTITIES: dict[str, tuple[Aspect, Callable[[Spec], Value]]] = {
    **_OF_AXES,
    "mesh.dp": (Aspect.RANKS, lambda spec: spec.data_degree),
    "pipeline.schedule": (Aspect.PIPELINE, lambda spec: str(spec.pipeline.schedule)),
    "pipeline.stages": (
        Aspect.PIPELINE,
        lambda spec: spec.pipeline.stages_over(spec.degree(Axis.PP)),
    ),
    "unit": (Aspect.DATA, lambda spec: str(spec.unit)),
    "overlap": (Aspect.DATA, lambda spec: str(spec.overlap or "stock")),
    "prefetch": (Aspect.DATA, lambda spec: spec.prefetch or 0),
    "sync.gradients": (Aspect.DATA, lambda spec: str(spec.sync.gradients)),
    "sync.reshard_after_forward": (
        Aspect.DATA,
        lambda spec: str(spec.sync.reshard_after_forward).lower(),
    ),
    "batch.micro": (Aspect.BATCH, lambda spec: spec.batch.micro),
    "batch.accumulate": (Aspect.BATCH, lambda spec: spec.batch.accumulate),
    "recompute": (Aspect.KEPT, recompute_of),
}
_RESULTS = ("memory", "time")
# Words, which equal or do not.
_WORDS = (
    *("pipeline.schedule", "unit", "overlap", "sync.gradients", "recompute"),
    "sync.reshard_after_forward",
)
_NAMES = {name.rpartition(".")[2]: name for name in _QUANTITIES if not name.startswith("placement")}


@dataclass(frozen=True, slots=True)
class Constraint:
    """One condition; `text` is how it was written."""

    text: str
    name: str
    compare: str
    bound: Value

    @property
    def part(self) -> Aspect:
        return Aspect.RESULT if self.name in _RESULTS else _QUANTITIES[self.name][0]

    def holds_of(self, value: Value) -> bool:
        """Return whether a value obeys it."""
        return _OPERATORS[self.compare](value, self.bound)

    def holds(self, spec: Spec) -> bool:
        """Return whether a spec that has the candidate's part obeys it."""
        return self.holds_of(_QUANTITIES[self.name][1](spec))


def parse(text: str) -> Constraint:
    """Return the constraint that is written. Raises SpecError for what is none."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise refused(_FLAG, f"{text!r} is no constraint", "write NAME<=VALUE, as in tp<=8")
    name, compare, bound = match.groups()
    name = _NAMES.get(name, name)
    if name in _RESULTS:
        return Constraint(text, name, compare, _figure(name, bound, text))
    if name not in _QUANTITIES:
        known = (*_NAMES, *_RESULTS)
        near = next(iter(get_close_matches(name, known, 1)), None)
        raise refused(
            _FLAG,
            f"{name}: nothing of a candidate is called so",
            f"did you mean {near}?" if near else f"write one of {', '.join(known)}",
        )
    value: Value = int(bound) if re.fullmatch(r"-?\d+", bound) else _modes(bound)
    if compare in _ORDERING and (isinstance(value, str) or name in _WORDS):
        raise refused(_FLAG, f"{text}: {name} has no order", f"write {name}=VALUE or !=")
    return Constraint(text, name, compare, value)


def _modes(bound: str) -> str:
    """A word, or a tuple of modes as a placement says it."""
    return bound.strip("[]").replace(" ", "").replace("O", "S@host") if "," in bound else bound


def _figure(name: str, bound: str, text: str) -> float:
    try:
        return float(bound) if name == "time" else float(parse_bytes(bound))
    except ValueError:
        example = "time<=2.5, in seconds" if name == "time" else "memory<=70 GB"
        raise refused(_FLAG, f"{text}: {bound} is no figure", f"write {example}") from None


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

    def bounds(self, name: str) -> Iterable[Constraint]:
        """Yield those about a figure."""
        return (rule for rule in self.constraints if rule.name == name)
