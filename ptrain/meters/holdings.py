"""The tensors that one rank holds, each under a key that is identical on all ranks that hold it.

A part of a tensor is named by its shard: the coordinates along the mesh dimensions of a DTensor
that shard it, and the range of elements within the shard of a flat unit. Ranks with equal keys hold
copies; a tensor that is sharded over an axis has a different key at each coordinate of that axis.
The set of ranks that replicate a tensor therefore follows from the current layout of the wrapped
tensors, with no declaration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch.distributed.tensor import DTensor

from ptrain.axes.data.cuts import ShardLayout
from ptrain.axes.data.run.flat_target import (
    FlatTarget,
    FlatTensorTarget,
    FrozenTarget,
    ZeroRedundancyUpdate,
    names_of,
)
from ptrain.axes.data.run.target import LocalPart, NamedTarget, Parameter, ParameterTarget
from ptrain.facts.parameters import OF_TOKENS
from ptrain.interpreter.program import Program
from ptrain.models.ledger import local_tensor
from ptrain.optimizers.build import TorchOptimizer
from ptrain.optimizers.update import COUNTER, MASTER, TargetsUpdate
from ptrain.report.finding import Subject
from ptrain.spec.placement import Axis


@dataclass(frozen=True, slots=True)
class Holding:
    """A tensor part that this rank holds.

    Attributes:
        subject: The state that the tensor belongs to.
        name: Canonical name of the tensor in the model.
        key: Key of the optimizer state (`exp_avg`); "" for the tensor itself.
        part: The shard of the tensor that this rank holds; "" for the full tensor.
        tensor: The local storage, not copied.
    """

    subject: Subject
    name: str
    key: str
    part: str
    tensor: torch.Tensor

    @property
    def identity(self) -> tuple[str, str, str, str]:
        """The key that is equal on all ranks that hold the same part."""
        return self.subject.value, self.name, self.key, self.part


def parameters(program: Program) -> Iterator[Holding]:
    """Yield the parameters as they are stored between steps.

    Master copies from which parameters are cast count as optimizer state.
    """
    for target in targets(program):
        subject = Subject.OPTIMIZER if target.owns_master else Subject.PARAMETERS
        key = MASTER if target.owns_master else ""
        for name, part, tensor in _parameter_parts(target):
            yield Holding(subject, program.wrapped.canonical_name(name), key, part, tensor)


def gradients(program: Program) -> Iterator[Holding]:
    """Yield the reduced gradients that are kept for the update.

    Gradients with a pending reduction (Partial placements) are left out, since no two ranks hold
    the same values. Gradients that an update in the backward pass has consumed are left out too.
    """
    for target in targets(program):
        for name, part, tensor in _gradient_parts(target):
            yield Holding(Subject.GRADIENTS, program.wrapped.canonical_name(name), "", part, tensor)


def optimizer_state(program: Program) -> Iterator[Holding]:
    """Yield the optimizer state that this rank stores, and the loss scaler's state.

    Step counters are left out; see `update_counts`.
    """
    for target, tensors in program.update.tensors():
        for key, stored in tensors.items():
            if key == COUNTER or stored.is_meta:
                continue
            for name, part, tensor in _slot_parts(target, stored):
                yield Holding(
                    Subject.OPTIMIZER, program.wrapped.canonical_name(name), key, part, tensor
                )
    if program.scaling is not None:
        for key, tensor in program.scaling.state().items():
            yield Holding(Subject.OPTIMIZER, "scaling", key, "", tensor)


def buffers(program: Program) -> Iterator[Holding]:
    """Yield the buffers of the model under the model's names, stage by stage.

    The part of a table with one row per token includes the position ranges of this rank's tokens.
    """
    for piece in program.pieces:
        spans = getattr(piece.module, "spans", ())
        rows = ",".join(f"{first}-{behind}" for first, behind in spans)
        for name, buffer in piece.module.named_buffers():
            if (part := _shard_coordinates(buffer)) is not None:
                part += rows if name.endswith(OF_TOKENS) else ""
                yield Holding(Subject.BUFFERS, name, "", part, local_tensor(buffer))


def update_counts(program: Program) -> dict[str, int]:
    """Return the number of updates of each tensor, as the optimizer counts them, by name.

    The counts are equal on all ranks that hold any part of the tensor.
    """
    names, counts = [], []
    for target, tensors in program.update.tensors():
        count = tensors.get(COUNTER)
        if count is not None and not count.is_meta:
            names.append(program.wrapped.canonical_name(names_of(target)[0]))
            counts.append(local_tensor(count).to(torch.float64).reshape(()))
    if not counts:
        return {}
    # The counters of torch's optimizers may be on different devices, and `stack` needs one.
    values = torch.stack([count.cpu() for count in counts]).tolist()
    return dict(zip(names, map(int, values), strict=True))


def hyperparameters(program: Program) -> dict[str, list[float]]:
    """Return the hyperparameters of the last update (`Adam.lr`, `Adam.eps`, …) on this rank.

    Each key has the sorted distinct values over all parameter groups.
    """
    update = program.update
    optimizers: list[torch.optim.Optimizer]
    match update:
        case TargetsUpdate():
            rules = chain.from_iterable(group.optimizers.values() for group in update.groups)
            optimizers = [rule.optimizer for rule in rules if isinstance(rule, TorchOptimizer)]
        case ZeroRedundancyUpdate():
            optimizers = [update.optimizer]
        case _:
            raise AssertionError(f"unknown optimizer of {type(update).__name__}")
    numbers_of: dict[str, set[float]] = {}
    for optimizer in optimizers:
        for key, value in chain.from_iterable(group.items() for group in optimizer.param_groups):
            listed = value if isinstance(value, tuple) else (value,)
            numbers = {n for n in listed if isinstance(n, float)}
            numbers_of.setdefault(f"{type(optimizer).__name__}.{key}", set()).update(numbers)
    return {key: sorted(values) for key, values in numbers_of.items() if values}


def targets(program: Program) -> Iterator[NamedTarget]:
    """Yield the update targets of the program's optimizer."""
    return (target for target, _ in program.update.tensors())


