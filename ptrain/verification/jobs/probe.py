"""The reference's model on this rank's own micro-batches: the same inputs, and the same gradients
of the loss by its outputs. What its modules return is what the wrapped ones must return for these
inputs; and its parameters' gradients are what this rank has to contribute to the global one, so
that the gradient that the optimizer got can be told in terms of ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ptrain.errors import Fault
from ptrain.models.arguments import is_real
from ptrain.models.boundary import CodeRaised, boundary, said
from ptrain.verification.jobs.again import cuda_devices
from ptrain.verification.jobs.modules import Calls, ModuleRecorder
from ptrain.verification.jobs.record import ForwardCall
from ptrain.verification.names import canonical_parameters


@dataclass(slots=True)
class ProbeResult:
    """`gradients` by micro-batch and parameter; a micro-batch without is one that cannot be run on
    one device (inputs that are DTensors, outputs that no loss was computed of)."""

    modules: Calls = field(default_factory=dict)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)


def probed(model: nn.Module, calls: Sequence[ForwardCall]) -> ProbeResult:
    """Leaves the model as it was: no gradient is kept, buffers are put back."""
    with untouched(model), ModuleRecorder(model) as recorder:
        gradients = [_run(model, call) for call in calls]
    return ProbeResult(recorder.calls, gradients)


def _run(model: nn.Module, call: ForwardCall) -> dict[str, Tensor]:
    inputs = tree_leaves((call.args, call.kwargs))
    if any(isinstance(leaf, DTensor) for leaf in (*inputs, *call.upstream.values())):
        return {}
    with ExitStack() as stack:
        stack.enter_context(autocast_of([call]))
        stack.enter_context(torch.enable_grad())
        leaves = _leaves(model, call)
    if any(place >= len(leaves) for place in call.upstream):
        return {}
    wanted = {place: leaves[place] for place in call.upstream if is_real(leaves[place])}
    alike = all(leaf.shape == call.upstream[place].shape for place, leaf in wanted.items())
    if not wanted or not alike:
        return {}
    parameters = {
        n: parameter
        for n, parameter in canonical_parameters(model).items()
        if parameter.requires_grad
    }
    gradients = torch.autograd.grad(
        list(wanted.values()),
        list(parameters.values()),
        [call.upstream[place].to(leaf.dtype) for place, leaf in wanted.items()],
        allow_unused=True,
    )
    return {n: g for n, g in zip(parameters, gradients, strict=True) if g is not None}


def _leaves(model: nn.Module, call: ForwardCall) -> list[Any]:
    """What the whole model returns; nothing where it cannot take what a stage of it is given."""
    try:
        with boundary(lambda error: Fault(place="model", finding=said(error))):
            return tree_leaves(model(*call.args, **call.kwargs))
    except CodeRaised:
        return []


def autocast_of(calls: Sequence[ForwardCall]) -> AbstractContextManager[object]:
    """Return the autocast under which the first of the loop's forward passes ran."""
    if not calls or calls[0].autocast is None:
        return nullcontext()
    leaves = tree_leaves((calls[0].args, calls[0].kwargs))
    device = next((leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)), "cpu")
    return torch.autocast(device, dtype=calls[0].autocast)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Put a model's buffers and torch's random state back."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with torch.random.fork_rng(devices=cuda_devices(model)):
            yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
