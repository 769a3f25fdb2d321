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
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch

from ptrain.data.corpus import corpus
from ptrain.interpreter.program import Program
from ptrain.optimizers.update import COUNTER
from ptrain.report.finding import Certainty, Mismatch, Moment, RootCause, Subject, Way
from ptrain.spec.placement import Axis
from ptrain.train.exchange import Exchange
from ptrain.train.schedule import learning_rate
from ptrain.verification.capture import Capture, Outputs, clipped_by, drive, watched
from ptrain.verification.causes.gradients import given_samples, gradient_cause
from ptrain.verification.causes.scene import EXACT, Evidence, Investigation, ProgramSide
from ptrain.verification.causes.states import norm_cause, of_a_product, proven_update, state_cause
from ptrain.verification.compare import AllDifferences, Differences
from ptrain.verification.jobs.evidence import untold
from ptrain.verification.jobs.job import Ranks, ranks_of_spec
from ptrain.verification.jobs.root_causes import over_axis
from ptrain.verification.jobs.verdict import Verdict
from ptrain.verification.parts import (
    Magnitude,
    held,
    missing_sum,
    numbers_apart,
    part_of,
    relative,
    without_masks,
)
from ptrain.verification.places import coordinates, data_place
from ptrain.verification.preconditions import States, of_program, of_reference
from ptrain.verification.reference import (
    OF_ITS_SAMPLES,
    MicroBatch,
    Pass,
    ReferenceTraining,
    sample_mismatches,
)
from ptrain.verification.updates.repeat import UpdateRecorder, wholes

_LEDGER = {"missing": "missing", "duplicate": "twice"}  # samples, and the word that says so
_MOST_VALUES = 4096  # of an output that ranks tell each other
_ORDER = (Subject.COUNTER, Subject.OPTIMIZER, Subject.PARAMETERS, Subject.BUFFERS)


def explain(
    mismatches: Sequence[Mismatch],
    evidence: Evidence | None,
    sides: tuple[Program, ReferenceTraining],
    ranks: Ranks,
) -> RootCause:
    """Explain all ranks' mismatches, the first first, with program and reference as they were when
    these were seen. Collective: all ranks give the same `mismatches`."""
    scene = Investigation(mismatches, evidence, sides, ranks)
    explainers = (*_EXPLAINERS[scene.first.subject], _unexplained)
    return next(filter(None, (explainer(scene) for explainer in explainers)))


def _of_state(scene: Investigation) -> RootCause:
    if scene.first.moment is not Moment.FORWARD:  # where parameters are used they differ alone
        scene = scene.about(_most_telling(scene))
    return _skipped(scene) if _is_left_out(scene) else state_cause(scene)


def _most_telling(scene: Investigation) -> Mismatch:
    """Return of one moment a counter, then optimizer state, from which parameters follow; but first
    what is not trained, and what nobody updated at all."""
    alike = scene.at(scene.first.moment)
    if scene.has_evidence and (untouched := _not_updated(scene, alike)) is not None:
        return untouched
    return min(alike, key=lambda mismatch: _ORDER.index(mismatch.subject))


def _not_updated(scene: Investigation, alike: Sequence[Mismatch]) -> Mismatch | None:
    """One that is not trained differs. Or some parameters' counters and values differ on a rank and
    others' there do not: its update did not take them along."""
    right = of_reference(scene.reference)
    counters = {
        name: float(held(tensor)) == float(right[subject, name])
        for (subject, name), tensor in of_program(scene.program).items()
        if subject is Subject.COUNTER
    }
    some = any(scene.ranks.gather(any(counters.values()) and not all(counters.values())))
    counted = {
        mismatch.name.rpartition(".")[0]
        for mismatch in alike
        if mismatch.subject is Subject.COUNTER
    }
    for mismatch in alike:
        if mismatch.subject is not Subject.PARAMETERS:
            continue
        if mismatch.name not in scene.evidence.expected.gradients:
            return mismatch
        if some and mismatch.name in counted:
            return replace(mismatch, subject=Subject.OPTIMIZER)
    return None


def _is_left_out(scene: Investigation) -> bool:
    """A parameter in the place of its optimizer state."""
    one = scene.one
    return one.subject is Subject.OPTIMIZER and one.name in scene.reference.parameters


