"""One step of both loops, and every difference that this rank sees."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ptrain.report.finding import Moment, Subject
from ptrain.verification.compare import Differences, ParameterMove
from ptrain.verification.jobs.averages import Averages
from ptrain.verification.jobs.compare import (
    compare_buffers,
    compare_gradients,
    compare_in_use,
    compare_states,
    compare_update,
    digest,
    digests,
    state_of,
    sure_of,
)
from ptrain.verification.jobs.drawing import Drawing, RandomState, drawing_from
from ptrain.verification.jobs.job import Alone, Job, Ranks, Tolerance
from ptrain.verification.jobs.record import ModelState, StepRecorder
from ptrain.verification.jobs.shards import ParameterShard, values_of
from ptrain.verification.parts import COARSER, Magnitude, named, square
from ptrain.verification.updates.clip import Accumulation, UpdateCase, compare_masters

Rows = dict[str, Tensor]


@dataclass(slots=True, kw_only=True)
class LoopPair:
    """Both loops, what this rank holds of the loop's parameters and of the reference's, and where
    these were at the start. `sure`: of each parameter the elements whose gradients were more than
    rounding in every step."""

    reference: Job
    loop: Job
    holds: dict[str, ParameterShard]
    wholes: dict[str, ParameterShard]
    origin: Rows = field(default_factory=dict)
    sure: Rows = field(default_factory=dict)
    averages: Averages = field(init=False)

    def __post_init__(self) -> None:
        self.averages = Averages(self.reference, self.loop, self.holds, self.wholes)
        self.origin = values_of(self.wholes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComparison:
    """`losses`: the reference's and this rank's, as the steps returned them; `reference_state` and
    `loop_state`: what both models had before, `random` the loop's generators; `unclipped`: squares
    of the reference's gradients as its backward pass left them."""

    differences: Differences
    expected: StepRecorder
    seen: StepRecorder
    losses: tuple[Any, Any]
    reference_state: ModelState
    loop_state: ModelState
    random: RandomState
    case: UpdateCase
    unclipped: dict[str, float]


Watches = Sequence[AbstractContextManager[object]]


def both_losses(
    pair: LoopPair, batch: Any, share: Any, drawing: Drawing,
    within: tuple[Watches, Watches] = ((), ()),
) -> tuple[Any, Any]:  # fmt: skip
    """Run the loop's step first, then the reference's, which draws what the loop drew, `within` the
    contexts of each; return what both return. Of either pair the reference's is first."""
    loop, plain = pair.loop.model, pair.reference.model
    random, (of_reference, of_loop) = RandomState.of(loop), within
    with ExitStack() as stack:
        for context in (*of_loop, drawing.recorded(loop)):
            stack.enter_context(context)
        loss = pair.loop.step(share)
    drawing.exchange()
    with drawing_from(random, plain), ExitStack() as stack:
        for context in (*of_reference, drawing.replayed(plain), Alone()):
            stack.enter_context(context)
        return pair.reference.step(batch), loss


def run_step(
    pair: LoopPair, number_: int, batch: Any, share: Any, limit: Tolerance, drawing: Drawing
) -> StepComparison:
    """Run a step of both, and compare all that they do."""
    random = RandomState.of(pair.loop.model)
    began = ModelState.of(pair.reference.model), ModelState.of(pair.loop.model)
    before, run_before = values_of(pair.wholes), values_of(pair.holds)
    pair.averages.before()
    seen = StepRecorder(pair.loop.model, pair.holds)
    expected = StepRecorder(pair.reference.model, pair.wholes)
    unclipped = Accumulation(pair.wholes)
    right, loss = both_losses(pair, batch, share, drawing, ((expected, unclipped), (seen,)))
    differences = Differences(step=number_, rank=drawing.ranks.rank)
    if seen.updates != expected.updates:
        description = f"{seen.updates} updates, one device {expected.updates}"
        differences.add(Moment.START, Subject.COUNTER, "optimizer.step", description)
    sides = expected, seen
    compare_gradients(differences, sides, pair.holds, limit)
    compare_in_use(differences, sides, (before, run_before), pair.holds, limit)
    scale = Magnitude.of(expected.gradients)
    for name, shard in pair.holds.items():
        gradient = expected.gradients.get(name)
        if gradient is not None:
            part = shard.of(gradient.view(shard.shape))
            now = sure_of(part, seen.gradients.get(name), gradient, limit)
            pair.sure[name] = pair.sure[name] & now if name in pair.sure else now
        course = ParameterMove(
            parameter=shard.parameter,
            origin=shard.of(pair.origin[name]),
            before=shard.of(before[name]),
            after=shard.of(pair.wholes[name].value()),
            run_before=run_before[name],
            run_after=shard.value().clone(),
            sure=pair.sure.get(name, torch.ones_like(run_before[name], dtype=torch.bool)),
        )
        quiet = gradient is not None and scale.is_noise(gradient)
        compare_update(differences, name, course, is_noise=quiet, limit=limit)
    states = state_of(expected, pair.wholes), state_of(seen, pair.holds)
    compare_states(differences, *states, pair.holds, limit)
    case = UpdateCase.of(differences, sides, pair.holds, limit)
    compare_masters(differences, case)
    pair.averages.compare(differences, limit)
    compare_buffers(differences, pair.reference.model, pair.loop.model, limit)
    return StepComparison(
        differences=differences, expected=expected, seen=seen, losses=(right, loss),
        reference_state=began[0], loop_state=began[1], random=random, case=case,
        unclipped=unclipped.squares,
    )  # fmt: skip


