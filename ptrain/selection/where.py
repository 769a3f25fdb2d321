"""Constraints of a search, such as `tp<=8`, `micro>=2`, `recompute=full` or `memory<=70 GB`.

Each compares one property of a candidate's spec, by the name of its key, or one predicted figure.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum, auto
from functools import partial
from operator import methodcaller
from typing import Any

from ptrain.axes.context.attention import written_attention
from ptrain.axes.data.candidates import OVERLAPS, UNITS
from ptrain.axes.data.form import form_of, joins_units, units_ahead
from ptrain.errors import input_error
from ptrain.selection.space import SEARCHED_AXES, SPACES
from ptrain.spec.activations import FULL, KEPT_MEANINGS, SELECTIVE, ActivationMode
from ptrain.spec.batch import ContextAttention, Hybrid
from ptrain.spec.dials import GradientSync, UnitSize
from ptrain.spec.leaf import find_similar
from ptrain.spec.pipeline import ScheduleName
from ptrain.spec.placement import DATA_AXES, EXPERT_AXES, TOKEN_AXES, Axis, Tier
from ptrain.spec.shorthand import expand_shorthands
from ptrain.spec.spec import Spec
from ptrain.spec.text import Tree
from ptrain.steps.wraps import REPLICAS
from ptrain.units import parse_bytes

FLAG = "--where"
RESULTS = ("memory", "time")
_HYBRID = "hybrid"
_ATTENTIONS = (*ContextAttention, _HYBRID)
_STOCK = "stock"  # the wrapper's default
_BUCKET = "bucket"  # as many consecutive blocks as fill a bucket


class Aspect(Enum):
    """The part of a candidate that determines a property."""

    WITHIN = auto()
    PIPELINE = auto()
    RANKS = auto()
    DATA = auto()
    BATCH = auto()
    KEPT = auto()
    RESULT = auto()


Value = int | float | str


def recompute_of(spec: Spec) -> str:
    """Return the spec's default way to keep activations, as a word of the grammar."""
    return keeping(spec.activations.default)


def keeping(kept: ActivationMode) -> str:
    """Return the word for a way to keep activations."""
    if kept.tier is not Tier.DEVICE:
        return "offload"
    return {None: "none", FULL: "full", SELECTIVE: "selective"}.get(kept.policy, "keep")


def unit_of(spec: Spec) -> str:
    """Return the size of the wrap unit, as a word of the grammar."""
    form = form_of(spec)
    is_bucket = form in REPLICAS or joins_units(spec, form)
    return _BUCKET if is_bucket else str(spec.unit_size)


def _placement(axis: Axis, spec: Spec) -> Value:
    """Return the placement of an axis, or "" if the spec does not have the axis."""
    modes = (str(f.placement).replace("O", "S@host") for f in spec.factors if f.axis is axis)
    return next(modes, "")


def _part(axis: Axis, of_data: Aspect) -> Aspect:
    """Return the part of a candidate that determines an axis; `of_data` for data axes."""
    if axis is Axis.PP:
        return Aspect.PIPELINE
    return of_data if axis in DATA_AXES else Aspect.WITHIN