def _skipped(scene: Investigation) -> RootCause:
    one = scene.one
    counter = replace(one, subject=Subject.COUNTER, name=f"{one.name}.{COUNTER}")
    of_values = replace(one, subject=Subject.PARAMETERS)
    ranks = scene.ranks_of(counter) or scene.ranks_of(of_values)
    before = scene.evidence.states[-1]
    still = True
    for (subject, name), tensor in of_program(scene.program).items():
        is_its = name == one.name or name.rpartition(".")[0] == one.name
        whole = before.get((subject, name)) if is_its else None
        if whole is not None and (part := scene.own_part(tensor, whole)) is not None:
            still = still and (scene.rank not in ranks or torch.equal(held(tensor), part.of(whole)))
    by_all = all(scene.ranks.gather(still))
    sentence = (
        f"The update omits {one.name}: its values, moments and step counter are as before. "
        "Give it to the optimizer, and step the optimizer of every shard."
    )
    tried = "all of these equal their values before the update"
    cause = scene.root_cause(scene.axis_of(ranks), "update skipped", sentence)
    cause = replace(cause, ranks=ranks)
    return cause.proven(tried) if by_all else replace(cause, tried=f"on some ranks only: {tried}")


def _of_output(scene: Investigation) -> RootCause | None:
    """Parameters' gradients tell more than the gradient of an output, unless a sum is missing from
    that."""
    if (cause := _partial(scene)) is not None or scene.first.moment is Moment.FORWARD:
        return cause
    return _of_gradients(scene)


def _partial(scene: Investigation) -> RootCause | None:
    """Over some axis the sum of what the differing ranks have is one device's."""
    key, evidence = (scene.first.name, scene.first.index), scene.evidence
    is_forward = scene.first.moment is Moment.FORWARD
    rows = torch.full((2, _MOST_VALUES), math.nan, dtype=torch.float64)
    own, whole = (
        (outputs.forward if is_forward else outputs.backward).get(key)
        for outputs in (evidence.seen.outputs, evidence.expected.outputs)
    )
    part = None if own is None or whole is None else scene.own_part(own, whole)
    if own is not None and whole is not None and part is not None:
        for row, tensor in zip(rows, (held(own), part.of(whole)), strict=True):
            values = tensor.double().reshape(-1)[:_MOST_VALUES].nan_to_num(nan=math.inf)
            row[: len(values)] = values
    parts, truths = scene.ranks.stack(rows).unbind(1)
    differing = set(scene.ranks_of(scene.first))
    for axis, groups in scene.ranks.summed.items():
        its = [group for group in groups if differing & set(group)]
        factor = missing_sum(parts, truths, its, EXACT)
        if factor is not None and abs(factor - 1.0) <= EXACT:
            over = over_axis(axis)
            what = "output" if is_forward else "gradient of the output"
            sentence = (
                f"Each rank has a partial sum of the {what} of {scene.first.place}. Sum it {over}."
            )
            name = axis.partition("+")[0]
            cause = scene.root_cause(name, f"missing all-reduce {over}", sentence)
            return cause.proven(f"summed {over} it matches the reference")
    return None


def _of_gradients(scene: Investigation) -> RootCause | None:
    gradients = scene.at(Moment.GRADIENTS, Subject.GRADIENTS)
    if not gradients:
        return None
    is_output = scene.first.moment is Moment.BACKWARD  # whose gradient differs before
    one = replace(gradients[0], name=scene.first.name) if is_output else gradients[0]
    return gradient_cause(scene.about(one))


def _samples(scene: Investigation) -> RootCause:
    words = scene.first.told
    kinds = [kind for kind, word in _LEDGER.items() if word in words]
    factor = f"{' and '.join(kinds)} sample{'s' * (len(kinds) > 1)}" if kinds else words
    sentence = (
        f"The mesh trains on other samples than the batch: {words}. Check the sampler, and "
        "which share of the batch each rank takes."
    )
    axis = scene.token_axis if OF_ITS_SAMPLES in words else None
    return given_samples(scene, scene.root_cause(axis, factor, sentence))


