"""The scale of a loss whose gradients are fp16: torch.amp.GradScaler's rule, by torch's operators.

The loss is multiplied before backward. Where a gradient is not finite on any rank, all ranks skip
the update and the scale is halved; after 2000 steps without one it is doubled. Gradients stay
scaled as long as they are kept (fp16 would lose the small ones again): the optimizer divides them
in the dtype of the update. No value is read off a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist

from ptrain.costs import State
from ptrain.models.tags import tier_of
from ptrain.rooms.mesh import Mesh
from ptrain.rooms.tiers import Tiers, alike, cast
from ptrain.spec.axis import Axis
from ptrain.spec.placement import Tier
from ptrain.spec.precision import INITIAL_SCALE, SCALE_BACKOFF, SCALE_GROWTH, SCALE_INTERVAL


class LossScale:
    """`scale` (fp32), `growth_tracker` (int32, steps since it last changed), and `found_inf` (fp32:
    exactly 1 where the last step was skipped, else 0): 12 bytes on the device.

    `axes` are those along which gradients are shards: each makes one scalar all-reduce.
    """

    def __init__(self, mesh: Mesh, axes: Sequence[Axis]) -> None:
        self.mesh = mesh
        self.axes = axes
        device = mesh.world.device
        self.scale = torch.full((), INITIAL_SCALE, dtype=torch.float32, device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)
        for scalar in (self.scale, self.found_inf):
            mesh.registry.tag(scalar, State.GRADIENTS)  # what they are when they travel
        self._tiers = Tiers(device, mesh.registry)
        self._on_host: tuple[torch.Tensor, torch.Tensor] | None = None

    def seed(self, loss: torch.Tensor) -> torch.Tensor:
        """Return what backward starts from in place of 1."""
        return self.scale.to(loss.dtype)

    def check(self, gradients: Sequence[torch.Tensor]) -> None:
        """Find out, on all ranks alike, whether any gradient is infinite or not a number."""
        self.found_inf.zero_()
        if gradients:
            flag = self._like(gradients[0])
            if gradients[0].dtype is torch.bfloat16:
                flag.copy_(not_finite(gradients))
            else:
                # unscales by 1: it is the check that is wanted
                one = alike(torch.ones_like(flag), flag)
                torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), flag, one)
            if flag is not self.found_inf:
                self.found_inf.copy_(flag)
        for axis in self.axes:
            group = self.mesh.group((axis,))
            dist.all_reduce(self.found_inf, dist.ReduceOp.MAX, group=group)

    def beside(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(scale, found_inf) where `tensor` is updated: copied to the host once a step."""
        if self._is_on_device(tensor):
            return self.scale, self.found_inf
        if self._on_host is None:
            self._on_host = (
                self._tiers.move(self.scale, Tier.HOST, State.GRADIENTS),
                self._tiers.move(self.found_inf, Tier.HOST, State.GRADIENTS),
            )
        return self._on_host

    def update(self, halted: torch.Tensor | None = None) -> None:
        """After the update: the scale of the next step; where `halted` is 1 it stays."""
        self._on_host = None
        held = (self.scale, self.growth_tracker)
        before = [] if halted is None else [scalar.clone() for scalar in held]
        torch._amp_update_scale_(*held, self.found_inf, SCALE_GROWTH, SCALE_BACKOFF, SCALE_INTERVAL)
        if halted is not None:
            for scalar, was in zip(held, before, strict=True):
                torch.where(halted != 0, was, scalar, out=scalar)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a checkpoint has to have."""
        return {"scale": self.scale, "growth_tracker": self.growth_tracker}

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        for scalar in (self.scale, self.growth_tracker, self.found_inf):
            yield State.OTHER, scalar

    def _is_on_device(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        return tier_of(storage, self.mesh.world.device.type) is Tier.DEVICE

    def _like(self, gradient: torch.Tensor) -> torch.Tensor:
        """A place for what is found, on the gradients' tier."""
        if self._is_on_device(gradient):
            return self.found_inf
        return self._tiers.empty(None, torch.float32, Tier.HOST, State.GRADIENTS).zero_()


def not_finite(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return whether any element of the gradients, of which there is one, is infinite or not a
    number (0-d, where they are). In any dtype: what torch has for scaled losses takes no bf16 on
    CUDA (`AmpKernels.cu` dispatches on fp16, fp32 and fp64, as of 2.13)."""
    mark = partial(alike, source=gradients[0])
    held = [gradient for gradient in gradients if gradient.numel()]
    if not held:  # of a rank whose shards are empty
        return mark(torch.zeros((), dtype=torch.bool))
    greatest = [mark(norm) for norm in torch._foreach_norm(held, math.inf)]  # NaN if an element is
    stacked = mark(torch.stack([cast(norm, torch.float64) for norm in greatest]))
    # x - x is 0 exactly if x is finite. `isfinite` has temporaries of its own, which have no tag,
    # so the meters would count them on the device.
    return mark(mark(stacked.sub_(stacked).ne(0)).any())
