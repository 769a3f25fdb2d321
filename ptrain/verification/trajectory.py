"""Compare the losses of many steps with one device's, step by step.

Theorem 5 states that they are equal; `tolerances` defines how close they must be. The first step
that is off, or not finite, is the last that runs. If no step explains why a trajectory fails, its
checks are reported alone.

The induction of Theorem 5: one device continues from a state that the run itself has reached.

Over a hundred steps training grows a single rounding beyond any fixed figure that could tell it
from a fault (`tolerances`). Two runs from the same state start with no difference: loss and
gradient of the next step, and the loss after its update, agree as closely at the end of a training
as at its beginning. So from the first on, every STATE_EVERY steps, a reference takes the run's full
state and goes two steps with it. How close these must be any loop's tolerances of the coarsest
dtype say.

`verify_every: n` makes the same induction every n steps of a training. A step that the meters
measure, or after which they measure, is skipped for the next one: they would measure the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor

from ptrain.data.corpus import corpus
from ptrain.errors import TrainingStopped, refused
from ptrain.interpreter.program import Program
from ptrain.models.modes import fork_generators
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.report.finding import RootCause, Subject
from ptrain.report.record import Check
from ptrain.spec.spec import Spec
from ptrain.train.exchange import Exchange
from ptrain.train.guard import StepGuard
from ptrain.train.journal import LOG
from ptrain.verification.capture import drive_and_add, shards_of, whole_gradients
from ptrain.verification.compare import (
    LargestDifference,
    alive,
    apart,
    at_most,
    parted,
    worst_of,
)
from ptrain.verification.jobs.job import TOLERANCES, Tolerance
from ptrain.verification.parts import whole
from ptrain.verification.preconditions import EVERY, Watch
from ptrain.verification.reference import ReferenceTraining, Trajectory
from ptrain.verification.references import (
    Progress,
    ReferenceRun,
    dropping,
    is_banded,
    without_dropout,
)
from ptrain.verification.tolerances import (
    Allowed,
)
from ptrain.verification.updates.repeat import UpdateRecorder

STATE_EVERY = 25  # steps between two states that a reference takes

States = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """What one device makes of a state: the loss, the gradients without clipping and the loss's
    scale, and the loss of the step after."""

    loss: float
    gradients: dict[str, Tensor]
    following: float


@dataclass(slots=True)
class Onward:
    """Of one run: `around` a step from whose state one device goes on, `judge` after it and after
    the next. Rank 0 compares; all ranks call all."""

    program: Program
    exchange: Exchange
    worst: dict[str, LargestDifference] = field(default_factory=dict)
    _of: int = -1  # the step whose reference is there
    _first: ReferenceStep | None = None  # rank 0's
    _updates: UpdateRecorder | None = None  # of this step

    @property
    def spec(self) -> Spec:
        return self.program.spec

    @property
    def limit(self) -> Tolerance:
        """Return the tolerances of any loop in the coarsest dtype of parameters and gradients; in
        fp64 all gradients as one vector are nearer than each by itself."""
        if self.spec.precision.compute_fp64:
            return replace(TOLERANCES[torch.float64], gradients=1e-12)
        layout = self.spec.precision.effective
        dtypes = (layout.parameters, layout.reduced, layout.gradients)
        rows = [TOLERANCES[TORCH_DTYPES[dtype]] for dtype in dtypes]
        return max(rows, key=lambda its: its.gradients)

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Take the state before a step, and record its update."""
        with fork_generators():
            self.take(step)
        self._updates = UpdateRecorder(shards_of(self.program))
        with self._updates:
            yield

    def judge(self, step: int, loss: float, norm: float | None) -> bool:
        """Compare what is known after such a step, or the one after it; return whether it differs,
        on all ranks alike."""
        if self._updates is not None:
            self.compare(loss, whole_gradients(self.program, self._updates, self.exchange, norm))
            self._updates = None
        else:
            self.compare_following(step, loss)
        return self.differs(step)

    @property
    def is_recorded(self) -> bool:
        """Return whether the step from whose state one device goes on is not judged yet."""
        return self._updates is not None

    def take(self, step: int) -> None:
        """Take the state before `step`, and compute what one device makes of it."""
        state = {
            kind: whole(tensors, self.exchange)
            for kind, tensors in self.program.state_dict().items()
        }
        self._of, is_first = step, self.exchange.world.is_first
        self._first = self._onward(ReferenceTraining(self.spec), state) if is_first else None

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
        if (first := self._first) is not None:
            self._add("loss", loss - first.loss, self.limit.losses * abs(first.loss))
            if not (_overflows(first.gradients) and _overflows(gradients)):  # both skip the update
                self._add("gradient", apart(first.gradients, gradients), self.limit.gradients)

    def compare_following(self, step: int, loss: float) -> None:
        """Compare the run's loss in the step after, if `step` is that."""
        if self._first is not None and step == self._of + 1:
            right = self._first.following
            # an update by signs, or in 16 bits, makes more of a rounding
            limit = TOLERANCES[torch.bfloat16] if is_banded(self.spec) else self.limit
            self._add("loss after the update", loss - right, limit.losses * abs(right))

    def _add(self, name: str, difference: float, allowed: float) -> None:
        name, place = f"from its own state: {name}", f"step {self._of}"
        now = LargestDifference(name, allowed, abs(difference), place)
        self.worst[name] = max(self.worst.get(name, now), now, key=lambda its: its.share)

    def differs(self, step: int) -> bool:
        """Return whether what was compared in this step is off, on all ranks alike. All ranks call
        it."""
        if self._of < 0 or step - self._of > 1:
            return False
        return bool(self.exchange.first(any(worst.share > 1.0 for worst in self.worst.values())))

    def checks(self) -> Iterator[Check]:
        """Rank 0's."""
        for worst in self.worst.values():
            why = f"{worst.place}: the reference, continued from the run's state, differs"
            allowed = worst.tolerance if math.isfinite(worst.tolerance) else math.nan
            yield at_most(worst.name, worst.difference, allowed, why)


