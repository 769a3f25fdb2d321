"""Diagnosis of an update that differs although its gradients are right.

The ingredients of the update (settings, state, values, gradients) are replaced by the reference's,
one after the other, to find those that make the update match the reference's. A replacement that
does is the root cause, with its state, its factor and the fix. Without one, the root cause is the
first difference with everything that was ruled out. Replicas are checked too: ranks with the same
shard must have identical bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain, combinations
from typing import Any

from torch import Tensor

from ptrain.report.finding import POSSIBLE, Certainty, Mismatch, RootCause, Subject
from ptrain.verification.jobs.job import Ranks
from ptrain.verification.jobs.record import checksum
from ptrain.verification.jobs.root_causes import list_families, make_root_cause
from ptrain.verification.parts import difference, factor_text, norm
from ptrain.verification.updates.clip import Remainder, UpdateCase
from ptrain.verification.updates.repeat import (
    Ingredients,
    are_equal,
    as_number,
    is_row,
    piece_shape,
)

# Entries of a parameter group that do not change the result: they select torch's implementation
# (torch/optim/optimizer.py, `_default_to_fused_or_foreach`), hold a scheduler's first learning rate
# (`initial_lr`), or are set by the class itself (AdamW's `decoupled_weight_decay`).
_OF_CLASS = {
    "foreach", "fused", "capturable", "differentiable", "initial_lr", "decoupled_weight_decay",
}  # fmt: skip
_MOST = 48  # bounds the seconds of a diagnosis: each trial repeats the update of all parameters


class Ingredient(StrEnum):
    """A kind of input of an update, in the order in which they are suspected."""

    SETTING = "setting"
    STATE = "state"
    VALUE = "value"
    GRADIENT = "gradient"


@dataclass(frozen=True, slots=True, order=True)
class Swap:
    """A replacement of one ingredient by the reference's.

    Attributes:
        ingredient: The kind of input.
        key: The key of a setting or of an entry of state; "" for the others.
    """

    ingredient: Ingredient
    key: str = ""

    def value(self, side: Ingredients) -> Any:
        """Return the ingredient's value on one side."""
        of_keys = {Ingredient.SETTING: side.settings, Ingredient.STATE: side.state}
        kept = of_keys.get(self.ingredient)
        return getattr(side, self.ingredient) if kept is None else kept.get(self.key)

    def apply(self, own: Ingredients, other: Ingredients) -> Ingredients:
        """Return the loop's ingredients with this one replaced by the reference's."""
        its = self.value(other)
        match self.ingredient:
            case Ingredient.SETTING:
                kept = {k: v for k, v in own.settings.items() if k != self.key}
                known = {self.key: its} if self.key in other.settings else {}
                return replace(own, settings=kept | known)
            case Ingredient.STATE:
                return own.with_state(**{self.key: its})
            case _:
                return replace(own, **{self.ingredient: its})


Swaps = tuple[Swap, ...]


def find_differences(case: UpdateCase) -> dict[Swap, list[str]]:
    """Return the ingredients that differ from the reference's on this rank, with the parameters."""
    names: dict[Swap, list[str]] = {}
    for name, own in case.loop_inputs.items():
        other = case.reference_inputs[name]
        for swap in _differing_swaps(
            own, other, max(case.limit.updates, 10 * case.limit.gradients)
        ):
            names.setdefault(swap, []).append(name)
    return names


def _differing_swaps(own: Ingredients, other: Ingredients, tolerance: float) -> Iterator[Swap]:
    keys = {
        Ingredient.SETTING: (own.settings.keys() | other.settings.keys()) - _OF_CLASS,
        Ingredient.STATE: own.state.keys() | other.state.keys(),
    }
    for kind in Ingredient:
        for key in sorted(keys.get(kind, {""})):
            swap = Swap(kind, key)
            mine, right = swap.value(own), swap.value(other)
            is_of_rows = is_row(mine, own.value) and is_row(right, other.value)
            differs = not are_equal(mine, right)
            if kind is Ingredient.STATE and is_of_rows:
                differs = difference(mine, right, norm(right)) > tolerance
            if differs:
                yield swap


