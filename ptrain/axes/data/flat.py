"""Flat units: any tuple of R, S, S* on the data axes, a handler per state.

Each unit's tensors are views of one flat padded buffer. Theta keeps the buffer, or a shard of it
that is gathered for use and freed after (`Parameters`); G lives in a buffer of the same layout,
filled by autograd in place and reduced to a shard when the unit's backward is complete
(`Gradients`); the update works on the shard that Omega is cut to (`FlatTarget`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ptrain.axes.data.layout import FlatLayout, same_memory
from ptrain.axes.data.target import Resident, Slot
from ptrain.costs import State
from ptrain.interpreter.mesh import Mesh
from ptrain.interpreter.registry import Registry
from ptrain.plan.step import FlatUnits, Units
from ptrain.spec.axis import Axis
from ptrain.spec.batch import GradientSync
from ptrain.units import ceil_div


class Parameters:
    """Theta of one unit: `stored` is this rank's shard over `cut` (all of it where `cut` is empty),
    `whole` the buffer that the module's parameters are views of, empty between uses if cut."""

    def __init__(
        self, named: list[tuple[str, nn.Parameter]], layout: FlatLayout, cut: tuple[Axis, ...]
    ) -> None:
        self.named = named
        self.layout = layout
        self.cut = cut
        first = named[0][1]
        whole = first.detach().new_zeros(layout.padded)
        for parameter, piece in zip((p for _, p in named), _pieces(whole, named), strict=True):
            piece.copy_(parameter.detach())
            parameter.data = piece
        self.whole = whole
        self.stored = layout.take(whole, (), cut).clone() if cut else whole
        layout.registry.tag(self.stored, State.PARAMETERS)
        layout.registry.tag(self.whole, State.PARAMETERS)
        self._nbytes = whole.untyped_storage().nbytes()
        self.is_gathered = True
        self.release()

    def gather(self) -> None:
        """Rebuild `whole` from the ranks' shards, if it is not there."""
        if self.is_gathered:
            return
        self.whole.untyped_storage().resize_(self._nbytes)
        with torch.no_grad():
            self.layout.gather(self.stored, self.cut, self.cut, into=self.whole)
        self.is_gathered = True

    def release(self) -> None:
        """Give `whole` back, if it can be rebuilt."""
        if self.cut and self.is_gathered:
            self.whole.untyped_storage().resize_(0)
            self.is_gathered = False


class Gradients:
    """G of one unit: a whole buffer while a backward pass fills it, then this rank's shard over
    `cut` (the buffer itself where `cut` is empty)."""

    def __init__(self, parameters: Parameters, cut: tuple[Axis, ...]) -> None:
        self.named = parameters.named
        self.layout = parameters.layout
        self.cut = cut
        self.whole: torch.Tensor | None = None
        self.shard: torch.Tensor | None = None

    def open(self) -> None:
        """Before the unit's backward: somewhere for autograd to add to."""
        if self.whole is not None:
            return
        first = self.named[0][1]
        self.whole = torch.zeros(self.layout.padded, dtype=first.dtype, device=first.device)
        self.layout.registry.tag(self.whole, State.GRADIENTS)
        for (_, parameter), piece in zip(self.named, _pieces(self.whole, self.named), strict=True):
            parameter.grad = piece

    def reduce(self) -> None:
        """After the unit's backward: sum over the ranks along `cut`, keep this rank's part."""
        if not self.cut or self.whole is None:
            return
        reduced = self.layout.reduce_scatter(self.whole, (), self.cut)
        self._close()
        if self.shard is None:
            self.shard = reduced
        else:
            self.shard.add_(reduced)

    def for_update(self, cut: tuple[Axis, ...], replicated: tuple[Axis, ...]) -> None:
        """From the layout of G to the layout of Omega: reduce what is still partial (smallest
        pieces first), then gather what the update needs whole."""
        held = self.shard if self.cut else self.whole
        if held is None:
            return
        narrower = tuple(axis for axis in cut if axis not in self.cut)
        wider = tuple(axis for axis in self.cut if axis not in cut)
        layout, now = self.layout, self.cut
        if narrower:
            held, now = layout.reduce_scatter(held, now, narrower), (*now, *narrower)
        self._close()
        if replicated:
            torch.distributed.all_reduce(held, group=layout.mesh.group(replicated))
        if wider:
            held = layout.gather(held, now, wider)
        self.shard = held

    def _close(self) -> None:
        self.whole = None
        for _, parameter in self.named:
            parameter.grad = None

    def clear(self) -> None:
        """After the update."""
        self._close()
        self.shard = None


