"""The inputs of the training loop: the learning rate of a step, and which steps are measured, timed
and profiled.

The third step, a steady one, is always measured. The step before it is measured, too, for one-time
work: DDP rebuilds its buckets there, so its additional traffic is set-up. That step also derives
states from the use of their storages, and reports differences from the declarations of the program.
The step after a measured one is timed for the wait on collectives, which the other meters would
distort.

`profile: [steps]` writes a Chrome trace of each of these steps per rank, for Perfetto or HTA. A
measured step is not traced, because its trace would contain the meters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from signal import Signals

import torch
from torch.profiler import ProfilerActivity, profile

from ptrain.cost import Estimate, Phase, Traffic, add_traffic
from ptrain.data.sampler import SampleSource
from ptrain.errors import TrainingStopped
from ptrain.files import warn_if_unwritable
from ptrain.interpreter.program import Program
from ptrain.meters.blocked import WaitMeter
from ptrain.meters.measure import Measurement, measure
from ptrain.meters.memory import RoleFinder
from ptrain.meters.replicas import ReplicaMeter
from ptrain.report.routing import LayerRouting
from ptrain.runtime.world import World
from ptrain.spec.dials import GatherAfterUpdate
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.spec import Spec
from ptrain.train.exchange import Exchange
from ptrain.train.folder import RunFolder
from ptrain.train.journal import LOG, Journal
from ptrain.train.rank_start import Interrupts


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopInputs:
    """The objects that the training loop uses in addition to its program.

    Attributes:
        corpus: The source of samples.
        exchange: The exchange of the ranks.
        interrupts: The received signals.
        journal: The reports of this rank.
        watch: Returns the context of a step (from 0), with the meters and profilers that are due.
        routing: Returns the routing counts of a step (from 0); empty if it was not watched.
        check_step: Called with step, loss and gradient norm; may stop the training.
        consistency: The comparison of replicas; may stop the training when it is due.
        save: Writes a checkpoint after this number of steps.
    """

    corpus: SampleSource
    exchange: Exchange
    interrupts: Interrupts
    journal: Journal
    watch: Callable[[int], AbstractContextManager[object]]
    routing: Callable[[int], Sequence[LayerRouting]]
    check_step: Callable[[int, float, float | None], None]
    consistency: Consistency
    save: Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a training.

    Attributes:
        steps: The number of finished steps, including those before a resume.
        loss: The loss of the last step. None: no step was done.
        held_out_loss: The last held-out loss. None: no evaluation was done.
        interrupt: The signal that ended the training early. None: it is complete.
    """

    steps: int
    loss: float | None = None
    held_out_loss: float | None = None
    interrupt: Signals | None = None


class Consistency:
    """The comparison of values that must be equal on several ranks.

    Args:
        program: The program.
        exchange: The exchange of the ranks.
        resume: Returns the command that continues from the last checkpoint, "" without one.
    """

    def __init__(self, program: Program, exchange: Exchange, resume: Callable[[], str]) -> None:
        self.every = program.spec.consistency_every
        self._replicas = ReplicaMeter(program, exchange)
        self._resume = resume
        self._checked = 0  # the number of steps at the last comparison

    def step_context(
        self, step: int, watch: AbstractContextManager[object]
    ) -> AbstractContextManager[object]:
        """Return the context of a step.

        It records the gradients of the step if `require_agreement` is due after it.

        Args:
            step: The step, from 0.
            watch: The context of the step, which is entered in any case.
        """
        return self._record_gradients(watch) if self.is_due(step + 1) else watch

    def is_due(self, steps: int) -> bool:
        """Return True if the ranks are compared after this number of steps.

        The caller settles the reports of all steps first: a value that is not finite is another
        finding, with another fix.
        """
        return self.every > 0 and steps % self.every == 0

    def require_agreement(self, steps: int) -> None:
        """Require that the ranks agree after this number of steps.

        It does nothing if they were compared after this step already, or if the check is off.

        Raises:
            TrainingStopped: Values differ. Raised on all ranks.
        """
        if not self.every or steps == self._checked:
            return
        self._checked = steps  # before the check, which raises on all ranks if it fails
        if (root_cause := self._replicas.root_cause(self._replicas.check(steps))) is None:
            LOG.debug("step %d  the ranks agree", steps)
            return
        command = self._resume()
        remedy = (
            f"Continue from the last checkpoint, where the ranks agreed: `{command}`"
            if command
            else "Train again with `checkpoint.every=N`; no checkpoint was saved."
        )
        raise TrainingStopped(
            f"step {steps}: values that must be identical on the ranks differ\n  {root_cause}\n "
            f" remedy: {remedy}"
        )

    @contextmanager
    def _record_gradients(self, watch: AbstractContextManager[object]) -> Iterator[None]:
        """Temporarily record gradients, inside the context `watch`."""
        with watch, self._replicas.record_gradients():
            yield


