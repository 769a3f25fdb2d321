"""The process groups of a plan's mesh, and the collectives of this project: blocking or awaited
later, tagged with the state they move.

The mesh is torch's DeviceMesh; any set of its axes has a process group.

The registry maps a storage to its state. Wraps and collectives write it, and the meters read it. A
storage is forgotten when it dies, so that one at the same address does not inherit an old tag.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ptrain.cost import Collective, Phase, State
from ptrain.errors import Fault, SpecError
from ptrain.internals.dtensor import flattened
from ptrain.internals.fakes import unset_fake_temporarily
from ptrain.internals.fsdp2 import AllGather, ReduceScatter
from ptrain.internals.part import replaced
from ptrain.internals.process_groups import (
    Work,
    all_gather_single,
    gloo_options,
    reduce_scatter_single,
)
from ptrain.models.ledger import OfStorages
from ptrain.rooms.room import Move
from ptrain.rooms.world import World, set_timeout
from ptrain.spec.dials import ReduceScatterVia
from ptrain.spec.placement import Axis
from ptrain.steps.step import CreateMesh
from ptrain.units import row_major


@dataclass(frozen=True, slots=True)
class Tag:
    """`substitute` names the collective that an exchange stands for (a reduce-scatter executed
    as all-to-all and a local sum). `phase`: of a step, where what is sent belongs to another one
    than the sender has come to. `name`: of the unit whose state it is, where that is known."""

    state: State
    substitute: Collective | None = None
    phase: Phase | None = None
    name: str = ""


class Registry:
    """Tags of the live storages of one program. Costs about 2 microseconds per new storage.
    `listeners` are told of every tag. `executed`: the collective as whose parts the calls of the
    moment are made, where the backend would make them itself, out of sight."""

    def __init__(self) -> None:
        self._tags: OfStorages[Tag] = WeakKeyDictionary()
        self.inputs: WeakSet[torch.UntypedStorage] = WeakSet()
        self.listeners: list[Callable[[torch.UntypedStorage, Tag], None]] = []
        self.executed: Collective | None = None

    def executing(self, collective: Collective) -> AbstractContextManager[None]:
        """What is called meanwhile is how `collective` is executed."""
        return replaced(self, executed=collective)

    def tag(
        self,
        tensor: torch.Tensor,
        state: State,
        substitute: Collective | None = None,
        phase: Phase | None = None,
        name: str = "",
    ) -> torch.Tensor:
        """Remember that this tensor's storage holds `state`; return the tensor. A name that it had
        stays."""
        storage = tensor.untyped_storage()
        if not name and (before := self._tags.get(storage)) is not None:
            name = before.name
        self._tags[storage] = label = Tag(state, substitute, phase, name)
        for listener in self.listeners:
            listener(storage, label)
        return tensor

    def mark_input(self, tensor: torch.Tensor) -> None:
        """Mark a tensor of the caller's, or a view of one, from which the program only copies: its
        storage is no memory of the program."""
        self.inputs.add(tensor.untyped_storage())

    def of(self, tensor: torch.Tensor) -> Tag | None:
        """The tag of this tensor's storage, if anybody gave it one."""
        return self.of_storage(tensor.untyped_storage())

    def of_storage(self, storage: torch.UntypedStorage) -> Tag | None:
        """The tag of this storage, if anybody gave it one."""
        return self._tags.get(storage)

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """Return whether this storage is tagged."""
        return storage in self._tags


_all_gather, _reduce_scatter = all_gather_single, reduce_scatter_single


IN_PLACE_BYTES = 2**20  # below, the clone is in the caches, and one call is as fast as several


def all_gather(
    output: torch.Tensor,
    shard: torch.Tensor,
    group: dist.ProcessGroup,
    registry: Registry,
    *,
    is_awaited: bool = True,
) -> dist.Work | None:
    """`output` (1-d, size x shard) becomes the ranks' shards in group order.

    Of a large one gloo (torch 2.11 to 2.15) would gather a clone and copy that, into memory whose
    pages are new where it is above 32 MiB. So a broadcast for each rank's part writes to its place:
    as many bytes, in a third of the time for 43 MiB and in two thirds for 8.
    """
    if not (_is_gloo(output, group) and _is_large(output)):
        work: dist.Work | None = _all_gather(output, shard, group=group, async_op=not is_awaited)
        return work
    parts = output.view(-1).chunk(group.size())
    if (own := parts[group.rank()]).data_ptr() != shard.data_ptr():
        own.copy_(shard.view(-1))
    with registry.executing(Collective.ALL_GATHER):
        works = [
            dist.broadcast(part, group=group, group_src=place, async_op=True)
            for place, part in enumerate(parts)
        ]
    work = _Together(works)
    if is_awaited:
        work.wait()
        return None
    return work


class _Together(Work):
    """Calls that are awaited as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True


def _is_gloo(whole: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether gloo's threads work on it, on a processor."""
    return whole.is_cpu and dist.get_backend(group) == "gloo"


