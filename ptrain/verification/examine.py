"""A program and one device side by side for a few steps: everything that a step makes is compared
in the order of time, on every rank, and what departs first is explained.

Every rank runs the whole reference, so that nothing is sent but verdicts. Run in fp64 (the spec's
`precision.compute`): a sum in another order differs by 1e-15, a fault by more than TOLERANCE.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from ptrain.data.corpus import corpus
from ptrain.interpreter.program import Program
from ptrain.report.finding import Moment, Subject, Way
from ptrain.spec.axis import Axis
from ptrain.train.exchange import Exchange
from ptrain.train.schedule import learning_rate
from ptrain.verification.capture import Capture, clipped_by, drive, watched
from ptrain.verification.differences import AllDifferences, Differences
from ptrain.verification.evidence import Evidence, ProgramSide
from ptrain.verification.explain import explain
from ptrain.verification.jobs.ranks import ranks_of_spec
from ptrain.verification.jobs.verdict import Verdict
from ptrain.verification.magnitude import Magnitude
from ptrain.verification.outputs import Outputs
from ptrain.verification.parts import (
    held,
    numbers_apart,
    part_of,
    relative,
    without_masks,
)
from ptrain.verification.places import coordinates, data_place
from ptrain.verification.reference import MicroBatch, Pass, ReferenceTraining
from ptrain.verification.samples import sample_departures
from ptrain.verification.states import States, of_program, of_reference
from ptrain.verification.updates.record import UpdateRecorder, wholes

TOLERANCE = 1e-11  # relative, fp64: what Adam makes of 1e-15, with room; faults are 1e-6 and more
KEPT = 4  # starts of steps with whose state a stale one is compared; each is a model in fp64
MOST = 400  # departures of one state at one moment that a rank tells of: 0.1 MB
_PARAMETERS = Subject.PARAMETERS
_MASKED = (Subject.BUFFERS, Subject.ACTIVATIONS)  # that may be a mask of attention, infinite


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination(Verdict):
    """`departures` of all ranks, the first first; `checks` have the largest difference of every
    subject over all ranks and steps."""

    steps: int


def examine(program: Program, exchange: Exchange, steps: int = 3) -> Examination:
    """`steps` steps from the program's initial state, or fewer where one departs. All ranks call
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
            if self.all.departures:
                break
            evidence = self._step(step, evidence)
            self._compare(evidence)
            self.all.take(self.differences, self.order)
            if any(its.subject is not Subject.LEARNING_RATE for its in self.all.departures):
                break  # a learning rate is proven by its update
            with UpdateRecorder(wholes(self.reference.updater.updated)) as updates:
                evidence.expected.norm = self.reference.update(step, dict(self.sums))
            evidence.expected.record = updates.record
            self._norm(evidence)
            self._state(Moment.UPDATE)
            self.all.take(self.differences, self.order)
        sides, departures = (self.program, self.reference), tuple(self.all.departures)
        culprit = explain(departures, evidence, sides, self.all.ranks) if departures else None
        done = evidence.step + 1 if evidence else 0
        checks = tuple(self.all.checks())
        return Examination(departures=departures, culprit=culprit, checks=checks, steps=done)

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
        its = [*sample_departures(batch, self.reference, step, self.rank, self.exchange)]
        self.differences.departures += its
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
