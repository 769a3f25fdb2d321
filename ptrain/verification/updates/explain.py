"""Explain an update that differs although its gradients are right: the root cause if the evidence
proves one, else what differs first and what was ruled out. Ranks that hold the same part of a
parameter must have the same bits of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch

from ptrain.report.finding import POSSIBLE, Certainty, Mismatch, RootCause, Subject
from ptrain.verification.jobs.job import Ranks
from ptrain.verification.jobs.record import digest
from ptrain.verification.jobs.root_causes import families, root_cause
from ptrain.verification.updates.clip import BROKEN, Remainder, UpdateCase
from ptrain.verification.updates.repeat import (
    CannotRepeat,
    Ingredients,
    UpdateOutcome,
    piece_shape,
    repeat,
)
from ptrain.verification.updates.swaps import (
    Ingredient,
    IngredientPair,
    Swap,
    SwapSearch,
    differing,
    differing_pairs,
    search,
    words,
)


def explain_replicas(mismatches: Sequence[Mismatch], case: UpdateCase, ranks: Ranks) -> RootCause:
    """Ranks have the same part, right to rounding, and not the same bits of it."""
    first = mismatches[0]
    left = {name: digest(case.seen.after[name].value) for name in case.seen.after}
    mine = left.get(first.name), first.name in case.written_after()
    everyones = [ranks.gather(mine)[rank] for rank in first.between]
    writers = [rank for rank, its in zip(first.between, everyones, strict=True) if its[1]]
    who = ", ".join(map(str, first.between))
    said = root_cause(
        mismatches, ranks, state=first.subject, axis=ranks.axis_of(first.between),
        factor="replicas differ", who=writers or None,
        sentence=f"Ranks {who} hold the same shard with different bits.",
        fix="Broadcast it once, and check the computation on each rank.",
        certainty=Certainty.UNEXPLAINED,
        tried="the difference from the reference is within rounding",
    )  # fmt: skip
    if not writers or None in {bits for bits, _ in everyones} or len({b for b, _ in everyones}) > 1:
        return said
    return said.proven(
        "the optimizers left the same bits on all of them, and rank "
        f"{', '.join(map(str, writers))} has others at the end of its step"
    )


def explain_update(mismatches: Sequence[Mismatch], case: UpdateCase, ranks: Ranks) -> RootCause:
    """Explain mismatches at the moment of the update. All ranks call it with the same."""
    explainer = UpdateExplainer(mismatches, case, ranks)
    if any(mismatch.subject in _UPDATED for mismatch in explainer.mismatches):
        return explainer.root_cause()
    return explain_replicas(mismatches, case, ranks)


_COARSE = 1e-6  # of what is left: a reader wants to see what it was before
_FOREIGN = "no torch.optim.Optimizer of the reference has the differing tensors"
_UPDATED = (Subject.PARAMETERS, Subject.OPTIMIZER)


class UpdateExplainer:
    """All ranks call `root_cause`, with the same mismatches of the moment of the update."""

    def __init__(self, mismatches: Sequence[Mismatch], case: UpdateCase, ranks: Ranks) -> None:
        self.mismatches = [mismatch for mismatch in mismatches if not mismatch.between]
        self.case, self.ranks = case, ranks
        self.obstacle = ""

    def root_cause(self) -> RootCause:
        """Return the first explanation whose trial holds."""
        case = self.case
        differing = self._departing()
        if any(self.ranks.gather(bool(without := self._without_a_step()))):
            return self._left_out(without)
        foreign = (differing & case.seen.after.keys()) - case.other.keys()
        if any(self.ranks.gather(bool(foreign))):
            return self._not_to_be_stepped(foreign)
        everyones = self.ranks.gather(case.seen.obstacle or case.expected.obstacle)
        if obstacle := next(filter(None, everyones), ""):
            return self.unexplained(f"the update cannot be replayed: {obstacle}{self._differing()}")
        after = case.seen.after
        mismatch = self._of_all(case.remainder({name: after[name] for name in case.own}))
        if mismatch.count == 0:
            return self._written_after(mismatch)
        return self._in_the_step(mismatch)

    def _departing(self) -> set[str]:
        """Return the parameters that differ on this rank, or whose state does."""
        return {
            mismatch.name.partition(" · ")[0]
            for mismatch in self.mismatches
            if mismatch.rank == self.case.rank and mismatch.subject in _UPDATED
        }

    def _rows(self, names: Sequence[str]) -> list[tuple[int, str]]:
        """Return all ranks' names, each with its rank."""
        everyones = self.ranks.gather(names)
        return [(rank, name) for rank, its in enumerate(everyones) for name in its]

    def _of_all(self, remainder: Remainder) -> Remainder:
        return Remainder.of_all(self.ranks.gather(remainder, Remainder))

    def _repeated(
        self, taken: dict[str, Ingredients]
    ) -> tuple[Remainder, dict[str, UpdateOutcome]]:
        """Return what is left of the mismatch on all ranks, and this rank's outcomes."""
        try:
            outcomes = repeat(taken)
        except CannotRepeat as error:
            outcomes, self.obstacle = {}, str(error)
        mine = self.case.remainder(outcomes) if outcomes or not taken else BROKEN
        return self._of_all(mine), outcomes

    def _without_a_step(self) -> set[str]:
        """Return what differs here and no optimizer of this rank stepped, but for what has the
        bits of a rank where one did (ZeRO: its update counts there)."""
        case = self.case
        without = self._departing() - case.seen.after.keys()
        stepped = {name: self._bits(name) for name in case.seen.after if name in case.courses}
        owners = self.ranks.gather(stepped) if any(self.ranks.gather(bool(without))) else []
        return {n for n in without if all(its.get(n) != self._bits(n) for its in owners)}

    def _bits(self, name: str) -> list[str]:
        """Which part of a parameter this rank has, and a checksum of it after the step."""
        return [self.case.part(name), digest(self.case.courses[name].run_after)]

    def _left_out(self, without: set[str]) -> RootCause:
        """No optimizer that stepped on this rank has what differs here."""
        case = self.case
        still = {name for name in without if case.courses[name].stood_still}
        obstacles = (
            (without - still, "the differing tensors changed in the step, and no "
             "torch.optim.Optimizer that stepped on their rank has them"),
            (without - case.other.keys(), _FOREIGN),
        )  # fmt: skip
        for names, obstacle in obstacles:
            if any(self.ranks.gather(bool(names))):
                return self.unexplained(obstacle)
        taken = {
            name: replace(
                case.other[name],
                shape=piece_shape(case.holds[name]),
                value=case.courses[name].run_before,
                gradient=case.gradients.get(name),
            )
            for name in still
        }
        left, _ = self._repeated(taken)
        if not left.is_fix_of(Remainder(1, max(d.difference for d in self.mismatches), 0.0)):
            return self.unexplained(
                "no optimizer that steps has the differing tensors, and with the reference "
                "optimizer and the present gradient they would still differ by "
                f"{left.worst:.2g}"
            )
        stepped = case.seen.after.keys() & case.courses.keys()
        mine = ([[n, case.part(n)] for n in sorted(its)] for its in (still, stepped))
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
        return self._proven(
            Subject.PARAMETERS, "stale on some ranks" if is_stale else "not updated",
            f"The gradient of the parameter is right, but it is {what}.", f"{fix}.",
            [name for _, (name, _) in rows], sorted({rank for rank, _ in rows}),
            "updated by the reference optimizer with the present gradient it matches the "
            f"reference to {left.worst:.2g}",
            axis=next(iter(self.ranks.axes), "") if is_stale else None,
        )  # fmt: skip

    def _not_to_be_stepped(self, names: set[str]) -> RootCause:
        """One device's optimizers do not have these."""
        courses = self.case.courses
        alike = all(torch.equal(courses[n].run_before, courses[n].after) for n in names)
        rows = self._rows(sorted(names))
        if not all(self.ranks.gather(alike)):
            return self.unexplained(_FOREIGN)
        return self._proven(
            Subject.PARAMETERS, "frozen parameter updated",
            "The optimizer steps it, but no optimizer of the reference does.",
            "Remove it from the optimizer's parameters.",
            [name for _, name in rows], sorted({rank for rank, _ in rows}),
            "its value before the step equals the reference value after the step",
        )  # fmt: skip

    def _written_after(self, mismatch: Remainder) -> RootCause:
        """What the optimizers left is one device's on every rank."""
        written = set(self._rows(self.case.written_after()))
        rows = [
            (its.rank, its.name.partition(" · ")[0])
            for its in self.mismatches
            if its.subject is Subject.OPTIMIZER or (its.rank, its.name) in written
        ]
        proof = f"the optimizers' own results match the reference to {mismatch.worst:.2g}"
        if not rows:  # the reference's parameters are not what its own optimizer left
            rows = [(its.rank, its.name) for its in self.mismatches]
        is_state = all(its.subject is Subject.OPTIMIZER for its in self.mismatches)
        state = Subject.OPTIMIZER if is_state else Subject.PARAMETERS
        mine = {name for rank, name in rows if rank == self.case.rank}
        is_stale = all(self.ranks.gather(not is_state and all(map(self._is_stale, mine))))
        return self._proven(
            state, f"{'stale' if is_stale else 'written'} after the update",
            f"The optimizer's step is right, but {'its state' if is_state else 'the parameter'} "
            f"differs at the end of the step{', where it is as before it' * is_stale}.",
            "Do the same after optimizer.step() as the reference (a gather, a broadcast, a copy, "
            "an average, a clamp), or nothing.",
            [name for _, name in rows], sorted({rank for rank, _ in rows}), proof,
        )  # fmt: skip

    def _is_stale(self, name: str) -> bool:
        """Return whether all that is not as the optimizer left it is as before the step."""
        course, left = self.case.courses[name], self.case.seen.after.get(name)
        after = course.run_after
        alike = after == course.run_before
        return bool((alike if left is None else alike | (after == left.value.to(after))).all())

    def _in_the_step(self, mismatch: Remainder) -> RootCause:
        case = self.case
        left, outcomes = self._repeated(dict(case.own))
        others = case.repeats(outcomes) if outcomes else sorted(case.own)
        rows = self._rows(others)
        if obstacle := next(filter(None, self.ranks.gather(self.obstacle)), ""):
            return self.unexplained(f"{obstacle}{self._differing()}")
        if rows and left.is_fix_of(mismatch):
            return self._proven(
                Subject.PARAMETERS, "written within the step",
                "optimizer.step() gives another result than its class computes from these "
                "gradients, state and settings.",
                "Check its hooks and wrappers, and what skips it.",
                [name for _, name in rows], sorted({rank for rank, _ in rows}),
                f"the step replayed with its inputs matches the reference to {left.worst:.2g}",
            )  # fmt: skip
        if rows:
            return self.unexplained(
                "the update cannot be replayed element by element: its gradients, state and "
                f"settings give {families((name for _, name in rows))} other values than its "
                f"step did{self._differing()}"
            )
        result = search(case, self.ranks, mismatch)
        if not result.fixes:
            return self.unexplained(_ruled_out(result))
        is_coarse = result.left.worst > _COARSE
        return self._exchanged(
            result, f" (it differed by {mismatch.worst:.2g})" if is_coarse else ""
        )

    def _differing(self) -> str:
        """What is not one device's before an update of which nothing can be tried."""
        everyones = self.ranks.gather(list(differing(self.case)), list[Swap])
        noise = (Ingredient.GRADIENT, Ingredient.VALUE)  # roundings of these alone are no reason
        titles = {
            swap.key or swap.ingredient
            for swap in chain.from_iterable(everyones)
            if swap.ingredient not in noise
        }
        listed = ", ".join(sorted(titles)) or "none of its settings and state"
        return f"; {listed} differed from the reference before it"

    def _exchanged(self, result: SwapSearch, was: str) -> RootCause:
        mine = differing_pairs(self.case, result.fixes[0])
        rows = [*chain.from_iterable(self.ranks.gather(mine, list[IngredientPair]))]
        state, factor, sentence, fix = words(result.fixes[0], rows, self.ranks.degrees)
        what, *others = (
            ", ".join(swap.key or str(swap.ingredient) for swap in its) for its in result.fixes
        )
        if others:
            sentence += f" {POSSIBLE}{'; '.join((what, *others))}."
        return self._proven(
            state, factor, sentence, fix, [row.name for row in rows],
            sorted({row.rank for row in rows}),
            f"the update replayed with the reference's {what} matches the reference to "
            f"{result.left.worst:.2g}{was}",
        )  # fmt: skip

    def _proven(
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
        return root_cause(
            self.mismatches, self.ranks, state=state, factor=factor, sentence=sentence,
            fix=fix, names=names, who=ranks, axis=axis,
        ).proven(proof)  # fmt: skip

    def unexplained(self, ruled_out: str) -> RootCause:
        first = max(self.mismatches, key=lambda mismatch: mismatch.difference)
        alike = [d for d in self.mismatches if d.subject is first.subject]
        return root_cause(
            alike, self.ranks, state=first.subject, factor=f"differs by {first.difference:.3g}",
            sentence="The gradients match the reference, but this differs at the end of the step.",
            certainty=Certainty.UNEXPLAINED, tried=ruled_out,
        )  # fmt: skip


def _ruled_out(result: SwapSearch) -> str:
    """What is not one device's, and how far the update with one device's is from it still."""
    tried = [
        f"{swap.key or swap.ingredient}: {left.worst:.2g}"
        for swap, left in sorted(result.singles.items(), key=lambda pair: pair[1].worst)
    ]
    if not tried:
        return (
            "settings, state, values and gradients before it match the reference to the bit, "
            "so the reference's step uses them differently (a hook, an attribute of its "
            "optimizer)"
        )
    together = f", and with each of {result.num_combined} combinations" * bool(result.num_combined)
    return (
        "the update replayed with the reference's still differs, by relative distance "
        f"({', '.join(tried)}){together}"
    )
