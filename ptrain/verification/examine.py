"""Run a program and one device side by side for a few steps, compare everything that a step makes
in the order of time on every rank, and explain the first mismatch: state, axis, factor and
place.

Every rank runs the whole reference, so only verdicts are sent. Both run in fp64 (the spec's
`precision.compute`): another order of a sum differs by 1e-15, a fault by more than TOLERANCE. Where
the parameters' gradients of the step tell more about the first mismatch (which samples, which
ranks), they are explained first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from ptrain.cost import Phase
from ptrain.data.corpus import corpus
from ptrain.interpreter.program import Program
from ptrain.report.finding import Certainty, Mismatch, Moment, RootCause, Subject, Way
from ptrain.train.exchange import Exchange
from ptrain.train.schedule import learning_rate
from ptrain.verification.capture import (
    Outputs,
    as_held,
    clipped_by,
    data_place,
    drive,
    recorded,
    sample_mismatches,
    shards_of,
    taken,
    token_place,
)
from ptrain.verification.compare import AllDifferences, Differences, ParameterMove
from ptrain.verification.jobs.evidence import (
    MOST,
    JobEvidence,
    OwnGradients,
    sampled,
    untold,
)
from ptrain.verification.jobs.fixes import Fix
from ptrain.verification.jobs.gradients import explain_gradients
from ptrain.verification.jobs.job import TOLERANCES, Ranks, Verdict, ranks_of_spec
from ptrain.verification.jobs.record import compare_gradients
from ptrain.verification.jobs.root_causes import families, over_axis, root_cause, shared_factor
from ptrain.verification.jobs.shards import ParameterShard
from ptrain.verification.jobs.step import of_own_optimizers
from ptrain.verification.parts import (
    held,
    multiple,
    numbers_apart,
    products,
    whole,
)
from ptrain.verification.program_step import (
    ProgramSide,
    Sides,
    compare_states,
    compare_tensors,
    gradients_of,
    of_each_slice,
    tensor_part,
)
from ptrain.verification.reference import MicroBatch, Pass, ReferenceTraining
from ptrain.verification.updates.clip import UpdateCase, update_apart
from ptrain.verification.updates.explain import explain_update
from ptrain.verification.updates.repeat import UpdateRecorder, wholes

_ORDER = (Subject.COUNTER, Subject.OPTIMIZER, Subject.PARAMETERS, Subject.BUFFERS)
_MOST_VALUES = 4096  # of an output that ranks tell each other
_EXACT = 1e-6  # a relative residual below which a sum is the reference


def explain(mismatches: Sequence[Mismatch], step: ProgramExaminer, ranks: Ranks) -> RootCause:
    """Return the root cause of the mismatches of all ranks, which are sorted by time.

    Gradients and updates are explained as in a training loop of the user. For anything else the
    first difference is returned, as not explained. All ranks call it with the same mismatches."""
    first = mismatches[0]
    if first.moment is Moment.START:
        return _first_difference(mismatches, first, ranks)
    if first.subject is Subject.BATCH:
        return _of_samples(mismatches, ranks)
    if first.subject is Subject.ACTIVATIONS and (partial := _partial(mismatches, step, ranks)):
        return partial
    if first.moment is Moment.UPDATE or first.subject is Subject.LEARNING_RATE:
        return _of_update(mismatches, step, ranks)
    if first.moment in (Moment.BACKWARD, Moment.GRADIENTS) or first.subject is Subject.LOSS:
        return _of_gradients(mismatches, step, ranks)
    return _first_difference(mismatches, first, ranks)


def _first_difference(
    mismatches: Sequence[Mismatch], one: Mismatch, ranks: Ranks, tried: str = ""
) -> RootCause:
    """Return the first difference as a root cause that is not explained, with the ranks where it
    occurs. A rank may hold no element of the first gradient, so any differing gradient counts."""
    alike = [
        its
        for its in mismatches
        if (its.when, its.subject) == (one.when, one.subject)
        and (its.name == one.name or one.subject is Subject.GRADIENTS)
    ]
    size = one.told or f"differs by {one.difference:.3g}"
    what = str(one.subject)
    if one.subject is Subject.ACTIVATIONS:
        what = "gradient of the output" if one.moment is Moment.BACKWARD else "output"
    what += f" of {one.place}" if one.place != what else ""
    return root_cause(
        alike, ranks, state=one.subject, factor=size, names=[one.place], tried=tried,
        certainty=Certainty.UNEXPLAINED,
        sentence=f"The first difference is in the {what}: {size}. Everything before it matches the "
                 "reference.",
        fix="Check how it is computed and communicated between ranks.",
    )  # fmt: skip


def _of_samples(mismatches: Sequence[Mismatch], ranks: Ranks) -> RootCause:
    first = mismatches[0]
    alike = [mismatch for mismatch in mismatches if mismatch.when == first.when]
    return root_cause(
        alike, ranks, state=Subject.BATCH, factor=first.told,
        sentence=f"The mesh trains on other samples than the batch: {first.told}.",
        fix="Check the sampler, and which share of the batch each rank takes.",
        tried="the inputs of each rank's model were compared with the batch, row by row",
    )  # fmt: skip


def _partial(
    mismatches: Sequence[Mismatch], step: ProgramExaminer, ranks: Ranks
) -> RootCause | None:
    """Return a missing sum if the outputs of the ranks, summed over one mesh axis, equal the
    reference; otherwise None. All ranks call it."""
    first = mismatches[0]
    is_forward = first.moment is Moment.FORWARD
    own, whole = (
        (side.outputs.forward if is_forward else side.outputs.backward).get(
            (first.name, first.index)
        )
        for side in (step.seen, step.expected)
    )
    part = (
        None
        if own is None or whole is None
        else tensor_part(step.reference.spec, ranks.rank, whole, own)
    )
    sizes = ranks.gather(None if own is None or part is None else own.numel())
    if None in sizes or len(set(sizes)) > 1:
        return None
    assert own is not None and part is not None, "every rank has both"
    both = (part, held(own))
    rows = torch.stack([its.double().reshape(-1)[:_MOST_VALUES] for its in both])
    axis, factor = shared_factor(ranks, ranks.stack(rows.nan_to_num(posinf=0, neginf=0)), _EXACT)
    if not axis:
        return None
    what = "output" if is_forward else "gradient of the output"
    return replace(
        _first_difference(mismatches, first, ranks), axis=axis, factor=factor,
        certainty=Certainty.FITS,
        sentence=f"Each rank has a partial sum of the {what} of {first.place}.",
        fix=f"Sum it {over_axis(axis)}.",
        tried=f"summed {over_axis(axis)} it matches the reference; the gradients then were not "
              "compared",
    )  # fmt: skip


def _of_gradients(mismatches: Sequence[Mismatch], step: ProgramExaminer, ranks: Ranks) -> RootCause:
    """Explain a loss, an output's gradient or parameter gradients by the gradients of the single
    micro-batches. All ranks call it."""
    first = mismatches[0]
    gradients = [its for its in mismatches if its.subject is Subject.GRADIENTS]
    tried = ""
    if gradients:
        limit = TOLERANCES[torch.float64]
        by_sums = explain_gradients(
            gradients, step.job_evidence(), ranks, limit,
            partial(_of_repeated_update, step, ranks),
        )  # fmt: skip
        if by_sums.certainty is not Certainty.UNEXPLAINED:
            return replace(by_sums, state=first.subject)
        tried = (by_sums.tried or "no sum of micro-batches' gradients equals it") + untold(
            step.reference.spec.batch.accumulate
        )
    if lost := step.lost():
        return root_cause(
            gradients or mismatches[:1], ranks, state=Subject.GRADIENTS, factor="no gradient",
            names=lost,
            sentence=f"No gradient reaches {families(lost)}, and one does in the reference.",
            tried="whether all other differences follow from it was not tested",
        )  # fmt: skip
    return _first_difference(mismatches, first, ranks, tried)


def _of_repeated_update(
    step: ProgramExaminer, ranks: Ranks, gradients: Mapping[str, Tensor], fix: Fix
) -> str:
    """Return what is wrong with the update that these gradients give, scaled as the reference's
    are before its update; "" if nothing is. All ranks call it."""
    case, rows = step.update_case(), {}
    for name, its in case.expected.before.items():
        if its.gradient is not None and name in gradients and name in case.holds:
            times = multiple(its.gradient, step.expected.gradients[name].flatten()).factor
            shard = case.holds[name]
            rows[name] = times * shard.of(gradients[name].view(shard.shape))
    return update_apart(*case.with_gradients(rows), ranks)


def _of_update(mismatches: Sequence[Mismatch], step: ProgramExaminer, ranks: Ranks) -> RootCause:
    """Explain an update by repeating it with the inputs that the program's optimizers received. If
    it cannot be explained, a step counter is reported before optimizer state, and that before
    parameters, because each follows from the one before. All ranks call it."""
    first = mismatches[0]
    updated = [its for its in mismatches if its.moment is Moment.UPDATE]
    if not updated:
        return _first_difference(mismatches, first, ranks)
    one = min(updated, key=lambda mismatch: _ORDER.index(mismatch.subject))
    if omitted := sorted({name for its in ranks.gather(sorted(step.omitted)) for name in its}):
        return root_cause(
            [its for its in updated if its.subject is one.subject], ranks,
            state=Subject.OPTIMIZER, factor="update skipped", names=omitted,
            sentence=f"{families(omitted)}: a gradient is there, but no optimizer steps it on "
                     "these ranks.",
            fix="Give it to the optimizer, and step every shard's optimizer.",
        )  # fmt: skip
    named = [_of_parameter(its) for its in updated if its.subject is not Subject.BUFFERS]
    case = step.update_case()
    lacks = {its.name.partition(" · ")[0] for its in named if its.rank == ranks.rank}
    tried = ""
    if named and not any(ranks.gather(bool(lacks - case.courses.keys()))):
        by_update = explain_update(named, case, ranks)
        if by_update.certainty is not Certainty.UNEXPLAINED:
            return by_update
        tried = by_update.tried
    one = one if first.moment is Moment.UPDATE else first
    return _first_difference(mismatches, one, ranks, tried)


def _of_parameter(mismatch: Mismatch) -> Mismatch:
    """Return a mismatch of optimizer state, or of a counter, by the name of the parameter that it
    is kept beside."""
    if mismatch.subject is Subject.PARAMETERS:
        return mismatch
    name, _, key = mismatch.name.rpartition(".")
    return replace(mismatch, subject=Subject.OPTIMIZER, name=f"{name} · {key}")


TOLERANCE = 1e-11  # relative, fp64: what Adam makes of 1e-15, with room; faults are 1e-6 and more
_MOST_TOLD = 400  # mismatches of one state at one moment that a rank tells of: 0.1 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination(Verdict):
    """`mismatches` of all ranks, the first first; `checks` have the largest difference of every
    subject over all ranks and steps."""

    steps: int


def examine(program: Program, exchange: Exchange, steps: int = 3) -> Examination:
    """`steps` steps from the program's initial state, or fewer where one differs. All ranks call
    it."""
    return ProgramExaminer(program, exchange).run(steps)


class ProgramExaminer:
    """Runs a program beside its reference, and keeps what both did in the last step: `seen` is the
    program's side, `expected` the reference's. `holds`: which elements of each parameter this
    rank's optimizers update, of which `seen` has gradients and updates. Gradients are without what
    clipping did. `rates`: the learning rates that the optimizers used; `omitted`: parameters with a
    gradient that no optimizer of this rank took."""

    step = -1
    seen: ProgramSide
    expected: ProgramSide
    rates: set[float]
    omitted: set[str]

    def __init__(self, program: Program, exchange: Exchange) -> None:
        self.program, self.exchange = program, exchange
        self.spec = program.spec
        self.reference = ReferenceTraining(self.spec)
        self.source = corpus(self.spec.data)
        last = self.spec.batch.accumulate - 1
        self.watched_passes = {0, last}  # micro-batches whose activations are compared
        self.ranks = ranks_of_spec(self.spec, exchange)
        self.differences = Differences(step=0, rank=self.ranks.rank)
        self.all = AllDifferences(self.ranks, self.reference.parameters, most=_MOST_TOLD)
        self.order: dict[str, int] = {}  # a module's place along the model
        self.holds = shards_of(program)
        self.earlier_gradients: Mapping[str, torch.Tensor] = {}

    def run(self, steps: int) -> Examination:
        self._states(Moment.START)
        self.all.take(self.differences)
        while self.step + 1 < steps and not self.all.mismatches:
            sums = self._step()
            self._compare()
            self.all.take(self.differences, self.order)
            if any(its.subject is not Subject.LEARNING_RATE for its in self.all.mismatches):
                break  # a learning rate is proven by its update
            with UpdateRecorder(wholes(self.reference.updater.updated)) as updates:
                self.expected.norm = self.reference.update(self.step, sums)
            self.expected.record = updates.record
            self._norm()
            self._states(Moment.UPDATE)
            self.all.take(self.differences, self.order)
        mismatches = tuple(self.all.mismatches)
        return Examination(
            mismatches=mismatches, checks=tuple(self.all.checks()), steps=self.step + 1,
            root_cause=explain(mismatches, self, self.ranks) if mismatches else None,
        )  # fmt: skip

    def _step(self) -> Mapping[str, torch.Tensor]:
        """Run the next step of both, of the reference up to the sums of its gradients. Return
        these."""
        self.earlier_gradients = self.expected.gradients if self.step >= 0 else {}
        self.step += 1
        outputs, expected = self._reference_pass()
        updates = UpdateRecorder(self.holds)
        with updates, recorded(self.program, self.holds, self.watched_passes) as seen:
            share, norm = drive(self.program, self.source, self.step)
        as_here = as_held(self.program, outputs)
        self.rates, self.omitted = updates.rates, seen.reached - updates.updated
        self.seen = ProgramSide(
            in_use=self.program.order.canonical(seen.in_use),
            gradients=taken(updates, clipped_by(self.spec, norm)),
            record=updates.record,
            outputs=seen,
            loss=self.exchange.add([share])[0],
            norm=norm,
        )
        self.expected = ProgramSide(
            in_use=as_here.in_use,
            gradients=expected.gradients,
            outputs=as_here,
            loss=expected.loss,
        )
        return dict(expected.sums)

    def _reference_pass(self) -> tuple[Outputs, Pass]:
        outputs, place = Outputs(self.watched_passes), data_place(self.spec, self.ranks.rank)

        def begins(batch: MicroBatch) -> None:
            outputs.phase(Phase.FORWARD, batch.k if batch.data_index == place else -1)

        with outputs.of(self.reference.module.named_modules()):
            expected = self.reference.accumulate(self.step, begins)
        for path, _ in outputs.forward:
            self.order.setdefault(path, len(self.order))
        return outputs, expected

    def _compare(self) -> None:
        """Compare all up to the gradients."""
        self.differences = Differences(step=self.step, rank=self.ranks.rank)
        self._samples()
        # parameters where they are used: gathered, copied, as they should be in this step
        in_use = self.seen.in_use, self.expected.in_use
        self._tensors(Moment.FORWARD, Subject.PARAMETERS, in_use)
        self._activations()
        self._number(Moment.FORWARD, Subject.LOSS, self.seen.loss, self.expected.loss)
        rate = learning_rate(self.spec.optimizer, self.step)
        for own in sorted(self.rates):
            self._number(Moment.GRADIENTS, Subject.LEARNING_RATE, own, rate)
        self._gradients()

    def _samples(self) -> None:
        batch, step = self.program.batch, self.step
        assert batch is not None, "a step has a batch"
        its = [*sample_mismatches(batch, self.reference, step, self.ranks.rank, self.exchange)]
        self.differences.mismatches += its
        size = math.inf if its else 0.0
        self.differences.see((Moment.BATCH, Subject.BATCH), size, TOLERANCE)

    def _activations(self) -> None:
        actual, expected = self.seen.outputs, self.expected.outputs
        for moment, *sides in (
            (Moment.FORWARD, actual.forward, expected.forward),
            (Moment.BACKWARD, actual.backward, expected.backward),
        ):
            for k in sorted(self.watched_passes):
                own, its = ({p: t for (p, n), t in side.items() if n == k} for side in sides)
                self._tensors(moment, Subject.ACTIVATIONS, (own, its), k)

    def _gradients(self) -> None:
        """Compare this rank's elements of every gradient, without what clipping did."""
        updated = self.seen.gradients.keys()
        own = {name: its for name, its in self.holds.items() if name not in self.omitted}
        holds = of_own_optimizers(updated, own, self.ranks)
        sides, limit = (self.expected, self.seen), TOLERANCES[torch.float64]
        compare_gradients(self.differences, sides, holds, limit)
        kind = Moment.GRADIENTS, Subject.GRADIENTS
        for name in self.lost():
            if name in self.seen.in_use and name not in self.holds:
                self.differences.add(*kind, name, "no gradient", Way.MISSING)

    def _norm(self) -> None:
        self.differences = Differences(step=self.step, rank=self.ranks.rank)
        norm, expected = self.seen.norm, self.expected.norm
        if norm is None:
            return
        assert expected is not None, "one device tells what a program tells"
        if math.isinf(expected) and not math.isfinite(norm):
            norm = expected  # both skip the step
        self._number(Moment.CLIP, Subject.NORM, norm, expected)

    def _states(self, moment: Moment) -> None:
        sides, ranks = (self.program, self.reference), self.ranks
        compare_states(self.differences, *sides, moment, ranks, tolerance=TOLERANCE)

    def _tensors(self, moment: Moment, subject: Subject, sides: Sides, index: int = 0) -> None:
        compare_tensors(
            self.differences, moment, subject, sides, self.spec, tolerance=TOLERANCE, index=index
        )

    def _number(self, moment: Moment, subject: Subject, actual: float, expected: float) -> None:
        words = f"{actual!r} for {expected!r}"
        ratio = actual / expected if expected else math.nan
        if ratio > 0 and (fits := products(ratio, self.ranks.degrees, _EXACT)):
            words += f", {fits[0]}"
        self.differences.compare(
            moment, subject, str(subject), words=words,
            difference=0.0 if actual == expected else numbers_apart(expected, actual),
            tolerance=TOLERANCE,
        )  # fmt: skip

    def lost(self) -> list[str]:
        """Return the parameters with a gradient in the reference that have none, or zeros, on every
        rank. All ranks call it."""
        own = [name for name, its in self.seen.gradients.items() if bool(its.any())]
        own += self.omitted
        reached = {name for its in self.ranks.gather(own) for name in its}
        expected = self.expected.gradients.items()
        return [name for name, whole in expected if name not in reached and bool(whole.any())]

    def job_evidence(self) -> JobEvidence:
        """Return the evidence from which gradients are explained, with the gradients of at most
        MOST micro-batches. All ranks call it."""
        truths, module = self.expected.gradients, self.reference.module
        known = {name for its in self.ranks.gather(sorted(self.holds)) for name in its}
        holds = {}
        for name in (name for name in truths if name in self.holds or name not in known):
            parameter = module.get_parameter(name)
            at = self.holds[name].at if name in self.holds else None
            holds[name] = ParameterShard(name, parameter, parameter.shape, at)
        given = list(islice(self._of_micro_batches(), MOST))  # each is as large as all parameters
        own = OwnGradients(
            holds=holds, truths=truths, given=given, before=self.earlier_gradients,
            taken={n: row for n, row in self.seen.gradients.items() if n in holds},
            micro_batches=max(self.ranks.gather(len(given))),  # as many rows on all ranks
        )  # fmt: skip
        return replace(sampled(self.ranks, own), is_weighed=True)

    def _of_micro_batches(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield what each of this rank's micro-batches gives to the gradients of all parameters;
        where ranks of cp have some of the tokens, the losses at its own."""
        rank, device = self.ranks.rank, self.reference
        for micro_batch in device.micro_batches_of(data_place(device.spec, rank), self.step):
            part = list(of_each_slice(device.spec, micro_batch))[token_place(device.spec, rank)]
            yield gradients_of(device, part)

    def update_case(self) -> UpdateCase:
        """Return the evidence from which an update is explained. All ranks call it."""
        now = whole(self.program.state_dict()["model"], self.exchange)
        seen, expected = self.seen.record, self.expected.record
        holds, courses = {}, {}
        for name, given in seen.before.items():
            if name not in expected.after or name not in now:
                continue
            leaf, value = self.holds[name], given.value.view(given.shape)
            shard = ParameterShard(name, value, leaf.shape, leaf.at)
            before = shard.of(expected.before[name].value)
            holds[name] = shard
            courses[name] = ParameterMove(
                parameter=shard.parameter,
                origin=before,
                before=before,
                after=shard.of(expected.after[name].value),
                run_before=given.value,
                run_after=shard.of(now[name]),
                sure=torch.ones_like(before, dtype=torch.bool),
            )
        differences = Differences(step=self.step, rank=self.ranks.rank, courses=courses)
        sides = self.expected, replace(self.seen, gradients={})
        return UpdateCase.of(differences, sides, holds, TOLERANCES[torch.float64])
