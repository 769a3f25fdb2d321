"""Run a step whose gradients differ again from its initial state and find the cause: what each
rank's own samples give, which module differs from the plain one, whether plain modules fix the
step, and whether random numbers were drawn on one side only, differently by ranks with the same
samples, or differently in a recomputation.

Modules that differ by themselves, by family, and what is said of one with which the step is
right again.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ptrain.report.finding import Certainty, Mismatch, Moment, RootCause, Subject
from ptrain.verification.jobs.diagnosis import TIED, explain_gradients, of_own_samples
from ptrain.verification.jobs.draws import Key, drawn_again_otherwise
from ptrain.verification.jobs.evidence import JobEvidence, evidence, places_of, untold
from ptrain.verification.jobs.job import GlobalLoss, Ranks, Tolerance, number
from ptrain.verification.jobs.modules import (
    Calls,
    ModuleRecorder,
    ProbeResult,
    Violation,
    autocast_of,
    innermost,
    is_within,
    probed,
    untouched,
    violations,
)
from ptrain.verification.jobs.record import ForwardCall, StepRecorder, digests, swapped
from ptrain.verification.jobs.root_causes import families, family, over_axis, proven
from ptrain.verification.jobs.slice_root_causes import SliceInquiry
from ptrain.verification.jobs.step import Drawing, LoopPair, StepComparison
from ptrain.verification.parts import (
    Magnitude,
    canonical_modules,
    difference,
    factor_text,
    missing_sum,
    multiple,
    numbers_apart,
)

_PLAIN = 1e-4  # a factor that is nearer to 1 is printed as 1
_LOOSE_SUSPECT = 10  # tolerances of an output within which it is a sum or a multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A family of modules (blocks.*.attn) that differ by themselves: where, in which pass, by how
    much at most, and which ranks saw it; `rewritten`: only where their parameters are not those of
    their first pass."""

    paths: tuple[str, ...]
    moment: Moment
    difference: float
    rewritten: bool
    ranks: tuple[int, ...]

    @property
    def place(self) -> str:
        return families(self.paths) or "the model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspects:
    """Of one step of a job, whose plain model is the `reference`. All ranks call its methods
    alike."""

    ranks: Ranks
    limit: Tolerance
    step: int
    reference: nn.Module

    def of_dtypes(self, mine: Sequence[Violation], suspects: Sequence[Suspect]) -> RootCause | None:
        """All modules that differ return another dtype than the plain ones: no fix is tried, as
        the loop would cast between them."""
        kinds = {
            " for ".join(str(side.dtype).removeprefix("torch.") for side in (v.actual, v.expected))
            for v in mine
            if v.actual.dtype != v.expected.dtype
        }
        count = sum(v.actual.dtype != v.expected.dtype for v in mine)
        everyones = self.ranks.gather([sorted(kinds), count == len(mine)])
        known = {kind for its, _ in everyones for kind in its}
        if len(known) != 1 or not all(is_all for _, is_all in everyones):
            return None
        (kind,) = known
        actual, _, expected = kind.partition(" for ")
        return RootCause(
            state=Subject.ACTIVATIONS, axis="", factor=kind,
            place=families([path for suspect in suspects for path in suspect.paths]),
            step=self.step, ranks=tuple(range(self.ranks.size)),
            sentence=f"Its modules compute in {actual}, the reference in {expected}. If this "
                     f"is intended, set `Terms(dtype=torch.{actual})`.",
        )  # fmt: skip

    def of_all_ranks(
        self, mine: Sequence[Violation], tested: set[str], order: Calls
    ) -> tuple[list[Suspect], set[str]]:
        """Return all ranks' suspects in the order in which their modules run, and the modules that
        some rank could run by themselves."""
        everyones = self.ranks.gather(
            [[v.path, int(v.moment), v.difference, v.rewritten] for v in mine]
        )
        tested = {path for paths in self.ranks.gather(sorted(tested)) for path in paths}
        rows = [(rank, *row) for rank, its in enumerate(everyones) for row in its]
        orders = self.ranks.gather(list(dict.fromkeys(path for path, _ in order)))
        every = (path for path, _ in canonical_modules(self.reference))
        places = list(dict.fromkeys([*(path for its in orders for path in its), *every]))
        paths = innermost([row[1] for row in rows])
        grouped: dict[str, list[str]] = {}
        for path in sorted(paths, key=places.index):
            grouped.setdefault(family(path), []).append(path)
        suspects = []
        for members in grouped.values():
            of = [row for row in rows if row[1] in members]
            suspects.append(
                Suspect(
                    paths=tuple(members),
                    moment=Moment(min(row[2] for row in of)),
                    difference=max(row[3] for row in of),
                    rewritten=all(row[4] for row in of),
                    ranks=tuple(sorted({row[0] for row in of})),
                )
            )
        return sorted(suspects, key=lambda suspect: suspect.moment), tested

    def blamed(
        self, suspect: Suspect, mine: Sequence[Violation], tested: set[str], order: Calls
    ) -> RootCause:
        """Say what the modules do, and over which axis a sum is missing."""
        axis, factor = self._shared(suspect, mine)
        if suspect.rewritten:
            return RootCause(
                state=Subject.PARAMETERS, axis="", factor=f"differs by {suspect.difference:.3g}",
                place=suspect.place, step=self.step, ranks=suspect.ranks,
                sentence=f"The parameters of {suspect.place} are written between the passes "
                         "of one step (a moving average after each micro-batch, an update in "
                         "backward). Write them once, after the last pass.",
            )  # fmt: skip
        path = suspect.paths[0]
        inside = [
            other
            for other in dict.fromkeys(name for name, _ in order)  # those that run at all
            if other != path and is_within(other, path)
        ]
        inner = sorted(other for other in inside if other in tested)
        closed = innermost([other for other in inside if other not in tested])
        if suspect.moment is Moment.FORWARD:
            what = f"{suspect.place} returns another output than the plain module for the same "
            what += "inputs."
        else:
            what = f"{suspect.place} returns another gradient of its input than the plain "
            what += "module, for the same gradient of its output."
        sentences = [what]
        if axis:
            when = "" if suspect.moment is Moment.FORWARD else " in backward"
            sentences.append(
                f"The ranks {over_axis(axis)} have partial sums. All-reduce them{when}."
            )
        else:
            if inner:
                sentences.append(f"Its submodules {families(inner)} match the plain ones.")
            if closed:
                sentences.append(f"{families(closed)} could not be run separately.")
            sentences.append("Check its forward and its wrappers.")
        return RootCause(
            state=Subject.ACTIVATIONS, axis=axis,
            factor=factor or f"differs by {suspect.difference:.3g}",
            place=families(closed) if closed and not path else suspect.place,
            step=self.step, ranks=suspect.ranks, sentence=" ".join(sentences),
        )  # fmt: skip

    def _shared(self, suspect: Suspect, mine: Sequence[Violation]) -> tuple[str, str]:
        """The axis and the factor of a module's output (or of the gradient that it hands back): a
        sum over an axis that is missing, or a multiple. Empty strings where it is neither."""
        own = next(
            (v for v in mine if v.path == suspect.paths[0] and v.moment is suspect.moment), None
        )
        is_readable = own is not None and own.expected.shape == own.actual.shape
        kinds = [str(own.actual.dtype), str(own.expected.dtype)] if own is not None else None
        shape = list(own.expected.shape) if own is not None and is_readable else None
        everyones = self.ranks.gather([shape, kinds])
        dtypes = next((its for _, its in everyones if its and its[0] != its[1]), None)
        if dtypes is not None:
            return "", " for ".join(dtypes).replace("torch.", "")
        if own is None or any(its != everyones[0][0] or its is None for its, _ in everyones):
            return "", ""
        row = own.expected.flatten()
        (where,) = places_of(self.ranks, {"": row}).values()
        both = torch.stack([row[where].double(), own.actual.flatten()[where].to(row).double()])
        both = both.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)  # NaN: has it not
        tolerance = _LOOSE_SUSPECT * self.limit.outputs
        return _factor(self.ranks, self.ranks.stack(both), tolerance)