_Pieces = Iterator[tuple[str, str, torch.Tensor]]  # name, part, tensor


def _parameter_parts(target: NamedTarget) -> _Pieces:
    """Yield the parts of the parameters that a target stores between steps."""
    match target:
        case FlatTarget() | FlatTensorTarget() | FrozenTarget():
            if isinstance(target, FlatTensorTarget) and target.index:
                return  # the first target of a unit yields the parameters of the full unit
            held = target.unit.parameters
            cut = held.cut
            stored = held.stored
            # the replicas are stale along these axes until the next gather: only the local shard
            # has been updated
            if behind := held.stale_axes:
                cut = (*cut, *behind)
                stored = held.cuts.take_part(stored, held.cut, cut)
            yield from _unit_parts(target.unit.named, held.cuts, cut, stored)
        case ParameterTarget():
            if (part := _shard_coordinates(target.parameter)) is not None:
                yield target.name, part, target.value()
        case _:
            raise AssertionError(f"unknown layout of {type(target).__name__}")


def _gradient_parts(target: NamedTarget) -> _Pieces:
    """Yield the parts of the reduced gradients that a target keeps."""
    match target:
        case FrozenTarget():
            return
        case FlatTarget() | FlatTensorTarget():
            kept = target.unit.gradients
            whole = kept.kept
            if whole is None or (isinstance(target, FlatTensorTarget) and target.index):
                return
            yield from _unit_parts(target.unit.named, kept.cuts, kept.now, whole)
        case ParameterTarget():
            gradient = target.parameter.grad
            if gradient is not None and (part := _shard_coordinates(gradient)) is not None:
                yield target.name, part, local_tensor(gradient)
        case _:
            raise AssertionError(f"unknown layout of {type(target).__name__}")


def _slot_parts(target: NamedTarget, stored: torch.Tensor) -> _Pieces:
    """Yield the parts of one optimizer state tensor of a target."""
    match target:
        case FlatTarget() | FlatTensorTarget() if not stored.dim():  # a 0-d state is replicated
            yield names_of(target)[0], "", stored
        case FlatTarget():
            unit = target.unit
            yield from _unit_parts(unit.named, unit.cuts, unit.step.optimizer, stored)
        case FlatTensorTarget():
            parameter = target.unit.named[target.index][1]
            slot = target.slot_of(stored)
            if slot is None or stored.shape == target.shape:
                yield target.name, _part_before_unit(parameter), stored
                return
            named = [(target.name, parameter)]
            yield from _unit_parts(named, slot.route.cuts, target.unit.step.optimizer, stored)
        case ParameterTarget():
            if (part := _shard_coordinates(target.parameter)) is not None:
                yield target.name, part, local_tensor(stored)
        case _:
            raise AssertionError(f"unknown layout of {type(target).__name__}")