def _learning_rate(scene: Investigation) -> RootCause:
    cause = _rate_in_words(scene)
    update = next(iter(scene.at(Moment.UPDATE)), None)
    proof = proven_update(scene.about(update)) if update is not None else None
    if proof is None:
        return cause
    return replace(cause, certainty=proof.certainty, tried=proof.tried)


def _rate_in_words(scene: Investigation) -> RootCause:
    rate = float(scene.first.told.partition(" ")[0])
    schedule = scene.spec.optimizer
    others = [
        step
        for step in range(scene.spec.train.steps + 1)
        if math.isclose(learning_rate(schedule, step), rate, rel_tol=1e-9)
    ]
    if others:
        sentence = (
            f"The update has the learning rate of step {others[0]}: {scene.first.told}. Step "
            "the schedule once per update."
        )
        return scene.root_cause(None, f"of step {others[0]}", sentence)
    sentence = (
        f"The update has another learning rate: {scene.first.told}. Set the scheduled rate "
        "in every group of every rank's optimizer."
    )
    return scene.root_cause(None, "other value", sentence)


def _loss(scene: Investigation) -> RootCause | None:
    own, right = scene.evidence.seen.loss, scene.evidence.expected.loss
    sentence = (
        f"The loss is {own:.6g}, the reference loss is {right:.6g}. Sum it over the data ranks "
        "once, and divide by the global number of tokens."
    )
    return of_a_product(scene, own / right, sentence) if right else None


def _unexplained(scene: Investigation) -> RootCause:
    first = scene.first
    what = "gradient of its output" if first.moment is Moment.BACKWARD else "output"
    what = what if first.subject is Subject.ACTIVATIONS else str(first.subject)
    sentence = (
        f"{first.place} is the first difference, by {first.difference:.3g} in its {what}. "
        "Everything before it matches the reference. Check how it is computed and "
        "communicated between ranks."
    )
    tried = ""
    if first.moment is Moment.GRADIENTS:
        tried = "no sum or multiple of its micro-batches' gradients equals it"
        tried += untold(scene.spec.batch.accumulate)
    cause = scene.root_cause(None, f"differs by {first.difference:.3g}", sentence, tried=tried)
    return replace(cause, certainty=Certainty.UNEXPLAINED)


# What explains a first mismatch, by what differs: the first that can.
_EXPLAINERS: dict[Subject, tuple[Callable[[Investigation], RootCause | None], ...]] = {
    **dict.fromkeys(_ORDER, (_of_state,)),
    Subject.BATCH: (_samples,),
    Subject.ACTIVATIONS: (_of_output,),
    Subject.LOSS: (_of_gradients, _loss),
    Subject.LEARNING_RATE: (_learning_rate,),
    Subject.GRADIENTS: (_of_gradients,),
    Subject.NORM: (norm_cause,),
}


TOLERANCE = 1e-11  # relative, fp64: what Adam makes of 1e-15, with room; faults are 1e-6 and more
KEPT = 4  # starts of steps with whose state a stale one is compared; each is a model in fp64
MOST = 400  # mismatches of one state at one moment that a rank tells of: 0.1 MB
_PARAMETERS = Subject.PARAMETERS
_MASKED = (Subject.BUFFERS, Subject.ACTIVATIONS)  # that may be a mask of attention, infinite


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination(Verdict):
    """`mismatches` of all ranks, the first first; `checks` have the largest difference of every
    subject over all ranks and steps."""

    steps: int


def examine(program: Program, exchange: Exchange, steps: int = 3) -> Examination:
    """`steps` steps from the program's initial state, or fewer where one differs. All ranks call
    it."""
    return _Examiner(program, exchange).run(steps)