def _factor(ranks: Ranks, everyones: Tensor, tolerance: float) -> tuple[str, str]:
    """[ranks, 2, elements]: what is right, and what is there."""
    truths, parts = everyones.unbind(1)
    for axis, groups in ranks.axes.items():
        if missing_sum(parts, truths, groups, tolerance) is not None:
            return axis, f"missing all-reduce {over_axis(axis)}"
    fit = multiple(parts, truths)
    is_multiple = fit.holds(tolerance) and abs(fit.factor - 1) > _PLAIN
    return "", factor_text(fit.factor, ranks.degrees) if is_multiple else ""


def root_cause_of_masks(inquiry: Inquiry, first: Sequence[Mismatch]) -> RootCause | None:
    """Return the root cause that a trial proves; None where none does. All ranks call it."""
    drawing = inquiry.drawing
    if not drawing.any:
        return None
    everyones, ranks = drawing.everyones, inquiry.ranks
    alone, loop_only = everyones.alone, set(everyones.by_key) - everyones.used  # as on all ranks
    unlike = dict(everyones.unlike)
    mine = sorted({draw.path or draw.outer for draw in drawn_again_otherwise(drawing.loop)})
    again = {path for paths in ranks.gather(mine) for path in paths}
    blame, everywhere = partial(proven, step=first[0].step), range(ranks.size)
    if unlike and (left := _left_alike(inquiry)) is not None:
        who = tuple(sorted({rank for its in unlike.values() for rank in its}))
        return blame(
            Subject.RANDOM, "other masks for the same samples", families(unlike) or "the model",
            f"Ranks {', '.join(map(str, who))} have the same samples but draw other masks "
            f"for them in {families(unlike)}, so their replicas differ. Seed these ranks "
            "identically, and differently from ranks with other samples.",
            "with the masks of the first of them on all, the gradients match the reference "
            f"to {left:.1e}", ranks=who, axis=ranks.axis_of(who),
        )  # fmt: skip
    if again and (left := _left_alike(inquiry)) is not None:
        place = families(again) or "the model"
        return blame(
            Subject.GRADIENTS, "different mask in the recomputation", place,
            f"The recomputation of {place} in backward draws other random numbers than "
            "forward. Preserve the generator's state (checkpoint(..., "
            "preserve_rng_state=True)), or draw outside of the recomputed code.",
            f"with forward's masks in backward, the gradients match the reference to {left:.1e}",
            ranks=everywhere,
        )  # fmt: skip
    if alone and (left := _left_of_reference(inquiry, alone)) is not None:
        return blame(
            Subject.RANDOM, "dropout in the reference only", _modules(alone),
            f"In {_modules(alone)} the reference applies dropout, but no rank of the loop "
            "does: it is in evaluation mode (call model.train() before the step), or its "
            "rate is 0.",
            f"without dropout there, the reference gradients match the loop to {left:.1e}",
            ranks=everywhere,
        )  # fmt: skip
    if loop_only and (left := _left_of_loop(inquiry, loop_only)) is not None:
        return blame(
            Subject.RANDOM, "dropout in the loop only", _modules(loop_only),
            f"In {_modules(loop_only)} the loop applies dropout, but the reference does not: "
            "their rates or modes (train, eval) differ.",
            f"without dropout there, the gradients match the reference to {left:.1e}",
            ranks=everywhere,
        )  # fmt: skip
    return None


