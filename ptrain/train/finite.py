"""Checks for values that are not finite, before an update, a checkpoint and a resumed training.

All ranks take part and reach the same result. Before an update the ranks exchange a few numbers, on
the host or on the device. Single tensors are inspected only if some value is not finite.

If the host runs ahead of its device, the last step has been launched but not reported. Its report
is written when its values have arrived.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from signal import Signals
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from ptrain.axes.data.run.flat_target import names_of
from ptrain.cost import Phase
from ptrain.errors import TrainingStopped
from ptrain.internals.dispatch import disable_modes
from ptrain.internals.functional_collectives import AsyncCollectiveTensor
from ptrain.interpreter.program import Program
from ptrain.meters import holdings
from ptrain.meters.holdings import Holding
from ptrain.models.ledger import local_tensor, watch_modules
from ptrain.optimizers.update import COUNTER
from ptrain.report.finding import Subject
from ptrain.report.routing import LayerRouting
from ptrain.runtime.queue import DeviceQueue, Milestone
from ptrain.train.exchange import (
    DeviceSums,
    Exchange,
    HostStepCheck,
    StepCheck,
    StepFigures,
    can_be_late,
)
from ptrain.train.journal import Journal, StepReport
from ptrain.train.rank_start import Interrupts, strongest_signal
from ptrain.units import group_by_key

_REMEDY = "a lower `optimizer.lr`, a longer `optimizer.schedule.warmup`, or `optimizer.clip=1.0`"
_UNKNOWN = "the rank with the first non-finite value is unknown"
_CHUNK_ELEMENTS = 1 << 22  # elements per comparison, which allocates a flag of one byte for each
_STATES = {
    Subject.PARAMETERS: "parameters are not finite",
    Subject.OPTIMIZER: "optimizer state is not finite",
    Subject.GRADIENTS: "reduced gradients are not finite",
}
_Place = tuple[int, int, int, str, str]  # in the model's order: state, stage, tensor, name, key


@dataclass(frozen=True, slots=True)
class NonFiniteTensor:
    """A tensor that is not finite.

    Attributes:
        place: Its position in the model's order.
        values: The values that are not finite on one rank, their numbers, and the number of
            elements.
    """

    place: _Place
    values: str


class FiniteGuard:
    """The check of each step: no update is applied unless loss and gradients are finite.

    If the host runs ahead of its device, the ranks agree on the device (`train.exchange`).
    `read_figures` raises when the next step has been launched, whose update the device skips, too.
    By then the gradients are freed. To name the tensor, the step is recomputed from its parameters,
    which have not changed.

    If backward updates (G = M), no unit waits for the other ranks. A rank reads one value per unit,
    and skips the update of the first unit whose reduced gradient is not finite and of all later
    units of this pass.
    """

    def __init__(
        self,
        program: Program,
        queue: DeviceQueue,
        exchange: Exchange,
        interrupts: Interrupts,
        repeat: Callable[[int], torch.Tensor | None],
    ) -> None:
        """Set up the check.

        Args:
            program: The program.
            queue: The queue of the program's device.
            exchange: The exchange of the ranks.
            interrupts: The received signals, which are summed together with the loss.
            repeat: Recomputes the gradients of a step and returns their norm.
        """
        self._repeat = repeat
        self._program, self._queue = program, queue
        self._exchange, self._interrupts = exchange, interrupts
        self._updated = 0  # units that were updated in the backward pass of this step
        self._left_out: list[NonFiniteTensor] = []
        self._is_repeated = True  # False after a failed recomputation
        if program.updates_in_backward:
            program.admits = self._admits_unit
        self._sums = DeviceSums(program, queue, interrupts) if can_be_late(program, queue) else None

    @property
    def is_late(self) -> bool:
        """True if the figures of a step arrive after the next step was launched."""
        return self._sums is not None

    def start_check(self, step: int, share: torch.Tensor, norm: torch.Tensor | None) -> StepCheck:
        """Start the check of a step before its update.

        Args:
            step: The step, from 0.
            share: This rank's share of the loss.
            norm: The result of `Program.reduce`.

        Raises:
            TrainingStopped: As `read_figures`, unless figures are late.
        """
        if self._sums is not None:
            return self._sums.start_check(share, norm)
        loss_share, length, is_sound = self._read_figures(share, norm)
        numbers = [loss_share, float(not is_sound), *self._interrupts.flags()]
        loss, unsound, *flags = self._exchange.sum_over_ranks(numbers)
        is_sound = math.isfinite(loss) and not unsound
        figures = StepFigures(
            loss=loss, is_sound=is_sound, interrupt=strongest_signal(flags), gradient_norm=length
        )
        self._require_finite(step, figures, loss_share)
        self._updated = 0
        return HostStepCheck(self._queue, figures, self._program.scaling)

    def read_figures(self, step: int, look: StepCheck) -> StepFigures:
        """Return the figures of a step whose update was launched.

        Args:
            step: The step, from 0.
            look: The check that was started for it. This call waits for its figures.

        Raises:
            TrainingStopped: The loss or a gradient of a rank is not finite. Raised on all ranks.
        """
        figures = look.wait_for_figures()
        self._require_finite(step, figures)
        return figures

    def _require_finite(self, step: int, figures: StepFigures, share: float = 0.0) -> None:
        """Raise TrainingStopped unless loss and gradients are finite."""
        if figures.is_sound:
            return
        loss, norm, origin = figures.loss, None, ""
        if self.is_late:
            norm, origin = self._recompute(step, share)
        what = (
            f"the loss is {loss}" if not math.isfinite(loss) else self._gradient_problem(loss, norm)
        )
        if not self.is_late:  # recomputing replaces the gradients of the step, so it comes second
            _, origin = self._recompute(step, share)
        raise TrainingStopped(
            f"step {step + 1}: {what}\n  {origin}\n  {self._parameters_text(step)}; step "
            f"{step + 1} was not saved\n  remedy: Use {_REMEDY}."
        )

    def _recompute(self, step: int, share: float) -> tuple[torch.Tensor | None, str]:
        """Recompute a step from its parameters to find the first value that is not finite.

        Returns:
            The gradient norm, and a sentence that names the rank and the value, equal on all ranks.
        """
        shares = self._exchange.gather(share)
        ranks = [str(rank) for rank, its in enumerate(shares) if not math.isfinite(its)]
        known = f"the loss is not finite on rank {', '.join(ranks)}" if ranks else ""
        if self._program.updates_in_backward:
            return None, known or f"{_UNKNOWN}: backward has already changed parameters"
        norm, witness = None, _NonFiniteFinder(self._program)
        with disable_modes(), witness.watch():
            self._program.wrapped.clear_gradients()  # else the step would add to them
            norm = self._repeat(step)
        answers = [(witness.found, witness.failure)]
        # If the recomputation failed here, other ranks may still wait for this one in a collective.
        with suppress(*(OSError, RuntimeError) if witness.failure else ()):
            answers = self._exchange.gather(answers[0])
        firsts, failures = ([its for its in answer if its] for answer in zip(*answers, strict=True))
        self._is_repeated, first = not failures, ""
        if firsts:
            # Lists compare in the order of their items: micro-batch, pass, stage, number of the
            # value.
            number, *_, place, values, _ = least = min(firsts)
            ranks = [str(its[-1]) for its in firsts if its[:5] == least[:5]]
            micro = f"micro-batch {number + 1} of {self._program.spec.batch.accumulate}"
            first = f"first on rank {', '.join(ranks)}, {micro}: {place} has {values}"
        unknown = f"{known}; {_UNKNOWN}" if known else _UNKNOWN
        if failures:  # report the earliest: the other ranks fail because they wait for this one
            _, rank, words = min(failures)
            why = f"recomputing the step failed on rank {rank}: {words}"
            return norm, f"{unknown}: {why}" + (f"; before that {first}" if first else "")
        why = "a device may be faulty, or the model keeps state between passes"
        none = f"{unknown}; recomputing the step gave finite values: {why}"
        return norm, first or none

    def _read_figures(
        self, share: torch.Tensor, norm: torch.Tensor | None
    ) -> tuple[float, float | None, bool]:
        """Read the loss share and the norm of this rank, and whether its gradients are finite.

        Gradients count as finite if the loss scaler skips their update. This is the only read from
        the device before the update. The norm is global, and finite only if the gradients of all
        ranks are. Without a norm each rank inspects its gradients by two scalars per tensor, which
        are freed before the update. The meters count neither.
        """
        program, scaling = self._program, self._program.scaling
        flags: list[torch.Tensor] = []
        with torch.no_grad(), disable_modes():
            if norm is not None:
                flags = [norm] if scaling is None else [norm, scaling.found_inf]
            elif scaling is None and not program.updates_in_backward:
                flags = _extreme_values(program.gradients())
            loss, *values = _copy_to_host([share, *flags])
        if norm is None:
            return loss, None, not self._left_out and all(map(math.isfinite, values))
        length, *is_skipped = values
        return loss, length, math.isfinite(length) or any(is_skipped)

    def _admits_unit(self, index: int) -> bool:
        """Return True if backward may update a unit."""
        gradients = [target.gradient for target in self._program.wrapped.targets()[index]]
        with disable_modes():
            if not self._left_out and not _is_finite([g for g in gradients if g is not None]):
                self._left_out = list(
                    _find_non_finite(self._program, holdings.gradients(self._program))
                )
        self._updated += not self._left_out
        return not self._left_out

    def _gradient_problem(self, loss: float, norm: torch.Tensor | None) -> str:
        """Return the problem of the gradients, equal on all ranks.

        Args:
            loss: The loss.
            norm: The norm of recomputed gradients. None: not recomputed.
        """
        root_causes: Iterable[NonFiniteTensor] = self._left_out
        if not self._program.updates_in_backward:
            root_causes = _find_non_finite(self._program, holdings.gradients(self._program))
        problem = _first_problem(root_causes, self._exchange) if self._is_repeated else ""
        if not problem:  # all gradients are finite, but the sum of their squares overflowed
            problem = "the gradient norm is not finite, although every gradient is finite"
            if self.is_late and (norm is None or norm.isfinite()):
                problem = "gradients are not finite"
        return f"the loss is {loss:.4f}, but {problem}"

    def _parameters_text(self, step: int) -> str:
        """Return a clause that names the step of the current parameters, equal on all ranks."""
        if not self._program.updates_in_backward:
            return f"the parameters are those of step {step}"
        groups = self._program.wrapped.targets()
        units = sum(not all(target.is_frozen for target in group) for group in groups)
        counts = self._exchange.gather(self._updated)
        if not any(counts) or min(counts) == units:
            return f"the parameters are those of step {step + 1 if any(counts) else step}"
        fewest, most = min(counts), max(counts)
        updated = f"{most}" if fewest == most else f"{fewest} to {most} (by rank)"
        return (
            f"{updated} of the {units} units have the parameters of step {step + 1}, updated "
            f"in its backward pass, the others those of step {step}"
        )


class _NonFiniteFinder:
    """The observer of a recomputed step, which records its first value that is not finite.

    Values are numbered within a micro-batch, in the same order on all ranks of a tp, cp or ep
    group. A rank that only received the value has a higher number than the rank that computed it.
    """

    def __init__(self, program: Program) -> None:
        self.found: list[Any] = []  # micro-batch, pass, stage, order, place, values, rank
        self.failure: list[Any] = []  # after how many seconds, rank, words
        self._program, self._pass, self._number = program, Phase.FORWARD, 0
        self._orders: Counter[int] = Counter()  # values so far, by micro-batch
        # Keyed by identity, because `==` compares the elements of tensors. Weak, so that
        # all-gathered parameters are freed as in the step.
        self._hooks, self._hooked = ExitStack(), WeakTensorKeyDictionary()
        self._began = time.monotonic()

    def phase(self, phase: Phase, micro_batch: int) -> None:
        """Inspect the loss of the pass that ends. Called as an observer of the program."""
        self._inspect_tensor("the loss", 0, self._program.loss.share)
        self._pass, self._number = phase, micro_batch

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Temporarily observe outputs and gradients, without the program's other observers.

        An exception, also of user code, is recorded and suppressed, because the finding about the
        step must still be reported.
        """
        program = self._program
        with self._hooks as hooks:
            # Pushed first, so that it runs last: the observers are restored in any case.
            hooks.push(self._record_failure)
            # The meters would count the recomputed step.
            for observers in (program.observers, program.gradient_observers):
                hooks.callback(observers.__setitem__, slice(None), [*observers])
                observers.clear()
            program.observers.append(self)
            for piece in program.pieces:
                inspect_output = partial(self._inspect_output, piece.index)
                before = partial(self._hook_parameters, piece.index)
                modules = piece.module.named_modules()
                hooks.enter_context(watch_modules(modules, before=before, after=inspect_output))
            yield

    def _record_failure(self, _: object, error: BaseException | None, __: object) -> bool:
        """Record an exception and suppress it. KeyboardInterrupt and SystemExit propagate."""
        words = " ".join(f"{type(error).__name__}: {error}".split())
        if is_kept := isinstance(error, Exception):
            self.failure = [time.monotonic() - self._began, self._program.world.rank, words]
        return is_kept

    def _hook_parameters(self, stage: int, name: str, module: nn.Module, *_: object) -> None:
        """Hook the current parameters: all-gathered units have other ones than sharded units."""
        for key, parameter in module.named_parameters(name, recurse=False):
            if parameter.requires_grad and parameter not in self._hooked:
                place = f"the gradient of {self._program.wrapped.canonical_name(key)}"
                hook = parameter.register_hook(partial(self._inspect_tensor, place, -stage))
                self._hooked[parameter] = self._hooks.callback(hook.remove)

    def _inspect_output(self, stage: int, name: str, _: nn.Module, __: object, output: Any) -> None:
        """Inspect the outputs of a module in the forward pass, and hook their gradients."""
        place = f"the output of {name or 'the model'}"
        leaves = tree_leaves(output) if self._pass is Phase.FORWARD else []  # not if recomputed
        for tensor in filter(torch.is_tensor, leaves):
            self._inspect_tensor(place, stage, tensor)
            if tensor.requires_grad:
                tensor.register_hook(
                    partial(self._inspect_tensor, f"the gradient of {place}", -stage)
                )

    @torch.no_grad()
    def _inspect_tensor(self, place: str, stage: int, tensor: torch.Tensor) -> None:
        """Record a tensor if it is the first one that is not finite."""
        self._orders[self._number] += 1
        with disable_modes():  # a collective may still write to the tensor, so wait for it first
            stored = AsyncCollectiveTensor(local_tensor(tensor)).trigger_wait()
            if not self.found and not _is_finite([stored]):
                at = [self._number, self._pass is not Phase.FORWARD, stage]
                values, rank = _count_text([stored]), self._program.world.rank
                self.found = [*at, self._orders[self._number], place, values, rank]


