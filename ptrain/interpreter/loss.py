"""The loss of a micro-batch, the order of a step's passes, gradient clipping and loss scaling.

The loss is computed from the model's output or, one chunk of tokens at a time, inside the model's
forward pass. It is summed over a rank's micro-batches.

Gradients are clipped by one norm over all parameters and all axes.

The loss of fp16 gradients is scaled by torch.amp.GradScaler's rule, with torch's operators. The
loss is multiplied by the scale before backward. If a gradient is not finite on any rank, all ranks
skip the update and the scale is halved; after 2000 steps without one it is doubled. Gradients stay
scaled while they are stored, since fp16 would lose small ones; the optimizer divides them in the
dtype of the update. No value is read from a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ptrain.axes.data.run.flat import WrappedModel
from ptrain.axes.data.run.target import NamedTarget
from ptrain.axes.tensor.run.apply import local_loss
from ptrain.cost import Phase, State
from ptrain.models.ledger import has_tier, tier_of
from ptrain.models.objective import LossInHead, Objective, SampleBatch, StepBatch
from ptrain.runtime.comm import Mesh
from ptrain.runtime.torch import Tiers, cast, tag_like
from ptrain.spec.placement import Axis, Tier, exclude_axes
from ptrain.spec.precision import INITIAL_SCALE, SCALE_BACKOFF, SCALE_GROWTH, SCALE_INTERVAL
from ptrain.steps.step import LONG_NORM, NORM_ROW, Clip


class LossScale:
    """The scale of the loss, with its state on the device (12 bytes).

    Attributes:
        scale: The factor of the loss (0-d fp32).
        growth_tracker: Steps since the scale last changed (0-d int32).
        found_inf: 1 if the last step was skipped, else 0 (0-d fp32).
        axes: Axes along which gradients are sharded; each needs one all-reduce of a scalar.
    """

    def __init__(self, mesh: Mesh, axes: Sequence[Axis]) -> None:
        self.mesh = mesh
        self.axes = axes
        device = mesh.world.device
        self.scale = torch.full((), INITIAL_SCALE, dtype=torch.float32, device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)
        for scalar in (self.scale, self.found_inf):
            # the state under which their copies are counted
            mesh.registry.tag(scalar, State.GRADIENTS)
        self._tiers = Tiers(device, mesh.registry)
        self._on_host: tuple[torch.Tensor, torch.Tensor] | None = None

    def seed(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the gradient with which backward starts, instead of 1."""
        return self.scale.to(loss.dtype)

    def update_overflow_flag(self, gradients: Sequence[torch.Tensor]) -> None:
        """Set `found_inf` on all ranks if any gradient of any rank is infinite or NaN."""
        self.found_inf.zero_()
        if gradients:
            flag = self._flag_like(gradients[0])
            if gradients[0].dtype is torch.bfloat16:
                flag.copy_(nonfinite_flag(gradients))
            else:
                # unscale by 1: only the check is needed
                one = tag_like(torch.ones_like(flag), flag)
                torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), flag, one)
            if flag is not self.found_inf:
                self.found_inf.copy_(flag)
        for axis in self.axes:
            group = self.mesh.group((axis,))
            # All ranks must skip the same steps, also ranks whose gradients are finite. One axis
            # after the other gives the maximum over all axes.
            dist.all_reduce(self.found_inf, dist.ReduceOp.MAX, group=group)

    def scalars_for(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scale and `found_inf` on the device of `tensor`.

        They are copied to the host at most once a step.
        """
        if self._is_on_device(tensor):
            return self.scale, self.found_inf
        if self._on_host is None:
            self._on_host = (
                self._tiers.copy_to_tier(self.scale, Tier.HOST, State.GRADIENTS),
                self._tiers.copy_to_tier(self.found_inf, Tier.HOST, State.GRADIENTS),
            )
        return self._on_host

    def update(self, halted: torch.Tensor | None = None) -> None:
        """Set the scale of the next step; keep it if `halted` is 1."""
        self._on_host = None
        held = (self.scale, self.growth_tracker)
        # The update below works in place, and whether it counts is known only on the device.
        before = [] if halted is None else [scalar.clone() for scalar in held]
        torch._amp_update_scale_(*held, self.found_inf, SCALE_GROWTH, SCALE_BACKOFF, SCALE_INTERVAL)
        if halted is not None:
            for scalar, was in zip(held, before, strict=True):
                torch.where(halted != 0, was, scalar, out=scalar)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a checkpoint saves."""
        return {"scale": self.scale, "growth_tracker": self.growth_tracker}

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        """Yield the tensors of the scale."""
        for scalar in (self.scale, self.growth_tracker, self.found_inf):
            yield State.OTHER, scalar

    def _is_on_device(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor is on the device tier."""
        storage = tensor.untyped_storage()
        return tier_of(storage, self.mesh.world.device.type) is Tier.DEVICE

    def _flag_like(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a flag on the tier of a gradient."""
        if self._is_on_device(gradient):
            return self.found_inf
        return self._tiers.empty(None, torch.float32, Tier.HOST, State.GRADIENTS).zero_()


def nonfinite_flag(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return True (0-d, on the gradients' device) if any element is infinite or NaN.

    It accepts any dtype: torch's check for scaled losses does not take bf16 on CUDA
    (`AmpKernels.cu` dispatches on fp16, fp32 and fp64, as of 2.13).
    """
    mark = partial(tag_like, source=gradients[0])
    if not (held := [gradient for gradient in gradients if gradient.numel()]):
        return mark(torch.zeros((), dtype=torch.bool))
    # NaN if an element is NaN
    greatest = [mark(norm) for norm in torch._foreach_norm(held, math.inf)]
    stacked = mark(torch.stack([cast(norm, torch.float64) for norm in greatest]))
    # x - x is 0 exactly if x is finite. `isfinite` allocates untagged temporaries, which the meters
    # would count on the device.
    return mark(mark(stacked.sub_(stacked).ne(0)).any())


# Views of gradients, by the axes that shard their operators; the longest tuple of axes first.
ByOperator: TypeAlias = Mapping[tuple[Axis, ...], Sequence[torch.Tensor]]
Mark: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


class Clipping:
    """The gradient clipping of a plan on this rank.

    `dtype` is the gradients' dtype, for a rank that has none.
    """

    def __init__(self, step: Clip, mesh: Mesh, dtype: torch.dtype) -> None:
        self.step, self.mesh = step, mesh
        self._none = torch.empty(0, dtype=dtype, device=mesh.world.device)

    def norm(
        self,
        gradients: Sequence[torch.Tensor],
        wrapped: WrappedModel,
        scaling: LossScale | None,
    ) -> torch.Tensor:
        """Return the global norm of the gradients; see `global_norm`.

        Args:
            gradients: All gradients of `wrapped`.
            wrapped: The wrapped model, whose copies of other stages' tensors do not count.
            scaling: The scale of the loss, None without.
        """
        copies, by_operator = wrapped.copied_targets(), None
        if self.step.operator_axes:
            targets = chain.from_iterable(wrapped.targets())
            own = [target for target in targets if not any(target is copy for copy in copies)]
            by_operator = _views_by_operator(own, self.step.operator_axes)
        copied = [id(target.gradient) for target in copies]
        like = gradients[0] if gradients else self._none
        return global_norm(gradients, self.step, self.mesh, scaling, by_operator, copied, like)

    def scale_down(self, gradients: Sequence[torch.Tensor], norm: torch.Tensor) -> None:
        """Scale gradients in place, so that the global norm is at most the plan's norm.

        Args:
            gradients: The gradients of this rank.
            norm: The global norm before clipping (0-d), from `norm`.
        """
        scale_down(gradients, norm, self.step)


def global_norm(
    gradients: Sequence[torch.Tensor],
    step: Clip,
    mesh: Mesh,
    scaling: LossScale | None = None,
    by_operator: ByOperator | None = None,
    copied: Collection[int] = (),
    like: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the global norm of all gradients (0-d, at least fp32, equal on all ranks).

    It is not finite if any gradient is not, or if the sum of squares overflows its dtype. It needs
    one all-reduce of a scalar per axis that shards gradients; replicated gradients count once.

    Args:
        gradients: This rank's gradients.
        step: The clipping of the plan.
        mesh: The process groups.
        scaling: The scale of the loss, by which the norm is divided.
        by_operator: Views of the gradients by the axes that shard their operators; None without
            such axes.
        copied: Ids of gradients that another rank counts; `by_operator` excludes them already.
        like: A tensor like the gradients, for a rank that may have none.
    """
    like = gradients[0] if like is None else like
    by_row = not mesh.world.stands_in
    if by_operator is not None:
        (_, cut), *others = by_operator.items()
        square = _squared_norm(cut, like, by_row=by_row)
        for axes, views in others:
            shared = _squared_norm(views, like, by_row=by_row)
            # Only one rank adds these: ranks that shard them over other axes may sum in another
            # order, and a scale that differs by an ulp would make their copies drift apart.
            if not any(mesh.coordinate(axis) for axis in exclude_axes(step.operator_axes, axes)):
                square.add_(shared)
    else:
        own = [gradient for gradient in gradients if id(gradient) not in copied]
        square = _squared_norm(own, like, by_row=by_row)
    if axes := step.reduced_axes:
        square = _all_reduce_scalar(square, like, axes, mesh)
    # The square is summed over the ranks and not the norm, since squares of disjoint parts add up.
    norm = square.sqrt_()
    if scaling is not None:
        # Gradients stay scaled, so their norm is divided instead of them.
        norm.div_(scaling.scalars_for(like)[0])
    return norm


def _views_by_operator(targets: Iterable[NamedTarget], axes: tuple[Axis, ...]) -> ByOperator:
    """Group the views of targets by the axes of `axes` that shard their operators.

    The groups are: all of `axes`, then fewer, then () for operators that all these ranks replicate.
    """
    views: dict[tuple[Axis, ...], list[torch.Tensor]]
    views = {axes[:count]: [] for count in range(len(axes), -1, -1)}
    for target in targets:
        for cutting, view in target.views():
            views[tuple(axis for axis in axes if axis in cutting)].append(view)
    return views


def scale_down(gradients: Sequence[torch.Tensor], norm: torch.Tensor, step: Clip) -> None:
    """Scale gradients with the global norm `norm` in place to at most `step.max_norm`.

    The formula is torch's `clip_grad_norm_`, including its 1e-6. A norm that is not finite
    makes all gradients non-finite.

    Args:
        gradients: This rank's gradients, changed in place.
        norm: The global norm (0-d).
        step: The clipping of the plan.
    """
    if not gradients:
        return
    scale = tag_like(norm + 1e-6, gradients[0]).reciprocal_().mul_(step.max_norm).clamp_(max=1.0)
    torch._foreach_mul_(list(gradients), scale)


def _squared_norm(
    gradients: Sequence[torch.Tensor], like: torch.Tensor, *, by_row: bool
) -> torch.Tensor:
    """Return the square of the gradients' norm in at least fp32, 0 without gradients.

    Args:
        gradients: The tensors.
        like: A tensor with their dtype and device.
        by_row: See `_row_norms`.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    if not gradients:
        return tag_like(like.new_zeros((), dtype=dtype), like)
    # results computed from a mapped file are in memory
    mark = partial(tag_like, source=like) if has_tier(like.untyped_storage()) else _identity
    # kept alive until their joint norm is computed
    norms = list(_row_norms(gradients, dtype, mark, by_row=by_row))
    joined = mark(torch.cat(norms)) if len(norms) > 1 else norms[0]
    return mark(torch.linalg.vector_norm(joined)).square_()


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor unchanged."""
    return tensor


def _row_norms(
    gradients: Sequence[torch.Tensor], dtype: torch.dtype, mark: Mark, *, by_row: bool
) -> Iterator[torch.Tensor]:
    """Yield 1-d tensors of norms, whose joint norm is the norm of all tensors.

    A short tensor has one norm. With `by_row`, a long contiguous CPU tensor has one norm per row of
    `NORM_ROW` elements and one for the rest; a tensor that represents a GPU's has one.
    """
    short: list[torch.Tensor] = []
    rows: list[torch.Tensor] = []
    for gradient in gradients:
        is_long = (
            by_row
            and gradient.device.type == "cpu"
            and gradient.numel() > LONG_NORM
            and gradient.is_contiguous()
        )
        if not is_long:
            short.append(gradient)
            continue
        flat, end = gradient.view(-1), gradient.numel() // NORM_ROW * NORM_ROW
        # A CPU adds squares one after the other, which loses bits in long fp32 sums (see
        # `LONG_NORM`).
        rows.append(flat[:end].view(-1, NORM_ROW))
        if end < gradient.numel():
            short.append(flat[end:])
    if short:
        yield mark(torch.stack([mark(norm) for norm in torch._foreach_norm(short, 2, dtype=dtype)]))
    for of_one in rows:
        yield mark(torch.linalg.vector_norm(of_one, dim=1, dtype=dtype))


def _all_reduce_scalar(
    square: torch.Tensor, gradient: torch.Tensor, axes: Sequence[Axis], mesh: Mesh
) -> torch.Tensor:
    """Sum a scalar over the axes on the device, and return it on the gradients' device."""
    device = mesh.world.device
    mesh.registry.tag(square, State.GRADIENTS)
    summed = square
    if tier_of(gradient.untyped_storage(), device.type) is not Tier.DEVICE:
        summed = Tiers(device, mesh.registry).copy_to_tier(square, Tier.DEVICE, State.GRADIENTS)
    for axis in axes:
        dist.all_reduce(summed, group=mesh.group((axis,)))
    return square if summed is square else square.copy_(summed)


class Loss:
    """The way in which a model computes its loss.

    `objective` computes it from the output; `inside`, if given, computes it in the forward pass.
    """

    def __init__(
        self, objective: Objective | None = None, inside: LossInHead | None = None
    ) -> None:
        self.objective = objective or Objective()
        self._inside = inside

    @property
    def is_inside(self) -> bool:
        """True if the model's forward pass computes the loss."""
        return self._inside is not None

    def attach(self, model: nn.Module, head: str) -> None:
        """Make the model compute its loss in forward, if this loss is inside.

        `head` names the module that makes the logits of a model that is not built in.
        """
        if self._inside is not None:
            self._inside.attach(model, head)

    def provide_targets(self, samples: SampleBatch) -> AbstractContextManager[None]:
        """Return the context that a forward pass runs in, which carries the targets."""
        return self._inside.provide_targets(samples.targets) if self._inside else nullcontext()

    def compute_loss(self, model: nn.Module, samples: SampleBatch) -> Tensor:
        """Run forward and return the micro-batch's loss before division (0-d)."""
        if self._inside is None:
            return local_loss(self.objective.run(model, samples))
        with self.provide_targets(samples):
            loss: Tensor = model(samples.inputs)
        return loss

    def forward(self, model: Any, samples: SampleBatch) -> Tensor:
        """Run a pipeline stage's forward; `of_forward` computes the loss from its output."""
        if self._inside is None:
            return self.objective.forward(model, samples)
        output: Tensor = model(samples.inputs)
        return output

    def of_forward(self, output: Tensor, samples: SampleBatch) -> Tensor:
        """Return the loss, like `compute_loss`, from the output of `forward`."""
        return output if self._inside else local_loss(self.objective.of_forward(output, samples))


class StepLoss:
    """The losses of a step's micro-batches and their sum.

    Each loss is divided so that the losses of the global batch add up to its mean. `share` (0-d) is
    the sum on this rank.
    """

    def __init__(
        self, loss: Loss, scaling: LossScale | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.loss, self._scaling = loss, scaling
        self._batch: StepBatch | None = None
        self.share = torch.zeros((), dtype=dtype, device=device)

    def begin(self, batch: StepBatch) -> None:
        """Start a step with this batch."""
        self._batch = batch
        self.share.zero_()

    @contextmanager
    def evaluate_batch(self, batch: StepBatch) -> Iterator[None]:
        """Temporarily compute losses of this batch outside a step."""
        self._batch = batch
        try:
            yield
        finally:
            self._batch = None

    def compute_loss(self, model: nn.Module, samples: SampleBatch) -> Tensor:
        """Run forward and return the divided loss (0-d); backward starts with `seed`."""
        return self.loss.compute_loss(model, samples) / self._loss_divisor(samples)

    def seed(self, loss: Tensor) -> Tensor | None:
        """Return the gradient with which backward starts; None for 1."""
        return self._scaling.seed(loss) if self._scaling else None

    def add(self, loss: Tensor) -> None:
        """Add a micro-batch's loss to the share."""
        self.share.add_(loss.detach())

    def of_last_stage(self, output: Tensor, samples: SampleBatch) -> Tensor:
        """Return the loss of a pipeline's last stage from its output, and add it to the share."""
        loss = self.of_output(output, samples)
        self.add(loss)
        return loss

    def of_output(self, output: Tensor, samples: SampleBatch) -> Tensor:
        """Return the divided loss of a micro-batch from the output of its forward pass (0-d)."""
        return self.loss.of_forward(output, samples) / self._loss_divisor(samples)

    def _loss_divisor(self, samples: SampleBatch) -> float:
        """Return the divisor of a micro-batch's loss."""
        assert self._batch is not None, "no step has started"
        return self.loss.objective.divisor(self._batch, samples)


Enter = Callable[[Phase, int], None]  # called with the phase and the micro-batch of every pass
Add = Callable[[Tensor], None]  # called with the loss of every micro-batch


class PassRunner(Protocol):
    """The order in which a step's micro-batches run."""

    def train(self, batch: StepBatch) -> None:
        """Run forward and backward of every micro-batch; gradients are complete afterwards."""

    def evaluate(self, batch: StepBatch, add: Add) -> None:
        """Run forward of every micro-batch, and call `add` with each loss this rank computes."""


class SequentialRunner:
    """A runner of one micro-batch after the other, each forward and then backward."""

    def __init__(
        self,
        wrapped: WrappedModel,
        model: nn.Module,
        sizes: tuple[int, int],
        loss: StepLoss,
        enter: Enter,
    ) -> None:
        """Prepare the passes.

        Args:
            wrapped: The wrapped model.
            model: The module that `wrapped` wraps.
            sizes: Micro-batches per step, and samples per micro-batch.
            loss: The losses of the step.
            enter: Called with the phase and the micro-batch of each pass.
        """
        self.wrapped, self.model = wrapped, model
        self.count, self.micro = sizes
        self.loss, self.enter = loss, enter

    def train(self, batch: StepBatch) -> None:
        for index, samples in enumerate(batch.micro_batches(self.micro)):
            with self.wrapped.micro_batch(index == self.count - 1):
                self.enter(Phase.FORWARD, index)
                loss = self.loss.compute_loss(self.wrapped.module, samples)
                self.loss.add(loss)
                self.enter(Phase.BACKWARD, index)
                loss.backward(self.loss.seed(loss))
            # drop the last reference to the graph before the next forward allocates
            del loss

    def evaluate(self, batch: StepBatch, add: Add) -> None:
        for samples in batch.micro_batches(self.micro):
            add(self.loss.compute_loss(self.model, samples))
