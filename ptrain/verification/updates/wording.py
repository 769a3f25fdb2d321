"""A proven exchange of ingredients in words: which state, which factor, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ptrain.report.finding import Subject
from ptrain.verification.jobs.culprits import families
from ptrain.verification.parts import factor_text, is_number_of
from ptrain.verification.updates.clip import UpdateCase
from ptrain.verification.updates.repeat import as_number, is_row
from ptrain.verification.updates.swaps import Ingredient, Swap, Swaps, differing, distance


@dataclass(frozen=True, slots=True, kw_only=True)
class IngredientPair:
    """Of one parameter on one rank an ingredient that is not one device's: both in words, as
    numbers where they are; `kinds` are the optimizers' classes. `is_rounded`: it is
    numbers of bf16, one device's is not; `is_master`: the optimizer has a copy of the parameter."""

    swap: Swap
    name: str
    rank: int
    own: str
    other: str
    numbers: tuple[float | None, float | None] = (None, None)
    is_rounded: bool = False
    is_master: bool = False
    kinds: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True)
class CureWords:
    """What is said of a cure."""

    state: Subject
    factor: str
    sentence: str


def differing_pairs(case: UpdateCase, swaps: Swaps) -> list[IngredientPair]:
    """Return what the swaps exchange on this rank."""
    names = differing(case)
    return [_pair(case, swap, name) for swap in swaps for name in names.get(swap, ())]


