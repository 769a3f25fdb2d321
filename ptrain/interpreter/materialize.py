"""From a spec's model to a wrapped module with values: the same weights whatever the placement."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import nn

from ptrain.axes.data.run.local_part import Parameter, whole_parameter
from ptrain.axes.data.run.members import RowWriter
from ptrain.axes.data.run.target import window_of
from ptrain.internals.fakes import detect_fake_mode
from ptrain.models.balance import weigh
from ptrain.models.build import build
from ptrain.models.initialize import (
    InitialValues,
    cast,
    keeps_its_weights,
    reset_buffers,
)
from ptrain.models.ledger import local
from ptrain.models.module_weights import (
    ModuleWeights,
    named_tensors,
    read_module_weights,
    without_values,
)
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.models.window import Window, rows
from ptrain.spec.axis import CUTTING_AXES, Axis
from ptrain.spec.model import HuggingFaceModel, ModelShape
from ptrain.spec.spec import Spec

_CPU = torch.device("cpu")


def build_module(
    spec: Spec, *, device: torch.device = _CPU, allow_import: bool = False
) -> nn.Module:
    """The spec's model in its dtypes: on the meta device where ptrain gives the weights, or reads
    some of them, else real on the CPU. Fake tensors are built where they are to live, on `device`:
    they take no memory anyway, and no module of them can be moved."""
    if detect_fake_mode() is None:
        device = torch.device("meta") if isinstance(spec.model, ModelShape) else _CPU
    with device, without_values() if _keeps_rows(spec) else nullcontext():
        module = build(
            spec.model,
            sequence=spec.batch.sequence,
            allow_import=allow_import,
            seed=spec.train.seed,
        )
    if not isinstance(spec.model, ModelShape):
        read_module_weights(module, spec.model.pretrained)
    cast(module, TORCH_DTYPES[spec.precision.effective.parameters])
    weigh(module, 1.0 / spec.batch.global_samples)
    return module


def _keeps_rows(spec: Spec) -> bool:
    """Whether ranks keep rows at most of the tensors of a class of transformers that files have.
    What cuts operators, experts or stages looks at their values, or moves them."""
    model = spec.model
    has_files = isinstance(model, HuggingFaceModel) and model.pretrained is not None
    is_cut = spec.is_cut_over((*CUTTING_AXES, Axis.PP))
    return has_files and not is_cut and detect_fake_mode() is None


class Filling:
    """What makes a module on meta real on `device`, with this rank's part of every initial tensor,
    rounded to the parameters' dtype (a master copy too begins as what the model computes with).
    `copies`: tensors that begin as others of the model."""

    def __init__(
        self, module: nn.Module, spec: Spec, device: torch.device, copies: Mapping[str, str]
    ) -> None:
        folder = spec.model.pretrained if keeps_its_weights(module) else None
        self._module, self._device, self._copies = module, device, copies
        self._tied = [names for names, _ in named_tensors(module)] if folder else []
        self._values = InitialValues(
            module=module,
            seed=spec.train.seed,
            dtype=TORCH_DTYPES[spec.precision.effective.parameters],
            weights=None if folder is None else ModuleWeights(module, folder),
        )

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
        """Return the buffers that have values already."""
        named = self._module.named_buffers()
        return {name: buffer for name, buffer in named if not buffer.is_meta}

    def _restore(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Undo what becoming real did beside: ties are cut, and buffers empty."""
        for first, *others in self._tied:
            for name in others:
                setattr(*self._place(name), getattr(*self._place(first)))
        for name, values in buffers.items():
            self._module.get_buffer(name).copy_(values)
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
        self._values.write(self._copies.get(name, name), parameter.shape, window, part)
