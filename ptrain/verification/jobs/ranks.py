"""The ranks of a run: how many, on which axes, and what they tell each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ptrain.internals.dtensor import root_mesh
from ptrain.interpreter.agreement import gather
from ptrain.spec.spec import Spec
from ptrain.train.exchange import Exchange
from ptrain.verification.places import line

RANKS = "ranks"
Axes: TypeAlias = dict[str, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """`axes`: of every axis with several places the groups of ranks that differ on it alone;
    without a mesh the only axis is that of all ranks."""

    rank: int
    size: int
    device: torch.device
    axes: Axes = field(default_factory=dict)
    group: dist.ProcessGroup | None = None

    def gather(self, value: Any, kind: Any = Any) -> list[Any]:
        """Return every rank's value of this type."""
        if self.size == 1:
            return [value]
        return gather(value, self.size, self.device, self.group, kind)

    def stack(self, tensor: Tensor) -> Tensor:
        """Every rank's tensor of the same shape: [ranks, …] in fp64."""
        mine = tensor.detach().double().contiguous().to(self.device)
        if self.size == 1:
            return mine.unsqueeze(0).cpu()
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self.group)
        return torch.stack(rows).cpu()

    def first(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor."""
        shared = tensor.contiguous().to(self.device)
        if self.size > 1:
            dist.broadcast(shared, src=0, group=self.group)
        return shared.cpu()

    def bytes(self, bodies: Sequence[bytes]) -> list[bytes]:
        """Every rank's bytes, all of a rank's in a row."""
        mine = b"".join(bodies)
        if self.size == 1:
            return [mine]
        sizes = self.gather(len(mine))
        row = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
        row[: len(mine)] = torch.frombuffer(bytearray(mine or b"\0"), dtype=torch.uint8)[
            : len(mine)
        ]
        rows = [torch.empty_like(row, device=self.device) for _ in sizes]
        dist.all_gather(rows, row.to(self.device), group=self.group)
        return [its[:size].cpu().numpy().tobytes() for its, size in zip(rows, sizes, strict=True)]

    @property
    def degrees(self) -> dict[str, int]:
        return {axis: len(groups[0]) for axis, groups in self.axes.items()}

    @property
    def summed(self) -> Axes:
        """What gradients may be summed over: every axis, then several together (`dp+cp`)."""
        together: Axes = {}
        for count in range(2, len(self.axes) + 1):
            for names in combinations(self.axes, count):
                groups = self.axes[names[0]]
                for name in names[1:]:
                    along = {rank: group for group in self.axes[name] for rank in group}
                    groups = tuple(
                        tuple(other for rank in group for other in along[rank])
                        for group in groups
                        if all(along[rank][0] == rank for rank in group)
                    )
                together["+".join(names)] = groups
        return self.axes | together

    def parting(self, chosen: Iterable[int], order: Iterable[str] | None = None) -> str:
        """Return the first axis (of this `order`) along which some of a rank's neighbours are among
        the chosen and others are not; "" where all ranks are."""
        who = set(chosen)
        for axis in self.axes if order is None else order:
            if any(set(group) & who and set(group) - who for group in self.axes.get(axis, ())):
                return axis
        return ""

    def axis_of(self, ranks: Sequence[int]) -> str:
        """The first axis on which these ranks differ."""
        for axis, groups in self.axes.items():
            if any(len(set(group) & set(ranks)) > 1 for group in groups):
                return axis
        return ""


def ranks_of(parameters: Iterable[Tensor], mesh: DeviceMesh | None) -> Ranks:
    """Return this process's place among those of the default group, and the axes they lie on."""
    parameters = list(parameters)
    device = next((parameter.device for parameter in parameters), torch.device("cpu"))
    if not dist.is_initialized():
        return Ranks(rank=0, size=1, device=device)
    size = dist.get_world_size()
    meshes = [mesh] if mesh else _meshes(parameters)
    widest = max(meshes, key=lambda candidate: (candidate.ndim, candidate.size()), default=None)
    axes = _axes(widest) if widest is not None and widest.size() == size else {}
    if not axes and size > 1:
        axes = {RANKS: (tuple(range(size)),)}
    return Ranks(rank=dist.get_rank(), size=size, device=device, axes=axes)


def ranks_of_spec(spec: Spec, exchange: Exchange) -> Ranks:
    """Return the ranks of a run, on the axes of its spec, which tell each other by its exchange."""
    return Ranks(
        rank=exchange.world.rank,
        size=exchange.world.size,
        device=torch.device("cpu"),
        axes={
            str(axis): tuple(
                dict.fromkeys(line(spec, rank, axis) for rank in range(spec.world_size))
            )
            for axis in (factor.axis for factor in spec.factors if factor.degree > 1)
        },
        group=exchange.group,
    )


def _meshes(parameters: Iterable[Tensor]) -> list[DeviceMesh]:
    """Return each whole mesh that some parameter lies on a part of."""
    return [
        root_mesh(parameter.device_mesh)
        for parameter in parameters
        if isinstance(parameter, DTensor)
    ]


def _axes(mesh: DeviceMesh) -> dict[str, tuple[tuple[int, ...], ...]]:
    names = mesh.mesh_dim_names
    if names is None:
        names = (RANKS,) if mesh.ndim == 1 else tuple(f"dim{dim}" for dim in range(mesh.ndim))
    axes = {}
    for dim, name in enumerate(names):
        groups = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.mesh.size(dim)).tolist()
        if mesh.mesh.size(dim) > 1:
            axes[name] = tuple(tuple(group) for group in groups)
    return axes