def checksums(pair: LoopPair, gradients: Mapping[str, Tensor]) -> dict[str, dict[str, list[str]]]:
    """Return checksums of what this rank has after a step, bit by bit."""
    return {
        "parameters": digests(pair.holds, values_of(pair.holds)),
        "gradients": digests(pair.holds, gradients),
    }


def gradient_norms(step: StepComparison, pair: LoopPair, ranks: Ranks) -> tuple[float, float]:
    """Return one device's norm of all gradients and the loop's, in which replicas count once. All
    ranks call it."""
    sizes = {name: gradient.numel() for name, gradient in step.seen.gradients.items()}
    own = {name: square(gradient) for name, gradient in step.seen.gradients.items()}
    everyones = ranks.gather([own, sizes])
    total = 0.0
    for name, shard in pair.wholes.items():
        held = sum(counts.get(name, 0) for _, counts in everyones)
        squares = sum(sums.get(name, 0.0) for sums, _ in everyones)
        total += squares * shard.shape.numel() / held if held else 0.0
    right = sum(map(square, step.expected.gradients.values()))
    return math.sqrt(right), math.sqrt(total)


def travelled(pair: LoopPair, start: Mapping[str, Tensor], ranks: Ranks) -> tuple[float, float]:
    """Return how far the parameters went relative to the initial weights, by the 2-norm: one
    device's, and the loop's over all ranks' parts, which began at `start`. All ranks call it."""
    distances = []
    for holds, began in ((pair.wholes, pair.origin), (pair.holds, start)):
        moved = sum(
            square(shard.value().double() - began[name].double()) for name, shard in holds.items()
        )
        length = sum(map(square, began.values()))
        both = [sum(of_rank) for of_rank in zip(*ranks.gather([moved, length]), strict=True)]
        distances.append(math.sqrt(both[0] / both[1]) if both[1] else math.inf)
    return distances[0], distances[1]


def is_finite(gradients: Mapping[str, Tensor], holds: Mapping[str, ParameterShard]) -> bool:
    """Return whether gradients and parameters are numbers at all."""
    values = (*gradients.values(), *(shard.value() for shard in holds.values()))
    return all(bool(torch.isfinite(tensor).all()) for tensor in values)


@dataclass(slots=True)
class History:
    """Checksums of this rank's elements by parameter, of the start and after each step."""

    sums: dict[str, list[str]] = field(default_factory=dict)

    def begin(self, holds: Mapping[str, ParameterShard]) -> None:
        """Take those of the start."""
        self.sums = {name: [digest(shard.value())] for name, shard in holds.items()}

    def see(self, holds: Mapping[str, ParameterShard]) -> None:
        """Take those after a step."""
        for name, shard in holds.items():
            self.sums[name].append(digest(shard.value()))

    def seen(
        self, step: StepComparison, holds: Mapping[str, ParameterShard]
    ) -> dict[str, list[object]]:
        """Return what each parameter is that is in use: [the step after which it had these values
        (-1: the start; None: none), the dtype that one device's are rounded to, if any]."""
        return {name: self._written(name, step, holds) for name in step.seen.in_use}

    def _written(
        self, name: str, step: StepComparison, holds: Mapping[str, ParameterShard]
    ) -> list[object]:
        value = step.seen.in_use[name]
        checksum = digest(value)
        earlier = [n - 1 for n, its in enumerate(self.sums[name][:-1]) if its == checksum]
        if earlier:
            return [earlier[-1], ""]
        right = holds[name].of(step.expected.in_use[name])
        for dtype in COARSER:
            if torch.equal(value, right.to(dtype).to(value.dtype)):
                return [None, named(dtype)]
        return [None, ""]
