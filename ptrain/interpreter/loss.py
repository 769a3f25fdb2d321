"""Compute the loss of a micro-batch, from the model's output or, a slice of the tokens at a time,
inside its forward pass; sum it over a rank's micro-batches; and order the forward and backward
passes of a step, independently of the program.

Gradients are clipped by one norm over all parameters and all axes. The loss of fp16 gradients is
scaled by torch.amp.GradScaler's rule, with torch's operators: it is multiplied before backward. If
a gradient is not finite on any rank, all ranks skip the update and the scale is halved; after 2000
steps without one it is doubled. Gradients stay scaled as long as they are kept (fp16 would lose the
small ones again): the optimizer divides them in the dtype of the update. No value is read off a
tensor.
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
from ptrain.axes.tensor.run.apply import local
from ptrain.cost import Phase, State
from ptrain.models.ledger import is_tagged, tier_of
from ptrain.models.objective import LossInside, Objective, SampleBatch, StepBatch
from ptrain.rooms.comm import Mesh
from ptrain.rooms.torch import Tiers, alike, cast
from ptrain.spec.placement import Axis, Tier, without
from ptrain.spec.precision import INITIAL_SCALE, SCALE_BACKOFF, SCALE_GROWTH, SCALE_INTERVAL
from ptrain.steps.step import LONG_NORM, NORM_ROW, Clip


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
    if not (held := [gradient for gradient in gradients if gradient.numel()]):
        return mark(torch.zeros((), dtype=torch.bool))
    greatest = [mark(norm) for norm in torch._foreach_norm(held, math.inf)]  # NaN if an element is
    stacked = mark(torch.stack([cast(norm, torch.float64) for norm in greatest]))
    # x - x is 0 exactly if x is finite. `isfinite` has temporaries of its own, which have no tag,
    # so the meters would count them on the device.
    return mark(mark(stacked.sub_(stacked).ne(0)).any())


# Views that make up gradients, by the axes along which ranks have other parts of their operators:
# those that are cut over most axes first.
ByOperator: TypeAlias = Mapping[tuple[Axis, ...], Sequence[torch.Tensor]]
Mark: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


class Clipping:
    """The clipping of a plan, on this rank. `dtype` is that of gradients, where it has none."""

    def __init__(self, step: Clip, mesh: Mesh, dtype: torch.dtype) -> None:
        self.step, self.mesh = step, mesh
        self._none = torch.empty(0, dtype=dtype, device=mesh.world.device)

    def norm(
        self,
        gradients: Sequence[torch.Tensor],
        wrapped: WrappedModel,
        scaling: LossScale | None,
    ) -> torch.Tensor:
        """Return the global norm of these gradients, all that `wrapped` has; see
        `global_norm`."""
        copies, by_operator = wrapped.copies(), None
        if self.step.operator_axes:
            targets = chain.from_iterable(wrapped.targets())
            own = [target for target in targets if not any(target is copy for copy in copies)]
            by_operator = _by_operator(own, self.step.operator_axes)
        copied = [id(target.gradient) for target in copies]
        like = gradients[0] if gradients else self._none
        return global_norm(gradients, self.step, self.mesh, scaling, by_operator, copied, like)

    def scale_down(self, gradients: Sequence[torch.Tensor], norm: torch.Tensor) -> None:
        """Scale `gradients` in place, whose global norm is `norm`, to at most the plan's."""
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
    """Return the norm of all gradients of all ranks (0-d, at least fp32, on all ranks alike). It is
    not finite where any gradient is not, or where the sum of squares exceeds its dtype. It takes
    one scalar all-reduce per axis along which they are shards; what is replicated is counted once.

    Of a scaled loss, the norm is that of the gradients without the scale. `copied` are the ids of
    gradients that another rank counts; in `by_operator` they are not. `like` is what gradients are
    like, of which a rank may have none.
    """
    like = gradients[0] if like is None else like
    by_row = not mesh.world.stands_in
    if by_operator is not None:
        (_, cut), *others = by_operator.items()
        square = _square(cut, like, by_row=by_row)
        for axes, views in others:
            shared = _square(views, like, by_row=by_row)
            # One rank's account for all: sharded over other axes the ranks may add it up in other
            # orders, and what a scale of an ulp more does to their copies would stay there.
            if not any(mesh.coordinate(axis) for axis in without(step.operator_axes, axes)):
                square.add_(shared)
    else:
        own = [gradient for gradient in gradients if id(gradient) not in copied]
        square = _square(own, like, by_row=by_row)
    if axes := step.reduced_axes:
        square = _all_reduced(square, like, axes, mesh)
    norm = square.sqrt_()
    if scaling is not None:
        norm.div_(scaling.beside(like)[0])
    return norm