def _attention(spec: Spec) -> str:
    """Return the way in which attention reaches other ranks' tokens; "" without token shards."""
    attention = written_attention(spec)
    return _HYBRID if isinstance(attention, Hybrid) else str(attention or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A property of a candidate.

    Attributes:
        part: Part of the candidate that determines it.
        of: Reads the property from a spec.
        words: Allowed values; if empty it is an integer, or a placement if `is_placement`.
        is_placement: True for the placement of an axis.
    """

    part: Aspect
    of: Callable[[Spec], Value]
    words: tuple[str, ...] = ()
    is_placement: bool = False


_OF_AXES = {
    **{
        f"mesh.{axis}": Quantity(part=_part(axis, Aspect.RANKS), of=methodcaller("degree", axis))
        for axis in SEARCHED_AXES
    },
    **{
        f"placement.{axis}": Quantity(
            part=_part(axis, Aspect.DATA), of=partial(_placement, axis), is_placement=True
        )
        for axis in SEARCHED_AXES
        if axis not in (*TOKEN_AXES, *EXPERT_AXES)  # these are placed as on the innermost data axis
    },
}
QUANTITIES: dict[str, Quantity] = {
    **_OF_AXES,
    "mesh.dp": Quantity(part=Aspect.RANKS, of=lambda spec: spec.data_degree),
    "pipeline.schedule": Quantity(
        part=Aspect.PIPELINE,
        of=lambda spec: str(spec.pipeline.schedule),
        words=tuple(ScheduleName),
    ),
    "pipeline.stages": Quantity(
        part=Aspect.PIPELINE,
        of=lambda spec: spec.pipeline.stages_over(spec.degree(Axis.PP)),
    ),
    "context.attention": Quantity(part=Aspect.WITHIN, of=_attention, words=_ATTENTIONS),
    "unit": Quantity(
        part=Aspect.DATA,
        of=unit_of,
        words=(_BUCKET, *dict.fromkeys(str(unit or UnitSize()) for unit in UNITS)),
    ),
    "overlap": Quantity(
        part=Aspect.DATA,
        of=lambda spec: str(spec.overlap or _STOCK),
        words=tuple(str(overlap or _STOCK) for overlap in OVERLAPS),
    ),
    "prefetch": Quantity(part=Aspect.DATA, of=lambda spec: units_ahead(spec, form_of(spec)) or 0),
    "sync.gradients": Quantity(
        part=Aspect.DATA, of=lambda spec: str(spec.sync.gradients), words=tuple(GradientSync)
    ),
    "sync.reshard_after_forward": Quantity(
        part=Aspect.DATA,
        of=lambda spec: str(spec.sync.reshard_after_forward).lower(),
        words=("true", "false"),
    ),
    "batch.micro": Quantity(part=Aspect.BATCH, of=lambda spec: spec.batch.micro),
    "batch.accumulate": Quantity(part=Aspect.BATCH, of=lambda spec: spec.batch.accumulate),
    "recompute": Quantity(
        part=Aspect.KEPT, of=recompute_of, words=("none", "selective", "full", "offload")
    ),
}
NAMES = {name.rpartition(".")[2]: name for name in QUANTITIES if not name.startswith("placement")}


def known_names(name: str) -> str:
    """Return the remedy for an unknown name."""
    known = (*NAMES, *RESULTS)
    places = (*known, *(name for name in _OF_AXES if name.startswith("placement")))
    near = next(iter(get_close_matches(name, places, 1)), None)
    return f"Did you mean `{near}`?" if near else f"Use one of {', '.join(known)}."


def value_of(quantity: Quantity, name: str, bound: str, text: str) -> Value:
    """Return the value that a constraint compares with.

    Args:
        quantity: The property.
        name: Its name.
        bound: The value as written.
        text: The constraint as written, for messages.

    Raises:
        SpecError: The property can never have this value.
    """
    if quantity.is_placement:
        return _tuple(Axis(name.partition(".")[2]), bound, text)
    if not quantity.words:
        if not re.fullmatch(r"\d{1,9}", bound):
            raise input_error(
                FLAG,
                f"{text}: {name} must be an integer, not {bound[:40]}",
                f"Use an integer, for example `{name}=2`.",
            )
        return int(bound)
    if bound not in quantity.words:
        near = find_similar(bound, quantity.words)
        meant = f"Did you mean `{near}`? " if near else ""
        choices = f"Use one of {', '.join(quantity.words)}."
        raise input_error(
            FLAG, f"{text}: {bound[:40]} is not a value of {name}", f"{meant}{choices}"
        )
    return bound


def placements_of(axis: Axis) -> list[str]:
    """Return the placements that a search tries on an axis, as candidates write them."""
    tried = (placement for space in SPACES for placement in space.tuples.get(axis, ()))
    # Candidates write the tier in full, because `offload.tier` changes the meaning of O.
    return list(dict.fromkeys(str(placement).replace("O", "S@host") for placement in tried))


def _tuple(axis: Axis, bound: str, text: str) -> str:
    """Return a placement, given as modes or a strategy name, as candidates write it."""
    tree = Tree(root={"placement": {axis.value: bound.strip("[]")}}, source="")
    faults = expand_shorthands(tree)
    modes = tree.root["placement"][axis.value] if isinstance(tree.root, dict) else None
    if not faults and isinstance(modes, dict):
        parsed = [str(mode) for mode in modes.values()]
        if all(mode in KEPT_MEANINGS for mode in parsed):
            return ",".join(parsed).replace("O", "S@host")
    finding = f"{text}: {bound[:40]} is not a placement of {axis}"
    tried = (f"[{placement}]" for placement in placements_of(axis))
    raise input_error(
        FLAG, finding, f"Use a strategy name or four modes. The search tries {', '.join(tried)}."
    )


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
    """One condition, as it was written in `text`.

    `is_of_spec`: the condition comes from a fixed value in the spec (or from a mesh without the
    axis), which only `auto` removes.
    """

    text: str
    name: str
    compare: str
    bound: Value
    is_of_spec: bool = False

    @property
    def part(self) -> Aspect:
        """The part of a candidate that determines the property."""
        return Aspect.RESULT if self.name in RESULTS else QUANTITIES[self.name].part

    @property
    def remedy(self) -> str:
        """The instruction that removes the constraint."""
        return f"Use `{self.name}=auto`." if self.is_of_spec else f"Remove `{self.text}`."

    @property
    def change(self) -> str:
        """The change that removes the constraint, in words."""
        return f"with {self.name}=auto" if self.is_of_spec else f"without {self.text}"

    def holds_of(self, value: Value) -> bool:
        """Return True if a value satisfies the condition."""
        return _OPERATORS[self.compare](value, self.bound)

    def holds(self, spec: Spec) -> bool:
        """Return True if a spec that has the relevant part satisfies the condition."""
        return self.holds_of(QUANTITIES[self.name].of(spec))


def parse(text: str) -> Constraint:
    """Return the constraint that a text states; raise SpecError if it is not valid."""
    if (match := _FORM.fullmatch(text)) is None:
        raise input_error(
            FLAG, f"{text!r} is not a constraint", "Use `NAME<=VALUE`, for example `tp<=8`."
        )
    name, compare, bound = match.groups()
    name = NAMES.get(name, name)
    if name in RESULTS:
        return Constraint(text, name, compare, _figure(name, bound, text))
    if name not in QUANTITIES:
        raise input_error(FLAG, f"{name} is not a property of a candidate", known_names(name))
    quantity = QUANTITIES[name]
    if compare in _ORDERING and (quantity.words or quantity.is_placement):
        raise input_error(
            FLAG, f"{text}: {name} has no order", f"Use `{name}=VALUE` or `{name}!=VALUE`."
        )
    return Constraint(text, name, compare, value_of(quantity, name, bound, text))


def _figure(name: str, bound: str, text: str) -> float:
    """Return the bound of a figure, in bytes or seconds."""
    try:
        return float(bound) if name == "time" else float(parse_bytes(bound))
    except ValueError:
        example = "`time<=2.5` (seconds)" if name == "time" else "`memory<=70 GB`"
        raise input_error(
            FLAG, f"{text}: {bound} is not a valid value", f"Use, for example, {example}."
        ) from None


@dataclass(frozen=True, slots=True)
class Where:
    """All constraints of a search."""

    constraints: Sequence[Constraint] = ()

    @classmethod
    def of(cls, texts: Iterable[str]) -> Where:
        """Parse constraints; raise SpecError for an invalid one."""
        return cls(tuple(map(parse, texts)))

    def admits(self, part: Aspect, spec: Spec) -> bool:
        """Return True if a spec satisfies all constraints on a part."""
        return all(rule.holds(spec) for rule in self.constraints if rule.part is part)

    def without(self, rule: Constraint) -> Where:
        """Return the other constraints."""
        return Where(tuple(other for other in self.constraints if other != rule))

    def bounds(self, name: str) -> Iterable[Constraint]:
        """Yield the constraints on a property or figure."""
        return (rule for rule in self.constraints if rule.name == name)
