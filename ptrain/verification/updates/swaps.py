"""Replace the ingredients of an update by one device's, one after the other, to find those that
make the update equal one device's; and add the ranks' gradients with and without the roundings of a
coarser dtype.

A proven replacement is put into words: which state, which factor, and the fix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import combinations
from typing import Any

from torch import Tensor

from ptrain.report.finding import Subject
from ptrain.verification.jobs.job import Ranks
from ptrain.verification.jobs.root_causes import families
from ptrain.verification.parts import (
    difference,
    factor_text,
    norm,
)
from ptrain.verification.updates.clip import BROKEN, Remainder, UpdateCase
from ptrain.verification.updates.repeat import (
    CannotRepeat,
    Ingredients,
    as_number,
    is_row,
    repeat,
    same,
)

# How torch computes an update, and what a schedule began with: nothing of what it is.
_OF_COMPUTATION = {"foreach", "fused", "capturable", "differentiable", "initial_lr"}
_MOST = 48  # updates that are tried of several ingredients at once


class Ingredient(StrEnum):
    """What an update is made of, in the order in which it is suspected."""

    SETTING = "setting"
    STATE = "state"
    ATTRIBUTE = "attribute"
    VALUE = "value"
    RULE = "rule"
    GRADIENT = "gradient"


@dataclass(frozen=True, slots=True, order=True)
class Swap:
    """One device's ingredient in the place of the loop's; `key` of a setting or of state."""

    ingredient: Ingredient
    key: str = ""

    def value(self, side: Ingredients) -> Any:
        """Return this ingredient of one side."""
        match self.ingredient:
            case Ingredient.SETTING:
                return side.settings.get(self.key)
            case Ingredient.STATE:
                return side.state.get(self.key)
            case Ingredient.ATTRIBUTE:
                return side.rule.attribute(self.key)
            case Ingredient.RULE:
                return side.rule.kind
            case _:
                return getattr(side, self.ingredient)

    def of(self, own: Ingredients, other: Ingredients) -> Ingredients:
        """Return the loop's ingredients with this one of one device."""
        its = self.value(other)
        match self.ingredient:
            case Ingredient.SETTING:
                kept = {k: v for k, v in own.settings.items() if k != self.key}
                known = {self.key: its} if self.key in other.settings else {}
                return replace(own, settings=kept | known)
            case Ingredient.STATE:
                return own.with_state(**{self.key: its})
            case Ingredient.ATTRIBUTE:
                return replace(own, rule=own.rule.with_attribute(self.key, its))
            case Ingredient.RULE:
                settings = other.settings | own.settings
                return replace(own, rule=other.rule, tensor=other.tensor, settings=settings)
            case _:
                return replace(own, **{self.ingredient: its})


Swaps = tuple[Swap, ...]


def differing(case: UpdateCase) -> dict[Swap, list[str]]:
    """Return what is not one device's on this rank, with the parameters of which."""
    names: dict[Swap, list[str]] = {}
    for name, own in case.own.items():
        other = case.other[name]
        for swap in _differences(own, other, max(case.limit.updates, 10 * case.limit.gradients)):
            names.setdefault(swap, []).append(name)
    return names


def _differences(own: Ingredients, other: Ingredients, tolerance: float) -> Iterator[Swap]:
    is_one_rule = own.rule.kind is other.rule.kind
    attributes = own.rule.attributes.keys() | other.rule.attributes.keys() if is_one_rule else set()
    keys = {
        Ingredient.SETTING: (own.settings.keys() | other.settings.keys()) - _OF_COMPUTATION,
        Ingredient.STATE: own.state.keys() | other.state.keys(),
        Ingredient.ATTRIBUTE: {key for key in attributes if not key.startswith("_")},
    }
    for kind in Ingredient:
        for key in sorted(keys.get(kind, {""})):
            swap = Swap(kind, key)
            mine, right = swap.value(own), swap.value(other)
            is_kept = kind is Ingredient.STATE
            if is_kept and is_row(mine, own.value) and is_row(right, other.value):
                differs = distance(mine, right) > tolerance
            else:
                differs = not same(mine, right)
            if differs:
                yield swap


