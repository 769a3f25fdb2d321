"""Run a step whose gradients differ again from its initial state and find the cause: each possible
cause that one can undo from outside is undone in a step of its own, and only the one that puts
gradients, loss and update right, alone, is proven. Else sums of what the ranks' samples give are
tried, and the first module that differs from the reference is found.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ptrain.errors import Fault
from ptrain.models.boundary import CodeRaised, boundary
from ptrain.models.boundary import said as said_of
from ptrain.report.finding import (
    POSSIBLE,
    RULED_OUT,
    Certainty,
    Mismatch,
    RootCause,
    Subject,
)
from ptrain.verification.jobs.draws import Key
from ptrain.verification.jobs.evidence import MOST, Fix, JobEvidence, evidence, rows_of
from ptrain.verification.jobs.gradients import (
    explain_gradients,
    of_own_samples,
    of_samples,
)
from ptrain.verification.jobs.job import (
    Alone,
    GlobalLoss,
    Job,
    Tolerance,
    number,
)
from ptrain.verification.jobs.localise import ModuleInquiry
from ptrain.verification.jobs.modules import Calls, ModuleRecorder, ProbeResult, is_within, probed
from ptrain.verification.jobs.record import StepRecorder, digests, shared_buffers
from ptrain.verification.jobs.root_causes import blame, families, family
from ptrain.verification.jobs.step import Drawing, LoopPair, StepComparison
from ptrain.verification.jobs.trials import (
    Context,
    LossTerms,
    PossibleCause,
    Trial,
    Waited,
    around_backward,
    candidates,
    kept_in_backward,
    of_shares,
)
from ptrain.verification.parts import (
    Magnitude,
    combination,
    difference,
    named,
    norm,
    numbers_apart,
)
from ptrain.verification.updates.clip import Remainder, update_apart

_EVEN = 1e-3  # relative: weights of terms that are alike
_MOST_TERMS = 4  # of a loss, of which each is run alone
_SHARE = 1e-3  # of what differs within a module, that differs outside of it too
_HALF = 2  # bytes
_RACES = 3  # runs of a step that waits for too little, one of which is wrong
_NEAR = 1e-3  # of a gradient, that is a sum of those of its terms
_LOOSE = 10  # tolerances of a gradient: the same addends in another order


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
        self._ruled_out, self._calls = list[str](), Calls()
        self._raises = False  # where the step runs again
        self.starts = Waited(waits=False)  # what this rank starts in the step
        self.untried = ""

    def root_cause(self, first: Sequence[Mismatch], before: Mapping[str, Tensor]) -> RootCause:
        """Explain the first mismatches, at the moment of gradients; `before` are the reference's
        gradients of the step before."""
        self.rewind()
        modules, again, differs = self._run_again()
        # a step that is right by itself the second time is put right by no change
        differs = differs or self._is_wrong_again()
        if differs:
            undone = self._of_candidates(candidates(self, first), is_repeatable=again)
            if undone is not None:
                return undone
        # Generators go on: of draws that no operator is known for, the reference would be given the
        # loop's own numbers, and what they explain would count as proven.
        self._restore_models()
        probe = self.probe_of(self.step.seen)
        job_evidence = evidence(
            self.ranks, self.pair.holds, reference=self.step.expected, run=self.step.seen,
            probe=probe, before=before,
        )  # fmt: skip
        by_samples = of_samples(first, job_evidence, self.ranks)
        ledger = job_evidence.ledger
        if by_samples is not None and (read := of_shares(self, by_samples, ledger)) is not None:
            return read
        by_sums = explain_gradients(first, job_evidence, self.ranks, self.limit, self._after)
        if by_sums.certainty is Certainty.PROVEN:
            return by_sums
        if by_sums.certainty is Certainty.UNEXPLAINED and by_sums.tried:
            self._ruled_out.append(f"all gradients {by_sums.tried.removeprefix(RULED_OUT)}")
        if by_samples is not None and by_samples.tried:
            return by_samples
        if (of_terms := self._of_terms(first)) is not None:
            return of_terms
        is_tried = again and self.pair.loop.evidence is None  # else it has compared its modules
        localised = ModuleInquiry(self, job_evidence, probe, modules) if is_tried else None
        if localised is not None and (by_modules := localised.root_cause()) is not None:
            return by_modules
        is_plain = localised is None or localised.is_plain
        # of ranks with the reference's own passes no samples are torn apart
        passes = [rows_of([call]) for call in self.step.seen.calls]
        is_same = passes == [rows_of([call]) for call in self.step.expected.calls]
        if is_plain and by_samples is None and not all(self.ranks.gather(is_same)):
            own = of_own_samples(first, job_evidence, self.ranks, self.limit)
            if own is not None:
                return own
        if by_sums.certainty is Certainty.FITS:
            return by_sums
        return self._unexplained(first, job_evidence, localised)

    def _is_wrong_again(self) -> bool:
        trial = self.trial()
        return trial is not None and self._is_wrong(trial.gradients)

    def _is_wrong(self, gradients: float) -> bool:
        """Return whether gradients that are so far off are wrong, as they were."""
        return gradients > min(_LOOSE * self.limit.gradients, self._before() / 2)

    def _of_candidates(
        self, candidates: Iterator[PossibleCause], *, is_repeatable: bool
    ) -> RootCause | None:
        """Return the one whose trial puts the gradients right, if the step is wrong without it ever
        after; of several none is proven, nor one that puts them right by chance. All ranks call
        it."""
        fitting: list[tuple[PossibleCause, Trial]] = []
        for candidate in candidates:
            trial = candidate.run()
            if trial is not None and trial.is_near(self.limit.gradients):
                fitting.append((candidate, trial))
                if candidate.is_of_time:  # others may help because they are slower
                    break
            elif trial is not None:
                self._ruled_out.append(candidate.words)
        # a race may be won by chance; a step that has become right by itself stays so
        if not fitting or not any(self._is_wrong_again() for _ in range(_RACES)):
            return None
        (first, trial), others = fitting[0], [its.blamed for its, _ in fitting[1:]]
        blamed = first.blamed
        if others:
            listed = "; ".join(its.factor for its in (blamed, *others))
            blamed = replace(blamed, sentence=f"{blamed.sentence} {POSSIBLE}{listed}.")
        said, limit = trial.of(blamed, first.words), self.limit.gradients
        if is_repeatable and not first.is_of_time:
            return said
        again = (first.run() for _ in range(_RACES))
        if all(its is not None and its.is_near(limit) for its in again):
            return said
        return said.fits(f"{said.tried}; they did not in all of {_RACES} further runs")

    def trial_of_reference(self, batch: Any, still: Collection[Key] = ()) -> Trial | None:
        """Run the reference's step once more, on this batch and without these draws, and compare
        the loop's with it; None where it cannot be run. All ranks call it."""
        self.rewind()
        pair = self.pair
        expected, _ = pair.recorders()
        draws = self.drawing.replayed(pair.reference.model, still=still)
        if (loss := self._ran(pair.reference, batch, expected, draws, Alone())) is None:
            return None
        apart = max(self._loss_apart(self.step.losses[1], loss[0]), default=0.0)
        right = self.step.case.with_gradients(self._parts(self.step.expected.gradients))
        left = self._most_apart(self.step.seen.gradients, expected.gradients)
        return Trial(left, self._before(), self._others(apart, *right))

    def of_buffers(self, said: RootCause) -> RootCause:
        """Try why only buffers differ at the end of the step. All ranks call it."""
        plain, loop = self.pair.reference.model, self.pair.loop.model
        ends = {name: its.clone() for name, its, _ in shared_buffers(plain, loop)}
        trial = self.trial(self.drawing.repeated(loop), kept_in_backward(loop))
        near = _LOOSE * self.limit.gradients
        is_right = trial is not None and not trial.others and trial.gradients <= near
        now = ((own, ends[name]) for name, _, own in shared_buffers(plain, loop))
        apart = max((difference(own, its, norm(its)) for own, its in now), default=0.0)
        if any(self.ranks.gather(not is_right or apart > self.limit.updates)):
            return said
        said = replace(
            said, factor=f"{said.factor}, written again in backward",
            sentence=f"{said.sentence.partition(POSSIBLE)[0]} The recomputation in backward writes "
            "it once more.",
            fix="Write it outside of the recomputed part, or not within backward.",
        )  # fmt: skip
        return said.proven(
            "with what backward writes to buffers undone, buffers, gradients, loss and update "
            "match the reference"
        )

    def accumulated(self) -> RootCause | None:
        """Return the root cause of gradients whose micro-batches are added up in 16 bits, and the
        reference's are not, by the dtype of `.grad`: they may differ within the tolerance. None of
        one micro-batch. All ranks call it."""
        own, right = self.step.seen.gradients, self.step.expected.gradients
        both = [name for name in own if name in right and right[name].dtype.itemsize > _HALF]
        count = len(self.step.seen.calls)
        halves = [name for name in both if own[name].dtype.itemsize == _HALF and count > 1]
        everyones = self.ranks.gather([[name, named(own[name].dtype)] for name in halves])
        dtypes = {name: dtype for its in everyones for name, dtype in its}
        if not dtypes:
            return None
        dtype = min(dtypes.values())
        return blame(
            Subject.GRADIENTS, f"accumulated in {dtype}", families(dtypes),
            f"The gradients of {count} micro-batches are added up in {dtype}, unlike in the "
            "reference.",
            "Accumulate them in a dtype as fine as the reference's.",
            step=self.step.differences.step, ranks=range(self.ranks.size),
        ).fits("the dtypes of .grad were compared when the optimizer steps")  # fmt: skip

    def _of_terms(self, first: Sequence[Mismatch]) -> RootCause | None:
        """One term of the loss has another weight than in the reference, or no gradient: each is
        run alone, and their sum is fitted to the reference's gradients."""
        loop = self.pair.loop.model
        whole, draws = LossTerms(loop), partial(self.drawing.repeated, loop)
        self.rewind()
        ran = self.stepped(whole, draws())
        names = [*whole.coefficients, *sorted(whole.outputs - whole.coefficients.keys())]
        is_one = len({tuple(its) for its in self.ranks.gather(names)}) == 1
        if ran is None or not is_one or not 1 < len(names) <= _MOST_TERMS:
            return None
        rows = []
        for name in names:
            self.rewind()
            joined = {name: 1.0} if name not in whole.coefficients else {}
            alone = LossTerms(loop, {its: 0.0 for its in names if its != name}, joined)
            if (ran := self.stepped(alone, draws())) is None:
                return None
            rows.append(self._in_a_row(ran[0].gradients))
        fit = combination(self._in_a_row(self._parts(self.step.expected.gradients)), rows)
        everyones = self.ranks.gather([*fit.coefficients, float(fit.holds(_NEAR))])
        weights = [sum(its) / len(its) for its in zip(*everyones, strict=True)][:-1]
        apart = (abs(a - b) for its in everyones for a, b in zip(its[:-1], weights, strict=True))
        is_sum = all(its[-1] for its in everyones) and max(apart) <= _EVEN
        right = [float(name in whole.coefficients) for name in names]
        odd = [n for n, its in enumerate(weights) if abs(its - right[n]) > _EVEN]
        if not is_sum or len(odd) != 1:
            return None
        name, weight = names[odd[0]], weights[odd[0]]
        is_new, is_nothing = name not in whole.coefficients, abs(weight) <= _EVEN
        change = LossTerms(loop, *(({}, {name: weight}) if is_new else ({name: weight},)))
        factor = 0.0 if is_nothing else 1 / weight
        said, what = f"× {factor:.4g}", f"has {factor:.4g} times its weight beside the other terms"
        if is_new:
            said, what = "no gradient", "gets no gradient from the loss of the loop"
        elif is_nothing:
            said, what = "not in the reference", "is not in the loss of the reference"
        trial = self.trial(change, draws(), loss=change.of)
        if trial is None or not trial.is_near(self.limit.gradients):
            return None
        blamed = blame(
            Subject.LOSS, said, families(its.name for its in first),
            f"The term {name} of the loss {what}.",
            "Give it the weight that it has in the reference.", step=first[0].step,
            ranks=range(self.ranks.size),
        )  # fmt: skip
        return trial.of(blamed, "with the weight that it has in the reference")

    def _parts(self, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's elements of the reference's tensors."""
        holds = self.pair.holds
        return {n: holds[n].of(row.view(holds[n].shape)) for n, row in wholes.items() if n in holds}

    def _in_a_row(self, gradients: Mapping[str, Tensor]) -> Tensor:
        names = [name for name in self.step.expected.gradients if name in self.pair.holds]
        sizes = {name: self.pair.holds[name].value().numel() for name in names}
        rows = (gradients.get(name, torch.zeros(sizes[name])) for name in names)
        empty = torch.empty(0, dtype=torch.float64)  # for a rank without parameters
        return torch.cat([empty, *(row.double().flatten().cpu() for row in rows)])

    def with_call(self, root_cause: RootCause) -> RootCause:
        """Add the line that calls the module which the root cause names, the first of several. All
        ranks call it, after `root_cause`."""
        first = re.split(", | and ", root_cause.place)[0]
        lines = (
            call.called_at
            for (path, _), call in self._calls.items()
            if first in (path or "the model", family(path))
        )
        everyones = self.ranks.gather(next(lines, ""))
        return replace(root_cause, called_at=next(filter(None, everyones), ""))

    def rewind(self) -> None:
        """Put both models and the loop's generators back to where the step began."""
        self.step.random.restore()
        self._restore_models()

    def stepped(
        self, *within: Context, before: Sequence[Context] = (), share: Any = None
    ) -> tuple[StepRecorder, Any] | None:
        """Run the loop's step once more within these, `before` the first of them the step is not
        recorded, on its share or on another one; return what is seen of it, and its loss; None on
        every rank where it cannot be run on some. All ranks call it."""
        _, seen = self.pair.recorders()
        share = self.share if share is None else share
        loss = self._ran(self.pair.loop, share, *before, seen, *within)
        return None if loss is None else (seen, loss[0])

    def _ran(self, job: Job, batch: Any, *within: Context) -> tuple[Any] | None:
        """Run one side's step within these; return the loss that it returns; None on every rank
        where it cannot be run on some. All ranks call it."""
        loss, raised = None, False
        try:
            with (
                boundary(lambda error: Fault(place="step", finding=said_of(error))),
                ExitStack() as stack,
            ):
                for context in within:
                    stack.enter_context(context)
                loss = job.step(batch)
        except CodeRaised:
            raised = True
        return None if any(self.ranks.gather(raised)) else (loss,)

    def trial(
        self,
        *within: Context,
        before: Sequence[Context] = (),
        share: Any = None,
        loss: Callable[[float | None], float | None] = lambda its: its,
    ) -> Trial | None:
        """Run the loop's step from where it began, within these; return how far it is from the
        reference's then; None where it cannot be run. `loss`: what the loss that it returns is with
        what is undone. All ranks call it."""
        self.rewind()
        ran = self.stepped(*within, before=before, share=share)
        if ran is None:
            return None
        gradients = ran[0].gradients
        left, obstacle = self.step.case.with_gradients(gradients, ran[0].record)
        losses = number(ran[1]), loss(number(ran[1]))  # a term without gradient is in the loss
        apart = min(max(self._loss_apart(its), default=0.0) for its in losses)
        others = self._others(apart, left, obstacle)
        return Trial(self._most_apart(gradients), self._before(), others)

    def checked(self, said: RootCause, *, repeats: bool = False) -> RootCause:
        """Return a proven root cause with what its proof did not look at: whether the loss is right
        and, if it `repeats`, whether the update with the reference's gradients is. All ranks call
        it."""
        if said.certainty is not Certainty.PROVEN:
            return said
        right, apart = Remainder(0, 0.0), max(self._loss_apart(), default=0.0)
        gradients = self._parts(self.step.expected.gradients)
        left = self.step.case.with_gradients(gradients) if repeats else (right, "")
        others = self._others(apart, *left)
        return said.fits(f"{said.tried}{others}") if others else said

    def _before(self) -> float:
        """Return how far the gradients were from the reference's. All ranks call it."""
        return self._most_apart(self.step.seen.gradients)

    def _most_apart(
        self, gradients: Mapping[str, Tensor], truth: Mapping[str, Tensor] | None = None
    ) -> float:
        """Return the largest difference of a gradient over all ranks. All ranks call it."""
        names = [*(self.step.expected.gradients if truth is None else truth)]
        mine = max(self._gradients_apart(names, gradients, truth), default=0.0)
        return max(self.ranks.gather(mine))

    def _after(self, gradients: Mapping[str, Tensor], fix: Fix) -> str:
        """Return what still differs, or could not be tried, with these whole gradients of all
        parameters. All ranks call it."""
        left, obstacle = self.step.case.with_gradients(self._parts(gradients))
        own, values = number(self.step.losses[1]), list[float]()
        if max(self._loss_apart(), default=0.0) > self.limit.losses:
            self.rewind()
            self.stepped(around_backward(partial(_keep_loss, values)))
        times = fix.loss_factor(self.ranks.rank, values)
        losses = (own, own if own is None or times is None else own * times)
        apart = min(max(self._loss_apart(loss), default=0.0) for loss in losses)
        return self._others(apart, left, obstacle)

    def _others(self, apart: float, left: Remainder, obstacle: str) -> str:
        """Return in words what of loss and update is not the reference's. All ranks call it."""
        words = f"; the loss still differs by {apart:.3g}" if apart > self.limit.losses else ""
        return words + update_apart(left, obstacle, self.ranks)

    def _restore_models(self) -> None:
        self.step.loop_state.restore()
        self.step.reference_state.restore()

    def _run_again(self) -> tuple[Calls, bool, bool]:
        """Every module's passes, whether the step gave the same bits, and whether it differs."""
        model, holds = self.pair.loop.model, self.pair.holds
        recorder = ModuleRecorder(model)
        ran = self.stepped(recorder, self.drawing.repeated(model), self.starts)
        if ran is None:
            self._raises = True
            return {}, False, False
        self._calls, gradients = recorder.calls, ran[0].gradients
        same = digests(holds, gradients) == digests(holds, self.step.seen.gradients)
        differs = self._is_wrong(self._most_apart(gradients))
        return recorder.calls, all(self.ranks.gather(same)), differs

    def probe_of(self, seen: StepRecorder) -> ProbeResult:
        """Run the reference's model on what this rank's model was given."""
        with self.drawing.replayed(self.pair.reference.model):
            return probed(self.pair.reference.model, seen.calls)

    def left_outside(
        self, seen: StepRecorder, loss: Any, inside: Sequence[str]
    ) -> tuple[str, str] | None:
        """Return in words what of a step is the reference's: the loss, and all gradients or those
        of parameters that are not in modules of these families, if any of it differed before, and
        what is not, or was not tried; else None. All ranks call it."""
        losses = self._loss_apart(loss)
        if any(apart > self.limit.losses for apart in losses):
            return None
        names = list(self.step.expected.gradients)
        outside = [n for n in names if not any(is_within(family(n), path) for path in inside)]
        bound, was = _LOOSE * self.limit.gradients, self.step.seen.gradients
        for chosen in filter(None, (names, outside)):
            before = [*self._gradients_apart(chosen, was), *self._loss_apart()]
            sizes = (before, self._gradients_apart(names, was),
                     self._gradients_apart(chosen, seen.gradients))  # fmt: skip
            rows = self.ranks.gather([max(its, default=0.0) for its in sizes])
            most, inner, left = (max(its) for its in zip(*rows, strict=True))
            # what differs within, and no more than roundings of it outside, is not tried by this
            if left <= bound < most and most >= _SHARE * min(1.0, inner):
                is_all = len(chosen) == len(names)
                whose = f"{'the loss and ' * bool(losses)}{'all' if is_all else 'the other'}"
                others = "; those within the module still differ"
                if is_all:
                    others = self._others(
                        0.0, *self.step.case.with_gradients(seen.gradients, seen.record)
                    )
                words = f"{whose} {len(chosen)} gradients match the reference to {left:.1e}"
                return words, others
        return None

    def _gradients_apart(
        self,
        names: Sequence[str],
        gradients: Mapping[str, Tensor],
        truth: Mapping[str, Tensor] | None = None,
    ) -> Iterator[float]:
        """Yield how far gradients are from the reference's (relative); one that is missing, and is
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

    def _loss_apart(self, *losses: Any) -> list[float]:
        """How far the global loss is from the reference's: of this rank's and of this reference's,
        or of the step as it was; nothing where there is none. All ranks call it."""
        own, right = map(number, (*losses, *self.step.losses[::-1][len(losses) :]))
        measured = self._loss.of(right, own)
        return [] if right is None or measured is None else [numbers_apart(right, measured)]

    def _unexplained(
        self, first: Sequence[Mismatch], job_evidence: JobEvidence,
        localised: ModuleInquiry | None,
    ) -> RootCause:  # fmt: skip
        names = [n for n in job_evidence.samples if any(d.name == n for d in first)]
        largest = max(mismatch.difference for mismatch in first)
        out = "; ".join(self._ruled_out) or "nothing, as no fix that is known fits"
        out += self.untried
        if (count := job_evidence.micro_batches) > MOST:
            out += f"; only the first {MOST} of {count} micro-batches of a rank were distinguished"
        place, where = families(names) or first[0].name, ""
        suspect = None if localised is None else localised.first_in_words()
        if suspect is not None:
            place, where = suspect[0] or place, f" {suspect[1]}"
        if self._raises:
            out += "; the step raises when it is run again, so no change was tried"
        elif localised is None and self.pair.loop.evidence is None:
            out += "; the step is not reproducible to the bit, so no module could be tried"
        is_forward = max(self._loss_apart(), default=0.0) > self.limit.losses
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


def _keep_loss(values: list[float], losses: list[Tensor]) -> Callable[[], None]:
    """Keep the number that a backward pass starts from."""
    values += [float(loss.detach()) for loss in losses if loss.numel() == 1]
    return lambda: None
