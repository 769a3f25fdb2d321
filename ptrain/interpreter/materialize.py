"""From a spec's model to a wrapped module with values: the same weights whatever the placement."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ptrain.axes.data.run.target import rows_of
from ptrain.internals.fakes import detect_fake_mode
from ptrain.models.balance import weigh
from ptrain.models.build import build
from ptrain.models.initialize import (
    cast,
    initial,
    keeps_its_weights,
    reset_buffers,
)
from ptrain.models.ledger import local
from ptrain.models.numerics import TORCH_DTYPES
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
        module = build(
            spec.model,
            sequence=spec.batch.sequence,
            allow_import=allow_import,
            seed=spec.train.seed,
        )
    cast(module, TORCH_DTYPES[spec.precision.effective.parameters])
    weigh(module, 1.0 / spec.batch.global_samples)
    return module


@torch.no_grad()
def fill(module: nn.Module, spec: Spec, device: torch.device, copies: Mapping[str, str]) -> None:
    """Make a module on meta real on `device`, with this rank's rows of every initial tensor,
    rounded to the parameters' dtype (a master copy too begins as what the model computes with); one
    whole tensor at a time on the CPU. `copies`: tensors that begin as others of the model."""
    assert not keeps_its_weights(module), "a model with weights of its own is never on meta"
    dtype = TORCH_DTYPES[spec.precision.effective.parameters]
    module.to_empty(device=device)
    for name, parameter in module.named_parameters():
        whole = initial(copies.get(name, name), parameter.shape, spec.train.seed, module).to(dtype)
        local(parameter).copy_(rows_of(whole, parameter))
    reset_buffers(module)