class FlatTarget:
    """What the optimizer updates of one unit: its shard over Omega's axes."""

    def __init__(self, unit: FlatUnit) -> None:
        self.unit = unit

    owns_master = False

    @property
    def gradient(self) -> torch.Tensor | None:
        return self.unit.gradients.shard

    def working_gradient(self) -> torch.Tensor | None:
        return self.gradient

    def slot(self, initial: torch.Tensor) -> Slot:
        return Resident(initial)

    def value(self) -> torch.Tensor:
        """The parameter's shard over Omega's axes, gathered where Theta is cut along others."""
        parameters, cut = self.unit.parameters, self.unit.updated
        missing = tuple(axis for axis in parameters.cut if axis not in cut)
        held, now = parameters.stored, parameters.cut
        if missing:
            held = parameters.layout.gather(held, now, missing)
            now = tuple(axis for axis in now if axis in cut)
        return parameters.layout.take(held, now, cut)

    def store(self, value: torch.Tensor) -> None:
        """Write an updated shard back to where Theta lives, gathering it where Theta is wider."""
        parameters, cut = self.unit.parameters, self.unit.updated
        layout, stored = parameters.layout, parameters.stored
        missing = tuple(axis for axis in cut if axis not in parameters.cut)
        extra = tuple(axis for axis in parameters.cut if axis not in cut)
        value = value.to(stored.dtype)
        if extra:
            value = layout.take(value, cut, parameters.cut)
        if missing:
            layout.registry.tag(value, State.PARAMETERS)
            layout.gather(value, (*cut, *extra), missing, into=stored)
        elif not same_memory(value, stored):
            stored.copy_(value)

    def split(self, part: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rows of the named tensors: gathers one unit, keeps this rank's share of every tensor."""
        names = [name for name, _ in self.unit.parameters.named]
        if part.dim() == 0:
            return dict.fromkeys(names, part)
        return self._rows(_whole(self.unit.parameters.layout, part, self.unit.updated))

    def join(self, named: dict[str, torch.Tensor]) -> torch.Tensor:
        first = named[self.unit.parameters.named[0][0]]
        if first.dim() == 0:
            return first
        return self._shard(named, self.unit.updated)

    def export(self) -> dict[str, torch.Tensor]:
        parameters = self.unit.parameters
        return self._rows(_whole(parameters.layout, parameters.stored, parameters.cut))

    def load(self, named: dict[str, torch.Tensor]) -> None:
        parameters = self.unit.parameters
        parameters.stored.copy_(self._shard(named, parameters.cut))

    def _rows(self, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        layout, named = self.unit.parameters.layout, self.unit.parameters.named
        mesh = layout.mesh.submesh(layout.axes)
        return {
            name: distribute_rows(piece, mesh)
            for (name, _), piece in zip(named, _pieces(whole, named), strict=True)
        }

    def _shard(self, named: dict[str, torch.Tensor], cut: tuple[Axis, ...]) -> torch.Tensor:
        parameters = self.unit.parameters
        first = named[parameters.named[0][0]]
        whole = torch.zeros(parameters.layout.padded, dtype=first.dtype, device=first.device)
        for (name, _), piece in zip(
            parameters.named, _pieces(whole, parameters.named), strict=True
        ):
            tensor = named[name]
            piece.copy_(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
        return parameters.layout.take(whole, (), cut)


class FlatUnit:
    """One unit with its hooks: gather before use, reduce when its gradients are complete."""

    def __init__(self, modules: list[nn.Module], parameters: Parameters, step: FlatUnits) -> None:
        self.parameters = parameters
        self.updated = step.optimizer
        self.gradients = Gradients(parameters, step.gradients)
        self.replicated = tuple(
            axis for axis in step.axes if axis not in step.optimizer + step.gradients
        )
        self.sync = step.sync
        self.is_last = True
        self.pending = 0
        modules[0].register_forward_pre_hook(self._before_forward)
        modules[-1].register_forward_hook(self._after_forward)
        for _, parameter in parameters.named:
            parameter.register_post_accumulate_grad_hook(self._accumulated)

    def _before_forward(self, module: nn.Module, args: tuple[object, ...]) -> None:
        self.parameters.gather()

    def _after_forward(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        if torch.is_grad_enabled():
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._before_backward)
        if self.sync.reshard_after_forward:
            self.parameters.release()

    def _before_backward(self, gradient: torch.Tensor) -> None:
        self.parameters.gather()
        if self.pending == 0:
            self.pending = len(self.parameters.named)
            self.gradients.open()

    def _accumulated(self, parameter: torch.Tensor) -> None:
        self.pending -= 1
        if self.pending == 0:
            self.finish()

    def finish(self) -> None:
        """The unit's backward is complete (or the pass is over and some parameter had no part)."""
        self.pending = 0
        if self.is_last or self.sync.gradients is GradientSync.EVERY:
            self.gradients.reduce()
        if self.is_last or self.sync.reshard_after_backward:
            self.parameters.release()


class FlatWrap:
    """All units of one model under one plan step."""

    def __init__(
        self,
        model: nn.Module,
        step: FlatUnits,
        mesh: Mesh,
        units: Units,
        registry: Registry,
    ) -> None:
        self.module = model
        self.step = step
        self.mesh = mesh
        self.units: list[FlatUnit] = []
        cut = step.parameters + step.optimizer + step.gradients
        for modules, named in parameters_by_unit(model, units):
            numel = sum(parameter.numel() for _, parameter in named)
            layout = FlatLayout.over(mesh, numel, cut, registry, step.reduce_scatter)
            parameters = Parameters(named, layout, step.parameters)
            members = [model.get_submodule(name) for name in modules]
            self.units.append(FlatUnit(members, parameters, step))

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """One forward and backward pass; the last one reduces and reshards whatever the policy."""
        for unit in self.units:
            unit.is_last = is_last
        yield
        for unit in self.units:
            if unit.pending:
                unit.finish()

    def end_evaluation(self) -> None:
        for unit in self.units:
            unit.parameters.release()

    def reduce_gradients(self) -> None:
        for unit in self.units:
            unit.gradients.for_update(unit.updated, unit.replicated)

    def clear_gradients(self) -> None:
        for unit in self.units:
            unit.gradients.clear()

    def targets(self) -> list[list[FlatTarget]]:
        """A group per unit, so that no more than one unit's parameters are gathered at once."""
        return [[FlatTarget(unit)] for unit in self.units]

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        for unit in self.units:
            yield State.PARAMETERS, unit.parameters.stored
            for held in (unit.gradients.whole, unit.gradients.shard):
                if held is not None:
                    yield State.GRADIENTS, held


def parameters_by_unit(
    model: nn.Module, units: Units
) -> Iterator[tuple[tuple[str, ...], list[tuple[str, nn.Parameter]]]]:
    """Each unit with the parameters that no unit before it has; units with none are left out."""
    seen: set[int] = set()
    for modules in units:
        named = [
            (f"{name}." * bool(name) + local, parameter)
            for name in modules
            for local, parameter in model.get_submodule(name).named_parameters()
            if id(parameter) not in seen
        ]
        seen.update(id(parameter) for _, parameter in named)
        if named:
            yield modules, named


def distribute_rows(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A tensor that every rank holds whole as a DTensor cut along its first dimension."""
    if tensor.dim() == 0:
        return DTensor.from_local(tensor.clone(), mesh, [Replicate()], run_check=False)
    rows = ceil_div(tensor.shape[0], mesh.size())
    start = min(rows * mesh.get_local_rank(), tensor.shape[0])
    return DTensor.from_local(
        tensor[start : start + rows].clone(),
        mesh,
        [Shard(0)],
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _whole(layout: FlatLayout, part: torch.Tensor, cut: tuple[Axis, ...]) -> torch.Tensor:
    return layout.gather(part, cut, cut) if cut else part


def _pieces(whole: torch.Tensor, named: list[tuple[str, nn.Parameter]]) -> Iterator[torch.Tensor]:
    start = 0
    for _, parameter in named:
        yield whole[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()


def _tensors(output: object) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)
