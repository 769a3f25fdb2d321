"""A step of a loop on this rank against the reference's: every difference beyond the tolerance,
with its place. What a rank holds is compared where it is, with the same elements of the whole
tensor."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ptrain.report.copies import Copy, differing
from ptrain.report.finding import Departure, Moment, Subject, Way
from ptrain.verification.compare import Differences, ParameterMove
from ptrain.verification.evidence import StepSide
from ptrain.verification.jobs.job import Tolerance
from ptrain.verification.jobs.record import StepRecorder
from ptrain.verification.jobs.shards import ParameterShard
from ptrain.verification.parts import (
    QUIET,
    Magnitude,
    canonical_modules,
    difference,
    held,
    mean_size,
    norm,
)

_SURE = 10  # tolerances of a gradient, relative to its root mean square
_ROUNDINGS = 16  # of a parameter, in its own dtype, that an update may differ by


def at_start(
    differences: Differences,
    wholes: Mapping[str, Tensor],
    names: Sequence[str],
    holds: Mapping[str, ParameterShard],
    elsewhere: Collection[str] = (),
) -> None:
    """Compare the names and values of the parameters, bit by bit, in the rank's own dtype. What
    other ranks hold (`elsewhere`) this one need not: it may be a stage of a pipeline."""
    for name in wholes:
        if name not in holds and name not in elsewhere:
            description = "the reference has it, the loop's model has not"
            differences.add(Moment.START, Subject.PARAMETERS, name, description, Way.MISSING)
    for name in names:
        if name not in wholes:
            description = "the loop's model has it, the reference has not"
            differences.add(Moment.START, Subject.PARAMETERS, name, description, Way.MISSING)
    scale = Magnitude.of(wholes)
    for name, shard in holds.items():
        value, expected = shard.value(), shard.of(wholes[name])
        if not torch.equal(value, expected.to(value)):
            size = difference(value, expected, scale.length(wholes[name], expected))
            differences.compare(
                Moment.START, Subject.PARAMETERS, name, difference=size or math.inf, tolerance=0.0
            )


def compare_in_use(
    differences: Differences,
    sides: tuple[StepSide, StepSide],
    before: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    holds: Mapping[str, ParameterShard],
    limit: Tolerance,
) -> None:
    """Compare the parameters in a step's first forward pass (`sides`: one device's and the loop's)
    where any was written since the step began: a checkpoint that is loaded."""
    reference, run = (side.in_use for side in sides)
    for name, value in run.items():
        if name not in reference:
            continue
        is_old = torch.equal(value, before[1][name])
        if is_old and torch.equal(reference[name], before[0][name]):
            continue
        right, earlier = (holds[name].of(whole) for whole in (reference[name], before[0][name]))
        size = beside_way(value, right, norm(right.double() - earlier.double()), limit)
        differences.compare(
            Moment.FORWARD, Subject.PARAMETERS, name, difference=size, tolerance=limit.updates
        )


def beside_way(
    own: Tensor, right: Tensor, way: float, limit: Tolerance, roundings: int = _ROUNDINGS
) -> float:
    """Return how far it is from what is right, relative to the way that this has gone, or to its
    own roundings where these are more."""
    rounding = limit.length_of(roundings * torch.finfo(own.dtype).eps * norm(right))
    return difference(own, right, max(way, rounding))


def compare_gradients(
    differences: Differences,
    sides: tuple[StepSide, StepSide],
    holds: Mapping[str, ParameterShard],
    limit: Tolerance,
) -> None:
    """Compare gradients as the optimizer takes them. A rank that has none where the reference has
    one that is not zero lacks it."""
    wholes, own = (side.gradients for side in sides)
    expected = {name: gradient for name, gradient in wholes.items() if name in holds}
    scale = Magnitude.of(expected)
    for name, shard in holds.items():
        gradient = own.get(name)
        whole = expected.get(name)
        if whole is None:
            if gradient is not None and bool(gradient.any()):
                description = "a gradient where the reference has none"
                differences.add(Moment.GRADIENTS, Subject.GRADIENTS, name, description, Way.MISSING)
            continue
        part = shard.of(whole.view(shard.shape))
        if gradient is None:
            if not scale.is_noise(part):
                description = "no gradient when the optimizer steps"
                differences.add(Moment.GRADIENTS, Subject.GRADIENTS, name, description, Way.MISSING)
            continue
        size = difference(gradient, part, scale.length(whole, part))
        differences.compare(
            Moment.GRADIENTS, Subject.GRADIENTS, name, difference=size, tolerance=limit.gradients
        )


def pieces(whole: Tensor, shape: torch.Size) -> Iterator[Tensor]:
    """Yield every even chunk of a whole tensor that has this shape, or itself."""
    if whole.shape == shape:
        yield whole
        return
    if len(shape) != whole.dim():
        return
    differing = [dim for dim in range(whole.dim()) if whole.size(dim) != shape[dim]]
    if len(differing) == 1 and shape[differing[0]]:
        (dim,) = differing
        yield from (piece for piece in whole.split(shape[dim], dim) if piece.shape == shape)


def compare_update(
    differences: Differences,
    name: str,
    course: ParameterMove,
    *,
    is_noise: bool,
    limit: Tolerance,
) -> None:
    """Compare the parameter after the update, relative to the way that it has gone since the start,
    or to its roundings where these are more. Adam makes a whole move of the sign of a gradient that
    is noise: such a tensor, and elements of which it is not sure, need only be numbers."""
    if not course.after.is_floating_point():
        same = torch.equal(course.run_after, course.after.to(course.run_after.device))
        differences.compare(
            Moment.UPDATE, Subject.PARAMETERS, name, difference=0.0 if same else math.inf,
            tolerance=limit.updates,
        )  # fmt: skip
        return
    after, run_after = course.after[course.sure], course.run_after[course.sure]
    moved = norm(after.double() - course.origin[course.sure].double())
    size = 0.0 if is_noise else beside_way(run_after, after, moved, limit)
    size = size if bool(torch.isfinite(course.run_after).all()) else math.inf
    if course.stood_still and course.reference_moved:  # roundings would hide it in 16 bits
        size = max(size, 1.0)
    differences.compare(
        Moment.UPDATE, Subject.PARAMETERS, name, difference=size, tolerance=limit.updates
    )
    differences.courses[name] = course


def sure_of(part: Tensor, gradient: Tensor | None, whole: Tensor, limit: Tolerance) -> Tensor:
    """Return which elements of a gradient are larger than its rounding, or exactly zero on both
    sides."""
    if gradient is None:
        return torch.ones_like(part, dtype=torch.bool)
    nothing = (part == 0) & (gradient.to(part.device) == 0)
    return (part.abs() > _SURE * limit.gradients * mean_size(whole)) | nothing


def compare_states(
    differences: Differences,
    reference: Mapping[str, Mapping[str, Tensor]],
    run: Mapping[str, Mapping[str, Tensor]],
    holds: Mapping[str, ParameterShard],
    limit: Tolerance,
) -> None:
    """Compare what the optimizers keep beside each parameter, where both keep something of that
    name: what is noise beside that of the other parameters (a key's bias has no gradient) relative
    to theirs."""
    scales = _scales_of(reference)
    for name, tensors in run.items():
        for key, state in tensors.items():
            whole = reference.get(name, {}).get(key)
            if whole is None or whole.shape != holds[name].shape:
                continue
            row = holds[name].like(state)
            if row is None:
                continue
            part = holds[name].of(whole)
            length = max(scales[key].length(whole, part), QUIET * norm(whole))
            size = difference(row, part, length)
            differences.compare(
                Moment.UPDATE, Subject.OPTIMIZER, f"{name} · {key}", difference=size,
                tolerance=max(limit.updates, 10 * limit.gradients),
            )  # fmt: skip


def _scales_of(states: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Magnitude]:
    """Return how large each kind of state is, over all parameters."""
    kinds: dict[str, dict[str, Tensor]] = {}
    for name, tensors in states.items():
        for key, state in tensors.items():
            kinds.setdefault(key, {})[name] = state
    return {key: Magnitude.of(tensors) for key, tensors in kinds.items()}


def compare_buffers(
    differences: Differences, reference: nn.Module, run: nn.Module, limit: Tolerance
) -> None:
    """Compare floating buffers, but not the statistics of batches, which each rank has of its
    own."""
    wrapped = dict(canonical_modules(run))
    for path, module in canonical_modules(reference):
        if isinstance(module, nn.modules.batchnorm._BatchNorm) or path not in wrapped:
            continue
        theirs = dict(wrapped[path].named_buffers(recurse=False))
        for name, buffer in module.named_buffers(recurse=False):
            other = theirs.get(name)
            if other is None or not buffer.is_floating_point() or other.shape != buffer.shape:
                continue
            size = difference(held(other), buffer, norm(buffer))
            full = f"{path}.{name}" if path else name
            differences.compare(
                Moment.UPDATE, Subject.BUFFERS, full, difference=size, tolerance=limit.updates
            )


def digests(
    holds: Mapping[str, ParameterShard], rows: Mapping[str, Tensor]
) -> dict[str, list[str]]:
    """Return by name which part of the whole this rank has, and a checksum of it, bit by bit."""
    return {
        name: ["" if holds[name].at is None else digest(holds[name].at), digest(row)]
        for name, row in rows.items()
    }


def digest(tensor: Tensor | None) -> str:
    if tensor is None:
        return ""
    raw = tensor.detach().contiguous().flatten().cpu().view(torch.uint8).numpy()
    return hashlib.blake2b(raw.tobytes(), digest_size=12).hexdigest()


def replicas(step: int, everyones: Sequence[Mapping[str, Sequence[str]]]) -> Iterator[Departure]:
    """Yield a departure where ranks hold the same part of a parameter and do not have the same bits
    of it."""
    when = Moment.UPDATE, Subject.PARAMETERS
    tables = [
        [Copy(*when, name, part, "", bits) for name, (part, bits) in mine.items()]
        for mine in everyones
    ]
    for departure in differing(tables, step):
        yield replace(departure, difference=math.inf, told="replicas differ")


def state_of(
    run: StepRecorder, holds: Mapping[str, ParameterShard]
) -> dict[str, dict[str, Tensor]]:
    """Return what the optimizers that stepped keep, by parameter and name."""
    names = {id(shard.parameter): name for name, shard in holds.items()}
    return {
        names[id(parameter)]: {k: v for k, v in state.items() if isinstance(v, Tensor) and v.dim()}
        for optimizer in run.optimizers
        for parameter, state in optimizer.state.items()
        if id(parameter) in names
    }