def _is_large(whole: torch.Tensor) -> bool:
    """Return whether a clone of it costs more than several calls."""
    return whole.numel() * whole.element_size() >= IN_PLACE_BYTES


def all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup, *, is_awaited: bool = True
) -> Move[torch.Tensor]:
    """`tensor` becomes the sum of the ranks'."""
    return Move(tensor, tensor, dist.all_reduce(tensor, group=group, async_op=not is_awaited))


def reduce_scatter(
    shard: torch.Tensor,
    whole: torch.Tensor,
    group: dist.ProcessGroup,
    via: ReduceScatterVia,
    registry: Registry,
    *,
    is_awaited: bool = True,
) -> Move[torch.Tensor]:
    """`shard` becomes this rank's part of the ranks' summed `whole` (1-d, size x shard), which is
    used up.

    Gloo's own is an all-reduce of a clone. To the bit the same sums are, between two ranks, those
    of halves that are exchanged, with half the bytes; between more, of a large tensor, those of an
    all-reduce of `whole` itself. Via all_to_all it needs one more buffer of `whole`'s size, and is
    a true reduce-scatter between any number of ranks.
    """
    if via is ReduceScatterVia.NATIVE:
        if _is_gloo(whole, group) and group.size() == 2:
            return _exchange_halves(shard, whole, group, registry, is_awaited=is_awaited)
        if _is_gloo(whole, group) and _is_large(whole):
            with registry.executing(Collective.REDUCE_SCATTER):
                work = dist.all_reduce(whole, group=group, async_op=not is_awaited)
            own = whole.chunk(group.size())[group.rank()]
            return Move(shard, whole, work, partial(shard.copy_, own))
        work = _reduce_scatter(shard, whole, group=group, async_op=not is_awaited)
        return Move(shard, whole, work)
    tag = registry.of(whole)
    received = torch.empty_like(whole)  # its tag is read before that of `whole`, which stays
    registry.tag(received, tag.state if tag else State.OTHER, Collective.REDUCE_SCATTER)
    work = dist.all_to_all_single(received, whole, group=group, async_op=not is_awaited)

    def add() -> None:
        torch.sum(received.view(group.size(), -1), 0, out=shard)
        # gloo's thread may hold its tensors a moment longer than `wait` does, on a loaded machine
        received.untyped_storage().resize_(0)

    return Move(shard, whole, work, add)


def _exchange_halves(
    shard: torch.Tensor,
    whole: torch.Tensor,
    group: dist.ProcessGroup,
    registry: Registry,
    *,
    is_awaited: bool,
) -> Move[torch.Tensor]:
    """The other rank's half of this rank's part arrives in `shard`, where this rank's is added."""
    place = group.rank()
    halves, sizes = whole.chunk(2), [0, 0]
    sizes[1 - place] = shard.numel()
    with registry.executing(Collective.REDUCE_SCATTER):
        work = dist.all_to_all_single(
            shard, halves[1 - place], sizes, sizes, group=group, async_op=not is_awaited
        )
    return Move(shard, whole, work, partial(shard.add_, halves[place]))


class _Tagged:
    """What FSDP2 calls for a unit, with its buffers tagged as the unit's `state`."""

    state: State

    def __init__(self, registry: Registry, name: str) -> None:
        self.registry = registry
        self.name = name

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        buffer = torch.empty(*size, dtype=dtype, device=device)
        return self.registry.tag(buffer, self.state, name=self.name)


class TaggedAllGather(_Tagged, AllGather):
    """FSDP2's all-gather of a unit."""

    state = State.PARAMETERS

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.registry.tag(output_tensor, State.PARAMETERS, name=self.name)
        return all_gather(
            output_tensor, input_tensor, group, self.registry, is_awaited=not async_op
        )


class TaggedReduceScatter(_Tagged, ReduceScatter):
    """FSDP2's reduce-scatter of a unit, native or by exchange. On an accelerator FSDP2 has a
    stream for it; `is_awaited`: nothing else is issued until it is over."""

    state = State.GRADIENTS

    def __init__(
        self, via: ReduceScatterVia, registry: Registry, name: str, *, is_awaited: bool = False
    ) -> None:
        super().__init__(registry, name)
        self.via = via
        self.is_awaited = is_awaited

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> dist.Work | None:
        assert op == dist.ReduceOp.SUM, f"averaging is disabled, but the reduce operator is {op}"
        if async_op:
            work: dist.Work | None = _reduce_scatter(
                output_tensor, input_tensor, group=group, async_op=True
            )
            return work
        reduce_scatter(output_tensor, input_tensor, group, self.via, self.registry).wait()
        if self.is_awaited and output_tensor.is_cuda:
            torch.cuda.current_stream(output_tensor.device).synchronize()
        return None