def _pair(case: UpdateCase, swap: Swap, name: str) -> IngredientPair:
    own, other = case.own[name], case.other[name]
    is_rounded = False
    match swap.ingredient:
        case Ingredient.SETTING:
            pair: tuple[Any, Any] = own.settings.get(swap.key), other.settings.get(swap.key)
        case Ingredient.STATE:
            pair = own.state.get(swap.key), other.state.get(swap.key)
        case Ingredient.ATTRIBUTE:
            pair = own.rule.attribute(swap.key), other.rule.attribute(swap.key)
        case Ingredient.VALUE:
            pair = own.value, other.value
            of_bf16 = [is_number_of(side.value, torch.bfloat16) for side in (own, other)]
            is_rounded = of_bf16 == [True, False]
        case Ingredient.RULE:
            pair = own.rule.kind.__name__, other.rule.kind.__name__
        case _:
            pair = own.gradient, other.gradient
    return IngredientPair(
        swap=swap, name=name, rank=case.rank, own=_text(*pair), other=_text(*reversed(pair)),
        numbers=(as_number(pair[0]), as_number(pair[1])), is_rounded=is_rounded,
        is_master=name in case.seen.masters,
        kinds=(own.rule.kind.__name__, other.rule.kind.__name__),
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


def words(
    cure: Swaps, rows: Sequence[IngredientPair], degrees: dict[str, int], *, is_first: bool
) -> CureWords:
    """Say what these swaps are; `rows` are all ranks', `is_first` of the first step."""
    kinds = {swap.ingredient for swap in cure}
    keys = {swap.key for swap in cure}
    if Ingredient.RULE in kinds or "decoupled_weight_decay" in keys:
        own, right = rows[0].kinds
        return CureWords(
            Subject.OPTIMIZER, f"{own} for {right}",
            f"The loop steps {_names(rows)} by {own}, one device by {right}: take one class.",
        )  # fmt: skip
    if kinds == {Ingredient.STATE}:
        return _of_state(keys, rows, is_first)
    settled = tuple(swap for swap in cure if swap.ingredient is Ingredient.SETTING)
    if settled and all(row.own == "none" for row in rows if row.swap not in settled):
        cure = settled  # what is kept beside a parameter follows from these
        rows = [row for row in rows if row.swap in settled]
    if len(cure) > 1:
        parts = [
            words((swap,), [row for row in rows if row.swap == swap], degrees, is_first=is_first)
            for swap in cure
        ]
        return CureWords(
            parts[0].state, " and ".join(part.factor for part in parts),
            " ".join(part.sentence for part in parts),
        )  # fmt: skip
    (swap,) = cure
    match swap.ingredient:
        case Ingredient.SETTING | Ingredient.ATTRIBUTE:
            return _of_setting(swap.key, rows, degrees)
        case Ingredient.VALUE:
            return _of_value(rows)
        case _ if rows[0].other == "none":
            return CureWords(
                Subject.GRADIENTS, f"a gradient of {rows[0].own} for none",
                f"The optimizer steps {_names(rows)} with a gradient of {rows[0].own}, where one "
                "device's has none and leaves it: a frozen parameter decays so. Set it to None.",
            )  # fmt: skip
        case _ if not any(row.is_master for row in rows):
            return CureWords(
                Subject.GRADIENTS, f"gradients {rows[0].own}",
                f"The gradients of {_names(rows)} are one device's within the tolerance "
                f"({rows[0].own}), and the update enlarges what is left: sum them in a finer dtype "
                "or in one order, or give Terms(tolerance=...).",
            )  # fmt: skip
        case _:
            return CureWords(
                Subject.GRADIENTS, f"gradients of the optimizer {rows[0].own}",
                f"What the optimizer itself takes of {_names(rows)} is not one device's gradient "
                f"({rows[0].own}): look at what is copied to it.",
            )  # fmt: skip


def _names(rows: Sequence[IngredientPair]) -> str:
    return families(row.name for row in rows)


def _of_setting(key: str, rows: Sequence[IngredientPair], degrees: dict[str, int]) -> CureWords:
    more = [row for row in rows if (row.numbers[0] or 0) > (row.numbers[1] or 0)]
    less = [row for row in rows if (row.numbers[0] or 0) < (row.numbers[1] or 0)]
    pairs = {(row.own, row.other) for row in rows}
    are_swapped = len(pairs) == 2 and pairs == {(other, own) for own, other in pairs}
    if are_swapped and more and less:
        what = "decay" if key == "weight_decay" else key
        return CureWords(
            Subject.OPTIMIZER, f"{what} groups swapped",
            f"{_names(more)} have {key} {more[0].own} and on one device {more[0].other}; "
            f"{_names(less)} have {less[0].own} and on one device {less[0].other}: the parameter "
            "groups have each other's settings.",
        )  # fmt: skip
    row = rows[0]
    own, right = row.numbers
    ratios = {mine / its if mine is not None and its else None for mine, its in _pairs(rows)}
    state = Subject.LEARNING_RATE if key == "lr" else Subject.OPTIMIZER
    if key == "lr" and len(pairs) == 1 and own is not None and right and None not in ratios:
        factor = factor_text(own / right, degrees)
    else:
        factor = f"{key} {row.own} for {row.other}"
    cure = (
        "set it, or step its schedule, as one device does"
        if key == "lr"
        else "give every rank \
the same settings"
    )
    return CureWords(
        state, factor,
        f"The optimizer updates {_names(rows)} with {key} {row.own}, one device with "
        f"{row.other}: {cure}.",
    )  # fmt: skip


def _pairs(rows: Sequence[IngredientPair]) -> list[tuple[float | None, float | None]]:
    return [row.numbers for row in rows]


def _of_state(keys: set[str], rows: Sequence[IngredientPair], is_first: bool) -> CureWords:
    steps = [row for row in rows if row.swap.key == "step"]
    tensors = [row for row in rows if row.swap.key != "step"]
    lost = [row for row in tensors if row.own in ("none", "zeros")]
    if not tensors:
        row = steps[0]
        own, right = row.numbers[0] or 0.0, row.numbers[1] or 0.0
        word = "lost" if own < right else "ahead"
        whose = "Adam" if "Adam" in row.kinds[0] else row.kinds[0]
        return CureWords(
            Subject.COUNTER, f"{whose}'s step {word}: {own:g} for {right:g}",
            f"The optimizer counts {own:g} steps of {_names(rows)} where one device counts "
            f"{right:g}, so the bias corrections of its moments are others: load the counters "
            "with the moments.",
        )  # fmt: skip
    names = ", ".join(sorted(keys - {"step"}))
    if is_first:
        return CureWords(
            Subject.OPTIMIZER, "other state at the start",
            f"Before the first update {names} of {_names(tensors)} are {tensors[0].own}, on one "
            f"device {tensors[0].other}: build both optimizers alike, or load both.",
        )  # fmt: skip
    if len(lost) == len(tensors):
        and_step = f", and its counter {steps[0].own}" if steps else ""
        return CureWords(
            Subject.OPTIMIZER, "moments lost",
            f"Before the update {names} of {_names(tensors)} are {lost[0].own}{and_step}, where "
            "one device has those of the steps before: keep the optimizer, or load its state "
            "where it is built anew (a resume).",
        )  # fmt: skip
    return CureWords(
        Subject.OPTIMIZER, f"{names} {tensors[0].own}",
        f"Before the update {names} of {_names(tensors)} are not one device's "
        f"({tensors[0].own}): something writes them between the steps.",
    )  # fmt: skip


def _of_value(rows: Sequence[IngredientPair]) -> CureWords:
    if all(row.is_rounded for row in rows):
        return CureWords(
            Subject.OPTIMIZER, "masters rebuilt from bf16",
            f"What the optimizer updates of {_names(rows)} is numbers of bfloat16 before the "
            f"update ({rows[0].own}), one device's is not: keep the master copies from step to "
            "step, and save and load them, not the model's rounded weights.",
        )  # fmt: skip
    return CureWords(
        Subject.PARAMETERS, f"values before the update {rows[0].own}",
        f"What the optimizer updates of {_names(rows)} is not one device's before the update "
        f"({rows[0].own}): look at what loads or writes it before.",
    )  # fmt: skip
