"""Find the cause of differing gradients by repeated steps from the same initial state.

Each possible cause that can be undone from outside is undone in a separate step. It is proven if it
is the only one that corrects gradients, loss and update. Otherwise sums of the contributions of the
ranks' samples are tried, and the first module that differs from the reference is located.
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
from ptrain.models.boundary import UserCodeError, convert_exceptions, describe_error
from ptrain.report.finding import POSSIBLE, RULED_OUT, Certainty, Mismatch, RootCause, Subject
from ptrain.verification.jobs.draws import Key
from ptrain.verification.jobs.evidence import MOST, Fix, JobEvidence, collect_evidence, row_keys
from ptrain.verification.jobs.gradients import (
    explain_gradients,
    explain_sample_faults,
    explain_separate_means,
)
from ptrain.verification.jobs.job import GlobalLoss, Job, NoComms, Tolerance, loss_value
from ptrain.verification.jobs.localise import ModuleInquiry
from ptrain.verification.jobs.modules import (
    Calls,
    ModuleRecorder,
    ProbeResult,
    is_within,
    probe_model,
)
from ptrain.verification.jobs.record import StepRecorder, shard_checksums, shared_buffers
from ptrain.verification.jobs.root_causes import layer_family, list_families, make_untested_cause
from ptrain.verification.jobs.step import DrawReplay, LoopPair, StepComparison
from ptrain.verification.jobs.trials import (
    CollectiveRecorder,
    Context,
    LossTerms,
    PossibleCause,
    Trial,
    explain_by_batches,
    hook_backward,
    possible_causes,
    restore_buffers_after_backward,
)
from ptrain.verification.parts import (
    Magnitude,
    difference,
    dtype_name,
    fit_combination,
    norm,
    number_difference,
)
from ptrain.verification.updates.clip import Remainder, describe_remainder

_EVEN = 1e-3  # weights of loss terms that differ by less are equal
_MOST_TERMS = 4  # terms of a loss: each needs a step
_SHARE = 1e-3  # outside of modules, a difference below this share of the largest is rounding
_HALF = 2  # bytes of a 16-bit element
_RACES = 3  # runs in which a race should show at least once
_NEAR = 1e-3  # relative residual of a gradient as a sum of those of its terms
_LOOSE = 10  # tolerances of a gradient: addends may be summed in another order


class Inquiry:
    """The search for the cause of one differing step. All ranks call its methods in the same order.

    Args:
        pair: The loop and its reference.
        step: The step that differs.
        limit: The tolerances.
        loss: The rule of the global loss.
        batch: The global batch of the step.
        share: This rank's share of it.
        drawing: The random draws of the step.
    """

    def __init__(
        self,
        pair: LoopPair,
        step: StepComparison,
        limit: Tolerance,
        *,
        loss: GlobalLoss,
        batch: Any,
        share: Any,
        drawing: DrawReplay,
    ) -> None:
        self.pair, self.step, self.ranks, self.limit = pair, step, loss.ranks, limit
        self._loss, self.batch, self.share, self.drawing = loss, batch, share, drawing
        self._ruled_out, self._calls = list[str](), Calls()
        self._raises = False  # whether the step fails when it runs again
        self.starts = CollectiveRecorder(waits=False)  # collectives of this rank
        self.untried = ""

    def root_cause(self, first: Sequence[Mismatch], before: Mapping[str, Tensor]) -> RootCause:
        """Return the cause of the first mismatches of gradients. All ranks call it.

        `before` has the reference's gradients of the previous step.
        """
        self.rewind()
        modules, again, differs = self._run_again()
        # a repeated step that matches without a change would confirm any change
        differs = differs or self._is_wrong_again()
        if differs:
            undone = self._try_candidates(possible_causes(self, first), is_repeatable=again)
            if undone is not None:
                return undone
        # The generators are not restored: the reference would draw the loop's numbers for operators
        # that `DrawRecorder` does not record, and a match by them would count as a proof.
        self._restore_models()
        probe = self.run_probe(self.step.seen)
        job_evidence = collect_evidence(
            self.ranks, self.pair.holds, reference=self.step.expected, run=self.step.seen,
            probe=probe, before=before,
        )  # fmt: skip
        by_samples = explain_sample_faults(first, job_evidence, self.ranks)
        ledger = job_evidence.ledger
        if (
            by_samples is not None
            and (read := explain_by_batches(self, by_samples, ledger)) is not None
        ):
            return read
        by_sums = explain_gradients(
            first, job_evidence, self.ranks, self.limit, self._remaining_text
        )
        if by_sums.certainty is Certainty.PROVEN:
            return by_sums
        if by_sums.certainty is Certainty.UNEXPLAINED and by_sums.tried:
            self._ruled_out.append(f"all gradients {by_sums.tried.removeprefix(RULED_OUT)}")
        if by_samples is not None and by_samples.tried:
            return by_samples
        if (of_terms := self._explain_loss_terms(first)) is not None:
            return of_terms
        is_tried = again and self.pair.loop.evidence is None  # evidence compares modules itself
        localised = ModuleInquiry(self, job_evidence, probe, modules) if is_tried else None
        if localised is not None and (by_modules := localised.root_cause()) is not None:
            return by_modules
        is_plain = localised is None or localised.is_plain
        # ranks that run the reference's passes do not separate samples of one pass
        passes = [row_keys([call]) for call in self.step.seen.calls]
        is_same = passes == [row_keys([call]) for call in self.step.expected.calls]
        if is_plain and by_samples is None and not all(self.ranks.gather(is_same)):
            own = explain_separate_means(first, job_evidence, self.ranks, self.limit)
            if own is not None:
                return own
        if by_sums.certainty is Certainty.FITS:
            return by_sums
        return self._unexplained_cause(first, job_evidence, localised)

    def _is_wrong_again(self) -> bool:
        """Return True if the step differs when it runs again unchanged."""
        trial = self.run_trial()
        return trial is not None and self._is_wrong(trial.gradients)

    def _is_wrong(self, gradients: float) -> bool:
        """Return True if a gradient difference exceeds rounding, or half of the original one."""
        return gradients > min(_LOOSE * self.limit.gradients, self._original_difference() / 2)

    def _try_candidates(
        self, candidates: Iterator[PossibleCause], *, is_repeatable: bool
    ) -> RootCause | None:
        """Return the cause whose trial corrects the gradients, or None. All ranks call it.

        The unchanged step must still be wrong in one of several runs. Other causes that succeed are
        listed as possible. In a step that varies from run to run, a cause must also succeed in all
        further runs, or it only fits.
        """
        fitting: list[tuple[PossibleCause, Trial]] = []
        for candidate in candidates:
            trial = candidate.run()
            if trial is not None and trial.is_near(self.limit.gradients):
                fitting.append((candidate, trial))
                if candidate.is_of_time:  # slower trials may win a race by chance
                    break
            elif trial is not None:
                self._ruled_out.append(candidate.words)
        # several runs: a race may be won by chance once
        if not fitting or not any(self._is_wrong_again() for _ in range(_RACES)):
            return None
        (first, trial), others = fitting[0], [its.blamed for its, _ in fitting[1:]]
        blamed = first.blamed
        if others:
            listed = "; ".join(its.factor for its in (blamed, *others))
            blamed = replace(blamed, sentence=f"{blamed.sentence} {POSSIBLE}{listed}.")
        said, limit = trial.confirm(blamed, first.words), self.limit.gradients
        if is_repeatable and not first.is_of_time:
            return said
        again = (first.run() for _ in range(_RACES))
        if all(its is not None and its.is_near(limit) for its in again):
            return said
        return said.as_fitting(f"{said.tried}; they did not in all of {_RACES} further runs")

    def try_reference(self, batch: Any, still: Collection[Key] = ()) -> Trial | None:
        """Run the reference's step with another batch or fewer draws; return the difference.

        Returns None if the step cannot run. All ranks call it.
        """
        self.rewind()
        pair = self.pair
        expected, _ = pair.recorders()
        draws = self.drawing.replay(pair.reference.model, still=still)
        if (loss := self._run_job(pair.reference, batch, expected, draws, NoComms())) is None:
            return None
        apart = max(self._loss_difference(self.step.losses[1], loss[0]), default=0.0)
        right = self.step.case.repeat_with_gradients(
            self._local_parts(self.step.expected.gradients)
        )
        left = self._largest_difference(self.step.seen.gradients, expected.gradients)
        return Trial(left, self._original_difference(), self._other_differences_text(apart, *right))

    def try_buffers(self, said: RootCause) -> RootCause:
        """Try whether a recomputation writes the buffers again. All ranks call it."""
        plain, loop = self.pair.reference.model, self.pair.loop.model
        ends = {name: its.clone() for name, its, _ in shared_buffers(plain, loop)}
        trial = self.run_trial(self.drawing.repeat(loop), restore_buffers_after_backward(loop))
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
        return said.as_proven(
            "with what backward writes to buffers undone, buffers, gradients, loss and update "
            "match the reference"
        )

    def explain_accumulation(self) -> RootCause | None:
        """Return the root cause of micro-batches that are accumulated in 16 bits, or None.

        The dtypes of `.grad` are compared, because the values may differ within the tolerance.
        Returns None if the reference's gradients are in 16 bits too, or with one micro-batch. All
        ranks call it.
        """
        own, right = self.step.seen.gradients, self.step.expected.gradients
        both = [name for name in own if name in right and right[name].dtype.itemsize > _HALF]
        count = len(self.step.seen.calls)
        halves = [name for name in both if own[name].dtype.itemsize == _HALF and count > 1]
        everyones = self.ranks.gather([[name, dtype_name(own[name].dtype)] for name in halves])
        dtypes = {name: dtype for its in everyones for name, dtype in its}
        if not dtypes:
            return None
        dtype = min(dtypes.values())
        return make_untested_cause(
            Subject.GRADIENTS, f"accumulated in {dtype}", list_families(dtypes),
            f"The gradients of {count} micro-batches are added up in {dtype}, unlike in the "
            "reference.",
            "Accumulate them in a dtype as fine as the reference's.",
            step=self.step.differences.step, ranks=range(self.ranks.size),
        ).as_fitting("the dtypes of .grad were compared when the optimizer steps")  # fmt: skip

    def _explain_loss_terms(self, first: Sequence[Mismatch]) -> RootCause | None:
        """Return the root cause of one loss term with another weight than in the reference.

        Each term runs alone, and the reference's gradients are fitted as a sum of theirs. Returns
        None if they are no such sum, or if several weights differ.
        """
        loop = self.pair.loop.model
        whole, draws = LossTerms(loop), partial(self.drawing.repeat, loop)
        self.rewind()
        ran = self.repeat_step(whole, draws())
        names = [*whole.coefficients, *sorted(whole.outputs - whole.coefficients.keys())]
        is_one = len({tuple(its) for its in self.ranks.gather(names)}) == 1
        if ran is None or not is_one or not 1 < len(names) <= _MOST_TERMS:
            return None
        rows = []
        for name in names:
            self.rewind()
            joined = {name: 1.0} if name not in whole.coefficients else {}
            alone = LossTerms(loop, {its: 0.0 for its in names if its != name}, joined)
            if (ran := self.repeat_step(alone, draws())) is None:
                return None
            rows.append(self._flatten_gradients(ran[0].gradients))
        fit = fit_combination(
            self._flatten_gradients(self._local_parts(self.step.expected.gradients)), rows
        )
        everyones = self.ranks.gather([*fit.coefficients, float(fit.is_within(_NEAR))])
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
        trial = self.run_trial(change, draws(), loss=change.changed_loss)
        if trial is None or not trial.is_near(self.limit.gradients):
            return None
        blamed = make_untested_cause(
            Subject.LOSS, said, list_families(its.name for its in first),
            f"The term {name} of the loss {what}.",
            "Give it the weight that it has in the reference.", step=first[0].step,
            ranks=range(self.ranks.size),
        )  # fmt: skip
        return trial.confirm(blamed, "with the weight that it has in the reference")

    def _local_parts(self, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's elements of the reference's full tensors."""
        holds = self.pair.holds
        return {
            n: holds[n].select(row.view(holds[n].shape)) for n, row in wholes.items() if n in holds
        }

    def _flatten_gradients(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the gradients of this rank's parameters as one fp64 tensor; missing ones are 0."""
        names = [name for name in self.step.expected.gradients if name in self.pair.holds]
        sizes = {name: self.pair.holds[name].value().numel() for name in names}
        rows = (gradients.get(name, torch.zeros(sizes[name])) for name in names)
        # torch.cat rejects an empty list, which a rank without parameters would pass
        empty = torch.empty(0, dtype=torch.float64)
        return torch.cat([empty, *(row.double().flatten().cpu() for row in rows)])

    def add_call(self, root_cause: RootCause) -> RootCause:
        """Add file and line of the call of the first module that the root cause names.

        All ranks call it, after `root_cause`.
        """
        first = re.split(", | and ", root_cause.place)[0]
        lines = (
            call.called_at
            for (path, _), call in self._calls.items()
            if first in (path or "the model", layer_family(path))
        )
        everyones = self.ranks.gather(next(lines, ""))
        return replace(root_cause, called_at=next(filter(None, everyones), ""))

    def rewind(self) -> None:
        """Restore both models and the generators to the start of the step."""
        self.step.random.restore()
        self._restore_models()

    def repeat_step(
        self, *within: Context, before: Sequence[Context] = (), share: Any = None
    ) -> tuple[StepRecorder, Any] | None:
        """Run the loop's step again. All ranks call it.

        Args:
            within: Contexts of the step, entered after the recorder.
            before: Contexts that are entered before the recorder.
            share: Samples that replace this rank's; None to repeat the step with the original ones.

        Returns:
            The record and the loss of the step; None if it fails on any rank.
        """
        _, seen = self.pair.recorders()
        share = self.share if share is None else share
        loss = self._run_job(self.pair.loop, share, *before, seen, *within)
        return None if loss is None else (seen, loss[0])

    def _run_job(self, job: Job, batch: Any, *within: Context) -> tuple[Any] | None:
        """Run a job's step in these contexts; return (loss,), or None if any rank fails."""
        loss, raised = None, False
        try:
            with (
                convert_exceptions(
                    lambda error: Fault(place="step", finding=describe_error(error))
                ),
                ExitStack() as stack,
            ):
                for context in within:
                    stack.enter_context(context)
                loss = job.step(batch)
        except UserCodeError:
            raised = True
        return None if any(self.ranks.gather(raised)) else (loss,)

    def run_trial(
        self,
        *within: Context,
        before: Sequence[Context] = (),
        share: Any = None,
        loss: Callable[[float | None], float | None] = lambda its: its,
    ) -> Trial | None:
        """Run the loop's step from its initial state; return the remaining difference.

        Args:
            within: Contexts of the step, which undo a possible cause.
            before: Contexts that are entered before the recorder.
            share: This rank's samples. Default: those of the step.
            loss: Returns the corrected loss, given the loss of the step.

        Returns:
            The trial, or None if the step fails on a rank. All ranks call it.
        """
        self.rewind()
        ran = self.repeat_step(*within, before=before, share=share)
        if ran is None:
            return None
        gradients = ran[0].gradients
        left, obstacle = self.step.case.repeat_with_gradients(gradients, ran[0].record)
        # the loss has a term without gradient already: the uncorrected loss may be right
        losses = loss_value(ran[1]), loss(loss_value(ran[1]))
        apart = min(max(self._loss_difference(its), default=0.0) for its in losses)
        others = self._other_differences_text(apart, left, obstacle)
        return Trial(self._largest_difference(gradients), self._original_difference(), others)

    def check_uncovered(self, said: RootCause, *, repeats: bool = False) -> RootCause:
        """Check a proven root cause for uncovered differences. All ranks call it.

        These are the loss and, with `repeats`, the update with the reference's gradients.
        """
        if said.certainty is not Certainty.PROVEN:
            return said
        right, apart = Remainder(0, 0.0), max(self._loss_difference(), default=0.0)
        gradients = self._local_parts(self.step.expected.gradients)
        left = self.step.case.repeat_with_gradients(gradients) if repeats else (right, "")
        others = self._other_differences_text(apart, *left)
        return said.as_fitting(f"{said.tried}{others}") if others else said

    def _original_difference(self) -> float:
        """Return the largest gradient difference of the original step. All ranks call it."""
        return self._largest_difference(self.step.seen.gradients)

    def _largest_difference(
        self, gradients: Mapping[str, Tensor], truth: Mapping[str, Tensor] | None = None
    ) -> float:
        """Return the largest relative gradient difference on any rank. All ranks call it."""
        names = [*(self.step.expected.gradients if truth is None else truth)]
        mine = max(self._gradient_differences(names, gradients, truth), default=0.0)
        return max(self.ranks.gather(mine))

    def _remaining_text(self, gradients: Mapping[str, Tensor], fix: Fix) -> str:
        """Describe the differences that remain with these full gradients. All ranks call it."""
        left, obstacle = self.step.case.repeat_with_gradients(self._local_parts(gradients))
        own, values = loss_value(self.step.losses[1]), list[float]()
        if max(self._loss_difference(), default=0.0) > self.limit.losses:
            self.rewind()
            self.repeat_step(hook_backward(partial(_append_loss, values)))
        times = fix.loss_factor(self.ranks.rank, values)
        losses = (own, own if own is None or times is None else own * times)
        apart = min(max(self._loss_difference(loss), default=0.0) for loss in losses)
        return self._other_differences_text(apart, left, obstacle)

    def _other_differences_text(self, apart: float, left: Remainder, obstacle: str) -> str:
        """Describe the remaining differences of loss and update; "" if none. All ranks call it."""
        words = f"; the loss still differs by {apart:.3g}" if apart > self.limit.losses else ""
        return words + describe_remainder(left, obstacle, self.ranks)

    def _restore_models(self) -> None:
        """Restore both models to the start of the step."""
        self.step.loop_state.restore()
        self.step.reference_state.restore()

    def _run_again(self) -> tuple[Calls, bool, bool]:
        """Run the step again unchanged.

        Returns:
            The module passes, whether all ranks got the same bits, and whether gradients differ.
        """
        model, holds = self.pair.loop.model, self.pair.holds
        recorder = ModuleRecorder(model)
        ran = self.repeat_step(recorder, self.drawing.repeat(model), self.starts)
        if ran is None:
            self._raises = True
            return {}, False, False
        self._calls, gradients = recorder.calls, ran[0].gradients
        same = shard_checksums(holds, gradients) == shard_checksums(holds, self.step.seen.gradients)
        differs = self._is_wrong(self._largest_difference(gradients))
        return recorder.calls, all(self.ranks.gather(same)), differs

    def run_probe(self, seen: StepRecorder) -> ProbeResult:
        """Run the reference's model on the inputs of this rank's model."""
        with self.drawing.replay(self.pair.reference.model):
            return probe_model(self.pair.reference.model, seen.calls)

    def compare_outside(
        self, seen: StepRecorder, loss: Any, inside: Sequence[str]
    ) -> tuple[str, str] | None:
        """Compare a step with the reference, all gradients or only those outside of some modules.

        It matches if the loss and the compared gradients match, and these differed before. All
        ranks call it.

        Args:
            seen: The record of the repeated step.
            loss: The loss that the repeated step returned.
            inside: Paths of modules, as layer families, whose gradients may still differ.

        Returns:
            Phrases for the match and for the remaining differences; None if it does not match.
        """
        losses = self._loss_difference(loss)
        if any(apart > self.limit.losses for apart in losses):
            return None
        names = list(self.step.expected.gradients)
        outside = [n for n in names if not any(is_within(layer_family(n), path) for path in inside)]
        bound, was = _LOOSE * self.limit.gradients, self.step.seen.gradients
        for chosen in filter(None, (names, outside)):
            before = [*self._gradient_differences(chosen, was), *self._loss_difference()]
            sizes = (before, self._gradient_differences(names, was),
                     self._gradient_differences(chosen, seen.gradients))  # fmt: skip
            rows = self.ranks.gather([max(its, default=0.0) for its in sizes])
            most, inner, left = (max(its) for its in zip(*rows, strict=True))
            # a difference outside that is rounding of the inner one shows nothing about this trial
            if left <= bound < most and most >= _SHARE * min(1.0, inner):
                is_all = len(chosen) == len(names)
                whose = f"{'the loss and ' * bool(losses)}{'all' if is_all else 'the other'}"
                others = "; those within the module still differ"
                if is_all:
                    others = self._other_differences_text(
                        0.0, *self.step.case.repeat_with_gradients(seen.gradients, seen.record)
                    )
                words = f"{whose} {len(chosen)} gradients match the reference to {left:.1e}"
                return words, others
        return None

    def _gradient_differences(
        self,
        names: Sequence[str],
        gradients: Mapping[str, Tensor],
        truth: Mapping[str, Tensor] | None = None,
    ) -> Iterator[float]:
        """Yield the relative differences of this rank's gradients from the reference's.

        A missing gradient yields infinity, unless the reference's is noise.
        """
        expected = self.step.expected.gradients if truth is None else truth
        scale = Magnitude.measure(expected)
        for name in names:
            if name not in self.pair.holds:
                continue
            shard, whole = self.pair.holds[name], expected[name]
            part = shard.select(whole.view(shard.shape))
            if name in gradients:
                yield difference(gradients[name], part, scale.scale_of(whole, part))
            elif not scale.is_noise(whole):
                yield math.inf

    def _loss_difference(self, *losses: Any) -> list[float]:
        """Return the relative difference of the global loss in a list; empty if there is no loss.

        `losses` are this rank's and the reference's. Default: those of the step. All ranks call it.
        """
        own, right = map(loss_value, (*losses, *self.step.losses[::-1][len(losses) :]))
        measured = self._loss.combine(right, own)
        return [] if right is None or measured is None else [number_difference(right, measured)]

    def _unexplained_cause(
        self, first: Sequence[Mismatch], job_evidence: JobEvidence,
        localised: ModuleInquiry | None,
    ) -> RootCause:  # fmt: skip
        """Return the root cause without an explanation, with everything that was ruled out."""
        names = [n for n in job_evidence.samples if any(d.name == n for d in first)]
        largest = max(mismatch.difference for mismatch in first)
        out = "; ".join(self._ruled_out) or "nothing, as no fix that is known fits"
        out += self.untried
        if (count := job_evidence.micro_batches) > MOST:
            out += f"; only the first {MOST} of {count} micro-batches of a rank were distinguished"
        place, where = list_families(names) or first[0].name, ""
        suspect = None if localised is None else localised.describe_first()
        if suspect is not None:
            place, where = suspect[0] or place, f" {suspect[1]}"
        if self._raises:
            out += "; the step raises when it is run again, so no change was tried"
        elif localised is None and self.pair.loop.evidence is None:
            out += "; the step is not reproducible to the bit, so no module could be tried"
        is_forward = max(self._loss_difference(), default=0.0) > self.limit.losses
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
        ).as_unexplained(out)


def _append_loss(values: list[float], losses: list[Tensor]) -> Callable[[], None]:
    """Append the value of the loss from which a backward pass starts."""
    values += [float(loss.detach()) for loss in losses if loss.numel() == 1]
    return lambda: None
