"""Locate the first module of a step that differs from the reference, also if tensors are sharded.

The inputs of modules, their outputs and the gradients of these outputs are compared with the
reference's. DTensors show the corresponding elements by placements; of other tensors the shard that
fits best is taken. The first difference is replaced by the reference's values in another step of
the loop. The next one follows, until the step is right or nothing can be replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ptrain.report.finding import POSSIBLE, RootCause, Subject
from ptrain.verification.jobs.evidence import JobEvidence, choose_elements
from ptrain.verification.jobs.modules import (
    Calls,
    ForcedValues,
    ModuleCall,
    ModuleRecorder,
    ProbeResult,
    TensorFit,
    candidate_parts,
    find_token_slice,
    innermost_paths,
    is_within,
    probe_model,
)
from ptrain.verification.jobs.record import StepRecorder
from ptrain.verification.jobs.root_causes import (
    axis_text,
    layer_family,
    list_families,
    shared_factor,
)
from ptrain.verification.parts import (
    difference,
    fit_multiple,
    is_even,
    local_cpu,
    norm,
    root_mean_square,
    zero_shared_infinities,
)

if TYPE_CHECKING:
    from ptrain.verification.jobs.inquiry import Inquiry


class TensorSide(IntEnum):
    """The tensor of a module's pass that is compared: input, output, or gradient of the output."""

    GIVEN = 0
    OUTPUT = 1
    UPSTREAM = 2


_WORDS = {
    TensorSide.GIVEN: "the reference's input of",
    TensorSide.OUTPUT: "the reference's output of",
    TensorSide.UPSTREAM: "the reference's gradient of the output of",
}
_LOOSE = 10  # tolerances: the rounding of earlier modules adds up
_COARSEST = 0.1  # upper bound of the limit: a fault is larger in any dtype
_QUIET = 1e-6  # a tensor below this share of the usual size is rounding
_NEAR = 1e-3  # relative residual of a multiple: a fault is larger
_MOST_ROUNDS = 6  # differences that are replaced one after the other: a step each

Place = tuple[str, TensorSide]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDifference:
    """The first difference of a step: the module, the micro-batch (`number`), ranks and size.

    `before` are modules whose outputs match before it. `between` have parameters and could not be
    compared before it. `is_last`: no compared gradient belongs to a later module, so the loss uses
    the output. `axis` and `factor` describe a missing sum or a multiple; "" if it is neither.
    """

    path: str
    side: TensorSide
    size: float
    number: int
    ranks: tuple[int, ...]
    before: tuple[str, ...]
    between: tuple[str, ...]
    is_last: bool
    axis: str = ""
    factor: str = ""


def _is_cause(first: FirstDifference, said: RootCause) -> bool:
    """Return True if the difference shows a cause, and not only a place."""
    if POSSIBLE in said.sentence:
        return False
    if first.side is TensorSide.OUTPUT and first.path and not first.between:
        return True
    return not said.factor.startswith(("differs by", "other gradient"))


