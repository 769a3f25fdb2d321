"""Update targets of flat units, by tensor name, for checkpoints and the gradient norm.

The tensors of a flat unit appear as a module's parameters.

An update can be spread over replicas: each rank updates some full tensors and sends them to the
others (torch's ZeroRedundancyOptimizer). Ω is then S, in units of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard

from ptrain.axes.data.cuts import Axes, ShardLayout
from ptrain.axes.data.run.target import (
    CutView,
    Named,
    Parameter,
    ParameterTarget,
    axes_of,
    full_tensor,
    part_of,
    whole_of,
)
from ptrain.axes.data.theta import Parameters
from ptrain.axes.data.update import ShardTarget, TensorsUpdate, TensorTarget, UnitState
from ptrain.cost import State
from ptrain.internals import zero_redundancy
from ptrain.optimizers.build import TorchLeaf, build_optimizer, initial_state
from ptrain.optimizers.update import Scale, Slot
from ptrain.runtime.comm import TagRegistry
from ptrain.runtime.torch import TorchRuntime
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.placement import Axis, Tier
from ptrain.spec.precision import Layout
from ptrain.steps.wraps import FlatUnits
from ptrain.units import ceil_div

# Writes initial values of a parameter: canonical name, parameter, first row, and the tensor to
# fill. Rows count within the part that this rank stores.
RowWriter = Callable[[str, Parameter, int, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class LocalRowWriter:
    """A writer of initial values for the part of a unit that this rank stores.

    Attributes:
        write: Writes rows of a parameter's initial values.
        stretches: Ranges (start, end) of elements of the unit's full buffer that this rank stores.
    """

    write: RowWriter
    stretches: Sequence[tuple[int, int]]

    def fill(self, name: str, parameter: Parameter, start: int, piece: torch.Tensor) -> None:
        """Write the rows of a parameter that the ranges cover; other rows are left unchanged.

        Args:
            name: Canonical name of the parameter.
            parameter: The parameter.
            start: Its first element in the buffer.
            piece: Its view of the buffer; 0-d is one row.
        """
        piece = torch.atleast_1d(piece)
        # `write` takes full rows, so ranges of elements are widened to rows. Rows that two ranks
        # share are written on both.
        row = max(1, math.prod(piece.shape[1:]))
        for begin, end in self.stretches:
            first = max(begin - start, 0) // row
            behind = min(ceil_div(max(end - start, 0), row), len(piece))
            if first < behind:
                self.write(name, parameter, first, piece[first:behind])


class ParameterMembers:
    """The parameters of a flat unit, or the parts that this rank stores, by canonical name.

    `values` writes initial values, if the parameters have none and no memory yet.
    """

    def __init__(self, named: Sequence[tuple[str, Parameter]]) -> None:
        self.values: LocalRowWriter | None = None
        self.named = list(named)
        self.names = [name for name, _ in named]
        self.shapes = [tuple(parameter.shape) for _, parameter in named]
        axes = {axes for _, parameter in named if (axes := axes_of(parameter))}
        assert len(axes) <= 1, "what is cut over other axes is of another unit"
        self.cutting_axes: tuple[Axis, ...] = next(iter(axes), ())
        self.are_cut = [bool(axes_of(parameter)) for _, parameter in named]
        self._starts = [0, *accumulate(map(math.prod, self.shapes))]
        # contiguous strides, computed once for `as_strided`
        self._strides = [torch.empty(shape, device="meta").stride() for shape in self.shapes]

    def pieces(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors as views of the unit's full buffer."""
        return [self._view_of(whole, index) for index in range(len(self.named))]

    def _view_of(self, whole: torch.Tensor, index: int) -> torch.Tensor:
        """Return one tensor's view of the buffer.

        It is called for every gradient, so it uses one call (as_strided) instead of a slice and a
        view.
        """
        # The offset counts from the start of the storage, and `whole` may be a view of a larger
        # buffer.
        start = whole.storage_offset() + self._starts[index]
        return whole.as_strided(self.shapes[index], self._strides[index], start)

    def bind_views(self, whole: torch.Tensor) -> None:
        for index, (name, parameter) in enumerate(self.named):
            piece = self._view_of(whole, index)
            if self.values is None:
                piece.copy_(parameter.detach())
            else:
                self.values.fill(name, parameter, self._starts[index], piece)
            # The parameter stays the same object, so that hooks, optimizers and ties keep it.
            parameter.data = piece

    def write_gradient(self, index: int, whole: torch.Tensor, *, is_bound: bool) -> None:
        _, parameter = self.named[index]
        piece = self._view_of(whole, index)
        if parameter.grad is None:
            piece.zero_()
        else:
            piece.copy_(parameter.grad)
        # Autograd adds later gradients in place to `.grad`, that is, to the buffer. Under another
        # dtype of the reduction it cannot.
        parameter.grad = piece if is_bound else None

    def add_gradient(self, index: int, whole: torch.Tensor) -> None:
        _, parameter = self.named[index]
        if parameter.grad is not None:
            self._view_of(whole, index).add_(parameter.grad)
            parameter.grad = None

    def drop_gradients(self) -> None:
        for _, parameter in self.named:
            parameter.grad = None


