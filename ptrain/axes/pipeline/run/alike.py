"""Whether a model's stages, one after the other, compute what the model computes.

A model may do something between the modules that its plan names: scale the embedding, or the
logits. Every stage runs the model's own forward, and would do it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ptrain.axes.pipeline.run.cut import part_of
from ptrain.errors import Fault, SpecError, refused
from ptrain.facts.stages import Ends, Stage
from ptrain.models.boundary import boundary, said

_ROUNDINGS = 4  # of the largest logit: the operators are the same, on tensors of the same sizes


def require_alike(
    model: nn.Module, stages: Sequence[Stage], ends: Ends, hidden: int, tokens_BT: torch.Tensor
) -> None:
    """Raises SpecError where they do not. Costs two forward passes of the few `tokens_BT`."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _evaluated(model):
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        whole_BTV = torch.func.functional_call(model, buffers, (tokens_BT,))
        x = tokens_BT
        for index in range(len(stages)):
            x = _through(model, stages, index, ends, x)
            if index < len(stages) - 1 and tuple(x.shape) != (*tokens_BT.shape, hidden):
                finding = f"stage {index} hands on {list(x.shape)}, and hidden states are "
                raise _unlike(finding + f"{[*tokens_BT.shape, hidden]}")
    bound = _ROUNDINGS * torch.finfo(whole_BTV.dtype).eps * whole_BTV.abs().max().item()
    if x.dtype != whole_BTV.dtype or not torch.allclose(x, whole_BTV, rtol=0.0, atol=bound):
        between = "something between the modules of its pp_plan (a scale of embeddings or logits)"
        raise _unlike(f"{between} is computed on every stage: they do not give the model's logits")


def _through(
    model: nn.Module, stages: Sequence[Stage], index: int, ends: Ends, x: torch.Tensor
) -> torch.Tensor:
    def fault(error: BaseException) -> Fault:
        return _unlike(f"stage {index} does not run by itself: {said(error)}").faults[0]

    with boundary(fault):
        y = part_of(model, stages, index, ends)(x)
    if not isinstance(y, torch.Tensor):
        raise _unlike(f"stage {index} hands on a {type(y).__name__}, not one tensor")
    return y


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """Without dropout; every module is left in the mode it was in."""
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True


def _unlike(finding: str) -> SpecError:
    return refused(
        "mesh.pp",
        f"the model cannot be cut into stages by its modules: {finding}",
        "choose a model that is a chain of its embedding, layers, norm and head, or write no pp",
    )