def _left_alike(inquiry: Inquiry) -> float | None:
    return inquiry.left_with(inquiry.drawing.repeated(inquiry.pair.loop.model, alike=True))


def _left_of_loop(inquiry: Inquiry, still: set[Key]) -> float | None:
    return inquiry.left_with(inquiry.drawing.repeated(inquiry.pair.loop.model, still=still))


def _left_of_reference(inquiry: Inquiry, still: set[Key]) -> float | None:
    """Run one device's step once more; return how far the loop's is from it, if that is near."""
    inquiry.rewind()
    pair = inquiry.pair
    draws = inquiry.drawing.replayed(pair.reference.model, still=still)
    with StepRecorder(pair.reference.model, pair.wholes) as expected, draws:
        pair.reference.step(inquiry.batch)
    return inquiry.left(inquiry.step.seen.gradients, expected.gradients)


def _modules(keys: set[Key]) -> str:
    return families(path or "the model" for path, _ in sorted(keys))


_MOST_TRIALS = 6  # families of modules that are replaced, one after the other
_SHARE = 1e-3  # of what differs within a module, that differs outside of it too
_LOOSE = 10  # tolerances of an output within which it is a sum or a multiple


class Inquiry:
    """All ranks make one of the same step, and call its methods alike."""

    def __init__(
        self,
        pair: LoopPair,
        step: StepComparison,
        limit: Tolerance,
        *,
        loss: GlobalLoss,
        batch: Any,
        share: Any,
        drawing: Drawing,
    ) -> None:
        self.pair, self.step, self.ranks, self.limit = pair, step, loss.ranks, limit
        self._loss, self.batch, self.share, self.drawing = loss, batch, share, drawing
        self.suspects = Suspects(
            ranks=loss.ranks, limit=limit, step=step.differences.step,
            reference=pair.reference.model,
        )  # fmt: skip
        self._ruled_out: list[str] = []
        self._is_plain = False  # the model as a whole does what the plain one does

    def root_cause(self, first: Sequence[Mismatch], before: Mapping[str, Tensor]) -> RootCause:
        """Explain the first mismatches, at the moment of gradients; `before` are one device's
        gradients of the step before."""
        self.rewind()
        modules, again, differs = self._run_again()
        # a step that is right by itself the second time is put right by no other masks
        if differs and (of_masks := root_cause_of_masks(self, first)) is not None:
            return of_masks
        # Generators go on: of draws that no operator is known for, one device would be given the
        # loop's own numbers, and what they explain would count as proven.
        self._restore_models()
        probe = self._probe()
        job_evidence = evidence(
            self.ranks, self.pair.holds, reference=self.step.expected, run=self.step.seen,
            probe=probe, before=before,
        )  # fmt: skip
        by_sums = explain_gradients(first, job_evidence, self.ranks, self.limit)
        if by_sums.certainty is Certainty.PROVEN:
            return by_sums
        if by_sums.certainty is Certainty.UNEXPLAINED:
            self._ruled_out.append(
                "one multiple, a sum over an axis, other micro-batches or the previous step in "
                "all gradients"
            )
        of_slices = SliceInquiry(self, modules).root_cause() if again else None
        if of_slices is not None and of_slices.certainty is Certainty.PROVEN:
            return of_slices
        if again and (by_modules := self._of_modules(probe, modules)) is not None:
            return by_modules
        if (dropped := self._dropped_arguments(first)) is not None:
            return dropped
        own = of_own_samples(first, job_evidence, self.ranks, self.limit, self._is_plain)
        if own is not None and own.certainty is Certainty.PROVEN:
            is_tied = own.factor == TIED
            return _with_norms(own, self.pair.reference.model) if is_tied else own
        if of_slices is not None:
            return of_slices
        if by_sums.certainty is Certainty.FITS:
            return by_sums
        return self._unexplained(first, job_evidence, probe, again)

    def _dropped_arguments(self, first: Sequence[Mismatch]) -> RootCause | None:
        """Arguments that one device's model is given and the loop's, within its wrappers, is not.
        Of a stage nothing is said: it is given something else."""
        forward = inspect.signature(self.pair.reference.model.forward)
        is_whole = len(self.pair.holds) == len(self.pair.wholes)
        expected, seen = (
            _arguments(forward, calls[0]) if calls and is_whole else None
            for calls in (self.step.expected.calls, self.step.seen.calls)
        )
        mine = [] if expected is None or seen is None else sorted(expected - seen)
        lacking = {name for names in self.ranks.gather(mine) for name in names}
        if not lacking:
            return None
        listed = ", ".join(sorted(lacking))
        return RootCause(
            state=Subject.BATCH, axis="", factor="missing argument", place=listed,
            step=first[0].step, ranks=tuple(range(self.ranks.size)),
            sentence=f"The reference model is called with {listed}, but the loop's model is "
                     "not. A wrapper or the step does not pass it on.",
        )  # fmt: skip

    def rewind(self) -> None:
        """Put both models and the loop's generators back to where the step began."""
        self.step.random.restore()
        self._restore_models()

    def stepped(self, *within: AbstractContextManager[object]) -> tuple[StepRecorder, Any]:
        """Run the loop's step once more within these; return what is seen of it, and its loss."""
        with StepRecorder(self.pair.loop.model, self.pair.holds) as seen, ExitStack() as stack:
            for context in within:
                stack.enter_context(context)
            return seen, self.pair.loop.step(self.share)

    def left_with(self, *within: AbstractContextManager[object]) -> float | None:
        """Run the loop's step from where it began, within these; return how far it is from one
        device's, if that is near."""
        self.rewind()
        return self.left(self.stepped(*within)[0].gradients)

    def _restore_models(self) -> None:
        self.step.loop_state.restore()
        self.step.reference_state.restore()

    def _run_again(self) -> tuple[Calls, bool, bool]:
        """Every module's passes, whether the step gave the same bits, and whether it differs."""
        model, holds = self.pair.loop.model, self.pair.holds
        recorder = ModuleRecorder(model)
        seen, _ = self.stepped(recorder, self.drawing.repeated(model))
        same = digests(holds, seen.gradients) == digests(holds, self.step.seen.gradients)
        return recorder.calls, all(self.ranks.gather(same)), self.left(seen.gradients) is None

    def _probe(self) -> ProbeResult:
        with self.drawing.replayed(self.pair.reference.model):
            return probed(self.pair.reference.model, self.step.seen.calls)

    def _of_modules(self, probe: ProbeResult, modules: Calls) -> RootCause | None:
        """Put plain modules in the place of those that differ by themselves, the innermost, one
        family after the other and then all; what makes the step right is where the fault is."""
        reference, autocast = self.pair.reference.model, autocast_of(self.step.seen.calls[:1])
        with untouched(reference), autocast, self.drawing.repeated(reference):
            mine = violations(self.pair.reference.model, probe.modules, modules, self.limit)
        self._is_plain = not any(self.ranks.gather(any(not v.path for v in mine.list)))
        suspects, tested = self.suspects.of_all_ranks(mine.list, mine.tested, probe.modules)
        trials: list[tuple[Suspect, ...]] = [(suspect,) for suspect in suspects[:_MOST_TRIALS]]
        trials += [tuple(suspects)] if len(suspects) > 1 else []
        for chosen in trials:
            paths = [path for suspect in chosen for path in suspect.paths]
            left, count = self._with_plain(paths)
            places = " and ".join(suspect.place for suspect in chosen)
            if left is not None and left <= self.limit.gradients * _LOOSE:
                others = f" and the other {count} gradients" if count else ""
                be = "are" if count else "is"
                tried = (
                    f"with the plain module in place of {places} the loss{others} {be} "
                    f"within {left:.1e} of the reference"
                )
                blamed = self.suspects.blamed(chosen[0], mine.list, tested, probe.modules)
                return replace(
                    blamed.proven(tried), place=places if len(chosen) > 1 else blamed.place
                )
            self._ruled_out.append(f"the plain module in place of {places}")
        return self.suspects.of_dtypes(mine.list, suspects)

    def _with_plain(self, paths: Sequence[str]) -> tuple[float | None, int]:
        """Run the step with plain modules in these places. Return the largest difference that is
        left (relative) over all ranks, of the loss and of the gradients of what is not in them, and
        how many gradients these are; None where neither can be compared."""
        self.rewind()
        reference, model = self.pair.reference.model, self.pair.loop.model
        plain = {path: reference.get_submodule(path) for path in paths}
        inside = {id(parameter) for path in paths for parameter in plain[path].parameters()}
        names = [
            name for name, whole in self.pair.wholes.items()
            if id(whole.parameter) not in inside and name in self.step.expected.gradients
        ]  # fmt: skip
        with untouched(reference), swapped(model, plain):
            seen, loss = self.stepped(self.drawing.repeated(model, reference))
        before = [*self._gradients_apart(names, self.step.seen.gradients), *self._loss_apart()]
        after = [*self._gradients_apart(names, seen.gradients), *self._loss_apart(loss)]
        bound = _LOOSE * self.limit.gradients
        own = [name for name in self.step.expected.gradients if name not in names]
        within = max(self._gradients_apart(own, self.step.seen.gradients), default=0.0)
        outside = self.ranks.gather([max(before, default=0.0), within])
        most = max(size for size, _ in outside)
        # what differs within, and no more than roundings of it outside, is not tried by this
        least = _SHARE * min(1.0, max(size for _, size in outside))
        differed = most > bound and most >= least
        worst = [size for size in self.ranks.gather(max(after, default=None)) if size is not None]
        return (max(worst) if worst and differed else None), len(names)

    def _gradients_apart(
        self,
        names: Sequence[str],
        gradients: Mapping[str, Tensor],
        truth: Mapping[str, Tensor] | None = None,
    ) -> Iterator[float]:
        """Yield how far gradients are from one device's (relative); one that is missing, and is
        more than rounding there, infinitely."""
        expected = self.step.expected.gradients if truth is None else truth
        scale = Magnitude.of(expected)
        for name in names:
            if name not in self.pair.holds:
                continue
            shard, whole = self.pair.holds[name], expected[name]
            part = shard.of(whole.view(shard.shape))
            if name in gradients:
                yield difference(gradients[name], part, scale.length(whole, part))
            elif not scale.is_noise(whole):
                yield math.inf

    def left(
        self, gradients: Mapping[str, Tensor], expected: Mapping[str, Tensor] | None = None
    ) -> float | None:
        """Return the largest difference of a gradient (relative) over all ranks, from one device's
        or `expected`, where it is rounding; else None. All ranks call it."""
        its = self.step.expected.gradients if expected is None else expected
        mine = max(self._gradients_apart(list(its), gradients, its), default=0.0)
        most = max(self.ranks.gather(mine))
        return most if most <= _LOOSE * self.limit.gradients else None

    def _loss_apart(self, *losses: Any) -> list[float]:
        """How far the global loss is from one device's: of this rank's, or of the step as it was;
        nothing where there is none. All ranks call it."""
        right, own = (
            number(loss) for loss in (*self.step.losses[:1], *(losses or self.step.losses[1:]))
        )
        measured = self._loss.of(right, own)
        return [] if right is None or measured is None else [numbers_apart(right, measured)]

    def _unexplained(
        self, first: Sequence[Mismatch], job_evidence: JobEvidence, probe: ProbeResult, again: bool
    ) -> RootCause:
        names = [n for n in job_evidence.samples if any(d.name == n for d in first)]
        largest = max(mismatch.difference for mismatch in first)
        out = "; ".join(self._ruled_out) + untold(job_evidence.micro_batches)
        module, later = _right_down_to(names, _in_order(job_evidence, probe.modules))
        place = module or families(names) or first[0].name
        if len(later) > 0:
            where = (
                f" Backward is right down to {module}: the gradients of parameters used "
                f"after it ({families(later)}) match the reference. Check the consumers of "
                f"the output of {module}, and its backward pass."
            )
        else:
            where = ""
        if not again:
            out += "; the step is not reproducible to the bit, so no module could be tried"
        right, own = (number(loss) for loss in self.step.losses)
        measured = self._loss.of(right, own)
        is_forward = right is not None and measured is not None
        is_forward = is_forward and numbers_apart(right or 0.0, measured or 0.0) > self.limit.losses
        return RootCause(
            state=Subject.LOSS if is_forward else first[0].subject,
            axis="",
            factor=f"differs by {largest:.3g}",
            place=place,
            step=first[0].step,
            ranks=tuple(sorted({mismatch.rank for mismatch in first})),
            sentence=f"The gradient of {len(names)} of {len(job_evidence.samples)} "
            "parameters differs from the reference when the optimizer "
            f"steps{', and so does the loss' if is_forward else ''}; this is the "
            f"first difference.{where}",
        ).unexplained(out)


