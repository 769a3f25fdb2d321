"""Which module makes a model's logits, for whoever puts something in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ptrain.errors import refused
from ptrain.models.chain import sample
from ptrain.models.chunked import can_fuse
from ptrain.models.contract import logits_of
from ptrain.models.ledger import storage_of
from ptrain.models.roles import named_in_spec
from ptrain.models.transformer import Transformer
from ptrain.models.units import ROOT
from ptrain.spec.spec import Spec

Made = dict[str, tuple[Tensor, int]]  # by module: what it returned, and in which version


def head_of(model: nn.Module, spec: Spec) -> str:
    """Return the name of the head; the root's, of a built-in model, which has a method for it.
    Raises SpecError where the loss cannot be computed in its place: where the model changes what
    its head gives, or torch has no operator for both. Runs a model that is not built in forward
    once."""
    if spec.loss.fused and not can_fuse():
        finding = f"torch {torch.__version__} has no linear_cross_entropy that goes by chunks"
        raise refused("loss.fused", finding, "remove it: chunks do without, or take torch 2.13")
    if isinstance(model, Transformer):
        return ROOT
    outputs: Made = {}
    tokens = sample(model, spec)
    handles = [
        module.register_forward_hook(_notes(outputs, name, tokens.shape))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            logits = logits_of(model, tokens, spec)
    finally:
        for handle in handles:
            handle.remove()
    for name, (output, version) in outputs.items():
        if _is(logits, output, version):
            return name
    _, model_name = named_in_spec(model, spec)
    finding = f"{model_name} does not return what one of its nn.Linear makes of all its tokens: "
    finding += "other operators come behind, or are the head"
    raise refused("loss", finding, "leave the logits whole (remove loss), or end the model so")


def _notes(outputs: Made, name: str, shape: torch.Size) -> Callable[..., None]:
    def hook(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        if inputs and inputs[0].shape[:-1] == shape:
            outputs[name] = output, output._version

    return hook


def _is(logits: Tensor, output: Tensor, version: int) -> bool:
    """The same tensor into which nobody wrote, or the same numbers in another dtype."""
    if output.shape != logits.shape or output._version != version:
        return False
    if output.dtype != logits.dtype:
        return torch.equal(output.double(), logits.double())
    return storage_of(output)._cdata == storage_of(logits)._cdata