def distance(own: Tensor, other: Tensor) -> float:
    """Return how far a row is from one device's, relative to that."""
    return difference(own, other, norm(other))


def left_with(case: UpdateCase, swaps: Swaps) -> Remainder:
    """Return how far the update repeated with these swaps is from one device's, on this rank."""
    taken = dict(case.own)
    for swap in swaps:
        taken = {name: swap.of(own, case.other[name]) for name, own in taken.items()}
    try:
        return case.remainder(repeat(taken))
    except CannotRepeat:
        return BROKEN


@dataclass(frozen=True, slots=True)
class SwapSearch:
    """`fixes`: the fewest swaps that make the update one device's, on all ranks, the best first;
    `left`: what is left then; `singles`: what is left with each alone; `num_combined`: how often
    several were tried."""

    fixes: tuple[Swaps, ...]
    left: Remainder
    singles: dict[Swap, Remainder]
    num_combined: int = 0


def search(case: UpdateCase, ranks: Ranks, mismatch: Remainder) -> SwapSearch:
    """Try one ingredient, then all of a kind, then pairs. All ranks call it with the same
    `mismatch`, which is that of the update as it was."""
    everyones = ranks.gather(list(differing(case)), list[Swap])
    order = list(Ingredient)
    of_any = {swap for of_rank in everyones for swap in of_rank}
    swaps = sorted(of_any, key=lambda swap: (order.index(swap.ingredient), swap.key))
    lefts = _all_ranks(case, ranks, [(swap,) for swap in swaps])
    by_swap = {swap: left for (swap,), left in lefts.items()}
    if not any(left.is_fix_of(mismatch) for left in lefts.values()):
        lefts = _all_ranks(case, ranks, _several(swaps))
    fixes = [its for its, left in lefts.items() if left.is_fix_of(mismatch)]
    fixes.sort(key=lambda its: (len(its), lefts[its].worst))
    alike = tuple(its for its in fixes if len(its) == len(fixes[0]))
    return SwapSearch(alike, lefts[fixes[0]] if fixes else mismatch, by_swap, len(lefts))


def _several(swaps: Sequence[Swap]) -> list[Swaps]:
    """Pairs, and all of a kind together: what is lost with an optimizer is all of its state."""
    state, settings, rule = (
        tuple(swap for swap in swaps if swap.ingredient is kind)
        for kind in (Ingredient.STATE, Ingredient.SETTING, Ingredient.RULE)
    )
    kinds = [its for its in (state, settings, state + settings) if len(its) > 2]
    rows = tuple(swap for swap in state if swap.key != "step")
    kinds += [rows] if len(rows) > 2 else []
    kinds += [(*rule, *settings, *state)] if rule else []
    pairs = combinations([swap for swap in swaps if swap.ingredient is not Ingredient.RULE], 2)
    return list(dict.fromkeys([*kinds, *pairs]))[:_MOST]


def _all_ranks(case: UpdateCase, ranks: Ranks, trials: Sequence[Swaps]) -> dict[Swaps, Remainder]:
    mine = [left_with(case, swaps) for swaps in trials]
    everyones = zip(*ranks.gather(mine, list[Remainder]), strict=True)
    return {swaps: Remainder.of_all(its) for swaps, its in zip(trials, everyones, strict=True)}


@dataclass(frozen=True, slots=True, kw_only=True)
class IngredientPair:
    """Of one parameter on one rank an ingredient that is not one device's: both in words, and as
    numbers where they are; `is_master`: the optimizer has a copy of the parameter; `kinds`: the
    optimizers' classes."""

    swap: Swap
    name: str
    rank: int
    own: str
    other: str
    numbers: tuple[float | None, float | None] = (None, None)
    is_master: bool = False
    kinds: tuple[str, str] = ("", "")


def differing_pairs(case: UpdateCase, swaps: Swaps) -> list[IngredientPair]:
    """Return what the swaps exchange on this rank."""
    names = differing(case)
    return [_pair(case, swap, name) for swap in swaps for name in names.get(swap, ())]


