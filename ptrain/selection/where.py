"""Constraints of a search: `tp<=8`, `micro>=2`, `recompute=full`, `memory<=70 GB`, each about one
thing that a candidate's spec says or that it takes, by the names that a spec has for it."""

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
from ptrain.errors import refused
from ptrain.selection.space import SEARCHED_AXES, SPACES
from ptrain.spec.activations import FULL, SELECTIVE, Kept
from ptrain.spec.context import ContextAttention, Hybrid
from ptrain.spec.dials import GradientSync, Overlap, UnitSize
from ptrain.spec.leaf import KEPT_MEANINGS, nearest
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
_STOCK = "stock"  # what the wrapper does by itself
_BUCKET = "bucket"  # as many neighbours as fill one


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
    return keeping(spec.activations.default)


def keeping(kept: Kept) -> str:
    """Return the word for one way to keep them."""
    if kept.tier is not Tier.DEVICE:
        return "offload"
    return {None: "none", FULL: "full", SELECTIVE: "selective"}.get(kept.policy, "keep")


def unit_of(spec: Spec) -> str:
    """Return what is gathered or reduced together, in the grammar's words."""
    form = form_of(spec)
    is_bucket = form in REPLICAS or joins_units(spec, form)
    return _BUCKET if is_bucket else str(spec.unit_size)


def _placement(axis: Axis, spec: Spec) -> Value:
    modes = (str(f.placement).replace("O", "S@host") for f in spec.factors if f.axis is axis)
    return next(modes, "")


def _overlap(overlap: Overlap | None) -> str:
    return str(overlap or _STOCK)


def _part(axis: Axis, of_data: Aspect) -> Aspect:
    if axis is Axis.PP:
        return Aspect.PIPELINE
    return of_data if axis in DATA_AXES else Aspect.WITHIN


def _attention(spec: Spec) -> str:
    """How attention reaches the tokens of other ranks, in a word; "" without them."""
    attention = written_attention(spec)
    return _HYBRID if isinstance(attention, Hybrid) else str(attention or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """Something that a candidate says: `part` is what of it says it, `of` reads it off a spec.
    `words` are all that it may be; without, it is a whole number, or a tuple where
    `is_placement`."""

    part: Aspect
    of: Callable[[Spec], Value]
    words: tuple[str, ...] = ()
    is_placement: bool = False

    @property
    def has_order(self) -> bool:
        return not self.words and not self.is_placement


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
        if axis not in (*TOKEN_AXES, *EXPERT_AXES)  # as on the innermost data axis
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
        of=lambda spec: _overlap(spec.overlap),
        words=tuple(_overlap(overlap) for overlap in OVERLAPS),
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
    """What to write in the place of a name that nothing has."""
    known = (*NAMES, *RESULTS)
    places = (*known, *(name for name in _OF_AXES if name.startswith("placement")))
    near = next(iter(get_close_matches(name, places, 1)), None)
    return f"Did you mean `{near}`?" if near else f"Use one of {', '.join(known)}."


def value_of(quantity: Quantity, name: str, bound: str, text: str) -> Value:
    """Raises SpecError for what the quantity can never be."""
    if quantity.is_placement:
        return _tuple(Axis(name.partition(".")[2]), bound, text)
    if not quantity.words:
        if not re.fullmatch(r"\d{1,9}", bound):
            raise refused(
                FLAG,
                f"{text}: {name} must be an integer, not {bound[:40]}",
                f"Use an integer, for example `{name}=2`.",
            )
        return int(bound)
    if bound not in quantity.words:
        near = nearest(bound, quantity.words)
        meant = f"Did you mean `{near}`? " if near else ""
        choices = f"Use one of {', '.join(quantity.words)}."
        raise refused(FLAG, f"{text}: {bound[:40]} is not a value of {name}", f"{meant}{choices}")
    return bound


def placements_of(axis: Axis) -> list[str]:
    """Return the tuples that a search tries on an axis, as candidates say them."""
    tried = (placement for space in SPACES for placement in space.tuples.get(axis, ()))
    return list(dict.fromkeys(str(placement).replace("O", "S@host") for placement in tried))


def _tuple(axis: Axis, bound: str, text: str) -> str:
    """A tuple of modes, or a strategy's name for one, as a candidate says it."""
    tree = Tree(root={"placement": {axis.value: bound.strip("[]")}}, source="")
    faults = expand_shorthands(tree)
    modes = tree.root["placement"][axis.value] if isinstance(tree.root, dict) else None
    if not faults and isinstance(modes, dict):
        parsed = [str(mode) for mode in modes.values()]
        if all(mode in KEPT_MEANINGS for mode in parsed):
            return ",".join(parsed).replace("O", "S@host")
    finding = f"{text}: {bound[:40]} is not a placement of {axis}"
    tried = (f"[{placement}]" for placement in placements_of(axis))
    raise refused(
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
