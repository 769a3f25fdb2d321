"""The comparison of a run's losses with the reference's over many steps.

Theorem 5 states that they are equal; `tolerances` defines how close they must be. The run ends at
the first step whose loss is not finite or outside of the tolerance. If no step explains why a
trajectory fails, its checks are reported alone.

The induction step of Theorem 5: the reference continues from a state of the run.

Over a hundred steps, training enlarges a single rounding beyond any fixed tolerance that still
detects faults (`tolerances`). Two runs from the same state start without a difference: loss and
gradient of the next step, and the loss after its update, agree as closely at the end of a training
as at its beginning. So every STATE_EVERY steps, from the first on, the reference loads the run's
full state and continues for two steps. Their tolerances are those of any loop in the coarsest
dtype.

`verify_every: n` runs this induction step every n steps of a training. It is postponed at a step
that the meters measure, or that precedes one, because they would measure the reference too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor

from ptrain.data.corpus import open_corpus
from ptrain.errors import TrainingStopped, input_error
from ptrain.interpreter.program import Program
from ptrain.models.modes import fork_generators
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.report.finding import RootCause, Subject
from ptrain.report.record import Check
from ptrain.spec.spec import Spec
from ptrain.train.exchange import Exchange
from ptrain.train.journal import LOG
from ptrain.train.options import StepGuard
from ptrain.verification.capture import full_gradients, leaf_shards, run_step_for_global_loss
from ptrain.verification.compare import (
    LargestDifference,
    joint_difference,
    learning_checks,
    limit_check,
    norm_checks,
    worst_index,
)
from ptrain.verification.jobs.job import TOLERANCES, Tolerance
from ptrain.verification.parts import gather_full_tensors
from ptrain.verification.preconditions import EVERY, StepObserver
from ptrain.verification.reference import ReferenceTraining, Trajectory
from ptrain.verification.references import (
    Progress,
    ReferenceRun,
    has_dropout,
    is_order_sensitive,
    without_dropout,
)
from ptrain.verification.tolerances import (
    RunTolerances,
)
from ptrain.verification.updates.repeat import UpdateRecorder

STATE_EVERY = 25  # steps between two states that a reference takes: four in the default 100 steps

States = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """The reference's result from a loaded state.

    Attributes:
        loss: The loss of the step.
        gradients: Its gradients by name, without clipping and loss scale.
        following: The loss of the next step.
    """

    loss: float
    gradients: dict[str, Tensor]
    following: float


@dataclass(slots=True)
class ReferenceContinuation:
    """A comparison of a run with the reference, continued from the run's state.

    Enter `step_context` around a step, and call `check_step` after it and after the next one. All
    ranks call all methods; rank 0 runs the reference and compares.

    Attributes:
        worst: The largest difference of each figure, by name of the check. Filled on rank 0.
    """

    program: Program
    exchange: Exchange
    worst: dict[str, LargestDifference] = field(default_factory=dict)
    _of: int = -1  # the step from whose state the reference continued
    _first: ReferenceStep | None = None  # its result, on rank 0
    _updates: UpdateRecorder | None = None  # until the step is checked

    @property
    def spec(self) -> Spec:
        return self.program.spec

    @property
    def limit(self) -> Tolerance:
        """The tolerances of any loop in the coarsest dtype of parameters and gradients.

        In fp64 the tolerance of gradients is smaller, because all gradients as one vector differ
        less than each by itself.
        """
        if self.spec.precision.compute_fp64:
            return replace(TOLERANCES[torch.float64], gradients=1e-12)
        layout = self.spec.precision.effective_layout
        dtypes = (layout.parameters, layout.reduced, layout.gradients)
        return max(
            (TOLERANCES[TORCH_DTYPES[dtype]] for dtype in dtypes), key=lambda its: its.gradients
        )

    @contextmanager
    def step_context(self, step: int) -> Iterator[None]:
        """Run the reference from the state before a step; while the context is open, record the
        updates of the run."""
        with fork_generators():
            # The reference must not advance the generators of the run.
            self.continue_from(step)
        self._updates = UpdateRecorder(leaf_shards(self.program))
        with self._updates:
            yield

    def check_step(self, step: int, loss: float, norm: float | None) -> bool:
        """Compare after a step inside `step_context`, or after the step that follows it.

        Args:
            step: The step, from 0.
            loss: The global mean loss of the step.
            norm: The gradient norm before clipping; None if unknown.

        Returns:
            True on all ranks if a figure differs.
        """
        if self._updates is not None:
            self.compare_step(
                loss, full_gradients(self.program, self._updates, self.exchange, norm)
            )
            self._updates = None
        else:
            self.compare_following(step, loss)
        return self.has_difference(step)

    @property
    def is_recorded(self) -> bool:
        """True while the step inside `step_context` has not been checked."""
        return self._updates is not None

    def continue_from(self, step: int) -> None:
        """Run the reference on rank 0, from the state before `step`."""
        state = {
            kind: gather_full_tensors(tensors, self.exchange)
            for kind, tensors in self.program.state_dict().items()
        }
        self._of, is_first = step, self.exchange.world.is_first
        self._first = self._run_two_steps(ReferenceTraining(self.spec), state) if is_first else None

    def _run_two_steps(self, device: ReferenceTraining, states: States) -> ReferenceStep:
        """Run two steps from a state; the second without an update."""
        step, device.sample_offset = self._of, self.program.sample_offset
        load_program_state(device, states)
        accumulated = device.accumulate(step)
        gradients = accumulated.gradients  # before they are clipped in place
        device.update(step, accumulated.sums)
        return ReferenceStep(accumulated.loss, gradients, device.accumulate(step + 1).loss)

    def compare_step(self, loss: float, gradients: Mapping[str, Tensor]) -> None:
        """Compare the loss and the gradients of the run's step, on rank 0.

        Args:
            loss: The global mean loss.
            gradients: The full gradients before clipping, by name.
        """
        if (first := self._first) is not None:
            self._record("loss", loss - first.loss, self.limit.losses * abs(first.loss))
            if not (_overflows(first.gradients) and _overflows(gradients)):  # both skip the update
                self._record(
                    "gradient", joint_difference(first.gradients, gradients), self.limit.gradients
                )

    def compare_following(self, step: int, loss: float) -> None:
        """Compare the loss of the step after the checked one, on rank 0.

        Args:
            step: The step, from 0. Any other step than the following one is ignored.
            loss: The global mean loss.
        """
        if self._first is not None and step == self._of + 1:
            right = self._first.following
            # an update by signs, or in 16 bits, enlarges a rounding of the gradient
            limit = TOLERANCES[torch.bfloat16] if is_order_sensitive(self.spec) else self.limit
            self._record("loss after the update", loss - right, limit.losses * abs(right))

    def _record(self, name: str, difference: float, allowed: float) -> None:
        name, place = f"from its own state: {name}", f"step {self._of}"
        now = LargestDifference(name, allowed, abs(difference), place)
        self.worst[name] = max(self.worst.get(name, now), now, key=lambda its: its.share)

    def has_difference(self, step: int) -> bool:
        """Return True on all ranks if a figure compared in this step differs. All ranks call it."""
        if self._of < 0 or step - self._of > 1:
            return False
        return bool(
            self.exchange.broadcast(any(worst.share > 1.0 for worst in self.worst.values()))
        )

    def checks(self) -> Iterator[Check]:
        """Yield a check per figure; none on ranks other than 0."""
        for worst in self.worst.values():
            why = f"{worst.place}: the reference, continued from the run's state, differs"
            allowed = worst.tolerance if math.isfinite(worst.tolerance) else math.nan
            yield limit_check(worst.name, worst.difference, allowed, why)


def _overflows(gradients: Mapping[str, Tensor]) -> bool:
    """Return True if a gradient has overflowed, as a scaled loss may cause."""
    return any(not bool(torch.isfinite(gradient).all()) for gradient in gradients.values())


@torch.no_grad()
def load_program_state(device: ReferenceTraining, states: States) -> None:
    """Load a program's state into a reference.

    Args:
        device: The reference.
        states: Full tensors, named as in `Program.state_dict`: parameters, master copies, optimizer
            state, loss scale and router biases.
    """
    updater, optimizer = device.updater, states["optimizer"]
    for name, parameter in updater.parameters.items():
        parameter.copy_(states["model"][name])
        if (updated := updater.updated.get(name)) is None:
            continue  # frozen
        if updated is not parameter:
            updated.copy_(optimizer[f"{name}.master"])
        owner = updater.optimizer_of(name)
        own = {
            key: optimizer[f"{name}.{key}"].to(value.dtype)
            for key, value in updater.initial_entries(name).items()
        }
        owner.state[updated].update(own)
    if "scaling" in states:
        updater.scale = float(states["scaling"]["scale"])
        updater.steps_since_change = int(states["scaling"]["growth_tracker"])
    for name, bias in states.get("routers", {}).items():
        device.module.get_buffer(name).copy_(bias)


Checks: TypeAlias = "tuple[Check, ...]"

_REFERENCE = "reference: "  # the prefix of checks of the reference alone


@dataclass(slots=True, kw_only=True)
class LossCorridor:
    """The expected loss of each step, with its tolerance.

    Attributes:
        center: The reference's loss of each step.
        allowed: The tolerances.
        derive_wider: Runs permuted references and derives wider tolerances from them. Called once,
            at the first violation; None if that is not possible (any more).
    """

    center: tuple[float, ...]
    allowed: RunTolerances
    derive_wider: Callable[[], RunTolerances] | None = None

    def contains(self, step: int, loss: float) -> bool:
        """Return True if a loss is finite and within the tolerance, widened if necessary.

        All ranks must call it.

        Args:
            step: The step of the loss, from 0.
            loss: The global mean loss, equal on all ranks.
        """
        if not math.isfinite(loss):
            return False
        return self._is_near(step, loss) or (self._widen() and self._is_near(step, loss))

    def check_with(self, checks: Callable[[RunTolerances], Checks]) -> Checks:
        """Return the checks for the tolerances, widened if a check fails.

        All ranks must call it, and must get equal checks.
        """
        own = checks(self.allowed)
        is_beyond = any(not check.holds and check.tolerance for check in own)
        return checks(self.allowed) if is_beyond and self._widen() else own

    def _is_near(self, step: int, loss: float) -> bool:
        return abs(loss - self.center[step]) <= self.allowed.losses[step]

    def _widen(self) -> bool:
        if self.derive_wider is None:
            return False
        with fork_generators():  # the references must not advance the run's generators
            self.allowed, self.derive_wider = self.derive_wider(), None
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRun(Trajectory):
    """The trajectory of a program, equal on all ranks.

    Attributes:
        stop_step: The step at which a difference ended the run; None if all steps ran.
        continuation_checks: The checks of references that continued from the run's states.
    """

    stop_step: int | None
    continuation_checks: tuple[Check, ...] = ()


def run_trajectory(
    program: Program,
    exchange: Exchange,
    within: LossCorridor,
    watch: StepObserver,
    progress: Progress,
) -> ProgramRun:
    """Run a program until a step differs from the reference, or ranks differ from each other.

    All ranks must call it.

    Args:
        program: The program, before its first step.
        exchange: The group of all ranks.
        within: The expected losses. Their number is the number of steps.
        watch: Compares the ranks in every EVERYth step.
        progress: Prints the progress.

    Returns:
        The trajectory.
    """
    source = open_corpus(program.spec.data)
    losses: list[float] = []
    norms: list[float] = []
    stopped = None
    onward = ReferenceContinuation(program, exchange)
    for step in range(len(within.center)):
        with ExitStack() as stack:
            # Not before the last step: the comparison needs the loss of the step after it.
            if step % STATE_EVERY == 0 and step < len(within.center) - 1:
                stack.enter_context(onward.step_context(step))
            if step % EVERY == 0:
                stack.enter_context(watch.observe_step(step))
            loss, norm = run_step_for_global_loss(program, source, step, exchange)
        differs = onward.check_step(step, loss, norm)
        progress.step("the ranks", step + 1, len(within.center))
        losses.append(loss)
        norms += [] if norm is None else [norm]
        if watch.mismatches or differs or not within.contains(step, loss):
            stopped = step
            break
    parameters = gather_full_tensors(program.state_dict()["model"], exchange)
    return ProgramRun(
        losses=tuple(losses),
        gradient_norms=tuple(norms),
        parameters=parameters,
        stop_step=stopped,
        continuation_checks=broadcast_checks(0, list(onward.checks()), exchange),
    )


def trajectory_checks(
    reference: ReferenceRun, run: ProgramRun, allowed: RunTolerances, exchange: Exchange
) -> tuple[Check, ...]:
    """Return all checks of a run, which the owner of the reference computes, on all ranks.

    Args:
        reference: The reference run, whose owner compares.
        run: The program's run.
        allowed: The tolerances.
        exchange: The group of all ranks, which all call this.
    """
    own: list[Check] = []
    if (solo := reference.trajectory) is not None:
        own = [
            loss_check(  # a run that was stopped is outside of the tolerance in its last step
                "loss of every step",
                run.losses,
                reference.losses,
                allowed.losses,
                worst=None if run.stop_step is None else len(run.losses) - 1,
            ),
            *learning_checks("reference", solo),
        ]
        if run.stop_step is None:
            own += norm_checks(solo, run, allowed.norms, allowed.parameters)
    return (*broadcast_checks(reference.owner, own, exchange), *run.continuation_checks)


def broadcast_checks(rank: int, own: list[Check], exchange: Exchange) -> tuple[Check, ...]:
    """Return the checks of one rank on all ranks. All ranks must call it.

    Args:
        rank: The rank whose checks are returned.
        own: This rank's checks; only the checks of `rank` are used.
        exchange: The group of all ranks.
    """
    return tuple(exchange.gather(own, list[Check])[rank])


def loss_check(
    name: str, losses: Sequence[float], center: Sequence[float], allowed: Sequence[float],
    words: str = "the reference has {}", worst: int | None = None,
) -> Check:  # fmt: skip
    """Return the check of the loss that uses the largest share of its tolerance.

    Args:
        name: The name of the check.
        losses: The loss of each step.
        center: The expected loss of each step.
        allowed: The absolute tolerance of each step.
        words: The text about the expected loss; `{}` is replaced by it.
        worst: The step to report; default: the one with the largest share.
    """
    off = [abs(loss - its) for loss, its in zip(losses, center, strict=False)]
    worst = worst_index(off, allowed) if worst is None else worst
    why = f"step {worst}: the loss is {losses[worst]:.12g}"
    if math.isfinite(losses[worst]):
        why += f", {words.format(f'{center[worst]:.12g}')}"
    return limit_check(name, off[worst], allowed[worst], why)


def explain_reference(checks: Sequence[Check], size: int) -> RootCause | None:
    """Return the root cause of a reference that does not learn.

    Two runs that do not learn agree whatever their sums are, so such a comparison proves nothing.

    Args:
        checks: The checks of a verification, including the reference's.
        size: The number of ranks; all are named.

    Returns:
        The root cause; None if the reference learns.
    """
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
    ).as_proven("the reference was run alone")


def explain_dtypes(
    checks: Sequence[Check], stopped: int | None, layout: str, size: int
) -> RootCause | None:
    """Return the root cause of checks that hold in fp64 but fail in the spec's dtypes.

    Args:
        checks: The checks in the spec's dtypes.
        stopped: The step that ended the run; None if all steps ran.
        layout: The name of the precision layout.
        size: The number of ranks.

    Returns:
        The root cause; None if all checks hold.
    """
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
    ).as_unexplained("every sum, because in fp64 the same steps match the reference")


class ReferenceGuard(StepGuard):
    """A guard of a training that runs the induction step of Theorem 5 every `verify_every` steps.

    All ranks must call all methods, because states are all-gathered.

    Attributes:
        every: The number of steps between two checks.
    """

    def __init__(
        self,
        program: Program,
        exchange: Exchange,
        is_measured: Callable[[int], bool],
        resume: Callable[[], str],
    ) -> None:
        """Check that the training can be guarded.

        Args:
            program: The program of the training.
            exchange: The group of all ranks.
            is_measured: Returns True for a step (from 0) that the meters measure.
            resume: Returns the command that continues from the last checkpoint, "" without one.

        Raises:
            SpecError: The model uses dropout. Its ranks draw other masks than the reference.
        """
        spec = program.spec
        if without_dropout(spec) is not spec or has_dropout(spec, exchange):
            raise input_error(
                "verify_every",
                "the model uses dropout, and ranks may draw other masks than the reference",
                "Set dropout to 0, or remove `verify_every`.",
            )
        self.every = spec.verify_every
        self._program, self._exchange = program, exchange
        self._is_measured, self._resume = is_measured, resume
        self._is_owed = False
        self._onward: ReferenceContinuation | None = None

    @contextmanager
    def step_context(self, step: int, watch: AbstractContextManager[object]) -> Iterator[None]:
        """Return the context of a step (from 0), which runs the reference first if that is due."""
        if not self._is_due(step):
            with watch:
                yield
            return
        self._is_owed = False
        self._onward = ReferenceContinuation(self._program, self._exchange)
        with self._onward.step_context(step), watch:
            yield

    def _is_due(self, step: int) -> bool:
        """Return True if the reference continues from the state before this step.

        Step 0 is excluded: its state is the initial one, which `ptrain verify` covers. The last
        step is excluded: the check needs the loss of the step after it.
        """
        self._is_owed |= step > 0 and step % self.every == 0
        is_metered = self._is_measured(step) or self._is_measured(step + 1)
        is_last = step + 1 == self._program.spec.train.steps
        return self._is_owed and not (is_metered or is_last) and self._onward is None

    def check_step(self, step: int, loss: float, norm: float | None) -> None:
        """Compare a finished step with the reference, if it is due.

        Args:
            step: The finished step, from 0.
            loss: The global mean loss.
            norm: The gradient norm, None if the spec does not clip.

        Raises:
            TrainingStopped: On all ranks, if a figure differs.
        """
        onward = self._onward
        if onward is None:
            return
        is_first = onward.is_recorded
        if onward.check_step(step, loss, norm):
            self._stop(onward, step)
        if not is_first:
            self._onward = None
            LOG.debug("step %d  the reference continues like the run", step + 1)

    def _stop(self, onward: ReferenceContinuation, step: int) -> None:
        differing = [
            (
                f"{check.name.removeprefix('from its own state: ')} differs by "
                f"{check.measured:.3g} (limit {check.tolerance:.3g})"
            )
            for check in onward.checks()
            if not check.holds
        ]
        words = self._exchange.broadcast("; ".join(differing))
        command = self._resume()
        again = f" Then resume from the last checkpoint: {command}" if command else ""
        raise TrainingStopped(
            f"step {step + 1}: the reference, continued from the run's state, differs\n  "
            f"{words}\n  remedy: Run `ptrain verify` with this spec to find the root "
            f"cause.{again}"
        )
