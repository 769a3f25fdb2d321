"""What one rank holds, each thing under a key that is the same on whichever rank holds it too.

A part of a tensor is named by what cuts it: the coordinates along the mesh dimensions of a DTensor
that shard it, and the range of its elements in the shard of a flat unit. Ranks whose keys are equal
hold copies; a tensor that is cut over an axis has another key at every place of it. So what is
replicated, and over which ranks, follows from the layouts that the wrapped tensors have now.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch.distributed.tensor import DTensor

from ptrain.axes.data.cuts import Cuts
from ptrain.axes.data.run.flat_target import (
    FlatTarget,
    FlatTensorTarget,
    FrozenTarget,
    ZeroRedundancyUpdate,
)
from ptrain.axes.data.run.target import LocalPart, NamedTarget, Parameter, ParameterTarget
from ptrain.facts.parameters import OF_TOKENS
from ptrain.interpreter.program import Program
from ptrain.models.ledger import local
from ptrain.optimizers.build import TorchOptimizer
from ptrain.optimizers.update import COUNTER, MASTER, TargetsUpdate
from ptrain.report.finding import Subject
from ptrain.spec.placement import Axis


@dataclass(frozen=True, slots=True)
class Holding:
    """`name`: a tensor's canonical one, `key`: which state of it (`exp_avg`; "" for itself);
    `part` of it, "" for all."""

    subject: Subject
    name: str
    key: str
    part: str
    tensor: torch.Tensor

    @property
    def identity(self) -> tuple[str, str, str, str]:
        return self.subject.value, self.name, self.key, self.part


def parameters(program: Program) -> Iterator[Holding]:
    """Yield the parameters as they are stored between steps. Masters that parameters are made of
    are the optimizer's."""
    for target in targets(program):
        subject = Subject.OPTIMIZER if target.owns_master else Subject.PARAMETERS
        key = MASTER if target.owns_master else ""
        for name, part, tensor in _parameter(target):
            yield Holding(subject, program.wrapped.canonical_name(name), key, part, tensor)


def gradients(program: Program) -> Iterator[Holding]:
    """Reduced, as they are kept for the update. One that is still a sum over ranks to be taken is
    nobody's copy, and left out; so are those that an update in the backward pass has used up."""
    for target in targets(program):
        for name, part, tensor in _gradient(target):
            yield Holding(Subject.GRADIENTS, program.wrapped.canonical_name(name), "", part, tensor)


def optimizer(program: Program) -> Iterator[Holding]:
    """Its state, where this rank has it; of counters see `counters`."""
    for target, tensors in program.update.tensors():
        for key, stored in tensors.items():
            if key == COUNTER or stored.is_meta:
                continue
            for name, part, tensor in _slot(target, stored):
                yield Holding(
                    Subject.OPTIMIZER, program.wrapped.canonical_name(name), key, part, tensor
                )
    if program.scaling is not None:
        for key, tensor in program.scaling.state().items():
            yield Holding(Subject.OPTIMIZER, "scaling", key, "", tensor)


def buffers(program: Program) -> Iterator[Holding]:
    """Yield the buffers of the model, the stages' under the model's names. Tables of tokens have
    rows for the positions that the model says it is given."""
    for piece in program.pieces:
        spans = getattr(piece.module, "spans", ())
        rows = ",".join(f"{first}-{behind}" for first, behind in spans)
        for name, buffer in piece.module.named_buffers():
            if (part := _cut(buffer)) is not None:
                part += rows if name.endswith(OF_TOKENS) else ""
                yield Holding(Subject.BUFFERS, name, "", part, local(buffer))


def counters(program: Program) -> dict[str, int]:
    """Return how many updates each tensor has had, by name, as the optimizer counts them: the same
    on all ranks that have any part of it."""
    names, counts = [], []
    for target, tensors in program.update.tensors():
        count = tensors.get(COUNTER)
        if count is not None and not count.is_meta:
            names.append(program.wrapped.canonical_name(names_of(target)[0]))
            counts.append(local(count).to(torch.float64).reshape(()))
    if not counts:
        return {}
    values = torch.stack([count.cpu() for count in counts]).tolist()
    return dict(zip(names, map(int, values), strict=True))


def hyperparameters(program: Program) -> dict[str, list[float]]:
    """Return the numbers that this rank's optimizers were given for their last update (lr, eps,
    weight_decay …), by rule, each with its values over all groups of parameters."""
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
    """Yield what the program's optimizer updates."""
    return (target for target, _ in program.update.tensors())


_Pieces = Iterator[tuple[str, str, torch.Tensor]]  # name, part, tensor


def _parameter(target: NamedTarget) -> _Pieces:
    match target:
        case FlatTarget() | FlatTensorTarget() | FrozenTarget():
            if isinstance(target, FlatTensorTarget) and target.index:
                return  # the first one of a unit tells all
            held = target.unit.parameters
            cut = held.cut
            stored = held.stored
            if behind := held.behind:  # along these axes a rank's own part alone is updated yet
                cut = (*cut, *behind)
                stored = held.cuts.take(stored, held.cut, cut)
            yield from _of_unit(target.unit.named, held.cuts, cut, stored)
        case ParameterTarget():
            if (part := _cut(target.parameter)) is not None:
                yield target.name, part, target.value()
        case _:
            raise AssertionError(f"unknown layout of {type(target).__name__}")


def _gradient(target: NamedTarget) -> _Pieces:
    match target:
        case FrozenTarget():
            return
        case FlatTarget() | FlatTensorTarget():
            kept = target.unit.gradients
            whole = kept.kept
            if whole is None or (isinstance(target, FlatTensorTarget) and target.index):
                return
            yield from _of_unit(target.unit.named, kept.cuts, kept.now, whole)
        case ParameterTarget():
            gradient = target.parameter.grad
            if gradient is not None and (part := _cut(gradient)) is not None:
                yield target.name, part, local(gradient)
        case _:
            raise AssertionError(f"unknown layout of {type(target).__name__}")


