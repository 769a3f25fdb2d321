"""Gradient clipping: the norms of all gradients, their memory, and their traffic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain

from ptrain.axes.ring import Calls, group_over
from ptrain.cost import Collective, Phase, State, Traffic
from ptrain.derivation.ghosts.wrapping import Wrapping
from ptrain.derivation.tape import Scene
from ptrain.spec.placement import Axis
from ptrain.spec.precision import DType
from ptrain.steps.step import LONG_NORM, NORM_ROW, Plan


def by_operator(scene: Scene, numels: Sequence[int]) -> list[list[int]]:
    """Return the elements of each tensor with a norm, by group of the norm (`Clip.groups`).

    Copies on a stage are counted on another stage.
    """
    clip = scene.plan.clip
    tensors = zip(numels, scene.facts.trained, strict=True)
    sizes = [(numel, tensor) for numel, tensor in tensors if not tensor.is_copy]
    if clip is None or not clip.operator_axes:
        return [[numel for numel, _ in sizes]]
    groups: list[list[int]] = [[] for _ in clip.groups]
    group_of = cache(clip.group_of)
    for numel, tensor in sizes:
        groups[group_of(tensor.cut_over)].append(numel)
    return groups


def norm_bytes(scene: Scene, clipped: Iterable[list[list[int]] | None]) -> tuple[int, int]:
    """Return the bytes of the norm over all wraps of a rank: the peak, and those that live until
    the step ends.

    `clipped` are the elements of each wrap's gradients by group. None if they are not on the
    device.
    """
    norms = [groups for groups in clipped if groups is not None]
    if scene.plan.clip is None or not norms:
        return 0, 0
    groups = [list(chain.from_iterable(of_group)) for of_group in zip(*norms, strict=True)]
    return clipping(scene, groups)


def clipping(scene: Scene, groups: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return the bytes of the norm: the peak, and those that live until the step ends.

    A scalar of each group of tensors stays until all norms are computed, and one scalar until the
    step ends. `groups` are the elements of each tensor by group.
    """
    scalar = max(4, scene.plan.update.layout.gradients.itemsize)
    is_cpu = not scene.spec.is_for_cuda
    most = max(before + _norm_scalars(sizes, is_cpu=is_cpu) for before, sizes in enumerate(groups))
    return most * scalar, scalar


def _norm_scalars(sizes: Sequence[int], *, is_cpu: bool) -> int:
    """Return the maximum number of scalars that exist at once in the norm of a group.

    There is a norm of each short tensor and, on a CPU, of each row of a long tensor and of its
    rest. Norms in several tensors are joined for the total norm.
    """
    long = [numel for numel in sizes if is_cpu and numel > LONG_NORM]
    short = len(sizes) - len(long) + sum(1 for numel in long if numel % NORM_ROW)
    norms = short + sum(numel // NORM_ROW for numel in long)
    is_joined = (short > 0) + len(long) > 1
    return max(2 * short, norms * (1 + is_joined) + 1)


def norm(wrapping: Wrapping) -> Iterator[Traffic]:
    """Yield the traffic of the norm.

    Each axis reduces one scalar: the squared norm in at least fp32. With loss scaling it also
    reduces an fp32 flag for overflow. Copies of scalars between tiers are included.
    """
    spec, plan = wrapping.wrapped.spec, wrapping.wrapped.plan
    calls = Calls(Collective.ALL_REDUCE, State.GRADIENTS, Phase.UPDATE)
    yield from (calls.traffic(group_over(spec, (axis,)), size) for axis, size in _scalars(plan))
    yield from wrapping.scalars()


def _scalars(plan: Plan) -> Iterator[tuple[Axis, int]]:
    """Yield the axis and the bytes of each scalar that is summed."""
    if plan.clip is not None:
        scalar = max(4, plan.update.layout.gradients.itemsize)
        yield from ((axis, scalar) for axis in plan.clip.reduced_axes)
    yield from ((axis, DType.FP32.itemsize) for axis in plan.update.scale_axes)


def clip(scene: Scene, clipped: Iterable[list[list[int]] | None]) -> None:
    """Time the norm over all wraps of a rank, its all-reduce, and the scaling of gradients.

    Gradients on the host are the rank's shard of all gradients.
    """
    plan, tape = scene.plan, scene.tape
    if tape.clock is None:
        return
    for axis, size in _scalars(plan):
        tape.clock.send(Collective.ALL_REDUCE, (axis,), size).wait()
    if plan.clip is None:
        return
    numels: list[int] = []
    for groups in clipped:
        if groups is None and not plan.wrap.keeps_gradients_on_device and tape.clock.pace.overlaps:
            own = -(-scene.facts.trained_numel // scene.spec.degree(Axis.DP_SHARD))
            tape.clock.use_host(3 * own * plan.update.layout.gradients.itemsize)  # norm, scaling
        numels += chain.from_iterable(groups or ())
    tape.clock.clip(plan.update.layout, numels)