def _by_operator(targets: Iterable[NamedTarget], axes: tuple[Axis, ...]) -> ByOperator:
    """Return what the targets have, of tensors that are cut over all of `axes`, then of those that
    are over the first of them alone, and at last of those that all of their ranks have alike."""
    views: dict[tuple[Axis, ...], list[torch.Tensor]]
    views = {axes[:count]: [] for count in range(len(axes), -1, -1)}
    for target in targets:
        for cutting, view in target.views():
            views[tuple(axis for axis in axes if axis in cutting)].append(view)
    return views


def scale_down(gradients: Sequence[torch.Tensor], norm: torch.Tensor, step: Clip) -> None:
    """Scale `gradients` in place, whose global norm is `norm`, to at most `step.max_norm`. The
    formula is torch's `clip_grad_norm_`, its 1e-6 included: a norm that is not finite spoils all of
    them."""
    if not gradients:
        return
    scale = alike(norm + 1e-6, gradients[0]).reciprocal_().mul_(step.max_norm).clamp_(max=1.0)
    torch._foreach_mul_(list(gradients), scale)


def _square(gradients: Sequence[torch.Tensor], like: torch.Tensor, *, by_row: bool) -> torch.Tensor:
    """The square of their norm, in at least fp32; 0 of none, where `like` is. `by_row` as of
    `_norms`."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    if not gradients:
        return alike(like.new_zeros((), dtype=dtype), like)
    # what is computed from a mapped file is in memory
    mark = partial(alike, source=like) if is_tagged(like.untyped_storage()) else _as_it_is
    norms = list(_norms(gradients, dtype, mark, by_row=by_row))  # alive until their norm is there
    joined = mark(torch.cat(norms)) if len(norms) > 1 else norms[0]
    return mark(torch.linalg.vector_norm(joined)).square_()


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _norms(
    gradients: Sequence[torch.Tensor], dtype: torch.dtype, mark: Mark, *, by_row: bool
) -> Iterator[torch.Tensor]:
    """Norms (1-d) that make up those of the tensors: one of a short tensor, and on the CPU one of
    each row of a long one, `by_row`, and of its end, unless it stands in for one of a GPU."""
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
        rows.append(flat[:end].view(-1, NORM_ROW))
        if end < gradient.numel():
            short.append(flat[end:])
    if short:
        yield mark(torch.stack([mark(norm) for norm in torch._foreach_norm(short, 2, dtype=dtype)]))
    for of_one in rows:
        yield mark(torch.linalg.vector_norm(of_one, dim=1, dtype=dtype))


def _all_reduced(
    square: torch.Tensor, gradient: torch.Tensor, axes: Sequence[Axis], mesh: Mesh
) -> torch.Tensor:
    """On the device, and back to where the gradients are."""
    device = mesh.world.device
    mesh.registry.tag(square, State.GRADIENTS)
    summed = square
    if tier_of(gradient.untyped_storage(), device.type) is not Tier.DEVICE:
        summed = Tiers(device, mesh.registry).move(square, Tier.DEVICE, State.GRADIENTS)
    for axis in axes:
        dist.all_reduce(summed, group=mesh.group((axis,)))
    return square if summed is square else square.copy_(summed)


class Loss:
    """How a model gives its loss: `objective` says which, and `inside` is what computes it in the
    model's own forward pass."""

    def __init__(
        self, objective: Objective | None = None, inside: LossInside | None = None
    ) -> None:
        self.objective = objective or Objective()
        self._inside = inside

    @property
    def is_inside(self) -> bool:
        """Whether the model's own forward pass computes it."""
        return self._inside is not None

    def attach(self, model: nn.Module, head: str) -> None:
        """To a model that gives its loss itself; `head` names the module that makes the logits of
        one that is not built in."""
        if self._inside is not None:
            self._inside.attach(model, head)

    def given(self, samples: SampleBatch) -> AbstractContextManager[None]:
        """Return the context that a forward pass runs in."""
        return self._inside.given(samples.targets) if self._inside else nullcontext()

    def run(self, model: nn.Module, samples: SampleBatch) -> Tensor:
        """Forward: the micro-batch's loss before it is divided (0-d)."""
        if self._inside is None:
            return local(self.objective.run(model, samples))
        with self.given(samples):
            loss: Tensor = model(samples.inputs)
        return loss

    def forward(self, model: Any, samples: SampleBatch) -> Tensor:
        """Forward of a stage, with `model` to call: what `of_forward` makes the loss of."""
        if self._inside is None:
            return self.objective.forward(model, samples)
        output: Tensor = model(samples.inputs)
        return output

    def of_forward(self, output: Tensor, samples: SampleBatch) -> Tensor:
        """The same as `run`, of what `forward` returned."""
        return output if self._inside else local(self.objective.of_forward(output, samples))


