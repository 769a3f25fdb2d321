"""The process groups of a plan's mesh, and this project's collectives, tagged with their state.

The mesh is torch's DeviceMesh; any set of its axes has a process group. Collectives are blocking,
or return a work to wait for.

The registry maps a storage to its state. Wraps and collectives write it, and the meters read it. A
storage is forgotten when it is freed, so that a new one at the same address does not inherit the
tag.
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
from ptrain.internals.dtensor import flatten_mesh
from ptrain.internals.fakes import unset_fake_temporarily
from ptrain.internals.fsdp2 import AllGather, ReduceScatter
from ptrain.internals.part import replace_attributes
from ptrain.internals.process_groups import (
    Work,
    all_gather_single,
    gloo_options,
    reduce_scatter_single,
)
from ptrain.models.ledger import OfStorages
from ptrain.runtime.interface import PendingResult
from ptrain.runtime.world import World, set_timeout
from ptrain.spec.dials import ReduceScatterVia
from ptrain.spec.placement import Axis
from ptrain.steps.step import CreateMesh
from ptrain.units import row_major


@dataclass(frozen=True, slots=True)
class Tag:
    """The state of a storage.

    Attributes:
        state: The state that the bytes and moves of the storage count as.
        substitute: The collective that an exchange implements, such as a reduce-scatter that runs
            as an all-to-all and a local sum.
        phase: The phase that the traffic belongs to, if it is not the sender's current one.
        name: The unit whose state it is, "" if unknown.
    """

    state: State
    substitute: Collective | None = None
    phase: Phase | None = None
    name: str = ""


class TagRegistry:
    """The tags of the live storages of one program. Costs about 2 microseconds per new storage.

    Attributes:
        inputs: Storages of the caller's batches, which are not the program's memory.
        listeners: Called with storage and tag for every new tag.
        executed: The collective that the current calls implement, if the backend would otherwise
            run it internally and unseen; else None.
    """

    def __init__(self) -> None:
        self._tags: OfStorages[Tag] = WeakKeyDictionary()
        self.inputs: WeakSet[torch.UntypedStorage] = WeakSet()
        self.listeners: list[Callable[[torch.UntypedStorage, Tag], None]] = []
        self.executed: Collective | None = None

    def mark_calls_as(self, collective: Collective) -> AbstractContextManager[None]:
        """Temporarily mark all calls as parts of `collective`."""
        return replace_attributes(self, executed=collective)

    def tag(
        self,
        tensor: torch.Tensor,
        state: State,
        substitute: Collective | None = None,
        phase: Phase | None = None,
        name: str = "",
    ) -> torch.Tensor:
        """Set the tag of a tensor's storage.

        Args:
            tensor: Any view of the storage.
            state: The state that it counts as.
            substitute: See `Tag`.
            phase: See `Tag`.
            name: The unit; an earlier name is kept if it is "".

        Returns:
            The tensor.
        """
        storage = tensor.untyped_storage()
        # A collective tags by state only and must not erase the unit that a wrap has set.
        if not name and (before := self._tags.get(storage)) is not None:
            name = before.name
        self._tags[storage] = label = Tag(state, substitute, phase, name)
        for listener in self.listeners:
            listener(storage, label)
        return tensor

    def mark_input(self, tensor: torch.Tensor) -> None:
        """Mark a tensor of the caller, or a view of one, whose storage is not the program's memory.

        The program only copies from it.
        """
        self.inputs.add(tensor.untyped_storage())

    def tag_of(self, tensor: torch.Tensor) -> Tag | None:
        """Return the tag of a tensor's storage, None if it has none."""
        return self.tag_of_storage(tensor.untyped_storage())

    def tag_of_storage(self, storage: torch.UntypedStorage) -> Tag | None:
        """Return the tag of a storage, None if it has none."""
        return self._tags.get(storage)

    def has_tag(self, storage: torch.UntypedStorage) -> bool:
        """Return True if a storage is tagged."""
        return storage in self._tags


_all_gather, _reduce_scatter = all_gather_single, reduce_scatter_single


# bytes: a smaller clone stays in the caches, and one call is as fast as several
IN_PLACE_BYTES = 2**20


