"""What all ranks learn of a step: its loss, whether it is sound, and who wants to stop.

Either the host knows before the update. Or the device sums it over the ranks and leaves the update
out by itself, and the host reads it a step later, when the next step is launched: then the device
never waits for the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from signal import Signals
from typing import Protocol

import torch
import torch.distributed as dist

from ptrain.axes.data.form import tier_of
from ptrain.cost import State
from ptrain.internals.dispatch import without_modes
from ptrain.interpreter.loss import LossScale, not_finite
from ptrain.interpreter.program import Program
from ptrain.models.objective import sent_to
from ptrain.rooms.queue import DeviceQueue, Milestone
from ptrain.spec.placement import Tier
from ptrain.train.interrupt import SIGNALS, Interrupts, strongest


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """Of one step: the global loss, whether it and all gradients are finite, and the interrupt that
    any rank has seen; the norm before clipping. Of a scaled loss the scale of the next step, and
    whether this one was skipped."""

    loss: float
    is_sound: bool
    interrupt: Signals | None = None
    gradient_norm: float | None = None
    loss_scale: float | None = None
    is_skipped: bool = False


class Look(Protocol):
    """What is known of a step. `halted` is what `Program.apply` is given."""

    halted: torch.Tensor | None

    def send(self) -> None:
        """The update is launched: what else is to be known of it goes to the host."""

    def figures(self) -> StepFigures:
        """Return what was found, when it is there."""
        ...


class HostLook:
    """Of a step whose figures were waited for, all but what its update makes of the loss scale."""

    halted = None

    def __init__(self, queue: DeviceQueue, figures: StepFigures, scaling: LossScale | None) -> None:
        self._queue, self._figures, self._scaling = queue, figures, scaling
        self._sent: tuple[torch.Tensor, Milestone] | None = None

    @torch.no_grad()
    def send(self) -> None:
        if self._scaling is not None:
            with without_modes():
                numbers = torch.stack([self._scaling.scale, self._scaling.found_inf])
                self._sent = self._queue.to_host(numbers), self._queue.mark()

    def figures(self) -> StepFigures:
        if self._sent is None:
            return self._figures
        numbers, sent = self._sent
        sent.wait()
        scale, is_skipped = numbers.tolist()
        return replace(self._figures, loss_scale=scale, is_skipped=bool(is_skipped))


class DeviceLook:
    """Of a step that the device has in its queue. `sums` (1-d fp64) are over the ranks; `halted`,
    `norm` and what there is of `scaling` all ranks have alike."""

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
        self._known = [sums, *([] if norm is None else [norm])]  # gone when it is sent
        self._numbers: torch.Tensor | None = None
        self._sent: Milestone | None = None

    @torch.no_grad()
    def send(self) -> None:
        scaling = self._scaling
        (sums, *norm), self._known = self._known, []
        others = [self.halted, *norm]
        others += [] if scaling is None else [scaling.scale, scaling.found_inf]
        with without_modes():
            numbers = torch.cat([sums, torch.stack([other.double() for other in others])])
            self._numbers = self._queue.to_host(numbers)
        self._sent = self._queue.mark()

    def figures(self) -> StepFigures:
        assert self._numbers is not None and self._sent is not None, (
            "values are sent before they are read"
        )
        self._sent.wait()
        loss, _, *numbers = self._numbers.tolist()
        flags, (halted, *others) = numbers[: len(SIGNALS)], numbers[len(SIGNALS) :]
        scale, is_skipped = others[-2:] if self._scaling is not None else (None, False)
        return StepFigures(
            loss=loss,
            is_sound=not halted,
            interrupt=strongest(flags),
            gradient_norm=others[0] if self._has_norm else None,
            loss_scale=scale,
            is_skipped=bool(is_skipped),
        )


def can_be_late(program: Program, queue: DeviceQueue) -> bool:
    """Return whether the host need not wait for what it knows of a step: the device does its work
    later, all of the update lies on it, and a flag there leaves it out. So it does of one fused
    kernel, and not where backward updates. `verify_every` wants the state behind a step, which
    waits anyway."""
    spec = program.spec
    is_read_at_once = spec.verify_every or program.updates_in_backward
    if not queue.runs_ahead or is_read_at_once or not spec.optimizer.row.is_fused:
        return False
    states = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS)
    return all(tier_of(spec.factors, state) is Tier.DEVICE for state in states)


class DeviceSums:
    """What the ranks of one training sum up on their devices, in each step. Nothing is read off
    them, and the meters see none of it.

    `halted` (fp32, 0 or 1, on all ranks alike) is 1 from the first step on whose loss or gradients
    are not finite: all that is launched behind it changes nothing.
    """

    def __init__(self, program: Program, queue: DeviceQueue, interrupts: Interrupts) -> None:
        self._program, self._queue, self._interrupts = program, queue, interrupts
        self.halted = torch.zeros((), dtype=torch.float32, device=program.world.device)

    @torch.no_grad()
    def look(self, share: torch.Tensor, norm: torch.Tensor | None) -> DeviceLook:
        """Look at a step before its update: `share` is this rank's of the loss, `norm` what
        `Program.reduce` returned."""
        device = self._program.world.device
        with without_modes():
            seen = torch.tensor(self._interrupts.flags(), dtype=torch.float64, device="cpu")
            unsound = self._unsound(norm)
            own = torch.stack([share.double(), unsound.double()])
            sums = torch.cat([own, sent_to(device, seen)])
            if self._program.world.size > 1:
                # of all ranks, by the group in which they compared their models: NCCL has it ready,
                # where one that only these sums need would be a communicator more
                dist.all_reduce(sums)
            is_unsound = sums[0].isfinite().logical_not_().logical_or_(sums[1] > 0)
            # a new one in each step: what is older than a step the meters would count
            self.halted = torch.maximum(self.halted, is_unsound.float())
        return DeviceLook(self._queue, self.halted, sums, norm, self._program.scaling)

    def _unsound(self, norm: torch.Tensor | None) -> torch.Tensor:
        """Whether this rank's gradients are not finite, and their update is not skipped anyway. The
        norm is of all ranks, and as finite as their gradients."""
        scaling = self._program.scaling
        if norm is not None:
            is_unsound = norm.isfinite().logical_not_()
            if scaling is not None:
                is_unsound.logical_and_(scaling.found_inf == 0)
            return is_unsound
        gradients = [] if scaling is not None else self._program.gradients()
        return not_finite(gradients) if gradients else torch.zeros_like(self.halted)
