"""Run a step whose gradients differ again from its initial state and find the cause: what each
rank's own samples give, which module differs from the reference first, whether a collective is not
waited for, and whether random numbers were drawn on one side only, differently by ranks with the
same samples, or differently in a recomputation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ptrain.errors import Fault
from ptrain.models.boundary import CodeRaised, boundary, said
from ptrain.models.ledger import OperatorMode
from ptrain.report.finding import RULED_OUT, Certainty, Mismatch, Moment, RootCause, Subject
from ptrain.verification.jobs.diagnosis import explain_gradients, of_own_samples
from ptrain.verification.jobs.draws import Key, drawn_again_otherwise
from ptrain.verification.jobs.evidence import JobEvidence, evidence, rows_of, untold
from ptrain.verification.jobs.job import TOLERANCES, Alone, GlobalLoss, Tolerance, number
from ptrain.verification.jobs.localise import ModuleInquiry
from ptrain.verification.jobs.loss import LossTerms
from ptrain.verification.jobs.modules import Calls, ModuleRecorder, ProbeResult, is_within, probed
from ptrain.verification.jobs.record import ModelState, StepRecorder, digests
from ptrain.verification.jobs.root_causes import families, family, proven
from ptrain.verification.jobs.step import Drawing, LoopPair, StepComparison
from ptrain.verification.parts import (
    Magnitude,
    difference,
    is_even,
    named,
    numbers_apart,
)
from ptrain.verification.updates.swaps import coarse_sum


class Waited(OperatorMode):
    """While entered, every collective is waited for where it starts; what is sent or received by
    itself is not, as two ranks that send to each other would wait forever."""

    def operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        name = function._schema.name
        if name.startswith("c10d::") and not any(word in name for word in ("send", "recv")):
            work = result[-1] if isinstance(result, tuple) else result
            if isinstance(work, torch.ScriptObject):
                dist.Work.unbox(work).wait()
        return result


def root_cause_of_masks(inquiry: Inquiry, first: Sequence[Mismatch]) -> RootCause | None:
    """Return the root cause that a trial proves; None where none does. All ranks call it."""
    drawing = inquiry.drawing
    if not drawing.any:
        return None
    everyones, ranks, loop = drawing.everyones, inquiry.ranks, inquiry.pair.loop.model
    alone, loop_only = everyones.alone, set(everyones.by_key) - everyones.used  # as on all ranks
    mine = sorted({draw.path or draw.outer for draw in drawn_again_otherwise(drawing.loop)})
    again = {path for paths in ranks.gather(mine) for path in paths}
    who = sorted({rank for its in everyones.unlike.values() for rank in its})

    def left_of_loop(**masks: Any) -> float | None:
        return inquiry.left_with(drawing.repeated(loop, **masks))

    for names, trial, factor, sentence, tried in (
        (
            sorted(everyones.unlike), partial(left_of_loop, alike=True),
            "other masks for the same samples",
            f"Ranks {', '.join(map(str, who))} have the same samples but draw other masks for "
            "them, so their replicas differ. Seed these ranks identically, and differently from "
            "ranks with other samples.",
            "with the masks of the first of them on all",
        ),
        (
            sorted(again), partial(left_of_loop, alike=True), "different mask in the recomputation",
            "The recomputation in backward draws other random numbers than forward. Preserve the "
            "generator's state (checkpoint(..., preserve_rng_state=True)), or draw outside of the "
            "recomputed code.",
            "with forward's masks in backward",
        ),
        (
            [path for path, _ in sorted(alone)], partial(_left_of_reference, inquiry, alone),
            "dropout in the reference only",
            "The reference applies dropout, but no rank of the loop does. Use the same mode "
            "(model.train() before the step) and rate in both.",
            "without dropout there",
        ),
        (
            [path for path, _ in sorted(loop_only)], partial(left_of_loop, still=loop_only),
            "dropout in the loop only",
            "The loop applies dropout, but the reference does not. Use the same mode (train, eval) "
            "and rate in both.",
            "without dropout there",
        ),
    ):  # fmt: skip
        if names and (left := trial()) is not None:
            is_unlike = "same samples" in factor
            return proven(
                Subject.GRADIENTS if "recomputation" in factor else Subject.RANDOM, factor,
                families(path or "the model" for path in names), sentence,
                f"{tried} the gradients match to {left:.1e}", step=first[0].step,
                ranks=who if is_unlike else range(ranks.size),
                axis=ranks.axis_of(who) if is_unlike else "",
            )  # fmt: skip
    return None


def _left_of_reference(inquiry: Inquiry, still: set[Key]) -> float | None:
    """Run the reference's step once more; return how far the loop's is from it, if that is near."""
    inquiry.rewind()
    pair = inquiry.pair
    draws = inquiry.drawing.replayed(pair.reference.model, still=still)
    with StepRecorder(pair.reference.model, pair.wholes) as expected, draws:
        pair.reference.step(inquiry.batch)
    return inquiry.left(inquiry.step.seen.gradients, expected.gradients)


_EVEN = 1e-3  # relative: weights of terms that are alike
_SHARE = 1e-3  # of what differs within a module, that differs outside of it too
_HALF = 2  # bytes
_FINE = TOLERANCES[torch.float32]
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
        self._ruled_out: list[str] = []
        self._calls: Calls = {}

    def root_cause(self, first: Sequence[Mismatch], before: Mapping[str, Tensor]) -> RootCause:
        """Explain the first mismatches, at the moment of gradients; `before` are the reference's
        gradients of the step before."""
        self.rewind()
        modules, again, differs = self._run_again()
        differs = differs or self.left_with() is None
        if differs and (unwaited := self._of_collectives(first)) is not None:
            return unwaited
        # a step that is right by itself the second time is put right by no other masks
        if differs and (of_masks := root_cause_of_masks(self, first)) is not None:
            return of_masks
        # Generators go on: of draws that no operator is known for, the reference would be given the
        # loop's own numbers, and what they explain would count as proven.
        probe, job_evidence = self._evidence(before)
        by_sums = explain_gradients(first, job_evidence, self.ranks, self.limit)
        if by_sums.certainty is Certainty.PROVEN:
            return by_sums
        if by_sums.certainty is Certainty.UNEXPLAINED and by_sums.tried:
            self._ruled_out.append(f"all gradients {by_sums.tried.removeprefix(RULED_OUT)}")
        if (read := self._of_other_samples(first, job_evidence)) is not None:
            return read
        if (of_terms := self._of_terms(first)) is not None:
            return of_terms
        localised = ModuleInquiry(self, job_evidence, probe, modules) if again else None
        if localised is not None and (by_modules := localised.root_cause()) is not None:
            return by_modules
        is_plain = localised is None or localised.is_plain
        # of ranks with the reference's own passes no samples are torn apart
        passes = [rows_of([call]) for call in self.step.seen.calls]
        is_same = passes == [rows_of([call]) for call in self.step.expected.calls]
        is_plain = is_plain and not all(self.ranks.gather(is_same))
        own = of_own_samples(first, job_evidence, self.ranks, self.limit, is_plain)
        if own is not None and own.certainty in (Certainty.PROVEN, Certainty.LOCATED):
            return own
        if by_sums.certainty is Certainty.FITS:
            return by_sums
        return self._unexplained(first, job_evidence, localised)

    def _evidence(self, before: Mapping[str, Tensor]) -> tuple[ProbeResult, JobEvidence]:
        self._restore_models()
        probe = self.probe_of(self.step.seen)
        return probe, evidence(
            self.ranks, self.pair.holds, reference=self.step.expected, run=self.step.seen,
            probe=probe, before=before,
        )  # fmt: skip

    def accumulated(self, before: Mapping[str, Tensor]) -> RootCause | None:
        """Return the root cause of gradients within the tolerance whose micro-batches are added up
        in 16 bits, and the reference's are not: by the dtype of `.grad`, or in the first step by
        that sum itself. None of one micro-batch. All ranks call it."""
        own, right = self.step.seen.gradients, self.step.expected.gradients
        both = [name for name in own if name in right and right[name].dtype.itemsize > _HALF]
        halves = [name for name in both if own[name].dtype.itemsize == _HALF]
        count, apart = len(self.step.seen.calls), self.step.differences
        is_apart = apart.most(Moment.GRADIENTS, Subject.GRADIENTS) > _FINE.gradients
        is_hidden = not apart.step and is_apart and self.limit.gradients > _FINE.gradients
        everyones = self.ranks.gather((halves if count > 1 else [], is_hidden and count > 1))
        names = [*dict.fromkeys(name for its, _ in everyones for name in its)] or both
        blamed = RootCause(
            state=Subject.GRADIENTS, axis="", factor="", place=families(names), sentence="",
            step=self.step.differences.step, ranks=tuple(range(self.ranks.size)),
        )  # fmt: skip
        if any(its for its, _ in everyones):
            dtypes = self.ranks.gather([named(own[name].dtype) for name in halves[:1]])
            dtype = next(its[0] for its in dtypes if its)
            return replace(
                blamed, factor=f"accumulated in {dtype}",
                sentence=f"The gradients of {count} micro-batches are added up in {dtype}, unlike "
                "in the reference. Accumulate them in a dtype as fine as the reference's.",
                tried="the dtypes of .grad were compared when the optimizer steps",
            )  # fmt: skip
        if not all(is_tried for _, is_tried in everyones):
            return None
        now = [ModelState.of(job.model) for job in (self.pair.loop, self.pair.reference)]
        _, job_evidence = self._evidence(before)
        for state in now:
            state.restore()  # the run goes on
        return coarse_sum(blamed, job_evidence, self.ranks, self.limit.gradients)

    def _of_other_samples(
        self, first: Sequence[Mismatch], job_evidence: JobEvidence
    ) -> RootCause | None:
        """Some ranks read samples that are not in the batch, and others read only those that are:
        what their modules return cannot be compared."""
        reports = job_evidence.rows
        who = [rank for rank, its in enumerate(reports) if its.count and its.unknown == its.count]
        is_clear = not any(its.sliced for its in reports) and all(
            not its.unknown for rank, its in enumerate(reports) if rank not in who
        )
        if not who or len(who) == len(reports) or not is_clear:
            return None
        own = of_own_samples(first, job_evidence, self.ranks, self.limit, True)
        if own is not None and own.certainty is Certainty.PROVEN:
            return own
        listed = ", ".join(map(str, who))
        return RootCause(
            state=Subject.BATCH, axis=self.ranks.parting(who), factor="other samples",
            place="samples", step=first[0].step, ranks=tuple(who),
            sentence=f"None of the samples that ranks {listed} read are in the global batch; all "
                     "that the other ranks read are. Check how these ranks draw their samples (the "
                     "seed, the epoch, the position in the data); ranks of tensor parallelism must "
                     "read the same ones.",
            tried="the inputs of the model were compared with the global batch, sample by sample",
        )  # fmt: skip

    def _of_collectives(self, first: Sequence[Mismatch]) -> RootCause | None:
        """Every collective is waited for: that makes a step right whose loop does not wait."""
        if self.ranks.size == 1:
            return None
        left = self.left_with(self.drawing.repeated(self.pair.loop.model), Waited())
        if left is None:
            self._ruled_out.append("every collective waited for where it starts")
            return None
        names = families([mismatch.name for mismatch in first])
        return proven(
            first[0].subject, "collective not waited for", names,
            "A collective is started (async_op=True) and its result is used before it is done. "
            "Wait for it first (`work.wait()`).",
            "with every collective waited for where it starts, the gradients match the reference "
            f"to {left:.1e}", step=first[0].step, ranks=range(self.ranks.size),
        )  # fmt: skip

    def _of_terms(self, first: Sequence[Mismatch]) -> RootCause | None:
        """One term of the loss has another weight beside the others than in the reference, or no
        gradient."""
        loop, plain = self.pair.loop.model, self.pair.reference.model
        self.rewind()
        with LossTerms(plain) as expected, self.drawing.replayed(plain), Alone():
            self.pair.reference.step(self.batch)
        self.rewind()
        own = LossTerms(loop)
        ran = self.stepped(own, self.drawing.repeated(loop))
        everyones = [its for its in self.ranks.gather(own.coefficients) if its]
        if (
            ran is None
            or not everyones
            or any(its.keys() != everyones[0].keys() for its in everyones)
        ):
            return None
        mean = {n: sum(its[n] for its in everyones) / len(everyones) for n in everyones[0]}
        right = expected.coefficients
        ratios = {n: mean[n] / right[n] for n in mean if right.get(n)}
        for name in dict.fromkeys((*right, *mean)):
            others = [ratio for other, ratio in ratios.items() if other != name]
            is_alone = {*right, *mean} - {name} == ratios.keys() - {name}
            if not others or not is_alone or not is_even(others, _EVEN):
                continue
            if name not in mean and name in expected.outputs:
                wanted = right[name] * others[0] / max(own.outputs.get(name, 0), 1)
                change = LossTerms(loop, joined={name: wanted})
                said, what = "no gradient", "gets no gradient from the loss of the loop"
            elif name not in right:
                change, said = LossTerms(loop, times={name: 0.0}), "not in the reference"
                what = "is not in the loss of the reference"
            elif name in mean and abs(ratios[name] / others[0] - 1) > _EVEN:
                change = LossTerms(loop, times={name: others[0] / ratios[name]})
                said = f"× {ratios[name] / others[0]:.4g}"
                what = f"has {said.removeprefix('× ')} times its weight beside the other terms"
            else:
                continue
            left = self.left_with(change, self.drawing.repeated(loop))
            if left is not None:
                return proven(
                    Subject.LOSS, said, name,
                    f"The term {name} of the loss {what}.",
                    f"with the weight that it has in the reference the gradients match to "
                    f"{left:.1e}", step=first[0].step, ranks=range(self.ranks.size),
                )  # fmt: skip
        return None

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

    def stepped(self, *within: AbstractContextManager[object]) -> tuple[StepRecorder, Any] | None:
        """Run the loop's step once more within these; return what is seen of it, and its loss; None
        on every rank where it cannot be run on some. All ranks call it."""
        seen, loss, raised = StepRecorder(self.pair.loop.model, self.pair.holds), None, False
        try:
            with (
                boundary(lambda error: Fault(place="step", finding=said(error))),
                ExitStack() as stack,
            ):
                for context in (seen, *within):
                    stack.enter_context(context)
                loss = self.pair.loop.step(self.share)
        except CodeRaised:
            raised = True
        return None if any(self.ranks.gather(raised)) else (seen, loss)

    def left_with(self, *within: AbstractContextManager[object]) -> float | None:
        """Run the loop's step from where it began, within these; return how far it is from one
        device's, if that is near."""
        self.rewind()
        ran = self.stepped(*within)
        return None if ran is None else self.left(ran[0].gradients)

    def _restore_models(self) -> None:
        self.step.loop_state.restore()
        self.step.reference_state.restore()

    def _run_again(self) -> tuple[Calls, bool, bool]:
        """Every module's passes, whether the step gave the same bits, and whether it differs."""
        model, holds = self.pair.loop.model, self.pair.holds
        recorder = ModuleRecorder(model)
        ran = self.stepped(recorder, self.drawing.repeated(model))
        if ran is None:
            return {}, False, False
        self._calls, gradients = recorder.calls, ran[0].gradients
        same = digests(holds, gradients) == digests(holds, self.step.seen.gradients)
        return recorder.calls, all(self.ranks.gather(same)), self.left(gradients) is None

    def probe_of(self, seen: StepRecorder) -> ProbeResult:
        """Run the reference's model on what this rank's model was given."""
        with self.drawing.replayed(self.pair.reference.model):
            return probed(self.pair.reference.model, seen.calls)

    def left_outside(
        self, seen: StepRecorder, loss: Any, inside: Sequence[str]
    ) -> tuple[str, bool] | None:
        """Return in words what of a step is the reference's: the loss, and all gradients or those
        of parameters that are not in modules of these families, if any of it differed before, and
        whether it is all; else None. All ranks call it."""
        losses = self._loss_apart(loss)
        if any(apart > self.limit.losses for apart in losses):
            return None
        names = list(self.step.expected.gradients)
        others = [n for n in names if not any(is_within(family(n), path) for path in inside)]
        bound = _LOOSE * self.limit.gradients
        for chosen in filter(None, (names, others)):
            if not (chosen or losses):
                continue  # nothing is left to be right
            before = [*self._gradients_apart(chosen, self.step.seen.gradients), *self._loss_apart()]
            within = max(self._gradients_apart(names, self.step.seen.gradients), default=0.0)
            after = max(self._gradients_apart(chosen, seen.gradients), default=0.0)
            rows = self.ranks.gather([max(before, default=0.0), within, after])
            most, inner, left = (max(row[place] for row in rows) for place in range(3))
            # what differs within, and no more than roundings of it outside, is not tried by this
            if left <= bound < most and most >= _SHARE * min(1.0, inner):
                is_all = len(chosen) == len(names)
                whose = f"{'the loss and ' * bool(losses)}{'all' if is_all else 'the other'}"
                return f"{whose} {len(chosen)} gradients match the reference to {left:.1e}", is_all
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

    def left(
        self, gradients: Mapping[str, Tensor], expected: Mapping[str, Tensor] | None = None
    ) -> float | None:
        """Return the largest difference of a gradient (relative) over all ranks, from the
        reference's or `expected`, where it is rounding; else None. All ranks call it."""
        its = self.step.expected.gradients if expected is None else expected
        mine = max(self._gradients_apart(list(its), gradients, its), default=0.0)
        most = max(self.ranks.gather(mine))
        return most if most <= _LOOSE * self.limit.gradients else None

    def _loss_apart(self, *losses: Any) -> list[float]:
        """How far the global loss is from the reference's: of this rank's, or of the step as it
        was; nothing where there is none. All ranks call it."""
        right, own = (
            number(loss) for loss in (*self.step.losses[:1], *(losses or self.step.losses[1:]))
        )
        measured = self._loss.of(right, own)
        return [] if right is None or measured is None else [numbers_apart(right, measured)]

    def _unexplained(
        self, first: Sequence[Mismatch], job_evidence: JobEvidence,
        localised: ModuleInquiry | None,
    ) -> RootCause:  # fmt: skip
        names = [n for n in job_evidence.samples if any(d.name == n for d in first)]
        largest = max(mismatch.difference for mismatch in first)
        out = "; ".join(self._ruled_out) or "nothing, as no fix that is known fits"
        out += untold(job_evidence.micro_batches)
        place, where = families(names) or first[0].name, ""
        suspect = None if localised is None else localised.first_in_words()
        if suspect is not None:
            place, where = suspect[0] or place, f" {suspect[1]}"
        if localised is None:
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