def require_finite(program: Program, step: int, exchange: Exchange) -> None:
    """Raise TrainingStopped, on all ranks, if a checkpoint would not be finite.

    It reads all resident tensors once and copies none.

    Args:
        program: The program.
        step: The number of finished steps.
        exchange: The exchange of the ranks.
    """
    if problem := describe_non_finite(program, exchange):
        raise TrainingStopped(
            f"step {step}: {problem}\n  no checkpoint of step {step} was written\n  remedy: "
            f"Continue from an earlier checkpoint, with {_REMEDY}."
        )


@torch.no_grad()
def describe_non_finite(program: Program, exchange: Exchange) -> str:
    """Return the state and first tensor that are not finite, equal on all ranks; "" if none is."""
    stored = list(_checkpoint_tensors(program))
    is_sound = _is_finite([part.tensor for part in stored])
    return _first_problem([] if is_sound else _find_non_finite(program, stored), exchange)


def _is_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if all elements of these local tensors are finite.

    Each tensor is read once, none is copied, and one value transfer is made per device.
    """
    return all(map(math.isfinite, _copy_to_host(_extreme_values(tensors))))


def _extreme_values(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the minimum and maximum of each tensor, both NaN if the tensor has a NaN.

    They are finite if and only if the tensor is. On a CPU they take a tenth of the time of the
    largest absolute value.
    """
    return [
        extreme
        for tensor in map(local_tensor, tensors)
        if tensor.is_floating_point() and tensor.numel()
        # aminmax propagates NaN (its example in torch/_torch_docs.py, torch 2.13).
        for extreme in torch.aminmax(tensor.detach())
    ]