class StepLoss:
    """The losses of a step's micro-batches, each divided so that those of the global batch add up
    to its mean, and their sum on this rank, `share` (0-d). `loss` is how the model gives them."""

    def __init__(
        self, loss: Loss, scaling: LossScale | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.loss, self._scaling = loss, scaling
        self._batch: StepBatch | None = None
        self.share = torch.zeros((), dtype=dtype, device=device)

    def begin(self, batch: StepBatch) -> None:
        """A step with this batch begins."""
        self._batch = batch
        self.share.zero_()

    @contextmanager
    def evaluating(self, batch: StepBatch) -> Iterator[None]:
        """While entered, losses are those of this batch, and none of a step's."""
        self._batch = batch
        try:
            yield
        finally:
            self._batch = None

    def run(self, model: nn.Module, samples: SampleBatch) -> Tensor:
        """Forward of a micro-batch: its loss (0-d), of which backward begins with `seed`."""
        return self.loss.run(model, samples) / self._divisor(samples)

    def seed(self, loss: Tensor) -> Tensor | None:
        """Return what backward begins with; None for 1."""
        return self._scaling.seed(loss) if self._scaling else None

    def add(self, loss: Tensor) -> None:
        """A micro-batch's loss, to the share."""
        self.share.add_(loss.detach())

    def of_last_stage(self, output: Tensor, samples: SampleBatch) -> Tensor:
        """The loss of what the last stage of a pipeline returned, of which backward begins with
        `seed`; added to the share."""
        loss = self.of_output(output, samples)
        self.add(loss)
        return loss

    def of_output(self, output: Tensor, samples: SampleBatch) -> Tensor:
        """The micro-batch's loss, of what its forward pass returned (0-d)."""
        return self.loss.of_forward(output, samples) / self._divisor(samples)

    def _divisor(self, samples: SampleBatch) -> float:
        assert self._batch is not None, "no step has started"
        return self.loss.objective.divisor(self._batch, samples)


Enter = Callable[[Phase, int], None]  # is told of every pass: its phase and its micro-batch
Add = Callable[[Tensor], None]  # is told of the loss of every micro-batch


class PassRunner(Protocol):
    """What the program needs of the order in which micro-batches run."""

    def train(self, batch: StepBatch) -> None:
        """Forward and backward of every micro-batch; gradients are complete after it."""

    def evaluate(self, batch: StepBatch, add: Add) -> None:
        """Forward of every micro-batch. Where the loss is, `add` is called with each."""


class InTurn:
    """One micro-batch after the other through the whole model, forward and then backward."""

    def __init__(
        self,
        wrapped: WrappedModel,
        model: nn.Module,
        sizes: tuple[int, int],
        loss: StepLoss,
        enter: Enter,
    ) -> None:
        """`model` is what `wrapped` wraps; `sizes` are micro-batches a step and samples in each."""
        self.wrapped, self.model = wrapped, model
        self.count, self.micro = sizes
        self.loss, self.enter = loss, enter

    def train(self, batch: StepBatch) -> None:
        for index, samples in enumerate(batch.micro_batches(self.micro)):
            with self.wrapped.micro_batch(index == self.count - 1):
                self.enter(Phase.FORWARD, index)
                loss = self.loss.run(self.wrapped.module, samples)
                self.loss.add(loss)
                self.enter(Phase.BACKWARD, index)
                loss.backward(self.loss.seed(loss))
            del loss

    def evaluate(self, batch: StepBatch, add: Add) -> None:
        for samples in batch.micro_batches(self.micro):
            add(self.loss.run(self.model, samples))