class FlatTensors:
    """The tensors of one flat buffer by name."""

    def __init__(
        self, members: ParameterMembers, cuts: ShardLayout[torch.Tensor], room: TorchRuntime
    ) -> None:
        self.tensors, self.named, self.pieces = members, members.named, members.pieces
        self.cutting_axes = members.cutting_axes
        self.buffer_cuts, self.own_room = cuts, room
        self.mesh, self.device = room.mesh, room.device

    def gather_full(
        self, cuts: ShardLayout[torch.Tensor], part: torch.Tensor, cut: Axes
    ) -> torch.Tensor:
        """Return the full tensor of a stored one, in new memory on the device.

        Args:
            cuts: The layout of the tensor.
            part: The stored shard, on any tier.
            cut: The axes that shard it.
        """
        room = self.own_room
        held = room.new_empty(part.numel(), room.dtype(part), Tier.DEVICE, State.OTHER)
        held.copy_(part)
        return cuts.gather_part(held, cut, cut, State.OTHER) if cut else held

    def shard_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a full tensor for a checkpoint: sharded over the ranks that shard the buffer."""
        axes = self.buffer_cuts.axes
        return distribute_rows(tensor, self.mesh.submesh(axes)) if axes else tensor.clone()

    def split(self, part: torch.Tensor, cut: Axes) -> Named:
        """Return this rank's rows of each named tensor, after an all-gather of the buffer."""
        whole = self.gather_full(self.buffer_cuts, part, cut)
        return {
            name: self.shard_rows(whole_of(parameter, piece))
            for (name, parameter), piece in zip(self.named, self.pieces(whole), strict=True)
        }

    def join(self, named: Named, cut: Axes) -> torch.Tensor:
        """Return this rank's shard of a buffer with the named tensors."""
        first, cuts = named[self.named[0][0]], self.buffer_cuts
        # Zeros, because the padding takes part in the update and in norms.
        whole = torch.zeros(cuts.padded, dtype=first.dtype, device=self.device)
        for (name, parameter), piece in zip(self.named, self.pieces(whole), strict=True):
            piece.copy_(part_of(parameter, full_tensor(named[name])))
        return cuts.take_part(whole, (), cut)

    def export(self, parameters: Parameters[torch.Tensor]) -> Named:
        """Return the parameters in the buffer by name."""
        parameters.finish_gather()
        return self.split(parameters.stored, parameters.cut)

    def load(self, parameters: Parameters[torch.Tensor], named: Named) -> None:
        """Write the named tensors to the parameters in the buffer."""
        parameters.finish_gather()
        parameters.stored.copy_(self.join(named, parameters.cut))


class FlatState(UnitState[torch.Tensor], FlatTensors):
    """The trained parameters of a module's unit, with gradients and optimizer state."""

    def __init__(
        self,
        members: ParameterMembers,
        cuts: ShardLayout[torch.Tensor],
        step: FlatUnits,
        layout: Layout,
        room: TorchRuntime,
    ) -> None:
        UnitState.__init__(self, members, cuts, step, layout)
        FlatTensors.__init__(self, members, cuts, room)


class FlatFrozen(FlatTensors):
    """The frozen parameters of a unit, which have neither gradients nor optimizer state."""

    def __init__(
        self,
        members: ParameterMembers,
        cuts: ShardLayout[torch.Tensor],
        step: FlatUnits,
        layout: Layout,
        room: TorchRuntime,
    ) -> None:
        super().__init__(members, cuts, room)
        self.parameters = Parameters(members, cuts, step, layout)


class _UnitInBuffer:
    """A target that exports and loads the parameters of a flat unit."""

    unit: FlatState | FlatFrozen

    def export(self) -> Named:
        return self.unit.export(self.unit.parameters)

    def load(self, named: Named) -> None:
        self.unit.load(self.unit.parameters, named)