def try_swaps(case: UpdateCase, swaps: Swaps) -> Remainder:
    """Repeat the update with these swaps, and return its difference from the reference's."""
    taken = dict(case.loop_inputs)
    for swap in swaps:
        taken = {name: swap.apply(own, case.reference_inputs[name]) for name, own in taken.items()}
    return case.repeat_update(taken)[0]


# The difference that is left with each swap alone.
Singles = dict[Swap, Remainder]


def search_swaps(
    case: UpdateCase, ranks: Ranks, mismatch: Remainder
) -> tuple[list[Swaps], Remainder, Singles]:
    """Find the smallest sets of swaps that make the update match the reference's on all ranks.

    Single ingredients are tried first, then all of a kind, then pairs. All ranks must call it.

    Args:
        case: The update of the step.
        ranks: The ranks.
        mismatch: The difference of the update without swaps, equal on all ranks.

    Returns:
        The sets of swaps that fix the update, the best first; the difference that is left with the
        best one (`mismatch` if there is none); and the difference with each swap alone.
    """
    everyones = ranks.gather(list(find_differences(case)), list[Swap])
    order = list(Ingredient)
    of_any = {swap for of_rank in everyones for swap in of_rank}
    swaps = sorted(of_any, key=lambda swap: (order.index(swap.ingredient), swap.key))
    lefts = _try_on_all_ranks(case, ranks, [(swap,) for swap in swaps])
    singles = {swap: left for (swap,), left in lefts.items()}
    if not any(left.is_fix_of(mismatch) for left in lefts.values()):
        lefts = _try_on_all_ranks(case, ranks, _swap_combinations(swaps))
    fixes = [its for its, left in lefts.items() if left.is_fix_of(mismatch)]
    fixes.sort(key=lambda its: (len(its), lefts[its].worst))
    alike = [its for its in fixes if len(its) == len(fixes[0])]
    return alike, lefts[fixes[0]] if fixes else mismatch, singles


def _swap_combinations(swaps: Sequence[Swap]) -> list[Swaps]:
    """Return combinations of swaps: all of a kind, then pairs.

    An optimizer that was created again has lost all of its state, so a kind is tried as a unit.
    """
    state, settings = (
        tuple(swap for swap in swaps if swap.ingredient is kind)
        for kind in (Ingredient.STATE, Ingredient.SETTING)
    )
    kinds = [its for its in (state, settings, state + settings) if len(its) > 2]
    return list(dict.fromkeys([*kinds, *combinations(swaps, 2)]))[:_MOST]


def _try_on_all_ranks(
    case: UpdateCase, ranks: Ranks, trials: Sequence[Swaps]
) -> dict[Swaps, Remainder]:
    mine = [try_swaps(case, swaps) for swaps in trials]
    everyones = zip(*ranks.gather(mine, list[Remainder]), strict=True)
    return {swaps: Remainder.combine(its) for swaps, its in zip(trials, everyones, strict=True)}


@dataclass(frozen=True, slots=True, kw_only=True)
class IngredientPair:
    """An ingredient of one parameter on one rank that differs from the reference's.

    Attributes:
        swap: The ingredient.
        name: The parameter.
        rank: The rank.
        own: The loop's value, as text.
        other: The reference's value, as text.
        is_master: True if the optimizer updates a master copy.
    """

    swap: Swap
    name: str
    rank: int
    own: str
    other: str
    is_master: bool = False


def differing_pairs(case: UpdateCase, swaps: Swaps) -> Iterator[IngredientPair]:
    """Yield the values that the swaps replace on this rank."""
    names = find_differences(case)
    for swap, name in ((its, name) for its in swaps for name in names.get(its, ())):
        own, other = (swap.value(side[name]) for side in (case.loop_inputs, case.reference_inputs))
        yield IngredientPair(
            swap=swap, name=name, rank=case.verdict.rank,
            own=_value_text(own, other), other=_value_text(other, own),
            is_master=name in case.run.record.masters,
        )  # fmt: skip


