"""The plan's mesh as torch's DeviceMesh, and the process group of any set of its axes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ptrain.errors import Fault, SpecError
from ptrain.internals.dtensor import flattened
from ptrain.internals.fakes import unset_fake_temporarily
from ptrain.internals.process_groups import gloo_options
from ptrain.rooms.registry import Registry
from ptrain.rooms.world import World, set_timeout
from ptrain.spec.placement import Axis
from ptrain.steps.step import CreateMesh


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
        size = 1
        for axis in axes:
            size *= self.degrees[axis]
        return size

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
        place = 0
        for axis in axes:
            place = place * self.degrees[axis] + self.coordinate(axis)
        return place

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
    product = 1
    for degree in step.degrees:
        product *= degree
    if product == world.size:
        return
    shape = " x ".join(
        f"{axis}={degree}" for axis, degree in zip(step.axes, step.degrees, strict=True)
    )
    raise SpecError(
        Fault(
            place="mesh",
            finding=f"{shape or 'one device'} needs {product} ranks; {world.size} were started",
            remedy=f"start {product} ranks, or let one degree be `auto`",
        )
    )