class ModuleInquiry:
    """The search for the first differing module of a step. All ranks call its methods together.

    `probe` has the reference's passes on this rank's micro-batches, and `modules` the passes of
    this rank's modules. `suspect` is the first difference, or None. `is_plain` is True if forward
    matches.
    """

    def __init__(
        self, inquiry: Inquiry, evidence: JobEvidence, probe: ProbeResult, modules: Calls
    ) -> None:
        self.inquiry, self.own, self.probe = inquiry, modules, probe
        self.ranks, self.step = inquiry.ranks, inquiry.step
        expected, seen = self.step.expected.calls, self.step.seen.calls
        self.part = find_token_slice(expected, seen)
        rows, pair = evidence.rows[self.ranks.rank], inquiry.pair
        is_run = bool(probe.gradients) and all(probe.gradients) and not rows.sliced
        is_whole = len(pair.holds) == len(pair.wholes)
        self._is_alone = is_run and self.part is None and (is_whole or not rows.unknown)
        if not self._is_alone:  # compare with shards of the reference's pass on the global batch
            with inquiry.drawing.replay(pair.reference.model):
                self.probe = probe_model(pair.reference.model, expected)
        upstreams = [its.upstream for its in self.probe.modules.values()]
        self._usual = max((root_mean_square([u]) for u in upstreams if u is not None), default=0.0)
        events = self.ranks.gather([list(event) for event in self.probe.events])[0]
        order: list[Place] = [(path, TensorSide(int(ends))) for path, ends in events]
        self._order = [*order, *((path, TensorSide.UPSTREAM) for path, ends in order[::-1] if ends)]
        self._factor = self._common_upstream_factor(modules)
        self.suspect = self._find_first(modules, {})
        self.is_plain = self.suspect is None or self.suspect.side is TensorSide.UPSTREAM

    def root_cause(self) -> RootCause | None:
        """Return the root cause that a trial supports, or None.

        If the scale of the output gradients is unknown, the degrees of the axes are tried.
        """
        factors = [*self.ranks.degrees.values(), 1] if self._factor is None else [self._factor]
        for factor in dict.fromkeys(factors if self.is_plain else [self._factor]):
            self._factor = factor
            if (root_cause := self._undo_differences()) is not None:
                return root_cause
        return None

    def _undo_differences(self) -> RootCause | None:
        """Replace one difference after the other until the step is right; return its root cause."""
        forces: dict[tuple[str, int], ForcedValues] = {}
        named: list[FirstDifference] = []
        modules, probe = self.own, self.probe
        for _ in range(_MOST_ROUNDS):
            first = self._find_first(modules, forces)
            if first is None or not self._force_family(first, modules, forces):
                break
            named.append(first)
            seen, left, modules = self._run_forced(forces, named)
            if left is not None:
                said = self._explain_first(named, modules, not left[1])
                tried = f"with {self._forced_text(named)} in its place {left[0]}"
                is_cause = _is_cause(named[0], said) and not left[1]
                return said.as_proven(tried) if is_cause else said.as_located(f"{tried}{left[1]}")
            if seen is None:
                break
            if self._is_alone:  # the output gradients have changed
                self.probe = self.inquiry.run_probe(seen)
            self._factor = self._factor or self._common_upstream_factor(modules)
        self.probe = probe
        return None

    def describe_first(self) -> tuple[str, str] | None:
        """Return the place of the first difference ("" in backward) and a sentence, or None."""
        first = self.suspect
        if first is None:
            return None
        place = list_families([first.path]) or "the model"
        axis = f", as partial sums {axis_text(first.axis)} do" if first.axis else ""
        if first.side is TensorSide.UPSTREAM:
            return place if first.is_last else "", (
                "Every output that could be compared matches the reference; the gradient of the "
                f"output of {place} is the first that differs in backward{axis}."
            )
        what = "input" if first.side is TensorSide.GIVEN else "output"
        return place, f"The {what} of {place} is the first that differs in forward{axis}."

    def _matching_passes(self, path: str, number: int) -> Iterator[ModuleCall]:
        """Yield the reference's passes to which this pass of a module may correspond."""
        its = self.probe.modules
        if self._is_alone:
            yield from (its[key] for key in ((path, number),) if key in its)
        else:
            yield from (
                call for (name, _), call in its.items()
                if name == path and (call.times == 1 or not number)
            )  # fmt: skip

    def _fit_call(
        self, path: str, number: int, call: ModuleCall
    ) -> Iterator[tuple[TensorSide, TensorFit]]:
        """Yield the fits of a pass's inputs, its output, and its output gradient if not tiny."""
        rights = list(self._matching_passes(path, number))
        for at, own in enumerate(tree_leaves(call.given)):
            wholes = [tree_leaves(right.given) for right in rights]
            pairs = [its[at] for its in wholes if len(its) == len(tree_leaves(call.given))]
            if (fit := self._best_fit(own, pairs, number, at)) is not None:
                yield TensorSide.GIVEN, fit
        returned = self._best_fit(call.output, [its.output for its in rights], number)
        if returned is not None:
            yield TensorSide.OUTPUT, returned
        loud = [
            its.upstream * (self._factor or 1.0)
            if its.upstream is not None
            and root_mean_square([local_cpu(its.upstream)]) > _QUIET * self._usual
            else None
            for its in rights
        ]
        place = returned.place if returned is not None else None
        if (fit := self._best_fit(call.upstream, loud, number, place=place)) is not None:
            yield TensorSide.UPSTREAM, fit

    def _best_fit(
        self, own: Any, wholes: Sequence[Any], number: int, leaf: int = 0,
        place: tuple[int, int] | None = None,
    ) -> TensorFit | None:  # fmt: skip
        """Return the best fit of a tensor to a part of the reference's tensors, or None.

        `number` and `leaf` are the micro-batch and the index of the input. `place` limits the
        search to one (tensor, part). Scalars and other values have no fit.
        """
        if not isinstance(own, Tensor) or not own.dim():
            return None
        fits = []
        for index, whole in enumerate(wholes):
            if (
                not isinstance(whole, Tensor)
                or whole.is_floating_point() != own.is_floating_point()
            ):
                continue
            for part, truth in enumerate(candidate_parts(whole, own, self.part)):
                if place is not None and place != (index, part):
                    continue
                both = zero_shared_infinities(local_cpu(own).double(), local_cpu(truth).double())
                length = max(norm(both[1]), _QUIET * norm(local_cpu(whole).double().nan_to_num()))
                fits.append(
                    TensorFit(
                        number=number, leaf=leaf, size=difference(*both, length), own=own,
                        truth=truth, place=(index, part),
                    )
                )  # fmt: skip
        return min(fits, key=lambda fit: fit.size, default=None)

    def _common_upstream_factor(self, modules: Calls) -> float | None:
        """Return the factor of this rank's output gradients, or None if ranks have no common one.

        A loss that is a mean over a rank's tokens causes such a factor. All ranks call it.
        """
        factors = self.ranks.gather(self._last_upstream_factor(modules))
        is_one = None not in factors and is_even(factors, _NEAR)
        return factors[self.ranks.rank] if is_one else None

    def _last_upstream_factor(self, modules: Calls) -> float | None:
        """Return the factor of the last output gradient that is a multiple of the reference's."""
        if self._is_alone:
            return 1.0
        fits = (
            fit_multiple(local_cpu(call.upstream).flatten(), local_cpu(truth).flatten())
            for path, side in self._order
            if side is TensorSide.UPSTREAM
            and (call := modules.get((path, 0))) is not None and call.upstream is not None
            for right in self._matching_passes(path, 0)
            if right.upstream is not None
            for truth in candidate_parts(right.upstream, call.upstream, self.part)
        )  # fmt: skip
        return next((fit.factor for fit in fits if fit.is_within(_NEAR)), None)

    def _limit(self, side: TensorSide) -> float:
        """Return the tolerance of a tensor, which includes the rounding of earlier modules."""
        limit = self.inquiry.limit
        exact = limit.gradients if side is TensorSide.UPSTREAM else limit.outputs
        return min(_LOOSE * exact, _COARSEST)

    def _compare_passes(self, modules: Calls) -> dict[Place, TensorFit]:
        """Return the worst fit of each place, in the first micro-batch that exceeds the limit."""
        worst: dict[Place, TensorFit] = {}
        for (path, number), call in modules.items():
            for side, fit in self._fit_call(path, number, call):
                known = worst.get((path, side))
                if known is None or (
                    fit.size > known.size
                    and (known.size <= self._limit(side) or fit.number == known.number)
                ):
                    worst[path, side] = fit
        return worst

    def _find_first(
        self, modules: Calls, forces: Mapping[tuple[str, int], ForcedValues]
    ) -> FirstDifference | None:
        """Return the first place that differs on any rank and is not forced, or None.

        Partial sums and reordered rows are skipped if the next comparison matches.
        """
        mine = self._compare_passes(modules)
        rows = [
            [*place, fit.size, fit.number, fit.size > self._limit(place[1]) and fit.is_reordered]
            for place, fit in mine.items()
        ]
        table: dict[Place, list[tuple[int, float, int, bool]]] = {}
        for rank, its in enumerate(self.ranks.gather(rows)):
            for path, side, size, number, is_reordered in its:
                row = (rank, size, number, is_reordered)
                table.setdefault((path, TensorSide(side)), []).append(row)
        forced_places = [
            (path, side)
            for (path, _), forced in forces.items()
            for side, value in enumerate((forced.given or None, forced.output, forced.upstream))
            if value is not None
        ]
        done = {(p, s) for its in self.ranks.gather(forced_places) for p, s in its}
        known = [place for place in self._order if place in table and place not in done]
        wrong = {
            place: [row for row in table[place] if row[1] > self._limit(place[1])]
            for place in known
        }
        for at, (path, side) in enumerate(known):
            if not (its := wrong[path, side]):
                continue
            number = min(row[2] for row in its)
            axis, factor = self._shared_cause(path, side, number, modules)
            ahead = [
                place
                for place in known[at + 1 :]
                if place[1] is not TensorSide.UPSTREAM
                and not (wrong[place] and all(row[3] for row in wrong[place]))
            ]
            is_undone = bool(ahead) and not wrong[ahead[0]] and side is not TensorSide.UPSTREAM
            if is_undone and (axis or all(row[3] for row in its)):
                continue
            right = [p for p, s in known[:at] if s is TensorSide.OUTPUT and not wrong[p, s]]
            kind = TensorSide.UPSTREAM if side is TensorSide.UPSTREAM else TensorSide.OUTPUT
            gone = [p for p, s in self._order[: self._order.index((path, side))] if s is kind]
            model = self.inquiry.pair.reference.model
            unknown = [
                p
                for p in gone
                if (p, kind) not in table
                and not is_within(path, p)
                and next(model.get_submodule(p).parameters(), None) is not None
            ]
            later = [p for p, s in known[:at] if s is TensorSide.UPSTREAM]
            return FirstDifference(
                path=path, side=side, size=max(row[1] for row in its), number=number,
                ranks=tuple(row[0] for row in its), before=tuple(right),
                between=tuple(innermost_paths(unknown)), is_last=not later, axis=axis,
                factor=factor,
            )  # fmt: skip
        return None

    def _shared_cause(
        self, path: str, side: TensorSide, number: int, modules: Calls
    ) -> tuple[str, str]:
        """Return the axis of a missing sum, or a factor, or "" for both. All ranks call it."""
        call = modules.get((path, number))
        fits = () if call is None else self._fit_call(path, number, call)
        fit = max((f for s, f in fits if s is side), key=lambda f: f.size, default=None)
        everyones = self.ranks.gather(None if fit is None else list(fit.own.shape))
        if fit is None or any(its != everyones[0] or its is None for its in everyones):
            return "", ""
        truth, own = (local_cpu(its).flatten().double() for its in (fit.truth, fit.own))
        if not bool(torch.isfinite(own).all()):
            truth = own = torch.zeros_like(own)
        (where,) = choose_elements(self.ranks, {"": truth}).values()
        both = torch.stack([truth[where], own[where]])
        return shared_factor(self.ranks, self.ranks.stack(both), self._limit(side))

    def _force_family(
        self, first: FirstDifference, modules: Calls, forces: dict[tuple[str, int], ForcedValues]
    ) -> bool:
        """Add the reference's values for this family of modules; return True if all ranks can.

        A rank cannot if a module runs several times in a micro-batch, or has no corresponding
        tensor.
        """
        is_possible = True
        for (path, number), call in modules.items():
            if layer_family(path) != layer_family(first.path):
                continue
            fits = [fit for side, fit in self._fit_call(path, number, call) if side is first.side]
            if call.times > 1 or not fits:
                is_possible = False
                continue
            forced = forces.setdefault((path, number), ForcedValues())
            if first.side is TensorSide.GIVEN:
                forced.given |= {
                    fit.leaf: fit.truth for fit in fits if fit.size > self._limit(first.side)
                }
            elif first.side is TensorSide.OUTPUT:
                forced.output = fits[0].truth
            else:
                forced.upstream = fits[0].truth
        return all(self.ranks.gather(is_possible))

    def _run_forced(
        self, forces: Mapping[tuple[str, int], ForcedValues], named: Sequence[FirstDifference]
    ) -> tuple[StepRecorder | None, tuple[str, str] | None, Calls]:
        """Run the step with forced values; return its record, a result in phrases, and passes.

        The first two are None if the step fails, the phrases also if it differs. The loss is not
        compared if the trial replaces its gradient.
        """
        model = self.inquiry.pair.loop.model
        recorder = ModuleRecorder(model, forces)
        self.inquiry.rewind()
        ran = self.inquiry.repeat_step(recorder, self.inquiry.drawing.repeat(model))
        if ran is None or not all(self.ranks.gather(set(forces) <= set(recorder.calls))):
            return None, None, recorder.calls
        inside = [
            layer_family(its.path) for its in named if its.side is TensorSide.OUTPUT and its.path
        ]
        inside += [layer_family(path) for its in named[:1] for path in its.between]
        seen, loss = ran
        is_of_labels = not named or (named[0].side is TensorSide.UPSTREAM and named[0].is_last)
        left = self.inquiry.compare_outside(seen, None if is_of_labels else loss, inside)
        return seen, left, recorder.calls

    def _forced_text(self, named: Sequence[FirstDifference]) -> str:
        return " and ".join(
            f"{_WORDS[side]} "
            f"{' and '.join(list_families(self._family_members(f)) or 'the model' for f in its)}"
            for side in TensorSide
            if (its := [first for first in named if first.side is side])
        )

    def _family_members(self, first: FirstDifference) -> list[str]:
        """Return the modules of the difference's family that run on any rank. All ranks call it."""
        mine = [path for path, _ in self.own if layer_family(path) == layer_family(first.path)]
        return [path for its in self.ranks.gather(list(dict.fromkeys(mine))) for path in its]

    def _explain_first(
        self, named: Sequence[FirstDifference], modules: Calls, is_all: bool = False
    ) -> RootCause:
        """Return the root cause of the first of these differences. All ranks call it.

        `is_all`: all gradients match, also of modules that could not be compared.
        """
        first = named[0]
        wrong = [
            path
            for (path, side), fit in self._compare_passes(modules).items()
            if side is first.side and layer_family(path) == layer_family(first.path)
            and fit.size > self._limit(side)
        ]  # fmt: skip
        everyones = self.ranks.gather(wrong)
        members = {path for its in everyones for path in its} or {first.path}
        place = list_families(sorted(members)) or "the model"
        who = [rank for rank, its in enumerate(everyones) if its] or first.ranks
        blamed = RootCause(
            state=Subject.ACTIVATIONS, axis=first.axis or self._axis, place=place, sentence="",
            factor=first.factor or f"differs by {first.size:.3g}", step=self.step.differences.step,
            ranks=tuple(who),
        )  # fmt: skip
        match first.side:
            case TensorSide.GIVEN:
                return self._explain_input(first, blamed, is_all)
            case TensorSide.OUTPUT:
                return self._explain_output(first, blamed, named)
            case _ if first.between and not is_all:
                closed = list_families(first.between)
                return replace(
                    blamed, state=Subject.GRADIENTS, place=closed,
                    sentence=f"The gradient that {closed} hands back to {place} differs from the "
                    f"reference, and what runs later is right. {closed} could not be compared.",
                    fix="Check its backward pass.",
                )  # fmt: skip
            case _ if first.is_last:
                return replace(
                    blamed, state=Subject.LOSS,
                    sentence=f"{place} returns its reference output, but the gradient of the loss "
                    f"by that output differs{self._over}. {POSSIBLE}other labels, masks or weights "
                    "of the loss; a loss that is computed or reduced in another way.",
                    fix="Compare the loss and its labels with the reference's on the same outputs.",
                )  # fmt: skip
            case _:
                shared = (
                    f"If the other ranks over {self._axis} use it too (keys and values), sum the "
                    "gradients of all of them in backward (reduce-scatter). Without that, each "
                    "rank has a partial gradient."
                )
                return replace(
                    blamed, state=Subject.GRADIENTS,
                    factor=first.factor or "other gradient in backward",
                    sentence=f"{place} returns its reference output, but the gradient of that "
                    "output differs from the reference, and is right in all modules that run "
                    "later.",
                    fix=shared if self._axis else f"Check the backward pass of what takes {place}.",
                )  # fmt: skip

    def _explain_input(self, first: FirstDifference, blamed: RootCause, is_all: bool) -> RootCause:
        """Return the root cause of a differing input: shifted positions, or the code before it."""
        mine = self._input_shifts(first)
        everyones = self.ranks.gather(mine)
        who = [rank for rank, its in enumerate(everyones) if its is not None]
        place = blamed.place
        if who and all(len(everyones[rank]) == 1 for rank in who):
            listed = ", ".join(f"rank {rank}: {everyones[rank][0]} too few" for rank in who)
            return replace(
                blamed, factor="positions not offset by rank",
                sentence=f"{place} gets positions without the offset of its shard ({listed}).",
                fix=f"Start positions at the offset of the rank's shard{self._over}.",
            )  # fmt: skip
        if who:
            return replace(
                blamed, factor="other inputs",
                sentence=f"{place} gets other inputs (positions, a mask, labels) than the "
                "reference for the same tokens.",
                fix=f"Shard them like the tokens{self._over}.",
            )  # fmt: skip
        last = list_families(first.before[-1:]) or "the input of the model"
        attention = (
            ". In attention these are the mask, and the keys and values that ranks gather"
            if self.part is not None
            else ""
        )
        closed = "" if is_all else list_families(first.between)
        unknown = f" {closed} could not be compared." if closed else ""
        return replace(
            blamed, place=closed or place,
            sentence=f"{place} gets another input than in the reference, although {last} matches."
            f"{unknown}",
            fix=f"Check what is computed between {last} and {place}{attention}{self._over}.",
        )  # fmt: skip

    def _input_shifts(self, first: FirstDifference) -> list[int] | None:
        """Return the differences between the reference's integer input and this rank's, or None."""
        call = self.own.get((first.path, first.number))
        for side, fit in self._fit_call(first.path, first.number, call) if call else ():
            if side is TensorSide.GIVEN and fit.size and not fit.own.is_floating_point():
                return (local_cpu(fit.truth).long() - local_cpu(fit.own).long()).unique().tolist()
        return None

    def _explain_output(
        self, first: FirstDifference, blamed: RootCause, named: Sequence[FirstDifference]
    ) -> RootCause:
        """Return the root cause of a differing output, such as missing sums."""
        place = blamed.place
        outputs = [its for its in named if its.side is TensorSide.OUTPUT]
        several = " and ".join(list_families(self._family_members(its)) for its in outputs)
        keys = [(its.path, its.number) for its in outputs]
        mine = [self.own[key].is_written for key in keys if key in self.own]
        if any(self.ranks.gather(bool(mine) and all(mine))):
            return replace(
                blamed, state=Subject.PARAMETERS, place=several,
                sentence=f"The parameters of {several} are written between the passes of one step "
                "(a moving average after each micro-batch, an update in backward).",
                fix="Write them once, after the last pass.",
            )  # fmt: skip
        inside = {
            path for path, _ in self._order if path != first.path and is_within(path, first.path)
        }
        inner = [path for path in first.before if path in inside]
        closed = [path for path in first.between if path in inside]
        sentences = [f"{place} returns another output than in the reference for the same samples."]
        if first.axis:
            sentences.append(f"The ranks {axis_text(first.axis)} have partial sums.")
        if inner:
            sentences.append(f"Its submodules {list_families(inner)} match the reference.")
        if closed:
            sentences.append(f"{list_families(closed)} could not be compared.")
        return replace(
            blamed, place=list_families(closed) if closed and not first.path else several,
            sentence=" ".join(sentences),
            fix="All-reduce them." if first.axis else "Check its forward and its wrappers.",
        )  # fmt: skip

    @property
    def _axis(self) -> str:
        return self.ranks.differing_axis(range(self.ranks.size)) if self.part is not None else ""

    @property
    def _over(self) -> str:
        return f" (over {self._axis})" if self._axis else ""