class _Examiner:
    def __init__(self, program: Program, exchange: Exchange) -> None:
        self.program, self.exchange = program, exchange
        self.spec = program.spec
        self.rank = program.world.rank
        self.reference = ReferenceTraining(self.spec)
        self.source = corpus(self.spec.data)
        self.place = coordinates(self.spec, self.rank)
        self.data_place = data_place(self.spec, self.rank)
        last = self.spec.batch.accumulate - 1
        self.watched_passes = {0, last}  # micro-batches whose activations are compared
        self.differences = Differences(step=0, rank=self.rank)
        ranks = ranks_of_spec(self.spec, exchange)
        self.all = AllDifferences(ranks, self.reference.parameters, most=MOST)
        self.order: dict[str, int] = {}  # a module's place along the model
        self.sums: dict[str, torch.Tensor] = {}

    def run(self, steps: int) -> Examination:
        self._state(Moment.START)
        self.all.take(self.differences)
        evidence = None
        for step in range(steps):
            if self.all.mismatches:
                break
            evidence = self._step(step, evidence)
            self._compare(evidence)
            self.all.take(self.differences, self.order)
            if any(its.subject is not Subject.LEARNING_RATE for its in self.all.mismatches):
                break  # a learning rate is proven by its update
            with UpdateRecorder(wholes(self.reference.updater.updated)) as updates:
                evidence.expected.norm = self.reference.update(step, dict(self.sums))
            evidence.expected.record = updates.record
            self._norm(evidence)
            self._state(Moment.UPDATE)
            self.all.take(self.differences, self.order)
        sides, mismatches = (self.program, self.reference), tuple(self.all.mismatches)
        root_cause = explain(mismatches, evidence, sides, self.all.ranks) if mismatches else None
        done = evidence.step + 1 if evidence else 0
        checks = tuple(self.all.checks())
        return Examination(mismatches=mismatches, root_cause=root_cause, checks=checks, steps=done)

    def _step(self, step: int, before: Evidence | None) -> Evidence:
        """Run one step of both; the reference's update is still to come."""
        earlier = before.states[1 - KEPT :] if before else []
        states = [*earlier, _copied(of_reference(self.reference, self.rank))]
        outputs, expected = self._reference_pass(step)
        self.sums = expected.sums
        with Capture(self.program, self.watched_passes) as capture:
            share, norm = drive(self.program, self.source, step)
        assert self.program.batch is not None, "a step has a batch"
        return Evidence(
            step=step,
            states=states,
            batch=self.program.batch,
            seen=ProgramSide(
                in_use=capture.used,
                gradients=capture.gradients(self.exchange, clipped_by(self.spec, norm)),
                record=capture.updates.record,
                outputs=capture.outputs,
                loss=self.exchange.add([share])[0],
                norm=norm,
            ),
            expected=ProgramSide(
                in_use={n: its for (kind, n), its in states[-1].items() if kind is _PARAMETERS},
                gradients=expected.gradients,
                outputs=capture.beside(outputs),
                loss=expected.loss,
            ),
            earlier_gradients=before.expected.gradients if before else {},
            rates=capture.rates,
            scale=expected.scale,
        )

    def _reference_pass(self, step: int) -> tuple[Outputs, Pass]:
        outputs = Outputs()
        modules = self.reference.module

        def around(batch: MicroBatch) -> AbstractContextManager[None]:
            is_ours = batch.data_index == self.data_place and batch.k in self.watched_passes
            return watched(modules.named_modules(), outputs, lambda: batch.k if is_ours else None)

        expected = self.reference.accumulate(step, around)
        for path, _ in outputs.forward:
            self.order.setdefault(path, len(self.order))
        return outputs, expected

    def _compare(self, evidence: Evidence) -> None:
        """Compare all up to the gradients."""
        self.differences = Differences(step=evidence.step, rank=self.rank)
        self._samples(evidence)
        # parameters where they are used: gathered, copied, as they should be in this step
        self._tensors(Moment.FORWARD, _PARAMETERS, evidence.seen.in_use, evidence.expected.in_use)
        self._activations(evidence)
        self._number(Moment.FORWARD, Subject.LOSS, evidence.seen.loss, evidence.expected.loss)
        rate = learning_rate(self.spec.optimizer, evidence.step)
        for own in sorted(evidence.rates):
            self._number(Moment.GRADIENTS, Subject.LEARNING_RATE, own, rate)
        self._gradients(evidence)

    def _samples(self, evidence: Evidence) -> None:
        batch, step = evidence.batch, evidence.step
        its = [*sample_mismatches(batch, self.reference, step, self.rank, self.exchange)]
        self.differences.mismatches += its
        size = math.inf if its else 0.0
        self.differences.see((Moment.BATCH, Subject.BATCH), size, TOLERANCE)

    def _activations(self, evidence: Evidence) -> None:
        actual, expected = evidence.seen.outputs, evidence.expected.outputs
        for moment, *sides in (
            (Moment.FORWARD, actual.forward, expected.forward),
            (Moment.BACKWARD, actual.backward, expected.backward),
        ):
            for k in sorted(self.watched_passes):
                own, its = ({p: t for (p, n), t in side.items() if n == k} for side in sides)
                self._tensors(moment, Subject.ACTIVATIONS, own, its, index=k)

    def _gradients(self, evidence: Evidence) -> None:
        """Per parameter, the whole vector: without the loss's scale and what clipping did. One that
        one device has none of should be zeros."""
        expected = evidence.expected.gradients
        zeros = {
            name: torch.zeros_like(self.reference.parameters[name], dtype=tensor.dtype)
            for name, tensor in evidence.seen.gradients.items()
            if name not in expected
        }
        both = evidence.seen.gradients, {**expected, **zeros}
        self._tensors(Moment.GRADIENTS, Subject.GRADIENTS, *both)

    def _norm(self, evidence: Evidence) -> None:
        self.differences = Differences(step=evidence.step, rank=self.rank)
        norm, expected = evidence.seen.norm, evidence.expected.norm
        if norm is None:
            return
        assert expected is not None, "one device tells what a program tells"
        if math.isinf(expected) and not math.isfinite(norm):
            norm = expected  # both skip the step
        self._number(Moment.CLIP, Subject.NORM, norm, expected)

    def _state(self, moment: Moment) -> None:
        """Compare parameters, optimizer state, counters and buffers, each part where it is."""
        sides = of_program(self.program), of_reference(self.reference, self.rank)
        for subject in dict.fromkeys(kind for kind, _ in sides[1]):
            own, its = (
                {n: t for (kind, n), t in side.items() if kind is subject} for side in sides
            )
            self._tensors(moment, subject, own, its)

    def _tensors(
        self,
        moment: Moment,
        subject: Subject,
        actual: Mapping[str, torch.Tensor],
        expected: Mapping[str, torch.Tensor],
        index: int = 0,
    ) -> None:
        """Compare what both sides have of a name."""
        shown = {n: _shown(its) for n, its in expected.items()} if subject in _MASKED else expected
        scale = Magnitude.of(shown)
        for name in (name for name in actual if name in expected):
            sides = actual[name], expected[name], shown[name]
            self._tensor(moment, subject, name, sides, scale=scale, index=index)

    def _number(self, moment: Moment, subject: Subject, actual: float, expected: float) -> None:
        self.differences.compare(
            moment, subject, str(subject), words=f"{actual!r} for {expected!r}",
            difference=0.0 if actual == expected else numbers_apart(expected, actual),
            tolerance=TOLERANCE,
        )  # fmt: skip

    def _tensor(
        self,
        moment: Moment,
        subject: Subject,
        name: str,
        sides: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        *,
        scale: Magnitude,
        index: int,
    ) -> None:
        """Nothing of an activation whose part nothing tells: it is of another shape on purpose.
        `sides`: what is there, one device's, and that without what masks hide."""
        tensor, whole, shown = sides
        part = part_of(
            tensor, whole.shape, degree=self.spec.degree(Axis.TP), place=self.place.get(Axis.TP, 0)
        )
        way, difference = Way.VALUE, 0.0
        if part is None:
            if subject is Subject.ACTIVATIONS:
                return
            way, difference = Way.SHAPE, math.inf
        else:
            own, its = held(tensor), part.of(whole)
            if subject in _MASKED:
                own, its = without_masks(own, its)
            if own.dtype != its.dtype:
                way = Way.DTYPE
            difference = relative(own, its, scale.length(shown, its))
        self.differences.compare(
            moment, subject, name, difference=difference, tolerance=TOLERANCE, way=way, index=index,
            words=f"{tensor.dtype} for {whole.dtype}" if way is Way.DTYPE else "",
        )  # fmt: skip


def _shown(tensor: torch.Tensor) -> torch.Tensor:
    """Without what a mask of attention hides, which is infinite: nothing is small beside that."""
    return without_masks(tensor, tensor)[0]


def _copied(states: States) -> States:
    return {key: tensor.clone() for key, tensor in states.items()}
