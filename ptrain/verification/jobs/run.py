"""Run the loop and the reference step by step, and compare them until one differs or all steps are
done.

A loop that does not repeat its result bit by bit cannot be judged. `RunObservations` examines the
reference's steps on their own for faults that both sides share: parameters without gradients or
updates, optimizer state that is lost between steps, and units with identical rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from ptrain.errors import Fault
from ptrain.models.boundary import UserCodeError, convert_exceptions, describe_error
from ptrain.report.finding import Certainty, DifferenceKind, Mismatch, Moment, RootCause, Subject
from ptrain.report.record import Check
from ptrain.verification.capture import find_sample_faults
from ptrain.verification.compare import (
    AllDifferences,
    Differences,
    LargestDifference,
    condition_check,
    learning_checks,
)
from ptrain.verification.jobs.evidence import row_keys
from ptrain.verification.jobs.inquiry import Inquiry
from ptrain.verification.jobs.job import (
    TOLERANCES,
    GlobalLoss,
    Job,
    LoopVerdict,
    Terms,
    choose_tolerance,
    loss_dtype,
    loss_value,
    ranks_from_mesh,
    require_one_reference,
    require_padded,
    require_trainable,
    require_unwrapped,
)
from ptrain.verification.jobs.metamorphic import (
    RelationTests,
    TriedRelation,
    order_rounding,
    shared_root_cause,
)
from ptrain.verification.jobs.record import (
    ModelState,
    StepRecorder,
    checksum,
    compare_buffers,
    compare_replicas,
    compare_start,
    shard_checksums,
)
from ptrain.verification.jobs.root_causes import (
    explain_average,
    explain_buffers,
    explain_in_use,
    explain_loss,
    explain_precision,
    explain_start,
    first_mismatch_cause,
    list_families,
    make_root_cause,
    non_finite_reference_cause,
)
from ptrain.verification.jobs.shards import (
    ParameterShard,
    copy_values,
    find_shards,
    parameter_names,
    tied_names,
)
from ptrain.verification.jobs.step import (
    CLIPPED,
    DrawReplay,
    LoopPair,
    RandomState,
    StepComparison,
    are_finite,
    check_repeated_run,
    describe_written,
    run_both_sides,
    run_step,
    step_checksums,
)
from ptrain.verification.jobs.trials import try_initial_values
from ptrain.verification.parts import canonical_parameters, number_difference, squared_norm
from ptrain.verification.reference import Trajectory, relative_distance
from ptrain.verification.updates.clip import explain_clipping
from ptrain.verification.updates.explain import explain_update

_STILL = 2  # unmoved steps at the end: one alone may be the schedule's last, with rate zero


@dataclass(slots=True)
class RunObservations:
    """The observations of a run that show faults shared by the reference and the loop.

    `values` are the parameters after the last step. `trained` had a nonzero gradient in some step.
    `steps` has, per step, whether any parameter had a gradient, and whether any moved.
    `has_masters`: an optimizer updates tensors that are not the model's. `emptied` counts, by
    parameter, the steps in which its optimizer state was lost.
    """

    num_ranks: int
    wholes: Mapping[str, ParameterShard]
    values: Mapping[str, Tensor]
    trained: set[str] = field(default_factory=set)
    steps: list[tuple[bool, bool]] = field(default_factory=list)
    has_masters: bool = False
    emptied: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _given: set[str] = field(default_factory=set)
    _kept: set[str] = field(default_factory=set)

    def record_step(self, run: StepRecorder) -> None:
        """Record a step of the reference."""
        now = copy_values(self.wholes)
        trained = {name for name, gradient in run.gradients.items() if bool(gradient.any())}
        moved = any(not torch.equal(row, self.values[name]) for name, row in now.items())
        self.trained |= trained
        self.steps.append((bool(trained), moved))
        for name in self._kept & run.record.before.keys():
            state = run.record.before[name].state.values()
            has_any = any(isinstance(row, Tensor) and bool(row.any()) for row in state)
            self.emptied[name] = self.emptied.get(name, 0) + (not has_any)
        own = {id(shard.parameter): name for name, shard in self.wholes.items()}
        given = [
            id(parameter)
            for optimizer in run.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        self._given |= {own[parameter] for parameter in given if parameter in own}
        self.has_masters = self.has_masters or any(parameter not in own for parameter in given)
        self._kept = {
            own[id(parameter)]
            for optimizer in run.optimizers
            for parameter, state in optimizer.state.items()
            if id(parameter) in own
            and any(isinstance(row, Tensor) and bool(row.any()) for row in state.values())
        }
        self.values = now

    def check_relations(self, origin: Mapping[str, Tensor]) -> Iterator[TriedRelation]:
        """Yield the relations that any training satisfies, with root causes of violations.

        Fewer than two steps show nothing. `origin` has the parameter values before the first step.
        """
        count = len(self.steps)
        if count < 2:
            return
        moved = {n for n in self.trained if not torch.equal(self.values[n], origin[n].flatten())}
        still = [] if self.has_masters or not moved else sorted(self.trained - moved)
        if rounded := [name for name in still if name in self._given]:
            self.notes.append(
                f"{list_families(rounded)} gets a gradient but stays the same to the bit: its "
                "learning rate is zero, or its updates are too small for its dtype"
            )
        stalled = len([*takewhile(lambda its: its == (True, False), reversed(self.steps))])
        is_stalled = _STILL <= stalled < count
        emptied = [n for n, times in self.emptied.items() if times == count - 1 > 1]
        alike = [
            name for name in moved if _has_equal_rows(self.values[name], self.wholes[name].shape)
        ]
        wrong = {
            "what gets a gradient moves": (
                Subject.PARAMETERS, "not updated in the reference either",
                list_families(name for name in still if name not in self._given),
                "It gets a gradient in the reference and in the loop, but no update changes it.",
                "Give it to the optimizer, or freeze it (requires_grad_(False)).",
                f"its value is the same to the bit after {count} steps",
            ),
            "every step moves": (
                Subject.LEARNING_RATE, "no update in the reference either",
                "all parameters" * is_stalled,
                f"From step {count - stalled} on no parameter changes, although each has a "
                "gradient: the learning rate is zero, or an update is too small for the dtype of "
                "the parameters.",
                "Check the schedule's length, and keep master weights in fp32.",
                f"the last {stalled} steps leave every value the same to the bit",
            ),
            "optimizers keep their state": (
                Subject.OPTIMIZER, "emptied in every step, in the reference too",
                list_families(sorted(emptied)),
                "The optimizer starts every step without its state of the previous step "
                "(moments, step counters): it is created again, or its state is emptied, in "
                "every step.",
                "Create the optimizer once, before the first step.",
                "when it steps there is no state of a parameter that it has updated before",
            ),
            "units differ": (
                Subject.PARAMETERS, "identical units", list_families(sorted(alike)),
                "All rows are the same after updates, because they were initialized identically "
                "(zeros, one value). They get the same gradient and never differ.",
                "Initialize them randomly (nn.init).",
                f"the rows are the same to the bit after {count} steps",
            ),
        }  # fmt: skip
        for name, of_it in wrong.items():
            step = count - stalled if of_it[0] is Subject.LEARNING_RATE else count - 1
            root_cause = shared_root_cause(*of_it, num_ranks=self.num_ranks, step=step)
            yield TriedRelation.from_cause(name, root_cause if of_it[2] else None)


def _has_equal_rows(values: Tensor, shape: torch.Size) -> bool:
    """Return True if the shape has two or more dimensions and rows, and all rows are identical."""
    rows = values.view(shape)
    is_matrix = len(shape) >= 2 and shape[0] >= 2 and bool(shape.numel())
    return is_matrix and bool((rows == rows[:1]).all())


_OF_CLOSURES = 1e4  # LBFGS' line search amplifies rounding by up to this in some steps
_NEAR = 1e-3  # relative: a gradient that differs by more is wrong, even if its sum cancels
_CANCELS = ": a sum that cancels"
_ORDERS_MORE = 10  # times the difference of the few orders that are tried: others may differ more
_REPEATED = 3  # leading steps that a second run must repeat bit by bit


class Examiner:
    """The comparison of one loop with its reference. Call `run` once.

    Every input of a decision is all-gathered, so that all ranks meet in the same collectives.
    """

    def __init__(
        self, reference: Job, loop: Job, terms: Terms, still: Collection[str] = ()
    ) -> None:
        require_unwrapped(reference)
        require_trainable(reference.model)
        self.terms = terms
        evidence = loop.evidence
        self.ranks = (
            evidence.ranks if evidence else ranks_from_mesh(loop.model.parameters(), terms.mesh)
        )
        wholes = canonical_parameters(reference.model)
        require_padded(terms, wholes)
        self._tied = tied_names(reference.model)
        require_one_reference(
            self.ranks, {n: checksum(whole.flatten()) for n, whole in wholes.items()}
        )
        self.loss = GlobalLoss(terms.loss, self.ranks)
        self.drawing = DrawReplay(self.ranks, still, draws=evidence is None)
        self.random = RandomState.read(loop.model)
        self.limit = terms.tolerance or choose_tolerance(terms.dtype, wholes.values())
        self.pair = LoopPair(
            reference=reference,
            loop=loop,
            holds=evidence.shards()
            if evidence
            else find_shards(loop.model, wholes, terms.part, tied=self._tied, padded=terms.padded),
            wholes={
                name: ParameterShard(name, whole, whole.shape) for name, whole in wholes.items()
            },
        )
        self.start = self.pair.copy_values()
        self.differences = AllDifferences(self.ranks, wholes)
        self.worst_loss = LargestDifference("losses", self.limit.losses)
        self.notes: list[str] = []
        self.losses: tuple[list[float], list[float]] = ([], [])
        self.norms: list[float] = []  # of the reference's full gradient, per step
        self.sums = [{"parameters": shard_checksums(self.pair.holds, self.start)}]
        self.root_cause: RootCause | None = None
        self.before: dict[str, torch.Tensor] = {}
        self._batch: Any = None  # the global batch of the examined step
        self._share: Any = None
        self._has_rows = False  # whether dimension 0 of a batch is samples, distributed over ranks
        self.watched = RunObservations(self.ranks.size, self.pair.wholes, self.pair.origin)

    @property
    def mismatches(self) -> list[Mismatch]:
        """The mismatches of all ranks, in the order in which they were found."""
        return self.differences.mismatches

    def run(
        self, batches: Sequence[Any], shares: Sequence[Any], again: Callable[[], Job] | None
    ) -> LoopVerdict:
        """Compare all steps, repeat the loop, and return the verdict.

        `batches` are the global batches, for the reference; `shares` are this rank's shares.
        `again` builds the loop once more, to check that it repeats itself; None skips that.
        """
        self._compare_start(batches[0], shares[0])
        steps = 0
        for step, (batch, share) in enumerate(zip(batches, shares, strict=True)):
            if self.root_cause is not None:
                break
            if self.terms.examined is None or step < self.terms.examined:
                self._examine_step(step, batch, share)
            else:
                both = run_both_sides(self.pair, batch, share, self.drawing)
                self._compare_losses(step, *both)
            steps += 1
        repeats = [self._repeat_loop(again, shares)] if again else []
        is_last = self.root_cause is not None or self.pair.loop.evidence is not None
        life = [] if is_last else self._check_learning(batches[0], shares[0])
        relations, notes = ([], []) if is_last else self._relations(batches[0])
        self.root_cause = next((r.root_cause for r in relations if r.root_cause), self.root_cause)
        shared = [relation.check for relation in relations]
        return LoopVerdict(
            checks=(*self._checks(life, repeats), *shared),
            notes=(*self.drawing.notes(), *self.notes, *notes),
            mismatches=tuple(self.mismatches),
            root_cause=self.root_cause,
            losses=(tuple(self.losses[0]), tuple(self.losses[1])),
            num_ranks=self.ranks.size,
            steps=steps,
        )

    def _relations(self, batch: Any) -> tuple[list[TriedRelation], list[str]]:
        """Test the relations of any training on the reference; return them with notes."""
        metamorphic = RelationTests(
            self.pair.reference, self.pair.wholes, self.limit, drawing=self.drawing,
            document_end=self.terms.document_end,
        )  # fmt: skip
        relations = list(self.watched.check_relations(self.pair.origin))
        try:
            with convert_exceptions(
                lambda error: Fault(place="step", finding=describe_error(error))
            ):
                relations += metamorphic.test_relations(batch, self.watched.trained)
        except UserCodeError as error:
            metamorphic.notes.append(
                f"code shared by both sides: no step can be run again: {error}"
            )
        return relations, [*self.watched.notes, *metamorphic.notes]

    def _compare_start(self, batch: Any, share: Any) -> None:
        """Compare parameters and buffers before the first step, and explain differences."""
        differences = Differences(step=0, rank=self.ranks.rank)
        holds, is_program = self.pair.holds, self.pair.loop.evidence is not None
        names = holds if is_program else parameter_names(self.pair.loop.model, self._tied)
        wholes = {name: shard.parameter.detach() for name, shard in self.pair.wholes.items()}
        elsewhere = {name for own in self.ranks.gather(sorted(holds)) for name in own}
        elsewhere |= wholes.keys() if is_program else set()  # no optimizer holds frozen ones
        compare_start(differences, wholes, names, self.start, holds, elsewhere)
        compare_buffers(differences, self.pair.buffers(), self.limit, Moment.START)
        if not self.differences.gather_step(differences):
            return
        first = self.differences.first_mismatches
        if is_program:
            self.root_cause = first_mismatch_cause(self.mismatches, self.ranks)
        else:
            said = self._explain_buffers(first) or explain_start(first, self.ranks)
            step = partial(run_step, self.pair, 0, batch, share, self.limit, self.drawing)
            self.root_cause = try_initial_values(
                said, first, self.pair, self.loss, step, self.limit
            )

    def _examine_step(self, step: int, batch: Any, share: Any) -> None:
        """Run one step on both sides, compare its tensors, and explain the first mismatch."""
        self._batch, self._share = batch, share
        seen = run_step(self.pair, step, batch, share, self.limit, self.drawing)
        sums = step_checksums(self.pair, seen)
        has_closure = any(self.ranks.gather(seen.seen.has_closure))
        kept = sums if step < _REPEATED else {"parameters": sums["parameters"]}
        self.sums.append(kept)
        self.differences.gather_step(seen.differences)
        everyones = self.ranks.gather(sums["parameters"])
        self.differences.add_mismatches(compare_replicas(step, everyones))
        self.drawing.require_attributed()
        # a closure runs inner passes, whose gradients are not seen
        if seen.expected.max_updates and not has_closure:
            self.norms.append(math.sqrt(sum(map(squared_norm, seen.expected.gradients.values()))))
        self.watched.record_step(seen.expected)
        if step == 0 and self.pair.loop.evidence is None:
            everyones = self.ranks.gather(row_keys(seen.seen.calls))
            samples = find_sample_faults(row_keys(seen.expected.calls), everyones)
            differ = any(rows != everyones[0] for rows in everyones)
            self._has_rows = samples is not None and (differ or self.ranks.size == 1)
        self._allow_order_rounding(seen)
        self._compare_losses(step, *seen.losses)
        if has_closure and self.terms.examined is None:
            self.terms = replace(self.terms, examined=1)
            self.worst_loss.tolerance *= _OF_CLOSURES
            self.notes.append(
                "an optimizer runs passes itself, which amplifies rounding: after the first "
                "step only losses are compared"
            )
        if not are_finite(seen.expected.gradients, self.pair.wholes):
            self.root_cause = non_finite_reference_cause(step, self.ranks)
        elif self.mismatches:
            self.root_cause = self._explain(seen)
        else:
            self.root_cause = self._make_inquiry(seen).explain_accumulation()
        self.before = {name: gradient.clone() for name, gradient in seen.expected.gradients.items()}

    def _allow_order_rounding(self, step: StepComparison) -> None:
        """Allow gradient differences that a reordering of the reference's samples causes too."""
        near = [
            its for its in self.mismatches
            if its.subject is Subject.GRADIENTS and its.way is DifferenceKind.VALUE
            and its.difference <= _NEAR
        ]  # fmt: skip
        if not near or not self._has_rows:
            return
        model = self.pair.reference.model
        now = ModelState.copy_of(model)
        step.reference_state.restore()
        mine = order_rounding(model, step.expected.calls, self.drawing)
        now.restore()
        allowed = self.ranks.gather(mine)[0]
        alike = [its for its in near if its.difference <= _ORDERS_MORE * allowed.get(its.name, 0.0)]
        self.differences.raise_tolerances(alike)
        names = {its.name for its in alike}
        if names and step.case.follows_gradients(names, self.ranks):
            self.differences.raise_tolerances(
                [
                    its for its in self.mismatches
                    if its.moment is Moment.UPDATE and not its.between
                    and its.name.partition(" · ")[0] in names
                ]
            )  # fmt: skip
        if alike and not any(_CANCELS in note for note in self.notes):
            worst = max(alike, key=lambda its: its.difference)
            self.notes.append(
                f"the gradient of {list_families(its.name for its in alike)} differs by "
                f"{worst.difference:.2g}; another order of the samples changes it in the reference "
                f"by {allowed[worst.name]:.2g}{_CANCELS}"
            )

    def _explain(self, step: StepComparison) -> RootCause:
        """Return the root cause of the first mismatches, by the moment at which they occur."""
        if (evidence := self.pair.loop.evidence) is not None:
            by_gradients = partial(self._explain_gradients, step)
            return evidence.explain(self.mismatches, step, by_gradients)
        first = self.differences.first_mismatches
        match first[0].moment:
            case Moment.START:
                return self._explain_updates(first, step)
            case Moment.FORWARD:
                sums = [its["parameters"] for its in self.sums[:-2]]
                mine = describe_written(step, self.pair.holds, sums)
                everyones = self.ranks.gather(mine, dict[str, tuple[str, str]])
                return explain_in_use(first, self.ranks, everyones)
            case Moment.GRADIENTS:
                return self._explain_gradients(step, first)
            case _ if first[0].subject is Subject.LOSS:
                is_plain = abs((step.clip_factor or 0.0) - 1.0) <= CLIPPED
                known = "match" if is_plain else "match after clipping"
                return self._explain_loss(first, loss_value(step.losses[1]), known)
            case _:
                others = [its for its in first if its.subject is not Subject.AVERAGE]
                inquiry = self._make_inquiry(step)
                if not others:
                    said = explain_average(first, self.ranks)
                elif (buffers := self._explain_buffers(others)) is not None:
                    said = inquiry.try_buffers(buffers)
                    if len(others) < len(first) and said.certainty is Certainty.PROVEN:
                        said = said.as_fitting(f"{said.tried}; the moving average differs, too")
                else:
                    said = explain_update(others, step.case, self.ranks)
                return inquiry.check_uncovered(said)

    def _explain_buffers(self, mismatches: Sequence[Mismatch]) -> RootCause | None:
        """Explain mismatches of buffers; return None unless only buffers differ."""
        if any(its.subject is not Subject.BUFFERS and not its.between for its in mismatches):
            return None
        buffers = [its for its in mismatches if its.subject is Subject.BUFFERS]
        models = self.pair.reference.model, self.pair.loop.model
        return explain_buffers(buffers, models, self.ranks, self.limit.updates) if buffers else None

    def _explain_updates(self, first: Sequence[Mismatch], step: StepComparison) -> RootCause:
        """Return the root cause of optimizers that step more or less often than the reference's."""
        updated = step.seen.updated or step.expected.updated
        mine = sorted(name for name in updated if name in self.pair.holds)
        everyones = self.ranks.gather(mine)
        names = [name for rank in {d.rank for d in first} for name in everyones[rank]]
        counted = make_root_cause(
            first, self.ranks, state=Subject.COUNTER, factor=first[0].told,
            sentence="The optimizer does not step as often as in the reference in this step.",
            fix="Step it once per global batch, after the last micro-batch.",
        )  # fmt: skip
        return replace(counted, place=list_families(sorted(names)) or counted.place)

    def _explain_gradients(self, step: StepComparison, first: Sequence[Mismatch]) -> RootCause:
        """Explain gradients by clipping, then by the autocast dtype, then by an inquiry."""
        wholes, evidence = (step.unclipped, step.expected.gradients), self.pair.loop.evidence
        clipped = None if evidence else explain_clipping(first, step.case, wholes, self.ranks)
        if clipped is not None:
            return self._make_inquiry(step).check_uncovered(clipped, repeats=True)
        lower = self.ranks.gather([step.seen.autocast, step.expected.autocast])
        for actual, expected in lower:
            if actual != expected:
                return explain_precision(actual, expected, first[0].step, self.ranks)
        inquiry = self._make_inquiry(step)
        said = inquiry.root_cause(first, self.before)
        return said if evidence else inquiry.add_call(said)

    def _make_inquiry(self, step: StepComparison) -> Inquiry:
        return Inquiry(
            self.pair, step, self.limit, loss=self.loss, batch=self._batch, share=self._share,
            drawing=self.drawing,
        )  # fmt: skip

    def _explain_loss(
        self, mismatches: Sequence[Mismatch], own: float | None,
        gradients: str = "of this step were not compared",
    ) -> RootCause:  # fmt: skip
        """Return the root cause of a differing loss; `own` is this rank's loss."""
        right, measured = self.losses[0][-1], self.losses[1][-1]
        ways = self.loss.combine_by_rules(right, own)
        limit = self.worst_loss.tolerance
        fitting = [how for how, loss in ways.items() if number_difference(right, loss) <= limit]
        return explain_loss(mismatches, self.ranks, (right, measured), fitting, gradients)

    def _compare_losses(self, step: int, returned: Any, own: Any) -> None:
        """Compare the global losses of a step, within the tolerance of their dtype."""
        right = loss_value(returned)
        measured = self.loss.combine(right, loss_value(own))
        self.notes += [its for its in self.loss.notes(returned, own) if its not in self.notes]
        if right is None or measured is None:
            return
        if not self.terms.tolerance:
            dtypes = (loss_dtype(returned), loss_dtype(own))  # None on stages without a loss
            mine = [TOLERANCES[dtype].losses for dtype in dtypes if dtype in TOLERANCES]
            limits = self.ranks.gather(max(mine, default=0.0))
            self.worst_loss.tolerance = max(self.worst_loss.tolerance, *limits)
        limit = self.worst_loss.tolerance
        for losses, loss in zip(self.losses, (right, measured), strict=True):
            losses.append(loss)
        size = number_difference(right, measured)
        self.worst_loss.record(size, f"step {step}", limit)
        if size > limit and not self.mismatches:
            mismatch = Mismatch(
                step=step, moment=Moment.UPDATE, subject=Subject.LOSS, name="loss", rank=0,
                difference=size, tolerance=limit,
            )  # fmt: skip
            self.differences.add_mismatches([mismatch])
            if self.terms.examined is not None and step >= self.terms.examined:
                self.root_cause = self._explain_loss([mismatch], loss_value(own))

    def _repeat_loop(self, again: Callable[[], Job], shares: Sequence[Any]) -> Check:
        """Run the loop again from the same start, and check that it gives the same bits.

        A failure replaces any root cause that is not proven, because it may explain every
        difference.
        """
        wholes = {
            name: row.view(self.pair.wholes[name].shape) for name, row in self.pair.origin.items()
        }
        job = again()
        self.random.restore()
        cause = check_repeated_run(
            job, wholes, self.terms, shares=shares, first=self.sums[: _REPEATED + 1],
            drawing=self.drawing, tied=self._tied,
        )  # fmt: skip
        if self.root_cause is None or self.root_cause.certainty is not Certainty.PROVEN:
            self.root_cause = cause or self.root_cause
        return condition_check("the same twice", None, cause is None, "other bits")

    def _check_learning(self, batch: Any, share: Any) -> list[Check]:
        """Check that the reference learned, with the loss of one more step if it can run."""
        again = None
        try:
            with convert_exceptions(
                lambda error: Fault(place="step", finding=describe_error(error))
            ):
                self.random.restore()  # draw the first step's dropout masks: others change the loss
                again = loss_value(run_both_sides(self.pair, batch, share, self.drawing)[0])
        except UserCodeError as error:
            self.notes.append(
                f"no further step can be run, so the loss after it is unknown: {error}"
            )
        run = Trajectory(
            losses=tuple(self.losses[0]), gradient_norms=tuple(self.norms), parameters={},
            moved_distance=relative_distance(self.pair.origin, copy_values(self.pair.wholes)),
            repeated_loss=again,
        )  # fmt: skip
        return list(learning_checks("reference", run))

    def _checks(self, life: Sequence[Check], repeats: Sequence[Check]) -> Iterator[Check]:
        """Yield the checks of the verdict, in the order in which they are printed."""
        unlike = any(mismatch.between for mismatch in self.mismatches)
        same_bits = condition_check("replicas", None, not unlike, "ranks have different bits")
        starts = [mismatch for mismatch in self.mismatches if mismatch.moment is Moment.START]
        held = not any(mismatch.subject is Subject.PARAMETERS for mismatch in starts)
        yield condition_check("same weights at the start", None, held, "they differ")
        if self.pair.loop.evidence is not None:
            yield from (*self.differences.checks(), same_bits)
            return
        counts = [mismatch.told for mismatch in starts if mismatch.subject is Subject.COUNTER]
        yield condition_check("updates in a step", None, not counts, "".join(counts[:1]))
        yield from repeats
        yield from self.differences.checks(since=Moment.BATCH)
        yield same_bits
        if self.worst_loss.count:
            yield self.worst_loss.check()
        yield from life