def _pair(case: UpdateCase, swap: Swap, name: str) -> IngredientPair:
    pair = [swap.value(side[name]) for side in (case.own, case.other)]
    return IngredientPair(
        swap=swap, name=name, rank=case.rank, own=_text(*pair), other=_text(*reversed(pair)),
        numbers=(as_number(pair[0]), as_number(pair[1])), is_master=name in case.seen.masters,
        kinds=(case.own[name].rule.kind.__name__, case.other[name].rule.kind.__name__),
    )  # fmt: skip


def _text(value: Any, other: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Tensor) and value.numel() != 1:
        if not bool(value.any()):
            return "zeros"
        if isinstance(other, Tensor) and is_row(value, other) and bool(other.any()):
            return f"{distance(value, other):.2g} off"
        return "values"
    number = as_number(value)
    return str(value) if number is None or isinstance(value, bool) else f"{number:g}"


_FIXES = {
    Ingredient.SETTING: "Use the same settings on every rank.",
    Ingredient.STATE: "Keep the optimizer, or load all of its state when it is created again.",
    Ingredient.ATTRIBUTE: "Build both optimizers alike.",
    Ingredient.VALUE: "Check the loads and writes before the update.",
    Ingredient.GRADIENT: "Sum it in a finer dtype or in one order, and check its copy to the "
    "optimizer; or set `Terms(tolerance=...)`.",
}  # fmt: skip


def words(
    fix: Swaps, rows: Sequence[IngredientPair], degrees: dict[str, int]
) -> tuple[Subject, str, str, str]:
    """Return the state, the factor, the sentence and the fix of these swaps; `rows` are all
    ranks'."""
    if any(s.ingredient is Ingredient.RULE or s.key == "decoupled_weight_decay" for s in fix):
        own, right = rows[0].kinds
        names = families(row.name for row in rows)
        return Subject.OPTIMIZER, f"{own} for {right}", (
            f"The loop steps {names} by {own}, the reference by {right}."
        ), "Use one class."  # fmt: skip
    settled = tuple(swap for swap in fix if swap.ingredient is Ingredient.SETTING)
    if settled and all(row.own == "none" for row in rows if row.swap not in settled):
        fix = settled  # what is kept beside a parameter follows from these
    parts = [_of_swap(swap, [row for row in rows if row.swap == swap], degrees) for swap in fix]
    state, factor = parts[0][0], " and ".join(factor for _, factor, _ in parts)
    kept = [row for row in rows if row.swap.key != "step" and not settled]
    is_state = all(swap.ingredient is Ingredient.STATE for swap in fix)
    if is_state and kept and all(row.own in ("none", "zeros") for row in kept):
        state, factor = Subject.OPTIMIZER, "moments lost"
    facts = " ".join(sentence for _, _, sentence in parts)
    return state, factor, facts, _FIXES[fix[0].ingredient]


def _of_swap(
    swap: Swap, rows: Sequence[IngredientPair], degrees: dict[str, int]
) -> tuple[Subject, str, str]:
    title = swap.key or str(swap.ingredient)
    pairs: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        pair = (rows[0].own, "") if "off" in row.own else (row.own, row.other)
        pairs.setdefault(pair, []).append(row.name)
    listed = "; ".join(
        f"{own}{other and f', in the reference {other}'}, for {families(names)}"
        for (own, other), names in list(pairs.items())[:3]
    )
    own, other = next(iter(pairs))
    factor = f"{title} {own}{other and f' for {other}'}"
    mine, right = rows[0].numbers
    if swap.key == "lr" and len(pairs) == 1 and mine is not None and right:
        factor = factor_text(mine / right, degrees)
    states = {
        Ingredient.GRADIENT: Subject.GRADIENTS,
        Ingredient.VALUE: Subject.OPTIMIZER if rows[0].is_master else Subject.PARAMETERS,
    }
    keys = {"lr": Subject.LEARNING_RATE, "step": Subject.COUNTER}
    state = states.get(swap.ingredient, keys.get(swap.key, Subject.OPTIMIZER))
    return state, factor, f"Before the update {title} is {listed}."
