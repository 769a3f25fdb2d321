"""From a spec's model to a wrapped module with values: the same weights whatever the placement."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch.distributed.tensor import DTensor

from ptrain.activations.run.apply import keep
from ptrain.axes.data.run.apply import apply
from ptrain.axes.data.run.target import rows_of
from ptrain.axes.data.run.wrapped import Wrapped
from ptrain.axes.tensor.costs import shards_differ, slices
from ptrain.axes.tensor.run.apply import parallelize
from ptrain.errors import refused
from ptrain.models.build import build
from ptrain.models.initialize import (
    NONE,
    cast,
    initial,
    initialize,
    keeps_its_weights,
    reset_buffers,
)
from ptrain.models.ledger import local
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.plan.step import FullyShard, Plan
from ptrain.rooms.mesh import Mesh
from ptrain.rooms.registry import Registry
from ptrain.rooms.tiers import Tiers
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec

_RETURNS_A_VIEW = "FSDP2-wrapped module .* returned a view tensor"


def build_module(spec: Spec, *, allow_import: bool = False) -> nn.Module:
    """The spec's model in its dtypes: on the meta device where ptrain gives the weights, else real
    on the CPU. Fake tensors are built where they are to live: they take no memory anyway."""
    meta = isinstance(spec.model, ModelShape) and detect_fake_mode() is None
    with torch.device("meta" if meta else "cpu"):
        module = build(
            spec.model,
            sequence=spec.batch.sequence,
            allow_import=allow_import,
            seed=spec.train.seed,
        )
    cast(module, TORCH_DTYPES[spec.precision.effective.parameters])
    return module


def wrap(
    module: nn.Module,
    spec: Spec,
    plan: Plan,
    mesh: Mesh,
    registry: Registry,
    copies: Mapping[str, str] = NONE,
) -> Wrapped:
    """Wrap and fill. FSDP2 shards the meta module first, so that no rank ever holds it whole.
    `copies`: tensors that begin as others of the model."""
    device = mesh.world.device
    is_meta = any(parameter.is_meta for parameter in module.parameters())
    if not is_meta and any(parameter.device != device for parameter in module.parameters()):
        module.to(device)
    layout = plan.update.layout
    if isinstance(plan.wrap, FullyShard) and plan.wrap.materialized and layout.master is not None:
        cast(module, TORCH_DTYPES[layout.master])  # while its tensors are plain
    if plan.tensor is not None:
        parallelize(module, plan.tensor, mesh.submesh((plan.tensor.axis,)), registry)
        _require_alike_shards(module, plan, mesh)
    if plan.keep is not None:
        keep(module, plan.keep, Tiers(device, registry, plan.keep.path))
    if isinstance(plan.wrap, FullyShard):
        if isinstance(spec.model, ModelShape):
            # a gpt's mlp returns a view, and nothing in our models writes into what a unit returns
            warnings.filterwarnings("ignore", _RETURNS_A_VIEW, UserWarning)
        wrapped = apply(module, plan, mesh, registry)
        if is_meta:
            module.to_empty(device=device)
            fill_shards(module, spec.train.seed, TORCH_DTYPES[layout.parameters], copies)
        return wrapped
    if is_meta:
        module.to_empty(device=device)
        if plan.tensor is None:
            initialize(module, spec.train.seed, copies)
        else:
            fill_shards(module, spec.train.seed, TORCH_DTYPES[layout.parameters], copies)
    return apply(module, plan, mesh, registry)


def _require_alike_shards(module: nn.Module, plan: Plan, mesh: Mesh) -> None:
    """Of a model that is not built in the algebra does not know the sizes."""
    assert plan.tensor is not None
    degree, wrap = mesh.degrees[plan.tensor.axis], plan.wrap
    shards = mesh.size(wrap.shard_axes) if isinstance(wrap, FullyShard) else 1
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor) or not parameter.placements[0].is_shard(0):
            continue
        rows = parameter.shape[0]
        if not min(slices(rows, degree)):
            finding = f"tp={degree} leaves ranks without a row of {name}, which has {rows}"
            raise refused("mesh.tp", finding, "choose a lower degree")
        if shards_differ(rows, degree, shards):
            finding = f"not yet: the {rows} rows of {name} in slices of {degree} ranks, each in "
            finding += f"{shards} shards of unlike heights"
            remedy = f"what works today: a multiple of {degree}, or parameters R on the data axes"
            raise refused("mesh.tp", finding, remedy)


@torch.no_grad()
def fill_shards(
    module: nn.Module, seed: int, dtype: torch.dtype, copies: Mapping[str, str] = NONE
) -> None:
    """This rank's rows of every initial tensor, rounded to `dtype` (a master copy too begins as
    the parameters that the model computes with); one whole tensor at a time on the CPU."""
    assert not keeps_its_weights(module), "a model with weights of its own is never on meta"
    for name, parameter in module.named_parameters():
        whole = initial(copies.get(name, name), parameter.shape, seed, module).to(dtype)
        local(parameter).copy_(rows_of(whole, parameter))
    reset_buffers(module)