def all_gather(
    output: torch.Tensor,
    shard: torch.Tensor,
    group: dist.ProcessGroup,
    registry: TagRegistry,
    *,
    is_awaited: bool = True,
) -> dist.Work | None:
    """All-gather the ranks' shards into `output` (1-d, size x shard), in group order.

    For a large output, gloo (torch 2.11 to 2.15) would gather into a clone and copy that, and above
    32 MiB the pages of the clone are new in every call. One broadcast per rank's part writes to its
    place directly: it sends equally many bytes, in a third of the time for 43 MiB and two thirds
    for 8 MiB.

    Args:
        output: Receives all shards.
        shard: This rank's shard; it may be a view of its place in `output`.
        group: The process group.
        registry: Marks the broadcasts as an all-gather.
        is_awaited: Wait for the result.

    Returns:
        The work to wait for, None if awaited.
    """
    if not (_is_gloo(output, group) and _is_large(output)):
        work: dist.Work | None = _all_gather(output, shard, group=group, async_op=not is_awaited)
        return work
    parts = output.view(-1).chunk(group.size())
    # Before the broadcasts: the root of a broadcast sends from its place in `output`.
    if (own := parts[group.rank()]).data_ptr() != shard.data_ptr():
        own.copy_(shard.view(-1))
    with registry.mark_calls_as(Collective.ALL_GATHER):
        works = [
            # All at once, so that they overlap, and in the same order on all ranks, because gloo
            # matches the calls of a group by their order.
            dist.broadcast(part, group=group, group_src=place, async_op=True)
            for place, part in enumerate(parts)
        ]
    work = _JointWork(works)
    if is_awaited:
        work.wait()
        return None
    return work


class _JointWork(Work):
    """Several works that are waited for as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True


def _is_gloo(whole: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Return True if gloo handles a tensor in host memory."""
    return whole.is_cpu and dist.get_backend(group) == "gloo"


def _is_large(whole: torch.Tensor) -> bool:
    """Return True if cloning a tensor costs more than issuing several calls."""
    return whole.numel() * whole.element_size() >= IN_PLACE_BYTES


def all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup, *, is_awaited: bool = True
) -> PendingResult[torch.Tensor]:
    """Sum `tensor` over the ranks in place.

    Args:
        tensor: This rank's summand, which receives the sum.
        group: The process group.
        is_awaited: Wait for the result.
    """
    return PendingResult(
        tensor, tensor, dist.all_reduce(tensor, group=group, async_op=not is_awaited)
    )


def reduce_scatter(
    shard: torch.Tensor,
    whole: torch.Tensor,
    group: dist.ProcessGroup,
    via: ReduceScatterVia,
    registry: TagRegistry,
    *,
    is_awaited: bool = True,
) -> PendingResult[torch.Tensor]:
    """Reduce-scatter `whole` (1-d, size x shard) into this rank's `shard`; `whole` is overwritten.

    gloo's native reduce-scatter all-reduces a clone. Two cheaper forms give bitwise equal sums. Two
    ranks exchange halves, with half the bytes. More ranks all-reduce a large `whole` itself,
    without a clone.

    Args:
        shard: Receives this rank's part of the sum.
        whole: This rank's summand.
        group: The process group.
        via: The native collective; or an all-to-all, which is a true reduce-scatter for any number
            of ranks but needs another buffer of the size of `whole`.
        registry: Marks the calls as a reduce-scatter.
        is_awaited: Wait for the communication. The sums are complete after `PendingResult.wait`.
    """
    if via is ReduceScatterVia.NATIVE:
        if _is_gloo(whole, group) and group.size() == 2:
            return _exchange_halves(shard, whole, group, registry, is_awaited=is_awaited)
        if _is_gloo(whole, group) and _is_large(whole):
            with registry.mark_calls_as(Collective.REDUCE_SCATTER):
                work = dist.all_reduce(whole, group=group, async_op=not is_awaited)
            own = whole.chunk(group.size())[group.rank()]
            return PendingResult(shard, whole, work, partial(shard.copy_, own))
        work = _reduce_scatter(shard, whole, group=group, async_op=not is_awaited)
        return PendingResult(shard, whole, work)
    tag = registry.tag_of(whole)
    # the meter reads this tag before the tag of `whole`, which stays
    received = torch.empty_like(whole)
    registry.tag(received, tag.state if tag else State.OTHER, Collective.REDUCE_SCATTER)
    work = dist.all_to_all_single(received, whole, group=group, async_op=not is_awaited)

    def add() -> None:
        # `out` writes to the shard without a temporary, and the order of ranks is fixed, so sums
        # are reproducible.
        torch.sum(received.view(group.size(), -1), 0, out=shard)
        # gloo's thread may hold its tensors for a moment after `wait` on a loaded machine
        received.untyped_storage().resize_(0)

    return PendingResult(shard, whole, work, add)