def _overflows(gradients: Mapping[str, Tensor]) -> bool:
    """Return True if a gradient of a scaled loss is beyond its dtype."""
    return any(not bool(torch.isfinite(gradient).all()) for gradient in gradients.values())


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


Checks: TypeAlias = "tuple[Check, ...]"

_REFERENCE = "reference: "  # what checks of one device begin with


@dataclass(slots=True, kw_only=True)
class Corridor:
    """Where the loss of each step should be, and what is `allowed` of a run. `wider` derives more
    of references that it runs first: once, and where what is allowed does not do."""

    center: tuple[float, ...]
    allowed: Allowed
    wider: Callable[[], Allowed] | None = None

    def contains(self, step: int, loss: float) -> bool:
        """False of what is not a number. All ranks call it, with the same loss."""
        if not math.isfinite(loss):
            return False
        return self._is_near(step, loss) or (self._widens() and self._is_near(step, loss))

    def judged(self, checks: Callable[[Allowed], Checks]) -> Checks:
        """Return the checks by what is allowed. All ranks call it, with checks that are alike."""
        own = checks(self.allowed)
        is_beyond = any(not check.holds and check.tolerance for check in own)
        return checks(self.allowed) if is_beyond and self._widens() else own

    def _is_near(self, step: int, loss: float) -> bool:
        return abs(loss - self.center[step]) <= self.allowed.losses[step]

    def _widens(self) -> bool:
        if self.wider is None:
            return False
        with fork_generators():  # references draw, in the midst of a run
            self.allowed, self.wider = self.wider(), None
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRun(Trajectory):
    """A program's steps, alike on all ranks: also the step at which it was `stopped`, and what one
    device made of its states on the way (`onward`)."""

    stopped: int | None
    onward: tuple[Check, ...] = ()


def follow(
    program: Program, exchange: Exchange, within: Corridor, watch: Watch, progress: Progress
) -> ProgramRun:
    """Run as many steps as the corridor has, or up to the first outside of it, or in which ranks
    differ from each other. All ranks call it."""
    source = corpus(program.spec.data)
    losses: list[float] = []
    norms: list[float] = []
    stopped = None
    onward = Onward(program, exchange)
    for step in range(len(within.center)):
        with ExitStack() as stack:
            if step % STATE_EVERY == 0 and step < len(within.center) - 1:
                stack.enter_context(onward.around(step))
            if step % EVERY == 0:
                stack.enter_context(watch.step(step))
            loss, norm = drive_and_add(program, source, step, exchange)
        differs = onward.judge(step, loss, norm)
        progress.step("the ranks", step + 1, len(within.center))
        losses.append(loss)
        norms += [] if norm is None else [norm]
        if watch.mismatches or differs or not within.contains(step, loss):
            stopped = step
            break
    parameters = whole(program.state_dict()["model"], exchange)
    return ProgramRun(
        losses=tuple(losses),
        gradient_norms=tuple(norms),
        parameters=parameters,
        stopped=stopped,
        onward=from_rank(0, list(onward.checks()), exchange),
    )


def checks(
    reference: ReferenceRun, run: ProgramRun, allowed: Allowed, exchange: Exchange
) -> tuple[Check, ...]:
    """All checks of a run, made on the rank that has the reference; equal on all."""
    own: list[Check] = []
    if (solo := reference.solo) is not None:
        own = [
            of_losses(  # where it is more than allowed, that is the last step that ran
                "loss of every step",
                run.losses,
                reference.losses,
                allowed.losses,
                worst=None if run.stopped is None else len(run.losses) - 1,
            ),
            *alive("reference", solo),
        ]
        if run.stopped is None:
            own += parted(solo, run, allowed.norms, allowed.parameters)
    return (*from_rank(reference.owner, own, exchange), *run.onward)


def from_rank(rank: int, own: list[Check], exchange: Exchange) -> tuple[Check, ...]:
    """Return the checks of one rank, on all."""
    return tuple(exchange.gather(own, list[Check])[rank])


