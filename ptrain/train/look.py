"""The check of one step on all ranks: its loss, whether it is finite, and received signals.

Either the host waits for these figures before the update. Or the device sums them over the ranks
and skips the update by a flag, and the host reads them when the next step has been launched. Then
the device never waits for the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from signal import Signals
from typing import Protocol

import torch
import torch.distributed as dist

from ptrain.axes.data.form import tier_of
from ptrain.cost import State
from ptrain.internals.dispatch import disable_modes
from ptrain.interpreter.loss import LossScale, nonfinite_flag
from ptrain.interpreter.program import Program
from ptrain.models.objective import sent_to
from ptrain.runtime.queue import DeviceQueue, Milestone
from ptrain.spec.placement import Tier
from ptrain.train.interrupt import SIGNALS, Interrupts, strongest_signal


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """The figures of one step.

    Attributes:
        loss: The global loss.
        is_sound: True if the loss and all gradients are finite.
        interrupt: The signal that a rank received. None: none.
        gradient_norm: The norm before clipping. None: not computed.
        loss_scale: The scale of the next step. None: the loss is not scaled.
        is_skipped: True if the loss scaler skipped the update.
    """

    loss: float
    is_sound: bool
    interrupt: Signals | None = None
    gradient_norm: float | None = None
    loss_scale: float | None = None
    is_skipped: bool = False


class StepCheck(Protocol):
    """The check of a step. `halted` is the flag that `Program.apply` takes."""

    halted: torch.Tensor | None

    def start_copy(self) -> None:
        """Start copying remaining figures to the host. Called after the update was launched."""

    def wait_for_figures(self) -> StepFigures:
        """Wait for the figures and return them."""
        ...


class HostStepCheck:
    """A check whose figures are on the host, except for the loss scale that the update changes.

    Args:
        queue: The queue of the device.
        figures: The figures, which are equal on all ranks.
        scaling: The loss scale. None: the loss is not scaled.
    """

    halted = None

    def __init__(self, queue: DeviceQueue, figures: StepFigures, scaling: LossScale | None) -> None:
        self._queue, self._figures, self._scaling = queue, figures, scaling
        self._sent: tuple[torch.Tensor, Milestone] | None = None

    @torch.no_grad()
    def start_copy(self) -> None:
        """Start copying the loss scale to the host, if there is one."""
        if self._scaling is not None:
            with disable_modes():
                numbers = torch.stack([self._scaling.scale, self._scaling.found_inf])
                self._sent = self._queue.to_host(numbers), self._queue.mark()

    def wait_for_figures(self) -> StepFigures:
        """Return the figures, after the loss scale has arrived."""
        if self._sent is None:
            return self._figures
        numbers, sent = self._sent
        sent.wait()
        scale, is_skipped = numbers.tolist()
        return replace(self._figures, loss_scale=scale, is_skipped=bool(is_skipped))


class DeviceStepCheck:
    """A check in the queue of the device.

    Args:
        queue: The queue.
        halted: The flag that skips updates, equal on all ranks.
        sums: Sums over the ranks, fp64 in one dimension: loss, number of ranks with gradients that
            are not finite, and one number per signal.
        norm: The gradient norm, equal on all ranks. None: not computed.
        scaling: The loss scale. None: the loss is not scaled.
    """

    def __init__(
        self,
        queue: DeviceQueue,
        halted: torch.Tensor,
        sums: torch.Tensor,
        norm: torch.Tensor | None,
        scaling: LossScale | None,
    ) -> None:
        self.halted = halted
        self._queue, self._scaling, self._has_norm = queue, scaling, norm is not None
        self._known = [sums, *([] if norm is None else [norm])]  # freed by `start_copy`
        self._numbers: torch.Tensor | None = None
        self._sent: Milestone | None = None

    @torch.no_grad()
    def start_copy(self) -> None:
        """Start copying all figures to the host, and free their device tensors."""
        scaling = self._scaling
        (sums, *norm), self._known = self._known, []
        others = [self.halted, *norm]
        others += [] if scaling is None else [scaling.scale, scaling.found_inf]
        with disable_modes():
            # One tensor, so that one copy to the host suffices.
            numbers = torch.cat([sums, torch.stack([other.double() for other in others])])
            self._numbers = self._queue.to_host(numbers)
        self._sent = self._queue.mark()

    def wait_for_figures(self) -> StepFigures:
        """Return the figures, after they have arrived."""
        assert self._numbers is not None and self._sent is not None, (
            "values are sent before they are read"
        )
        self._sent.wait()
        loss, _, *numbers = self._numbers.tolist()
        # The order of `start_copy`: loss, unsound ranks, signals, halted, then the optional
        # figures.
        flags, (halted, *others) = numbers[: len(SIGNALS)], numbers[len(SIGNALS) :]
        scale, is_skipped = others[-2:] if self._scaling is not None else (None, False)
        return StepFigures(
            loss=loss,
            is_sound=not halted,
            interrupt=strongest_signal(flags),
            gradient_norm=others[0] if self._has_norm else None,
            loss_scale=scale,
            is_skipped=bool(is_skipped),
        )


def can_be_late(program: Program, queue: DeviceQueue) -> bool:
    """Return True if the host need not wait for the figures of a step.

    This requires a device that runs asynchronously, all states on the device, and an update that a
    flag on the device can skip: one fused kernel, not an update in backward. `verify_every`
    compares the state after each step, which waits anyway.
    """
    spec = program.spec
    is_read_at_once = spec.verify_every or program.updates_in_backward
    if not queue.runs_ahead or is_read_at_once or not spec.optimizer.properties.is_fused:
        return False
    states = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS)
    return all(tier_of(spec.factors, state) is Tier.DEVICE for state in states)


class DeviceSums:
    """The sums of the ranks on their devices, in each step of a training.

    The host reads none of them in the step, and the meters do not count them. `halted` (fp32, 0 or
    1, equal on all ranks) is 1 from the first step whose loss or gradients are not finite: all
    updates that are launched later change nothing.

    Args:
        program: The program.
        queue: The queue of its device.
        interrupts: The received signals, which are summed with the loss.
    """

    def __init__(self, program: Program, queue: DeviceQueue, interrupts: Interrupts) -> None:
        self._program, self._queue, self._interrupts = program, queue, interrupts
        self.halted = torch.zeros((), dtype=torch.float32, device=program.world.device)

    @torch.no_grad()
    def start_check(self, share: torch.Tensor, norm: torch.Tensor | None) -> DeviceStepCheck:
        """Launch the check of a step before its update.

        Args:
            share: This rank's share of the loss.
            norm: The result of `Program.reduce`.
        """
        device = self._program.world.device
        with disable_modes():
            seen = torch.tensor(self._interrupts.flags(), dtype=torch.float64, device="cpu")
            unsound = self._unsound_flag(norm)
            own = torch.stack([share.double(), unsound.double()])
            sums = torch.cat([own, sent_to(device, seen)])
            if self._program.world.size > 1:
                # On the default group, whose NCCL communicator exists: the ranks compared their
                # models with it. A group for these sums would create another communicator.
                dist.all_reduce(sums)
            is_unsound = sums[0].isfinite().logical_not_().logical_or_(sums[1] > 0)
            # A new tensor in each step: the meters count storages that are older than a step.
            self.halted = torch.maximum(self.halted, is_unsound.float())
        return DeviceStepCheck(self._queue, self.halted, sums, norm, self._program.scaling)

    def _unsound_flag(self, norm: torch.Tensor | None) -> torch.Tensor:
        """Return a flag that is set if this rank's gradients are not finite.

        It is not set if the loss scaler skips their update. The norm is global, and finite only if
        the gradients of all ranks are.
        """
        scaling = self._program.scaling
        if norm is not None:
            is_unsound = norm.isfinite().logical_not_()
            if scaling is not None:
                is_unsound.logical_and_(scaling.found_inf == 0)
            return is_unsound
        gradients = [] if scaling is not None else self._program.gradients()
        return nonfinite_flag(gradients) if gradients else torch.zeros_like(self.halted)