def _value_text(value: Any, other: Any) -> str:
    if isinstance(value, Tensor) and value.numel() != 1:
        if not bool(value.any()):
            return "zeros"
        is_apart = isinstance(other, Tensor) and is_row(value, other) and bool(other.any())
        return f"{difference(value, other, norm(other)):.2g} off" if is_apart else "values"
    number = None if isinstance(value, bool) else as_number(value)
    return str(value).replace("None", "none") if number is None else f"{number:g}"


_FIXES = {
    Ingredient.SETTING: "Use the same settings on every rank.",
    Ingredient.STATE: "Keep the optimizer, or load all of its state when it is created again.",
    Ingredient.VALUE: "Check the loads and writes before the update.",
    Ingredient.GRADIENT: "Sum it in a finer dtype or in one order, and check its copy to the "
    "optimizer; or set `Terms(tolerance=...)`.",
}  # fmt: skip


def describe_swaps(
    fix: Swaps, rows: Sequence[IngredientPair], degrees: dict[str, int]
) -> tuple[Subject, str, str, str]:
    """Return the state, the factor, the sentence and the fix of a root cause.

    Args:
        fix: The swaps.
        rows: The replaced values on all ranks.
        degrees: The degrees of the mesh axes, to explain a ratio of learning rates.
    """
    settled = tuple(swap for swap in fix if swap.ingredient is Ingredient.SETTING)
    if settled and all(row.own == "none" for row in rows if row.swap not in settled):
        fix = settled  # missing state follows from a setting, such as `momentum` or `amsgrad`
    parts = [
        _describe_swap(swap, [row for row in rows if row.swap == swap], degrees) for swap in fix
    ]
    state, factor = parts[0][0], " and ".join(factor for _, factor, _ in parts)
    kept = [row for row in rows if row.swap.key != "step" and not settled]
    is_state = all(swap.ingredient is Ingredient.STATE for swap in fix)
    if is_state and kept and all(row.own in ("none", "zeros") for row in kept):
        state, factor = Subject.OPTIMIZER, "moments lost"
    facts = " ".join(sentence for _, _, sentence in parts)
    return state, factor, facts, _FIXES[fix[0].ingredient]


def _describe_swap(
    swap: Swap, rows: Sequence[IngredientPair], degrees: dict[str, int]
) -> tuple[Subject, str, str]:
    title = swap.key or str(swap.ingredient)
    pairs: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        pair = (rows[0].own, "") if "off" in row.own else (row.own, row.other)
        pairs.setdefault(pair, []).append(row.name)
    listed = "; ".join(
        f"{own}{other and f', in the reference {other}'}, for {list_families(names)}"
        for (own, other), names in list(pairs.items())[:3]
    )
    own, other = next(iter(pairs))
    factor = f"{title} {own}{other and f' for {other}'}"
    if swap.key == "lr" and len(pairs) == 1 and "none" not in (own, other) and float(other):
        factor = factor_text(float(own) / float(other), degrees)
    states = {
        Ingredient.GRADIENT: Subject.GRADIENTS,
        Ingredient.VALUE: Subject.OPTIMIZER if rows[0].is_master else Subject.PARAMETERS,
    }
    keys = {"lr": Subject.LEARNING_RATE, "step": Subject.COUNTER}
    state = states.get(swap.ingredient, keys.get(swap.key, Subject.OPTIMIZER))
    return state, factor, f"Before the update {title} is {listed}."


def explain_replicas(mismatches: Sequence[Mismatch], ranks: Ranks) -> RootCause:
    """Return the root cause of replicas that are correct up to rounding but differ in bits."""
    first = mismatches[0]
    return make_root_cause(
        mismatches, ranks, state=first.subject, axis=ranks.differing_axis(first.between),
        factor="replicas differ",
        sentence=f"Ranks {', '.join(map(str, first.between))} hold the same shard with different "
        "bits.",
        fix="Broadcast it once, and check the computation on each rank.",
        certainty=Certainty.UNEXPLAINED,
        tried="the difference from the reference is within rounding",
    )  # fmt: skip