class FlatTarget(_UnitInBuffer, ShardTarget[torch.Tensor]):
    """The target of one unit: its shard over the axes of the update."""

    unit: FlatState

    @property
    def gradient(self) -> torch.Tensor | None:
        return self.unit.gradients.kept

    def views(self) -> Iterable[CutView]:
        gradients, cutting = self.unit.gradients, self.unit.cutting_axes
        if (held := gradients.kept) is None:
            return []
        runs = self.unit.parameters.cut_runs(gradients.now)
        return [(cutting if is_cut else (), held[start:end]) for start, end, is_cut in runs]

    def split(self, part: torch.Tensor) -> Named:
        if part.dim() == 0:
            return {name: part for name, _ in self.unit.named}
        return self.unit.split(part, self.unit.step.optimizer)

    def named_tensors(self, part: torch.Tensor) -> Named:
        return self.unit.split(part, self.unit.step.updated)

    def join(self, named: Named) -> torch.Tensor:
        first = named[self.unit.named[0][0]]
        if first.dim() == 0:
            return first
        return self.unit.join(named, self.unit.step.optimizer)


class FrozenTarget(_UnitInBuffer):
    """The target of a unit's frozen parameters, which is never updated."""

    is_frozen = True
    is_in_place = False
    owns_master = False
    gradient = None
    unit: FlatFrozen

    def __init__(self, unit: FlatFrozen) -> None:
        self.unit = unit

    def persistent_parameter(self) -> torch.Tensor | None:
        """Return None: the tensor is never updated."""

    def views(self) -> Iterable[CutView]:
        return []

    def working_gradient(self) -> None:
        """Return None: there is no gradient."""

    def value(self) -> torch.Tensor:
        return self.unit.parameters.stored

    def store(self, value: torch.Tensor) -> None:
        raise AssertionError("what is frozen is updated by nobody")

    def local_numels(self) -> list[int]:
        raise AssertionError("what is frozen is updated by nobody")

    def create_slot(self, initial: torch.Tensor) -> Slot[torch.Tensor]:
        raise AssertionError("what is frozen has no optimizer state")

    def split(self, part: torch.Tensor) -> Named:
        raise AssertionError("what is frozen has no optimizer state")

    def join(self, named: Named) -> torch.Tensor:
        raise AssertionError("what is frozen has no optimizer state")

    def named_tensors(self, part: torch.Tensor) -> Named:
        return self.unit.split(part, self.unit.parameters.cut)


class FlatTensorTarget(TensorTarget[torch.Tensor]):
    """The target of one full tensor of a unit. The first target also represents the full unit."""

    unit: FlatState

    def __init__(self, update: TensorsUpdate[torch.Tensor], whole: FlatTarget, index: int) -> None:
        super().__init__(update, index)
        self.name = whole.unit.named[index][0]
        self._whole = whole

    @property
    def gradient(self) -> torch.Tensor | None:
        return self._whole.gradient if self.index == 0 else None

    def views(self) -> Iterable[CutView]:
        return self._whole.views() if self.index == 0 else []

    def named_tensors(self, part: torch.Tensor) -> Named:
        return {self.name: self.unit.shard_rows(part.view(self.shape))}

    def split(self, part: torch.Tensor) -> Named:
        if part.dim() == 0:
            return {self.name: part}
        if (slot := self.slot_of(part)) is not None:
            cuts = slot.route.cuts
            flat = self.unit.gather_full(cuts, part, self.unit.step.optimizer)
            part = flat[: cuts.numel].view(slot.shape)
        return {self.name: self.unit.shard_rows(part)}

    def join(self, named: Named) -> torch.Tensor:
        whole = full_tensor(named[self.name])
        if whole.dim() == 0 or self.keeps_whole:
            return whole
        cuts = self.cuts_of(tuple(whole.shape))
        flat = whole.new_zeros(cuts.padded)
        flat[: whole.numel()].copy_(whole.reshape(-1))
        return cuts.take_part(flat, (), self.route.stored_axes)

    def export(self) -> Named:
        return self._whole.export() if self.index == 0 else {}

    def load(self, named: Named) -> None:
        if self.index == 0:
            self._whole.load(named)


def names_of(target: object) -> list[str]:
    """Return the names of the tensors that a target updates, as its stage names them."""
    match target:
        case FlatTarget() | FrozenTarget():
            return [name for name, _ in target.unit.named]
        case FlatTensorTarget() | ParameterTarget():
            return [target.name]
        case _:
            raise AssertionError(f"unknown name of {type(target).__name__}")


