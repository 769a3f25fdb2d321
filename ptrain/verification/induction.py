"""The induction of Theorem 5: from a state that the run itself has come to, one device goes on as
the run does.

Over a hundred steps training makes of one rounding what a fixed figure cannot tell from a fault
(`tolerances`). From one and the same state there is nothing to grow from: loss and gradient of the
next step, and the loss after its update, are one device's as closely at the end of a training as at
its beginning. So every EVERY steps a reference takes the run's whole state and goes two steps
beside it. In 16 bits, and where the update computes in them, how close that is follows from
references that take the same state and add up in other orders.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from ptrain.interpreter.program import Program
from ptrain.report.record import Check
from ptrain.spec.spec import Spec
from ptrain.train.exchange import Exchange
from ptrain.verification.compare import FP64, apart, at_most, share_of
from ptrain.verification.parts import whole
from ptrain.verification.permuted import Permuted
from ptrain.verification.reference import ReferenceTraining
from ptrain.verification.tolerances import (
    FP32_GRADIENT,
    FP32_LOSS,
    FP64_GRADIENT,
    MANY,
    from_permuted,
)
from ptrain.verification.variants import is_banded

EVERY = 25  # steps between two states that a reference takes

States = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """What one device makes of a state: the loss, the gradients without clipping and the loss's
    scale, and the loss of the step after."""

    loss: float
    gradients: dict[str, Tensor]
    following: float


@dataclass(slots=True)
class LargestShare:
    """The look with the largest share of what is allowed."""

    share: float = -1.0
    measured: float = 0.0
    allowed: float = 0.0
    step: int = 0

    def add(self, step: int, measured: float, allowed: float) -> None:
        share = share_of(measured, allowed)
        if share > self.share:
            self.share, self.measured, self.allowed, self.step = share, measured, allowed, step


@dataclass(frozen=True, slots=True)
class Other:
    """What a permuted reference makes of the same state: both losses, and how far its gradient is
    from the first's."""

    loss: float
    following: float
    distance: float


@dataclass(slots=True)
class Onward:
    """Of one run. The loop calls `is_due`, `take` before such a step, `compare` after it and
    `compare_following` after the next. Rank 0 compares; all ranks call all, and share the permuted
    references, each of which is gone before the next is built."""

    program: Program
    exchange: Exchange
    worst: dict[str, LargestShare] = field(default_factory=dict)
    _of: int = -1  # the step whose reference is there
    _first: ReferenceStep | None = None  # rank 0's
    _others: list[Other] = field(default_factory=list)

    @property
    def spec(self) -> Spec:
        return self.program.spec

    def is_due(self, step: int) -> bool:
        return step > 0 and step % EVERY == 0

    def take(self, step: int) -> None:
        """Take the state before `step`, and compute what one device makes of it."""
        state = {
            kind: whole(tensors, self.exchange)
            for kind, tensors in self.program.state_dict().items()
        }
        self._of, world = step, self.exchange.world
        number = MANY if is_banded(self.spec) else 0
        seeds = [seed for seed in range(number) if seed % world.size == world.rank]
        first, own = None, []
        if world.is_first or seeds:  # what the permuted ones are compared with is not sent
            first = self._onward(ReferenceTraining(self.spec), state)
            own = [self._other(seed, first, state) for seed in seeds]
        self._first = first if world.is_first else None
        self._others = [*chain.from_iterable(self.exchange.gather(own, list[Other]))]

    def _other(self, seed: int, first: ReferenceStep, states: States) -> Other:
        its = self._onward(Permuted(self.spec, seed), states)
        return Other(its.loss, its.following, apart(first.gradients, its.gradients))

    def _onward(self, device: ReferenceTraining, states: States) -> ReferenceStep:
        """Run two steps from a state; the second without an update."""
        step, device.sample_offset = self._of, self.program.sample_offset
        load(device, states)
        accumulated = device.accumulate(step)
        gradients = accumulated.gradients  # before they are clipped in place
        device.update(step, accumulated.sums)
        return ReferenceStep(accumulated.loss, gradients, device.accumulate(step + 1).loss)

    def compare(self, loss: float, gradients: Mapping[str, Tensor]) -> None:
        """Compare the run's loss in that step, and its gradients without clipping."""
        if self._first is None:
            return
        first, others = self._first, self._others
        losses = [first.loss, *(other.loss for other in others)]
        self._add("loss", loss - first.loss, self._loss_allowed(losses))
        distances = [other.distance for other in others]
        allowed = from_permuted(distances) if others else self._gradient_allowed()
        self._add("gradient", apart(first.gradients, gradients), allowed)

    def compare_following(self, step: int, loss: float) -> None:
        """Compare the run's loss in the step after, if `step` is that."""
        if self._first is None or step != self._of + 1:
            return
        losses = [self._first.following, *(other.following for other in self._others)]
        self._add("loss after the update", loss - losses[0], self._loss_allowed(losses))

    def _add(self, name: str, difference: float, allowed: float) -> None:
        self.worst.setdefault(name, LargestShare()).add(self._of, abs(difference), allowed)

    def _loss_allowed(self, losses: Sequence[float]) -> float:
        if len(losses) > 1:
            return from_permuted([abs(loss - losses[0]) for loss in losses[1:]]) + _summing(losses)
        if self.spec.precision.compute_fp64:
            return FP64.of_loss(0) * abs(losses[0])
        return FP32_LOSS

    def _gradient_allowed(self) -> float:
        return FP64_GRADIENT if self.spec.precision.compute_fp64 else FP32_GRADIENT

    def departs(self, step: int) -> bool:
        """Return whether what was compared in this step is off, on all ranks alike. All ranks call
        it."""
        if self._of < 0 or step - self._of > 1:
            return False
        return bool(self.exchange.first(any(worst.share > 1.0 for worst in self.worst.values())))

    def checks(self) -> Iterator[Check]:
        """Rank 0's."""
        for name, worst in self.worst.items():
            why = f"step {worst.step}: from the run's own state it is another"
            allowed = worst.allowed if math.isfinite(worst.allowed) else math.nan
            yield at_most(f"from its own state: {name}", worst.measured, allowed, why)


def _summing(losses: Sequence[float]) -> float:
    """A loss is a sum in fp32 at best, whose last bit no reference need differ in."""
    return 4 * torch.finfo(torch.float32).eps * abs(losses[0])


@torch.no_grad()
def load(device: ReferenceTraining, states: States) -> None:
    """Parameters, master copies, optimizer state, the loss's scale and routers' biases, as
    `Program.state_dict` names them, whole."""
    updater, optimizer = device.updater, states["optimizer"]
    for name, parameter in updater.parameters.items():
        parameter.copy_(states["model"][name])
        updated = updater.updated[name]
        if updated is not parameter:
            updated.copy_(optimizer[f"{name}.master"])
        owner = updater.owner(name)
        own = {
            key: optimizer[f"{name}.{key}"].to(value.dtype)
            for key, value in updater.initial(name).items()
        }
        owner.state[updated].update(own)
    if "scaling" in states:
        updater.scale = float(states["scaling"]["scale"])
        updater.steps_since_change = int(states["scaling"]["growth_tracker"])
    for name, bias in states.get("routers", {}).items():
        device.module.get_buffer(name).copy_(bias)