def explain_update(mismatches: Sequence[Mismatch], case: UpdateCase, ranks: Ranks) -> RootCause:
    """Return the root cause of mismatches after the update.

    All ranks must call it with the same mismatches.

    Args:
        mismatches: The mismatches after the update, equal on all ranks.
        case: The update of the step.
        ranks: The ranks.
    """
    explainer = UpdateExplainer(mismatches, case, ranks)
    if any(mismatch.subject in UPDATED for mismatch in explainer.mismatches):
        return explainer.root_cause()
    return explain_replicas(mismatches, ranks)


_COARSE = 1e-6  # a remainder above it is reported with the original difference
_FOREIGN = "no torch.optim.Optimizer of the reference has the differing tensors"
UPDATED = (Subject.PARAMETERS, Subject.OPTIMIZER)


class UpdateExplainer:
    """The search for the root cause of an update that differs.

    All ranks must call `root_cause`, with the same mismatches.
    """

    def __init__(self, mismatches: Sequence[Mismatch], case: UpdateCase, ranks: Ranks) -> None:
        self.mismatches = [mismatch for mismatch in mismatches if not mismatch.between]
        self.case, self.ranks = case, ranks
        self.obstacle = ""

    def root_cause(self) -> RootCause:
        """Return the root cause: the first explanation whose trial matches the reference."""
        case = self.case
        differing = self._differing_parameters()
        if any(self.ranks.gather(bool(without := self._unstepped_parameters()))):
            return self._explain_unstepped(without)
        foreign = (differing & case.run.record.after.keys()) - case.reference_inputs.keys()
        if any(self.ranks.gather(bool(foreign))):
            return self.unexplained_cause(_FOREIGN)
        everyones = self.ranks.gather(case.run.record.obstacle or case.reference.record.obstacle)
        if obstacle := next(filter(None, everyones), ""):
            return self.unexplained_cause(
                f"the update cannot be replayed: {obstacle}{self._differing_inputs_text()}"
            )
        after = case.run.record.after
        own = case.measure_remainder({name: after[name] for name in case.loop_inputs})
        mismatch = Remainder.combine(self.ranks.gather(own, Remainder))
        if mismatch.count == 0:
            return self._explain_later_write(mismatch)
        kinds = [
            [its.rule.kind.__name__ for its in (case.loop_inputs[n], case.reference_inputs[n])]
            for n in case.loop_inputs
        ]
        unlike = [both for its in self.ranks.gather(kinds) for both in its if both[0] != both[1]]
        if unlike:
            return self.unexplained_cause(
                "the loop steps by {}, the reference by {}".format(*unlike[0])
            )
        return self._explain_step(mismatch)

    def _differing_parameters(self) -> set[str]:
        """Return the parameters that differ on this rank, or whose state differs."""
        return {
            mismatch.name.partition(" · ")[0]
            for mismatch in self.mismatches
            if mismatch.rank == self.case.verdict.rank and mismatch.subject in UPDATED
        }

    def _gather_rows(self, names: Sequence[str]) -> list[tuple[int, str]]:
        """Return the names of all ranks, each with its rank."""
        everyones = self.ranks.gather(names)
        return [(rank, name) for rank, its in enumerate(everyones) for name in its]

    def _repeat_update(self, taken: dict[str, Ingredients]) -> Remainder:
        """Repeat the update with these ingredients, and return the difference on all ranks."""
        left, self.obstacle = self.case.repeat_update(taken)
        return Remainder.combine(self.ranks.gather(left, Remainder))

    def _unstepped_parameters(self) -> set[str]:
        """Return the differing parameters that no optimizer of this rank stepped.

        Parameters with the bits of a rank whose optimizer stepped them are left out: with ZeRO,
        the update happens on another rank and is broadcast.
        """
        case = self.case
        without = self._differing_parameters() - case.run.record.after.keys()
        stepped = {
            name: self._shard_checksums(name)
            for name in case.run.record.after
            if name in case.verdict.moves
        }
        owners = self.ranks.gather(stepped) if any(self.ranks.gather(bool(without))) else []
        return {n for n in without if all(its.get(n) != self._shard_checksums(n) for its in owners)}

    def _shard_checksums(self, name: str) -> list[str]:
        """Return checksums of the rank's element indices, and of the elements after the step."""
        return [self.case.shard_checksum(name), checksum(self.case.verdict.moves[name].run_after)]

    def _explain_unstepped(self, without: set[str]) -> RootCause:
        """Return the root cause of parameters that no optimizer of this rank stepped."""
        case = self.case
        still = {name for name in without if case.verdict.moves[name].is_unchanged}
        obstacles = (
            (without - still, "the differing tensors changed in the step, and no "
             "torch.optim.Optimizer that stepped on their rank has them"),
            (without - case.reference_inputs.keys(), _FOREIGN),
        )  # fmt: skip
        for names, obstacle in obstacles:
            if any(self.ranks.gather(bool(names))):
                return self.unexplained_cause(obstacle)
        taken = {
            name: replace(
                case.reference_inputs[name],
                shape=piece_shape(case.holds[name]),
                value=case.verdict.moves[name].run_before,
                gradient=case.run.gradients.get(name),
            )
            for name in still
        }
        left = self._repeat_update(taken)
        if not left.is_fix_of(Remainder(1, max(d.difference for d in self.mismatches))):
            return self.unexplained_cause(
                "no optimizer that steps has the differing tensors, and with the reference "
                "optimizer and the present gradient they would still differ by "
                f"{left.worst:.2g}"
            )
        stepped = case.run.record.after.keys() & case.verdict.moves.keys()
        mine = ([[n, case.shard_checksum(n)] for n in sorted(its)] for its in (still, stepped))
        everyones = self.ranks.gather(list(mine))
        rows = [(rank, part) for rank, (its, _) in enumerate(everyones) for part in its]
        elsewhere = [part for _, its in everyones for part in its]
        is_stale = all(part in elsewhere for _, part in rows)
        what, fix = (
            ("updated on other ranks and stale here", "Broadcast or gather it from the rank that "
             "updates it")
            if is_stale
            else ("not updated, and no optimizer that steps on these ranks has it", "Give it to an "
                  "optimizer")
        )  # fmt: skip
        return self._proven_cause(
            Subject.PARAMETERS, "stale on some ranks" if is_stale else "not updated",
            f"The gradient of the parameter is right, but it is {what}.", f"{fix}.",
            [name for _, (name, _) in rows], sorted({rank for rank, _ in rows}),
            "updated by the reference optimizer with the present gradient it matches the "
            f"reference to {left.worst:.2g}",
            axis=next(iter(self.ranks.axes), "") if is_stale else None,
        )  # fmt: skip

    def _explain_later_write(self, mismatch: Remainder) -> RootCause:
        """Return the root cause of values that changed after correct optimizer steps."""
        written = set(self._gather_rows(self.case.later_written_parameters()))
        rows = [
            (its.rank, its.name.partition(" · ")[0])
            for its in self.mismatches
            if its.subject is Subject.OPTIMIZER or (its.rank, its.name) in written
        ]
        proof = f"the optimizers' own results match the reference to {mismatch.worst:.2g}"
        if not rows:  # the reference's parameters differ from the result of its optimizer
            rows = [(its.rank, its.name) for its in self.mismatches]
        is_state = all(its.subject is Subject.OPTIMIZER for its in self.mismatches)
        state = Subject.OPTIMIZER if is_state else Subject.PARAMETERS
        return self._proven_cause(
            state, "differs after the update",
            f"The optimizer's step is right, but {'its state' if is_state else 'the parameter'} "
            "differs at the end of the step.",
            "Do the same after optimizer.step() as the reference (a gather, a broadcast, a copy, "
            "an average, a clamp), or nothing.",
            [name for _, name in rows], sorted({rank for rank, _ in rows}), proof,
        )  # fmt: skip

    def _explain_step(self, mismatch: Remainder) -> RootCause:
        case = self.case
        left = self._repeat_update(dict(case.loop_inputs))
        rows = self._gather_rows(
            sorted(case.loop_inputs) if self.obstacle else case.unreproduced_parameters()
        )
        if obstacle := next(filter(None, self.ranks.gather(self.obstacle)), ""):
            return self.unexplained_cause(f"{obstacle}{self._differing_inputs_text()}")
        if rows and left.is_fix_of(mismatch):
            return self._proven_cause(
                Subject.PARAMETERS, "written within the step",
                "optimizer.step() gives another result than its class computes from these "
                "gradients, state and settings.",
                "Check its hooks and wrappers, and what skips it.",
                [name for _, name in rows], sorted({rank for rank, _ in rows}),
                f"the step replayed with its inputs matches the reference to {left.worst:.2g}",
            )  # fmt: skip
        if rows:
            return self.unexplained_cause(
                "the update cannot be replayed element by element: its gradients, state and "
                f"settings give {list_families((name for _, name in rows))} other values than its "
                f"step did{self._differing_inputs_text()}"
            )
        fixes, rest, singles = search_swaps(case, self.ranks, mismatch)
        if not fixes:
            return self.unexplained_cause(_ruled_out_text(singles))
        was = f" (it differed by {mismatch.worst:.2g})" if rest.worst > _COARSE else ""
        return self._explain_swaps(fixes, f"{rest.worst:.2g}{was}")

    def _differing_inputs_text(self) -> str:
        """Return a clause with the inputs that differ, for an update that cannot be repeated."""
        everyones = self.ranks.gather(list(find_differences(self.case)), list[Swap])
        noise = (Ingredient.GRADIENT, Ingredient.VALUE)  # roundings of these alone are no reason
        titles = {
            swap.key or swap.ingredient
            for swap in chain.from_iterable(everyones)
            if swap.ingredient not in noise
        }
        listed = ", ".join(sorted(titles)) or "none of its settings and state"
        return f"; {listed} differed from the reference before it"

    def _explain_swaps(self, fixes: Sequence[Swaps], rest: str) -> RootCause:
        mine = list(differing_pairs(self.case, fixes[0]))
        rows = [*chain.from_iterable(self.ranks.gather(mine, list[IngredientPair]))]
        state, factor, sentence, fix = describe_swaps(fixes[0], rows, self.ranks.degrees)
        what, *others = (
            ", ".join(swap.key or str(swap.ingredient) for swap in its) for its in fixes
        )
        if others:
            sentence += f" {POSSIBLE}{'; '.join((what, *others))}."
        return self._proven_cause(
            state, factor, sentence, fix, [row.name for row in rows],
            sorted({row.rank for row in rows}),
            f"the update replayed with the reference's {what} matches the reference to {rest}",
        )  # fmt: skip

    def _proven_cause(
        self,
        state: Subject,
        factor: str,
        sentence: str,
        fix: str,
        names: Sequence[str],
        ranks: Sequence[int],
        proof: str,
        *,
        axis: str | None = None,
    ) -> RootCause:
        return make_root_cause(
            self.mismatches, self.ranks, state=state, factor=factor, sentence=sentence,
            fix=fix, names=names, who=ranks, axis=axis,
        ).as_proven(proof)  # fmt: skip

    def unexplained_cause(self, ruled_out: str) -> RootCause:
        first = max(self.mismatches, key=lambda mismatch: mismatch.difference)
        alike = [d for d in self.mismatches if d.subject is first.subject]
        return make_root_cause(
            alike, self.ranks, state=first.subject, factor=f"differs by {first.difference:.3g}",
            sentence="The gradients match the reference, but this differs at the end of the step.",
            certainty=Certainty.UNEXPLAINED, tried=ruled_out,
        )  # fmt: skip


def _ruled_out_text(singles: Singles) -> str:
    """Return a clause with the swaps that were tried and the difference that each left."""
    tried = [
        f"{swap.key or swap.ingredient}: {left.worst:.2g}"
        for swap, left in sorted(singles.items(), key=lambda pair: pair[1].worst)
    ]
    if not tried:
        return (
            "settings, state, values and gradients before it match the reference to the bit, "
            "so the reference's step uses them differently (a hook, an attribute of its "
            "optimizer)"
        )
    return (
        "the update replayed with the reference's, also with several at once, still differs, by "
        f"relative distance ({', '.join(tried)})"
    )