def _slot(target: NamedTarget, stored: torch.Tensor) -> _Pieces:
    match target:
        case FlatTarget() | FlatTensorTarget() if not stored.dim():  # a number is cut by nobody
            yield names_of(target)[0], "", stored
        case FlatTarget():
            unit = target.unit
            yield from _of_unit(unit.named, unit.cuts, unit.step.optimizer, stored)
        case FlatTensorTarget():
            parameter = target.unit.named[target.index][1]
            if stored.shape == target.shape:
                yield target.name, _own_part(parameter), stored
                return
            named = [(target.name, parameter)]
            yield from _of_unit(named, target.cuts, target.unit.step.optimizer, stored)
        case ParameterTarget():
            if (part := _cut(target.parameter)) is not None:
                yield target.name, part, local(stored)
        case _:
            raise AssertionError(f"unknown layout of {type(target).__name__}")


def _of_unit(
    named: Sequence[tuple[str, Parameter]],
    cuts: Cuts[torch.Tensor],
    cut: Sequence[Axis],
    stored: torch.Tensor,
) -> _Pieces:
    """The tensors of a flat shard over `cut`, each with the range of its elements that is there."""
    assert stored.numel() == cuts.shard_numel(cut), "the shard has another size"
    sizes = [parameter.numel() for _, parameter in named]
    ends = list(accumulate(sizes))
    start = 0
    for first, last in cuts.stretches(cut):
        for (name, parameter), size, end in zip(named, sizes, ends, strict=True):
            low, high = max(end - size, first), min(end, last)
            if low < high:
                offset = low - (end - size)
                is_whole = high - low == size
                elements = "" if is_whole else f"[{offset}:{offset + high - low}]"
                part = f"{_own_part(parameter)}{elements}"
                yield name, part, stored.view(-1)[start + low - first : start + high - first]
        start += last - first


def _own_part(parameter: Parameter) -> str:
    """Of a parameter of a flat unit: what cuts it before the unit does."""
    if not isinstance(parameter, LocalPart):
        return ""
    part = _cut(parameter.parameter)
    assert part is not None, "the tensor is not a parameter"
    return part


def _cut(tensor: torch.Tensor) -> str | None:
    """The place along every mesh dimension that shards a tensor, `tp=1`, "" for a whole one; None
    for a sum that is still to be taken."""
    if not isinstance(tensor, DTensor):
        return ""
    if any(placement.is_partial() for placement in tensor.placements):
        return None
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(f"dim{dim}" for dim in range(mesh.ndim))
    place = mesh.get_coordinate() or [0] * mesh.ndim
    cuts = zip(names, place, tensor.placements, strict=True)
    return ",".join(f"{name}={at}" for name, at, how in cuts if not how.is_replicate())


def names_of(target: NamedTarget) -> list[str]:
    """Return the names of the tensors that a target stands for, as its stage has them."""
    match target:
        case FlatTarget() | FrozenTarget():
            return [name for name, _ in target.unit.named]
        case FlatTensorTarget() | ParameterTarget():
            return [target.name]
        case _:
            raise AssertionError(f"unknown name of {type(target).__name__}")


def stale_copies(program: Program) -> Iterator[tuple[str, str]]:
    """Parameters that are not, bit by bit, their master copy in their own dtype: name, and that in
    words. Each rank looks at what it has of both."""
    for target, tensors in program.update.tensors():
        if (master := tensors.get(MASTER)) is None:
            continue
        for name, held, other in _with_master(target, master):
            copied = other.to(device=held.device, dtype=held.dtype)
            if not torch.equal(_bits(held), _bits(copied)):
                dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in (held, other)]
                yield (
                    program.wrapped.canonical_name(name),
                    f"differs from the {dtypes[0]} cast of its {dtypes[1]} master copy",
                )


def storages_by_name(program: Program) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors on whose storages parameters, their gradients and their optimizer state lie now, each
    by name of every tensor that is there; a unit's lie on one."""
    for target, tensors in program.update.tensors():
        held: list[torch.Tensor] = [tensor for tensor in tensors.values() if not tensor.is_meta]
        match target:
            case FlatTarget() | FlatTensorTarget():
                unit = target.unit
                held += [unit.parameters.stored, unit.parameters.whole, *unit.gradients.held()]
            case FrozenTarget():
                held += [target.unit.parameters.stored, target.unit.parameters.whole]
            case ParameterTarget():
                own = (target.parameter.detach(), target.parameter.grad)
                held += [local(tensor) for tensor in own if tensor is not None]
        for name in names_of(target):
            yield from ((program.wrapped.canonical_name(name), tensor) for tensor in held)


def _with_master(
    target: NamedTarget, master: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Name, parameter and master, of what this rank has of both."""
    match target:
        case FlatTarget():
            held, kept = target.unit.parameters, target.unit.step.optimizer
            here = (*held.cut, *held.behind)
            both = tuple(dict.fromkeys((*here, *kept)))
            stored = held.cuts.take(held.stored, held.cut, both)
            others = held.cuts.take(master, kept, both)
            mine = _of_unit(target.unit.named, held.cuts, both, stored)
            theirs = _of_unit(target.unit.named, held.cuts, both, others)
            for (name, _, own), (_, _, other) in zip(mine, theirs, strict=True):
                yield name, own, other
        case FlatTensorTarget():
            pass  # its master is cut by itself, and not as the unit is
        case ParameterTarget():
            yield target.name, target.value(), local(master)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