def _exchange_halves(
    shard: torch.Tensor,
    whole: torch.Tensor,
    group: dist.ProcessGroup,
    registry: TagRegistry,
    *,
    is_awaited: bool,
) -> PendingResult[torch.Tensor]:
    """Receive the other rank's summand of this rank's half in `shard`, and add this rank's."""
    place = group.rank()
    halves, sizes = whole.chunk(2), [0, 0]
    # each rank sends the other rank's half only, and keeps its half
    sizes[1 - place] = shard.numel()
    with registry.mark_calls_as(Collective.REDUCE_SCATTER):
        work = dist.all_to_all_single(
            shard, halves[1 - place], sizes, sizes, group=group, async_op=not is_awaited
        )
    return PendingResult(shard, whole, work, partial(shard.add_, halves[place]))


class _TaggedBuffers:
    """The buffer allocation of FSDP2's collectives, with buffers tagged by state and unit."""

    state: State

    def __init__(self, registry: TagRegistry, name: str) -> None:
        self.registry = registry
        self.name = name

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a tagged, uninitialized buffer."""
        buffer = torch.empty(*size, dtype=dtype, device=device)
        return self.registry.tag(buffer, self.state, name=self.name)


class TaggedAllGather(_TaggedBuffers, AllGather):
    """The all-gather that FSDP2 calls for a unit."""

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


class TaggedReduceScatter(_TaggedBuffers, ReduceScatter):
    """The reduce-scatter that FSDP2 calls for a unit, native or by all-to-all.

    FSDP2 runs it in a separate stream on an accelerator. If `is_awaited`, the host waits for that
    stream before it launches other work.
    """

    state = State.GRADIENTS

    def __init__(
        self, via: ReduceScatterVia, registry: TagRegistry, name: str, *, is_awaited: bool = False
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
        # The gloo forms and the all-to-all only sum. An average would silently be wrong.
        assert op == dist.ReduceOp.SUM, f"averaging is disabled, but the reduce operator is {op}"
        if async_op:
            work: dist.Work | None = _reduce_scatter(
                output_tensor, input_tensor, group=group, async_op=True
            )
            return work
        reduce_scatter(output_tensor, input_tensor, group, self.via, self.registry).wait()
        if self.is_awaited and output_tensor.is_cuda:
            # The current stream is FSDP2's reduce-scatter stream, in which it runs this call.
            torch.cuda.current_stream(output_tensor.device).synchronize()
        return None


class Mesh:
    """The axes of one job and their process groups.

    Every group is created once, in the same order on all ranks.
    """

    def __init__(self, step: CreateMesh, world: World) -> None:
        """Create the device mesh.

        Raises:
            SpecError: The product of the degrees is not the number of ranks.
        """
        self.axes = step.axes
        self.degrees = dict(zip(step.axes, step.degrees, strict=True))
        self.world = world
        self.registry = TagRegistry()
        self.device_mesh: DeviceMesh | None = None
        self._groups: dict[tuple[Axis, ...], dist.ProcessGroup] = {}
        self._submeshes: dict[tuple[Axis, ...], DeviceMesh] = {}
        self._adopted: dict[str, tuple[Axis, ...]] = {}
        self._consecutive: dict[tuple[Axis, int], dist.ProcessGroup | None] = {}
        self._coordinates: dict[Axis, int] = {}
        _require_size(step, world)
        if step.axes:
            # DeviceMesh reads ranks from a tensor, which must be real
            with unset_fake_temporarily():
                self.device_mesh = init_device_mesh(
                    world.device.type,
                    step.degrees,
                    mesh_dim_names=tuple(map(str, step.axes)),
                    backend_override=_pipeline_backend_options(step, world),
                )

    def sort_axes(self, axes: Sequence[Axis]) -> tuple[Axis, ...]:
        """Return these axes in mesh order."""
        return tuple(axis for axis in self.axes if axis in axes)

    def group_size(self, axes: Sequence[Axis]) -> int:
        """Return the number of ranks in a group over these axes."""
        return math.prod(self.degrees[axis] for axis in axes)

    def submesh(self, axes: Sequence[Axis]) -> DeviceMesh:
        """Return the 1-d mesh over these axes; several are flattened in mesh order."""
        names = self.sort_axes(axes)
        assert self.device_mesh is not None and names, "a submesh needs at least one axis"
        if names not in self._submeshes:
            with unset_fake_temporarily():
                self._submeshes[names] = (
                    self.device_mesh[str(names[0])]
                    if len(names) == 1
                    else flatten_mesh(self.device_mesh[tuple(map(str, names))], "_".join(names))
                )
        return self._submeshes[names]

    def group(self, axes: Sequence[Axis]) -> dist.ProcessGroup:
        """Return the process group over these axes that contains this rank."""
        names = self.sort_axes(axes)
        if names not in self._groups:
            group = self.submesh(names).get_group()
            # torch warns for backends without a timeout.
            if self.world.backend != "fake":
                set_timeout(group, self.world.timeout)
            self._groups[names] = group
        return self._groups[names]

    def create_group_at(self, axis: Axis, places: Sequence[int]) -> dist.ProcessGroup | None:
        """Return the group of the ranks at these coordinates along `axis`, None on all other ranks.

        All ranks create the groups of all lines along the axis. torch names a group that only its
        members create by its ranks, so a second one of that name would find the addresses of the
        first in the store.

        Args:
            axis: The axis of the group.
            places: The coordinates along the axis, from 0.
        """
        assert self.device_mesh is not None
        with unset_fake_temporarily():
            ranks = self.device_mesh.mesh.movedim(self.axes.index(axis), -1)
            # One line of ranks for each combination of the other coordinates.
            lines = ranks.reshape(-1, self.degrees[axis])[:, list(places)].tolist()
            groups = [dist.new_group(line, group_desc=f"mesh_{axis}") for line in lines]
        own = [group for line, group in zip(lines, groups, strict=True) if self.world.rank in line]
        for group in own:
            self.register_group(group, (axis,))
        return own[0] if own else None

    def consecutive_group(self, axis: Axis, size: int) -> dist.ProcessGroup | None:
        """Return the group of `size` consecutive ranks along `axis` that contains this rank.

        The first call is a collective over all ranks, and its result is cached.

        Args:
            axis: The axis of the group.
            size: The number of ranks, which divides the degree. None is returned for 1.
        """
        key, starts = (axis, size), range(0, self.degrees[axis], size)
        if size > 1 and key not in self._consecutive:
            lines = (range(start, start + size) for start in starts)
            own = [self.create_group_at(axis, line) for line in lines]
            self._consecutive[key] = next(filter(None, own))
        return self._consecutive.get(key)

    def register_group(self, group: dist.ProcessGroup, axes: Sequence[Axis]) -> None:
        """Register a group along `axes` that was created elsewhere, and set its timeout.

        Args:
            group: An existing process group.
            axes: The axes, in any order. Meters report the group's traffic under them.
        """
        if self.world.backend != "fake":
            set_timeout(group, self.world.timeout)
        self._adopted[group.group_name] = self.sort_axes(axes)

    def coordinate(self, axis: Axis) -> int:
        """Return this rank's coordinate along `axis`, cached.

        torch computes it in 30 us, and every move of a flat unit needs it.
        """
        assert self.device_mesh is not None
        if axis not in self._coordinates:
            self._coordinates[axis] = int(self.device_mesh.get_local_rank(str(axis)))
        return self._coordinates[axis]

    def position(self, axes: Sequence[Axis]) -> int:
        """Return this rank's row-major position over `axes`, the first outermost; 0 over none.

        Args:
            axes: The axes, from the outermost to the innermost.

        Returns:
            The position, from 0 to the group size minus one; 0 if `axes` is empty.
        """
        return row_major((self.coordinate(axis), self.degrees[axis]) for axis in axes)

    def axes_by_group(self) -> dict[str, tuple[str, ...]]:
        """Return the axes of each process group by its name, for the meters."""
        if self.device_mesh is None:
            return {}
        # create the groups of all axes first: a group has a name once it exists
        for axes in (*((axis,) for axis in self.axes), *self._submeshes):
            self.group(axes)
        named = {group.group_name: axes for axes, group in self._groups.items()} | self._adopted
        return {name: tuple(map(str, axes)) for name, axes in named.items()}


def _pipeline_backend_options(
    step: CreateMesh, world: World
) -> dict[int | str, tuple[str, dist.ProcessGroupGloo.Options]] | None:
    """Return the options of groups whose timeout must be the step's from the start, None if none.

    gloo's send and receive keep the timeout with which their group was created, by default 30
    minutes. Its collectives use a timeout that is set later.
    """
    if world.backend != "gloo" or Axis.PP not in step.axes:
        return None
    return {str(Axis.PP): ("gloo", gloo_options(timedelta(seconds=world.timeout.step)))}


def _require_size(step: CreateMesh, world: World) -> None:
    """Require that the mesh needs as many ranks as there are.

    Raises:
        SpecError: The product of the degrees differs.
    """
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