def learning_rate(optimizer: OptimizerSpec, step: int) -> float:
    """Return the learning rate of a step.

    Args:
        optimizer: The optimizer section of the spec.
        step: The step, from 0. The first of w warm-up steps uses lr / w.
    """
    schedule = optimizer.schedule
    if step < schedule.warmup:
        return optimizer.lr * (step + 1) / schedule.warmup
    if not schedule.decay_steps:
        return optimizer.lr
    done = min(1.0, (step - schedule.warmup) / schedule.decay_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * done))
    return optimizer.lr * (schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * cosine)


def moved_profiles(spec: Spec, metered: tuple[int, ...]) -> dict[int, int]:
    """Return the step that is traced instead, for each step to profile that is measured.

    Args:
        spec: The spec, whose `profile` lists steps from 1.
        metered: The measured steps, from 1.
    """
    return {step: max(metered) + 1 for step in spec.profile if step in metered}


def moved_profiles_line(spec: Spec, metered: tuple[int, ...]) -> str:
    """Return one line about steps that are traced instead of measured ones, "" without any.

    Args:
        spec: The spec, whose `profile` lists steps from 1.
        metered: The measured steps, from 1.
    """
    if not (moves := moved_profiles(spec, metered)):
        return ""
    steps, instead = " and ".join(map(str, moves)), max(metered) + 1
    end = "is traced instead" if instead <= spec.train.steps else "would be traced instead"
    return f"profile  step {steps} is measured; step {instead} of {spec.train.steps} {end}"


@contextmanager
def profile_step(folder: Path, step: int, world: World) -> Iterator[None]:
    """Temporarily profile a step, and write `rank<r>-step<n>.json.gz` at the end.

    Args:
        folder: The folder of the traces, created if missing.
        step: The step, from 1.
        world: The ranks.
    """
    with warn_if_unwritable(folder, LOG.warning):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU]
    if world.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True) as profiler:
        yield
        if world.device.type == "cuda":  # kernels that run after the profiler ends are not traced
            torch.cuda.synchronize(world.device)
    path = folder / f"rank{world.rank}-step{step}.json.gz"
    with warn_if_unwritable(path, LOG.warning):
        path.unlink(missing_ok=True)  # torch would write through a link
        profiler.export_chrome_trace(str(path))
        path.chmod(0o600)


FIRST_STEADY = 2  # the first two steps create optimizer state and rebuild DDP's buckets


