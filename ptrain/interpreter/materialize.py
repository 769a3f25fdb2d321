"""From a spec's model to a wrapped module with values: the same weights whatever the placement."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from ptrain.axes.data.run.members import RowWriter
from ptrain.axes.data.run.target import Parameter, whole_parameter, window_of
from ptrain.axes.tensor.run.fused import FusedOrder
from ptrain.internals.fakes import detect_fake_mode
from ptrain.models.balance import weigh
from ptrain.models.drawn import DrawnWeights, build_drawn
from ptrain.models.hollow import hollow
from ptrain.models.initialize import (
    InitialValues,
    ModuleWeights,
    build,
    cast,
    named_tensors,
    read_module_weights,
    reset_buffers,
)
from ptrain.models.ledger import local
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.models.window import Window, rows
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec

_CPU = torch.device("cpu")


def build_module(
    spec: Spec, *, device: torch.device = _CPU, allow_import: bool = False
) -> nn.Module:
    """The spec's model in its dtypes: on the meta device where ptrain gives the weights, else real
    on the CPU. Fake tensors are built where they are to live, on `device`: they take no memory
    anyway, and no module of them can be moved."""
    if detect_fake_mode() is None:
        device = torch.device("meta") if isinstance(spec.model, ModelShape) else _CPU
    with device:
        module = _built(spec, allow_import=allow_import)
    if not isinstance(spec.model, ModelShape):
        read_module_weights(module, spec.model.pretrained)
    return _prepared(module, spec)


def build_hollow(
    spec: Spec, *, allow_import: bool = False, draws: bool = True
) -> tuple[nn.Module, ModuleWeights | DrawnWeights]:
    """Build the spec's model, which is not built in, with its parameters on meta.

    Args:
        spec: The model begins with the weights in its folder, or with those that it draws.
        allow_import: Whether a function of the user's may be imported.
        draws: As of `build_drawn`, for a model without a folder.

    Returns:
        The module, and its initial weights.

    Raises:
        NeedsValues: It cannot be built without values.
        SpecError: It cannot be built, or the folder is not of this model.
    """
    folder = spec.model.pretrained
    build_it = partial(_built, spec, allow_import=allow_import)
    with _CPU:
        if folder is None:
            module, drawn = build_drawn(build_it, draws=draws)
            return _prepared(module, spec), drawn
        module = hollow(build_it)
    weights = ModuleWeights(module, folder)
    weights.read(module, only_buffers=True)
    return _prepared(module, spec), weights


def _built(spec: Spec, more: int = 0, *, allow_import: bool) -> nn.Module:
    """`more`: than the spec's seed."""
    sequence, seed = spec.batch.sequence, spec.train.seed + more
    return build(spec.model, sequence=sequence, allow_import=allow_import, seed=seed)


def _prepared(module: nn.Module, spec: Spec) -> nn.Module:
    cast(module, TORCH_DTYPES[spec.precision.effective.parameters])
    weigh(module, 1.0 / spec.batch.global_samples)
    return module


class Filling:
    """What makes a module on meta real on `device`, with this rank's part of every initial tensor.
    `copies`: tensors that begin as others of the model; `order`: in which those of fused
    projections are held."""

    def __init__(
        self,
        module: nn.Module,
        values: InitialValues,
        device: torch.device,
        copies: Mapping[str, str],
        order: FusedOrder,
    ) -> None:
        self._module, self._values, self._device = module, values, device
        self._copies, self._order = copies, order
        self._tied = [names for names, _ in named_tensors(module)]

    def all(self) -> None:
        """Fill everything."""
        buffers = self._computed()
        self._module.to_empty(device=self._device)
        self._restore(buffers)
        for name, parameter in self._module.named_parameters():
            self._write(name, parameter, window_of(parameter), local(parameter))

    def by_unit(self) -> RowWriter:
        """Give parameters no memory for now, and fill all else. What is returned writes rows of
        them to where they will be."""
        buffers = self._computed()
        for module in self._module.modules():
            module.to_empty(device=self._device, recurse=False)
            for parameter in module.parameters(recurse=False):
                local(parameter).untyped_storage().resize_(0)
        self._restore(buffers)
        return self._write_rows

    def _computed(self) -> dict[str, torch.Tensor]:
        """Return the buffers that have values already, by all their names."""
        named = self._module.named_buffers(remove_duplicate=False)
        return {name: buffer for name, buffer in named if not buffer.is_meta}

    def _restore(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Undo what becoming real did beside: ties are cut, and buffers empty."""
        for first, *others in self._tied:
            for name in others:
                setattr(*self._place(name), getattr(*self._place(first)))
        moved = {id(values): values.to(self._device) for values in buffers.values()}
        for name, values in buffers.items():
            owner, leaf = self._place(name)
            owner._buffers[leaf] = moved[id(values)]
        reset_buffers(self._module)

    def _place(self, name: str) -> tuple[nn.Module, str]:
        """Return whose tensor it is, and how it is called there."""
        owner, _, leaf = name.rpartition(".")
        return self._module.get_submodule(owner), leaf

    def _write_rows(self, name: str, stored: Parameter, first: int, part: torch.Tensor) -> None:
        parameter = whole_parameter(stored)
        self._write(name, parameter, rows(window_of(parameter), first, len(part)), part)

    @torch.no_grad()
    def _write(
        self, name: str, parameter: nn.Parameter, window: Window, part: torch.Tensor
    ) -> None:
        name, shape = self._copies.get(name, name), parameter.shape
        for ordered, place in self._order.pieces(name, shape, window, part):
            self._values.write(name, shape, ordered, place)