def distribute_rows(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a replicated tensor as a DTensor that is sharded along its first dimension."""
    if tensor.dim() == 0:
        return DTensor.from_local(tensor.clone(), mesh, [Replicate()], run_check=False)
    rows = ceil_div(tensor.shape[0], mesh.size())
    start = min(rows * mesh.get_local_rank(), tensor.shape[0])
    return DTensor.from_local(
        # A clone, because the view would keep the full tensor alive.
        tensor[start : start + rows].clone(),
        mesh,
        [Shard(0)],
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


class SpreadTarget(ParameterTarget):
    """The target of a replicated parameter whose optimizer state is on one rank, `owner`."""

    def __init__(self, name: str, parameter: nn.Parameter, owner: int, mesh: DeviceMesh) -> None:
        super().__init__(name, parameter)
        self.owner = owner
        self.mesh = mesh

    def split(self, part: torch.Tensor) -> Named:
        """Return the owner's tensor, sharded by rows over all ranks; one at a time is full here."""
        group = self.mesh.get_group()
        whole = torch.empty_like(part, device=self.parameter.device) if part.is_meta else part
        # `src` is a global rank; owners are ranks within the group
        dist.broadcast(whole, src=dist.get_global_rank(group, self.owner), group=group)
        return {self.name: distribute_rows(whole, self.mesh)}


class ZeroRedundancyUpdate:
    """The update by torch's ZeroRedundancyOptimizer.

    The parameters become views of one bucket per owner. Each owner broadcasts its bucket after its
    update.
    """

    def __init__(
        self,
        targets: Sequence[ParameterTarget],
        spec: OptimizerSpec,
        mesh: DeviceMesh,
        registry: TagRegistry,
        *,
        stands_in: bool,
    ) -> None:
        self.spec = spec
        self.frozen = [target for target in targets if target.is_frozen]
        targets = [target for target in targets if not target.is_frozen]
        self.optimizer = ZeroRedundancyOptimizer(
            [target.parameter for target in targets],
            lambda parameters: build_optimizer(spec.name, parameters, spec, stands_in=stands_in),
            process_group=mesh.get_group(),
            # One broadcast per owner instead of one per tensor.
            parameters_as_bucket_view=True,
        )
        owners = zero_redundancy.owner_ranks(self.optimizer)
        self.targets = [
            SpreadTarget(target.name, target.parameter, owners[target.parameter], mesh)
            for target in targets
        ]
        for bucket in self._owner_buckets():
            registry.tag(bucket, State.PARAMETERS)
        # like torch's first step, so that a checkpoint can be loaded before it
        for target in self.targets:
            if target.owner == mesh.get_local_rank():
                self.optimizer.optim.state[target.parameter].update(self._initial_state(target))

    def step(self, lr: float, scaling: Scale[torch.Tensor] | None = None) -> None:
        for options in self.optimizer.param_groups:
            options["lr"] = lr
        own = self.optimizer.optim
        scalars = scaling.scalars_for(self.targets[0].value()) if scaling else (None, None)
        # torch's fused optimizers read these attributes, which torch.amp.GradScaler sets
        own.grad_scale, own.found_inf = scalars
        self.optimizer.step()

    def tensors(self) -> Iterator[tuple[ParameterTarget, dict[str, torch.Tensor]]]:
        """Yield every target on every rank; state that another rank stores is on meta.

        Frozen targets come last, with no state.
        """
        for target in self.targets:
            held = self.optimizer.optim.state.get(target.parameter)
            yield target, dict(held) if held else self._initial_state(target, torch.device("meta"))
        yield from ((frozen, {}) for frozen in self.frozen)

    def leaves(self) -> Iterator[tuple[SpreadTarget, TorchLeaf, slice]]:
        for target in self.targets:
            yield target, TorchLeaf(target.parameter), slice(target.parameter.numel())

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        """Yield buckets and optimizer state.

        A rank that owns no tensor has a bucket of one element.
        """
        yield from ((State.PARAMETERS, bucket) for bucket in self._owner_buckets())
        for state in self.optimizer.optim.state.values():
            yield from ((State.OPTIMIZER, tensor) for tensor in state.values())

    def _owner_buckets(self) -> Iterator[torch.Tensor]:
        return zero_redundancy.buckets(self.optimizer)

    def _initial_state(self, target: ParameterTarget, device: torch.device | None = None) -> Named:
        return initial_state(self.spec.name, self.spec, target.parameter.detach(), device)