def _copy_to_host(scalars: Sequence[torch.Tensor]) -> list[float]:
    """Return the values of scalars, with one transfer per device."""
    if all(scalar.is_cpu for scalar in scalars):
        return [float(scalar) for scalar in scalars]
    index_by_kind: dict[torch.device, dict[torch.dtype, list[int]]] = {}
    for index, scalar in enumerate(scalars):
        index_by_kind.setdefault(scalar.device, {}).setdefault(scalar.dtype, []).append(index)
    values = [0.0] * len(scalars)
    for by_dtype in index_by_kind.values():
        # `stack` needs one dtype, and fp64 represents all smaller floating dtypes exactly.
        stacks = [torch.stack([scalars[i] for i in indices]) for indices in by_dtype.values()]
        numbers = torch.cat([stack.double() for stack in stacks]).tolist()
        for index, value in zip(chain.from_iterable(by_dtype.values()), numbers, strict=True):
            values[index] = value
    return values


def _checkpoint_tensors(program: Program) -> Iterator[Holding]:
    """Yield the local tensors that a checkpoint contains."""
    yield from holdings.parameters(program)
    yield from holdings.optimizer_state(program)
    for target, tensors in program.update.tensors():
        count = tensors.get(COUNTER)
        if count is not None and not count.is_meta:
            yield Holding(Subject.OPTIMIZER, names_of(target)[0], COUNTER, "", count)


