"""The facts that derivation needs of a model that is not built in, read off the module itself."""

from __future__ import annotations

import torch
from torch import nn

from ptrain.facts.model import ModelFacts, TensorFacts, UnitFacts
from ptrain.facts.parameters import expert_modules
from ptrain.models.attending import attending_of
from ptrain.models.batch import sample_bytes
from ptrain.models.chain import chain_of_module
from ptrain.models.dropout import drops_out
from ptrain.models.expert_layers import expert_layers_of
from ptrain.models.huggingface import ignored_fields
from ptrain.models.roles import cutting_of_module
from ptrain.models.units import blocks_of, unit_modules
from ptrain.spec.model import HuggingFaceModel
from ptrain.spec.spec import Spec

_WIDE_BYTES = 4  # buffers of reals are fp32, or fp64 where everything is


def untraced_facts(model: nn.Module, spec: Spec) -> ModelFacts:
    """Return the facts that are read off the module itself."""
    roles, fusions = cutting_of_module(model, spec)
    experts = expert_layers_of(model, spec)
    apart = experts.modules if experts else expert_modules(spec)
    return ModelFacts(
        units=_units(model, unit_modules(model, spec.unit, spec.model.blocks, apart)),
        buffers=tuple((name, _nbytes(buffer)) for name, buffer in model.named_buffers()),
        roles=roles,
        fusions=fusions,
        chain=chain_of_module(model, spec),
        blocks=tuple(blocks_of(model, spec.model.blocks)),
        draws=drops_out(model),
        attending=attending_of(model, spec),
        experts=experts,
        sample_bytes=sample_bytes(spec),
        ignored=ignored_fields(spec.model) if isinstance(spec.model, HuggingFaceModel) else (),
    )


def _units(model: nn.Module, groups: tuple[tuple[str, ...], ...]) -> tuple[UnitFacts, ...]:
    """Each unit with the parameters that no unit before it has."""
    seen: set[int] = set()
    units = []
    for modules in groups:
        fresh = [
            (f"{name}." * bool(name) + path, parameter)
            for name in modules
            for path, parameter in model.get_submodule(name).named_parameters()
            if id(parameter) not in seen
        ]
        seen.update(id(parameter) for _, parameter in fresh)
        tensors = tuple(
            TensorFacts(name=n, shape=tuple(p.shape), is_frozen=not p.requires_grad)
            for n, p in fresh
        )
        units.append(UnitFacts(modules=modules, tensors=tensors))
    return tuple(units)


def _nbytes(buffer: torch.Tensor) -> int:
    """As it is stored beside parameters of at most fp32."""
    itemsize = _WIDE_BYTES if buffer.is_floating_point() else buffer.itemsize
    return buffer.numel() * itemsize
