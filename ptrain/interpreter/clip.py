"""One gradient norm over all parameters and all axes, and the scaling that it asks for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TypeAlias

import torch
import torch.distributed as dist

from ptrain.axes.data.run.target import NamedTarget
from ptrain.axes.data.run.wrapped import WrappedModel
from ptrain.costs import State
from ptrain.interpreter.scaling import LossScale
from ptrain.models.tags import is_tagged, tier_of
from ptrain.rooms.mesh import Mesh
from ptrain.rooms.tiers import Tiers, alike
from ptrain.spec.axis import Axis, without
from ptrain.spec.placement import Tier
from ptrain.steps.step import LONG_NORM, NORM_ROW, Clip

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