class Mesh:
    """The axes of one job. Groups are made once, in the same order on every rank."""

    def __init__(self, step: CreateMesh, world: World) -> None:
        self.axes = step.axes
        self.degrees = dict(zip(step.axes, step.degrees, strict=True))
        self.world = world
        self.registry = Registry()
        self.device_mesh: DeviceMesh | None = None
        self._groups: dict[tuple[Axis, ...], dist.ProcessGroup] = {}
        self._submeshes: dict[tuple[Axis, ...], DeviceMesh] = {}
        self._adopted: dict[str, tuple[Axis, ...]] = {}
        self._coordinates: dict[Axis, int] = {}
        _require_size(step, world)
        if step.axes:
            with unset_fake_temporarily():  # a mesh reads its ranks off a tensor
                self.device_mesh = init_device_mesh(
                    world.device.type,
                    step.degrees,
                    mesh_dim_names=tuple(map(str, step.axes)),
                    backend_override=_waiting(step, world),
                )

    def ordered(self, axes: Sequence[Axis]) -> tuple[Axis, ...]:
        """These axes in mesh order."""
        return tuple(axis for axis in self.axes if axis in axes)

    def size(self, axes: Sequence[Axis]) -> int:
        """Ranks in a group over these axes."""
        return math.prod(self.degrees[axis] for axis in axes)

    def submesh(self, axes: Sequence[Axis]) -> DeviceMesh:
        """One dimension over these axes, flattened in mesh order where they are several."""
        names = self.ordered(axes)
        assert self.device_mesh is not None and names, "a submesh needs at least one axis"
        if names not in self._submeshes:
            with unset_fake_temporarily():
                self._submeshes[names] = (
                    self.device_mesh[str(names[0])]
                    if len(names) == 1
                    else flattened(self.device_mesh[tuple(map(str, names))], "_".join(names))
                )
        return self._submeshes[names]

    def group(self, axes: Sequence[Axis]) -> dist.ProcessGroup:
        """The process group over these axes that holds this rank."""
        names = self.ordered(axes)
        if names not in self._groups:
            group = self.submesh(names).get_group()
            if self.world.backend != "fake":
                set_timeout(group, self.world.timeout)
            self._groups[names] = group
        return self._groups[names]

    def group_at(self, axis: Axis, places: Sequence[int]) -> dist.ProcessGroup | None:
        """Return the group of the ranks at these places along `axis`, None on the others. Every
        rank makes those of all lines: a group that its own ranks alone make is named by them, and a
        second one of that name finds the addresses of the first in the store."""
        assert self.device_mesh is not None
        with unset_fake_temporarily():
            ranks = self.device_mesh.mesh.movedim(self.axes.index(axis), -1)
            lines = ranks.reshape(-1, self.degrees[axis])[:, list(places)].tolist()
            groups = [dist.new_group(line, group_desc=f"mesh_{axis}") for line in lines]
        own = [group for line, group in zip(lines, groups, strict=True) if self.world.rank in line]
        for group in own:
            self.adopt(group, (axis,))
        return own[0] if own else None

    def adopt(self, group: dist.ProcessGroup, axes: Sequence[Axis]) -> None:
        """A group that torch made for itself, of some of the ranks along `axes`."""
        if self.world.backend != "fake":
            set_timeout(group, self.world.timeout)
        self._adopted[group.group_name] = self.ordered(axes)

    def coordinate(self, axis: Axis) -> int:
        """This rank's place along `axis`. torch computes it anew for 30 us, and each move of a flat
        unit wants it."""
        assert self.device_mesh is not None
        if axis not in self._coordinates:
            self._coordinates[axis] = int(self.device_mesh.get_local_rank(str(axis)))
        return self._coordinates[axis]

    def place(self, axes: Sequence[Axis]) -> int:
        """This rank's row-major place over `axes`, the first of them outermost; 0 over none."""
        return row_major((self.coordinate(axis), self.degrees[axis]) for axis in axes)

    def axes_by_group(self) -> dict[str, tuple[str, ...]]:
        """Process group name -> axes, for whoever watches collectives."""
        if self.device_mesh is None:
            return {}
        for axes in (*((axis,) for axis in self.axes), *self._submeshes):
            self.group(axes)
        named = {group.group_name: axes for axes, group in self._groups.items()} | self._adopted
        return {name: tuple(map(str, axes)) for name, axes in named.items()}


def _waiting(
    step: CreateMesh, world: World
) -> dict[int | str, tuple[str, dist.ProcessGroupGloo.Options]] | None:
    """Groups that are made with the timeout of a step. gloo's sends and receives keep the one that
    their group was made with, half an hour where nothing is said; its collectives take a later."""
    if world.backend != "gloo" or Axis.PP not in step.axes:
        return None
    return {str(Axis.PP): ("gloo", gloo_options(timedelta(seconds=world.timeout.step)))}


def _require_size(step: CreateMesh, world: World) -> None:
    product = math.prod(step.degrees)
    if product == world.size:
        return
    shape = " x ".join(
        f"{axis}={degree}" for axis, degree in zip(step.axes, step.degrees, strict=True)
    )
    raise SpecError(
        Fault(
            place="mesh",
            finding=(
                f"{shape or 'a single device'} needs {product} ranks, but {world.size} were started"
            ),
            remedy=f"Start {product} ranks, or set one axis of the mesh to `auto`.",
        )
    )
