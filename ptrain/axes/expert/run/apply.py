"""Applies the expert axis to a module: each rank keeps its experts' shard of tensors, and rows are
dispatched to the ranks of their experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Shard

from ptrain.axes.context.run.slices import SampleSlices, route_slices
from ptrain.axes.expert.run.exchange import Assumption, Counts, Routed, Travels
from ptrain.axes.tensor.run.styles import OwnSlices, remake
from ptrain.cost import Phase
from ptrain.internals.dtensor import concatenate_meshes
from ptrain.models.moe import NUMBER, MoE, RoutedRows, route_rows
from ptrain.rooms.comm import Mesh
from ptrain.spec.placement import Axis
from ptrain.spec.routing import Choices
from ptrain.steps.experts import ExpertParallel, Loads


def parallelize_experts(model: nn.Module, step: ExpertParallel, mesh: Mesh) -> None:
    """Shard the experts of a model, or of a stage of it, over this rank's group.

    Tensors may be on meta. Tensors whose features another axis shards are then sharded over both
    axes. If that axis is folded, its ranks have shards of the tokens, and count choices together.

    Args:
        model: The model or stage, modified in place.
        step: How experts are sharded.
        mesh: The mesh.
    """
    group = mesh.group(step.axes)
    own = [(name, module) for name, module in model.named_modules() if name in step.modules]
    if not any(isinstance(module, MoE) for module in model.modules()):
        route_rows(model, [name for name, _ in own], step.number)
    for module in model.modules():
        if isinstance(module, (MoE, RoutedRows)):
            module.journey = Travels(group, step.overlaps)
    for _, experts in own:
        if isinstance(experts, RoutedRows):
            _shard_custom_experts(experts, step, mesh)
            continue
        for projection in experts.children():
            _shard_projection(projection, mesh.sort_axes(step.axes), mesh)
    if step.folded:
        tokens = SampleSlices(mesh.group(step.counting), mesh.registry, step.spans)
        route_slices(model, tokens, mesh.group_size(step.folded))


def assume(model: nn.Module, routing: Callable[[str], Assumption]) -> None:
    """Set the routing of rows on fake ranks. `routing` returns the assumption for a layer's
    name."""
    for name, module in model.named_modules():
        if isinstance(module, (MoE, RoutedRows)):
            assert isinstance(module.journey, Travels), "it has experts of other ranks"
            is_layer = isinstance(module, MoE)
            module.journey.assumed = routing(name if is_layer else name.rpartition(".")[0])


def _shard_projection(projection: nn.Module, axes: Sequence[Axis], mesh: Mesh) -> None:
    """Shard the weight of all experts, and let its module read the local shard."""
    # a weight that another axis shards: its module reads the local shard already
    is_read = isinstance(projection.get_parameter("weight"), DTensor)
    _shard_experts(projection, axes, mesh)
    if not is_read:
        OwnSlices().put_on(projection, mesh.submesh(axes))


def _shard_custom_experts(experts: RoutedRows, step: ExpertParallel, mesh: Mesh) -> None:
    """Shard all tensors of a module that is not built in, and set its number of local experts."""
    for module in experts.modules():
        _shard_experts(module, mesh.sort_axes(step.axes), mesh)
    experts.reading = _local_tensors
    if isinstance(getattr(experts, NUMBER, None), int):
        setattr(experts, NUMBER, step.number // mesh.group_size(step.axes))


@contextmanager
def _local_tensors(experts: nn.Module) -> Iterator[None]:
    """Temporarily replace the tensors of a module and its children by their local shards.

    This is not done by hooks of the module. Backward must run the conversion's backward before that
    of the module's inputs, where FSDP2 reduces; hooks of the module would run too early.
    """
    held = [
        (module, name, tensor)
        for module in experts.modules()
        for name, tensor in module.named_parameters(recurse=False)
    ]
    for module, name, tensor in held:  # instance attributes precede nn.Module.__getattr__
        vars(module)[name] = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    try:
        yield
    finally:
        for module, name, _ in held:
            vars(module).pop(name, None)


def _shard_experts(module: nn.Module, axes: Sequence[Axis], mesh: Mesh) -> None:
    """Shard a module's tensors by their first dimension, the experts."""
    remake(module, lambda _, weight: _shard_tensor(weight, axes, mesh))


@torch.no_grad()
def _shard_tensor(weight: torch.Tensor, axes: Sequence[Axis], mesh: Mesh) -> DTensor:
    """Return the rank's shard of an expert tensor as a DTensor."""
    held, meshes = weight, [mesh.submesh((axis,)) for axis in axes]
    placements: list[Placement] = [Shard(0)] * len(axes)
    if isinstance(weight, DTensor):
        meshes.append(weight.device_mesh)
        held, placements = weight.to_local(), [*placements, *weight.placements]
    own = len(held) // mesh.group_size(axes)
    return DTensor.from_local(
        held.narrow(0, own * mesh.position(axes), own).clone(),
        concatenate_meshes(*meshes) if len(meshes) > 1 else meshes[0],
        placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )


# Routing as the spec states it, for a fake rank without peers.


class StatedRouting:
    """The routing that a spec states, for the fake rank at one place of the tokens.

    It observes the program to follow the current micro-batch.
    """

    def __init__(self, loads: Loads, place: int) -> None:
        self._loads, self._place, self._micro_batch = loads, place, 0

    def phase(self, phase: Phase, micro_batch: int) -> None:
        """Note that the program enters a pass of a micro-batch."""
        self._micro_batch = micro_batch

    def lead(self, model: nn.Module) -> None:
        """Route the rows of the model's layers as stated from now on."""
        assume(model, lambda layer: partial(self._routed_rows, layer))

    def _routed_rows(self, layer: str, rows: int, ranks: int, own: int, rank: int) -> Routed:
        chosen = [
            self._loads.choices(layer, source)[self._micro_batch]
            for source in self._loads.group(self._place)
        ]
        assert (len(chosen), sum(chosen[rank])) == (ranks, rows), "a rule: counts fit the spec"
        sent = _by_rank(chosen[rank], own)
        return Routed(sent, [_by_rank(choices, own)[rank] for choices in chosen])


def _by_rank(choices: Choices, own: int) -> Counts:
    numbers: Sequence[int] = choices
    return [numbers[first : first + own] for first in range(0, len(numbers), own)]