def _find_non_finite(program: Program, stored: Iterable[Holding]) -> Iterator[NonFiniteTensor]:
    """Yield the tensors that are not finite, in the model's order, with their shards joined."""
    order = {
        name: (piece.index, place)
        for piece in program.pieces
        for place, (name, _) in enumerate(piece.module.named_parameters())
    }
    parts: dict[_Place, list[torch.Tensor]] = {}
    for part in stored:
        stage, tensor = order.get(part.name, (0, len(order)))
        state = list(_STATES).index(part.subject)
        parts.setdefault((state, stage, tensor, part.name, part.key), []).append(part.tensor)
    with torch.no_grad(), disable_modes():
        yield from (
            NonFiniteTensor(place, _count_text(parts[place]))
            for place in sorted(parts)
            if not _is_finite(parts[place])
        )


def _count_text(tensors: Sequence[torch.Tensor]) -> str:
    """Return the counts of values that are not finite: `nan in 2 and inf in 1 of 64 elements`."""
    counts = dict.fromkeys(("nan", "inf", "-inf"), 0)
    for chunk in chain.from_iterable(
        local_tensor(t).reshape(-1).split(_CHUNK_ELEMENTS) for t in tensors
    ):
        for value, is_it in zip(counts, (torch.isnan, torch.isposinf, torch.isneginf), strict=True):
            counts[value] += int(is_it(chunk).sum())
    words = " and ".join(f"{value} in {count}" for value, count in counts.items() if count)
    return f"{words} of {sum(tensor.numel() for tensor in tensors)} elements"