def _unit_parts(
    named: Sequence[tuple[str, Parameter]],
    cuts: ShardLayout[torch.Tensor],
    cut: Sequence[Axis],
    stored: torch.Tensor,
) -> _Pieces:
    """Yield each tensor's part of a flat shard over `cut`, with its range of elements.

    Args:
        named: Parameters of the unit by name, in the order in which they are laid out.
        cuts: The unit's shards.
        cut: Axes that shard the unit.
        stored: The local shard of the unit.
    """
    assert stored.numel() == cuts.shard_numel(cut), "the shard has another size"
    # optimizer state of a single tensor may be a factor, which is smaller
    is_single = len(named) == 1
    sizes = [cuts.numel] if is_single else [parameter.numel() for _, parameter in named]
    ends = list(accumulate(sizes))
    start = 0
    # A shard may begin and end inside a tensor, so each tensor has the overlap of its range with
    # the shard's.
    for first, last in cuts.shard_ranges(cut):
        for (name, parameter), size, end in zip(named, sizes, ends, strict=True):
            low, high = max(end - size, first), min(end, last)
            if low < high:
                offset = low - (end - size)
                is_whole = high - low == size
                elements = "" if is_whole else f"[{offset}:{offset + high - low}]"
                part = f"{_part_before_unit(parameter)}{elements}"
                yield name, part, stored.view(-1)[start + low - first : start + high - first]
        start += last - first


def _part_before_unit(parameter: Parameter) -> str:
    """Return the shard that a flat unit's parameter is before the unit shards it, "" if full."""
    if not isinstance(parameter, LocalPart):
        return ""
    part = _shard_coordinates(parameter.parameter)
    assert part is not None, "the tensor is not a parameter"
    return part


def _shard_coordinates(tensor: torch.Tensor) -> str | None:
    """Return the coordinates along the mesh dimensions that shard a tensor, such as `tp=1`.

    Returns "" for a full tensor, and None for a tensor with a pending reduction.
    """
    if not isinstance(tensor, DTensor):
        return ""
    if any(placement.is_partial() for placement in tensor.placements):
        return None
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(f"dim{dim}" for dim in range(mesh.ndim))
    place = mesh.get_coordinate() or [0] * mesh.ndim
    cuts = zip(names, place, tensor.placements, strict=True)
    return ",".join(f"{name}={at}" for name, at, how in cuts if not how.is_replicate())


def stale_copies(program: Program) -> Iterator[tuple[str, str]]:
    """Yield the name and a description of each parameter that differs from its master copy.

    A parameter must be equal, bit by bit, to its master copy cast to the parameter's dtype. Each
    rank compares the elements for which it holds both.
    """
    for target, tensors in program.update.tensors():
        if (master := tensors.get(MASTER)) is None:
            continue
        for name, held, other in _pairs_with_master(target, master):
            copied = other.to(device=held.device, dtype=held.dtype)
            if not torch.equal(_as_bytes(held), _as_bytes(copied)):
                dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in (held, other)]
                yield (
                    program.wrapped.canonical_name(name),
                    f"differs from the {dtypes[0]} cast of its {dtypes[1]} master copy",
                )


def storages_by_name(program: Program) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors whose storages hold parameters, gradients and optimizer state, by name.

    The parameters of a flat unit share a storage, so such a storage is yielded under several names.
    """
    for target, tensors in program.update.tensors():
        held: list[torch.Tensor] = [tensor for tensor in tensors.values() if not tensor.is_meta]
        match target:
            case FlatTarget() | FlatTensorTarget():
                unit = target.unit
                held += [
                    unit.parameters.stored,
                    unit.parameters.whole,
                    *unit.gradients.live_tensors(),
                ]
            case FrozenTarget():
                held += [target.unit.parameters.stored, target.unit.parameters.whole]
            case ParameterTarget():
                own = (target.parameter.detach(), target.parameter.grad)
                held += [local_tensor(tensor) for tensor in own if tensor is not None]
        for name in names_of(target):
            yield from ((program.wrapped.canonical_name(name), tensor) for tensor in held)


def _pairs_with_master(
    target: NamedTarget, master: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield name, parameter and master for the elements of which this rank holds both."""
    match target:
        case FlatTarget():
            held, kept = target.unit.parameters, target.unit.step.optimizer
            here = (*held.cut, *held.stale_axes)
            both = tuple(dict.fromkeys((*here, *kept)))
            stored = held.cuts.take_part(held.stored, held.cut, both)
            others = held.cuts.take_part(master, kept, both)
            mine = _unit_parts(target.unit.named, held.cuts, both, stored)
            theirs = _unit_parts(target.unit.named, held.cuts, both, others)
            for (name, _, own), (_, _, other) in zip(mine, theirs, strict=True):
                yield name, own, other
        case FlatTensorTarget():
            pass  # its master is sharded per tensor, the parameters per unit: parts do not align
        case ParameterTarget():
            yield target.name, target.value(), local_tensor(master)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor as a 1-d uint8 tensor, so that NaNs compare equal."""
    return tensor.contiguous().view(-1).view(torch.uint8)
