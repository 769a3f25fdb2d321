"""What of a candidate may be constrained, by the names that a spec has for it, and which values
each of these may have."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum, auto

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


def _placement(axis: Axis) -> Callable[[Spec], Value]:
    def value(spec: Spec) -> Value:
        modes = (str(f.placement).replace("O", "S@host") for f in spec.factors if f.axis is axis)
        return next(modes, "")

    return value


def _degree(axis: Axis) -> Callable[[Spec], Value]:
    return lambda spec: spec.degree(axis)


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
        f"mesh.{axis}": Quantity(part=_part(axis, Aspect.RANKS), of=_degree(axis))
        for axis in SEARCHED_AXES
    },
    **{
        f"placement.{axis}": Quantity(
            part=_part(axis, Aspect.DATA), of=_placement(axis), is_placement=True
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
    tried = dict.fromkeys(f"[{placement}]" for s in SPACES for placement in s.tuples.get(axis, ()))
    raise refused(
        FLAG, finding, f"Use a strategy name or four modes. The search tries {', '.join(tried)}."
    )