class Probe:
    """The meters and profilers of the steps; a call with a step (from 0) returns its context.

    Args:
        program: The program.
        folder: The run folder.
        first: The number of finished steps.
        every: Measure every N steps. 0: only the steady step.
        measured: Called with the estimate of each measured step.

    Attributes:
        steady: The steady step that is always measured, from 0.
        estimate: The figures of this step, with rows of the set-up. None before it.
    """

    def __init__(
        self,
        program: Program,
        folder: RunFolder,
        *,
        first: int,
        every: int,
        measured: Callable[[Estimate], None],
    ) -> None:
        self._program = program
        self._folder = folder
        self.steady = first_steady_step(program.spec, first)
        metered = (self.steady, self.steady + 1)  # from 1: the step before the steady one, and it
        instead = moved_profiles(program.spec, metered)
        self._traced = {instead.get(step, step) for step in program.spec.profile}
        self._every = every
        self._measured = measured
        if line := moved_profiles_line(program.spec, metered):
            LOG.warning(line)
        self._before: Estimate | None = None
        self.estimate: Estimate | None = None  # of the first steady step, with the set-up rows

    def __call__(self, step: int) -> AbstractContextManager[None]:
        is_watched = step + 1 in self._traced or self.is_measured(step) or self._is_timed(step)
        return self._watch_step(step) if is_watched else nullcontext()

    @contextmanager
    def _watch_step(self, step: int) -> Iterator[None]:
        """Run a step with the meters and profilers that are due."""
        with ExitStack() as stack:
            if step + 1 in self._traced:
                stack.enter_context(profile_step(self._folder.trace, step + 1, self._program.world))
            measurement = (
                stack.enter_context(measure(self._program)) if self.is_measured(step) else None
            )
            # The finder runs in the step before the steady one, whose memory is not reported.
            is_before = step == self.steady - 1
            finder = stack.enter_context(RoleFinder(self._program)) if is_before else None
            stopwatch = (
                stack.enter_context(
                    WaitMeter(self._program.mesh.axes_by_group(), rank=self._program.world.rank)
                )
                if self._is_timed(step)
                else None
            )
            yield
        if finder is not None:
            for row in finder.rows():
                if not row.agrees:
                    LOG.warning("memory: %s", row)
        if measurement is not None:
            self._store_measurement(step, measurement)
        if stopwatch is not None:
            self._store_times(step, stopwatch)

    def is_measured(self, step: int) -> bool:
        """Return True if the meters run in a step (from 0)."""
        # A traced step is not measured: its trace would contain the meters.
        chosen = self._every > 0 and step > self.steady and step % self._every == 0
        return (chosen and step + 1 not in self._traced) or step in (self.steady - 1, self.steady)

    def _is_timed(self, step: int) -> bool:
        """Return True if the wait on collectives is timed in a step (from 0)."""
        return self.is_measured(step - 1) and not self.is_measured(step)

    def _store_measurement(self, step: int, measurement: Measurement) -> None:
        """Store the estimate of a measured step."""
        estimate = measurement.estimate()
        if step == self.steady - 1:
            self._before = estimate
            return
        if step == self.steady:
            assert self._before is not None
            rows = (*estimate.traffic, *setup_traffic(self._before.traffic, estimate.traffic))
            undefined = {"blocked_seconds": "no step was timed"} | estimate.undefined
            self.estimate = replace(estimate, traffic=add_traffic(rows), undefined=undefined)
        self._measured(estimate)

    def _store_times(self, step: int, stopwatch: WaitMeter) -> None:
        """Store the times of a timed step; in `estimate` if it follows the steady step."""
        rows = stopwatch.rows()
        for row in rows:
            LOG.debug("step %d  waited for %s %.4f s", step + 1, "+".join(row.axes), row.seconds)
        if step != self.steady + 1 or self.estimate is None:
            return
        undefined = dict(self.estimate.undefined)
        del undefined["blocked_seconds"]
        if stopwatch.absent:
            undefined["blocked_seconds"] = stopwatch.absent
        self.estimate = replace(self.estimate, blocked=rows, undefined=undefined)


def first_steady_step(spec: Spec, first: int) -> int:
    """Return the first step whose time and memory are steady.

    It is the third step from `first`. If the next forward pass all-gathers updated units, it is the
    first step from there that follows no evaluation and no checkpoint, because these all-gather the
    units earlier.

    Args:
        spec: The spec, for its periods of evaluation and checkpoints.
        first: The first step that runs, from 0.

    Returns:
        The step, from 0. It may be after the last step.
    """
    third = first + FIRST_STEADY
    if spec.gather_after_update is not GatherAfterUpdate.NEXT_FORWARD:
        return third
    periods = [period for period in (spec.eval.every, spec.checkpoint.every) if period]
    later = range(third, spec.train.steps)
    return next((step for step in later if all(step % period for period in periods)), third)


def setup_traffic(before: tuple[Traffic, ...], steady: tuple[Traffic, ...]) -> Iterator[Traffic]:
    """Yield the set-up traffic: the calls of a step in addition to the steady step's calls.

    Args:
        before: The traffic of the step before the steady one.
        steady: The traffic of the steady step.
    """
    known = {row.key: row for row in steady}
    for row in before:
        usual = known.get(row.key)
        calls = row.calls - (usual.calls if usual else 0)
        if calls > 0:
            yield Traffic(
                key=replace(row.key, phase=Phase.SETUP),
                calls=calls,
                payload_bytes=row.payload_bytes - (usual.payload_bytes if usual else 0),
                sent_bytes=row.sent_bytes - (usual.sent_bytes if usual else 0),
            )