def of_losses(
    name: str, losses: Sequence[float], center: Sequence[float], allowed: Sequence[float],
    words: str = "the reference has {}", worst: int | None = None,
) -> Check:  # fmt: skip
    """Return the check of the step with the largest share of what is allowed (`worst`, if that is
    known); `words` say what should be there."""
    off = [abs(loss - its) for loss, its in zip(losses, center, strict=False)]
    worst = worst_of(off, allowed) if worst is None else worst
    why = f"step {worst}: the loss is {losses[worst]:.12g}"
    if math.isfinite(losses[worst]):
        why += f", {words.format(f'{center[worst]:.12g}')}"
    return at_most(name, off[worst], allowed[worst], why)


def of_reference(checks: Sequence[Check], size: int) -> RootCause | None:
    """Explain that one device does not learn: of several it says nothing. None where it does."""
    failed = [check for check in checks if check.name.startswith(_REFERENCE) and not check.holds]
    if not failed:
        return None
    return RootCause(
        state=Subject.LOSS,
        axis="",
        factor="the reference does not learn",
        place="reference",
        step=0,
        ranks=tuple(range(size)),
        sentence=f"The reference itself fails ({failed[0].name.removeprefix(_REFERENCE)}: "
        f"{failed[0].why}), so there is nothing to compare with.",
        fix="Use another `optimizer.lr`, or more `--steps`.",
    ).proven("the reference was run alone")


def of_dtypes(
    checks: Sequence[Check], stopped: int | None, layout: str, size: int
) -> RootCause | None:
    """Explain what holds in fp64 and not in the spec's own dtypes; `stopped` is the step that was
    the last. None where all holds."""
    failed = next((check.name for check in checks if not check.holds), None)
    if failed is None:
        return None
    return RootCause(
        state=Subject.GRADIENTS if "gradient" in failed else Subject.LOSS,
        axis="",
        factor=f"in {layout} only",
        place="",
        step=stopped or 0,
        ranks=tuple(range(size)),
        sentence="In fp64 the same steps match the reference, so every sum is right.",
        fix="Look for a state that is stored, reduced or cast in a coarser dtype than "
        "precision.layout, and for an overflow.",
    ).unexplained("every sum, because in fp64 the same steps match the reference")


class BesideOneDevice(StepGuard):
    """Of one training. `resume()` is the command that continues from its last checkpoint, "" where
    there is none. All ranks call all, for states are gathered."""

    def __init__(
        self,
        program: Program,
        exchange: Exchange,
        is_measured: Callable[[int], bool],
        resume: Callable[[], str],
    ) -> None:
        """Raises SpecError for a training that drops out, which draws other masks than one device
        would."""
        spec = program.spec
        if without_dropout(spec) is not spec or dropping(spec, exchange):
            raise refused(
                "verify_every",
                "the model uses dropout, and ranks may draw other masks than the reference",
                "Set dropout to 0, or remove `verify_every`.",
            )
        self.every = spec.verify_every
        self._program, self._exchange = program, exchange
        self._is_measured, self._resume = is_measured, resume
        self._is_owed = False
        self._onward: Onward | None = None

    @contextmanager
    def around(self, step: int, watch: AbstractContextManager[object]) -> Iterator[None]:
        """A step's context (`step` counts from 0), with the state before it taken where it is
        due."""
        if not self._is_due(step):
            with watch:
                yield
            return
        self._is_owed = False
        self._onward = Onward(self._program, self._exchange)
        with self._onward.around(step), watch:
            yield

    def _is_due(self, step: int) -> bool:
        """Step 0 has a state that nothing has come to, which `ptrain verify` looks at; after the
        last there is none to compare."""
        self._is_owed |= step > 0 and step % self.every == 0
        is_metered = self._is_measured(step) or self._is_measured(step + 1)
        is_last = step + 1 == self._program.spec.train.steps
        return self._is_owed and not (is_metered or is_last) and self._onward is None

    def judge(self, step: int, loss: float, norm: float | None) -> None:
        """Compare what is known after a step. Raises TrainingStopped on all ranks where it
        differs."""
        onward = self._onward
        if onward is None:
            return
        is_first = onward.is_recorded
        if onward.judge(step, loss, norm):
            self._stop(onward, step)
        if not is_first:
            self._onward = None
            LOG.debug("step %d  the reference continues like the run", step + 1)

    def _stop(self, onward: Onward, step: int) -> None:
        differing = [
            (
                f"{check.name.removeprefix('from its own state: ')} differs by "
                f"{check.measured:.3g} (limit {check.tolerance:.3g})"
            )
            for check in onward.checks()
            if not check.holds
        ]
        words = self._exchange.first("; ".join(differing))
        command = self._resume()
        again = f" Then resume from the last checkpoint: {command}" if command else ""
        raise TrainingStopped(
            f"step {step + 1}: the reference, continued from the run's state, differs\n  "
            f"{words}\n  remedy: Run `ptrain verify` with this spec to find the root "
            f"cause.{again}"
        )