def _arguments(forward: inspect.Signature, call: ForwardCall) -> set[str] | None:
    """Return the names of what a call gives; None where the signature does not fit."""
    try:
        given = forward.bind(*call.args, **call.kwargs).arguments
    except TypeError:
        return None
    return {name for name, value in given.items() if value is not None}


def _in_order(job_evidence: JobEvidence, modules: Calls) -> list[str]:
    """Return the parameters that have a gradient, as the modules that have them first run."""
    order = list(dict.fromkeys(path for path, _ in modules))
    known = [name for name in job_evidence.samples if name.rpartition(".")[0] in order]
    return sorted(known, key=lambda name: order.index(name.rpartition(".")[0]))


def _right_down_to(names: Sequence[str], parameters: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return down to which module the backward pass is right, and the parameters that are used
    after it; nothing where none is right that runs later."""
    last = max((parameters.index(name) for name in names if name in parameters), default=-1)
    later = parameters[last + 1 :]
    return (parameters[last].rpartition(".")[0], later) if last >= 0 and later else ("", ())


def _with_norms(root_cause: RootCause, model: nn.Module) -> RootCause:
    """Say which batch norms the model has, as they tie samples together."""
    norms = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
    ]
    if not norms:
        return root_cause
    return replace(
        root_cause, factor="per-rank batch statistics", place=families(norms),
        state=Subject.ACTIVATIONS,
        sentence=f"{root_cause.sentence} {families(norms)} uses mean and variance of the "
                 "samples of each micro-batch. Use torch.nn.SyncBatchNorm, or another norm.",
    )  # fmt: skip