def _first_problem(root_causes: Iterable[NonFiniteTensor], exchange: Exchange) -> str:
    """Return the first state and tensor that are not finite on any rank.

    The text lists the values of all ranks, is equal on all of them, and is "" if all are finite.
    """
    here = list(root_causes)
    firsts = list(chain.from_iterable(exchange.gather([u.place for u in here[:1]])))
    if not firsts:
        return ""
    state, *_, name, key = min(firsts)
    same = [u.values for u in here if (u.place[0], *u.place[3:]) == (state, name, key)]
    ranks = group_by_key(
        (values, str(rank))
        for rank, of_rank in enumerate(exchange.gather(same))
        for values in of_rank
    )
    places = "; ".join(f"{values} on rank {', '.join(ranks[values])}" for values in ranks)
    return f"{list(_STATES.values())[state]}: {f'{name}.{key}' if key else name} has {places}"


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose update has been launched.

    Attributes:
        step: The step, from 0.
        rate: The learning rate.
        check: The check of the step.
        span: The marks in the device's queue before and after the step.
        routing: The routing counts of each layer.
        seen: The result of `Journal.launch_figures`.
    """

    step: int
    rate: float
    check: StepCheck
    span: tuple[Milestone, Milestone]
    routing: Sequence[LayerRouting]
    seen: Mapping[str, float]


class StepReports:
    """The reports of the steps of a training. Each step is written once, in order.

    A step is judged and written when its figures have arrived. All ranks have the same figures, so
    they make the same calls in the same order.
    """

    def __init__(
        self,
        guard: FiniteGuard,
        journal: Journal,
        judge: Callable[[int, float, float | None], None],
        *,
        most: int,
    ) -> None:
        """Set up the reports.

        Args:
            guard: The check of the steps.
            journal: The journal of this rank.
            judge: Called with step, loss and gradient norm after each report.
            most: The number of launched steps that may wait for their report.
        """
        self._guard, self._journal, self._judge, self._most = guard, journal, judge, most
        self._waiting: deque[LaunchedStep] = deque()
        self.loss: float | None = None  # of the last step that was written down
        self.interrupt: Signals | None = None  # that was seen so far

    def add(self, launched: LaunchedStep) -> None:
        """Add a launched step, and write the reports that may not wait any longer.

        Raises:
            TrainingStopped: A value of a reported step is not finite. Raised on all ranks.
        """
        self._waiting.append(launched)
        self._write_reports(self._most)

    def finish(self) -> None:
        """Wait for all launched steps and write their reports. Raises as `add` does."""
        self._write_reports(0)

    def _write_reports(self, left: int) -> None:
        """Write reports until at most `left` steps wait."""
        while len(self._waiting) > left:
            launched = self._waiting.popleft()
            figures = self._guard.read_figures(launched.step, launched.check)
            self._write_report(launched, figures)
            self._judge(launched.step, figures.loss, figures.gradient_norm)

    def _write_report(self, launched: LaunchedStep, figures: StepFigures) -> None:
        """Write the report of a step, after the device has finished it."""
        began, ended = launched.span
        ended.wait()
        seconds, known = ended.seconds_since(began), (launched.routing, launched.seen)
        self._journal.write_step(
            StepReport(launched.step + 1, figures, launched.rate, seconds, *known)
        )
        self.loss = figures.loss
        self.interrupt = self.interrupt or figures.interrupt

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write the reports of finished, finite steps, however the training ends.

        If all ranks stop together, unfinished steps are waited for.
        """
        waits = isinstance(error, TrainingStopped)
        with suppress(RuntimeError, OSError):  # the device may be lost, or the disk full
            while self._waiting and (waits or self._waiting[0].span[1].is_passed):
                launched = self._waiting.popleft()
                if (figures := launched.check.wait_for_figures()).is_sound:
                    self._write_report(launched, figures)
