"""Whether a model's stages, one after the other, compute what the model computes.

A stage may need more of the ones before than their hidden states: a number that no gradient flows
through, or that is written into a buffer. Every stage runs the model's own forward, with numbers
that nobody needs in place of what is in front of its layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ptrain.axes.pipeline.run.cut import part_of
from ptrain.errors import Fault, SpecError, refused
from ptrain.facts.stages import Chain, Stage
from ptrain.models.boundary import boundary, said

_ROUNDINGS = 4  # of the largest logit: the operators are the same, on tensors of the same sizes


def require_alike(
    model: nn.Module, stages: Sequence[Stage], chain: Chain, tokens_BT: Tensor
) -> None:
    """Raises SpecError where they do not. Costs two forward passes of the few `tokens_BT`."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _evaluated(model):
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        whole_BTV = torch.func.functional_call(model, buffers, (tokens_BT,))
        given: tuple[Tensor, ...] = (tokens_BT,)
        for index in range(len(stages)):
            part = part_of(model, stages, index, chain)
            x = _through(part, index, given)
            _require_written_alike(part, index, buffers)
            if index < len(stages) - 1 and tuple(x.shape) != (*tokens_BT.shape, chain.hidden):
                finding = f"stage {index} hands on {list(x.shape)}, and hidden states are "
                raise _unlike(finding + f"{[*tokens_BT.shape, chain.hidden]}")
            given = (x, tokens_BT)
    if not _is_alike(x, whole_BTV):
        more = "more than hidden states goes from layer to layer (numbers without a gradient)"
        raise _unlike(f"{more}: they do not give the model's logits")


def _through(part: nn.Module, index: int, given: tuple[Tensor, ...]) -> Tensor:
    def fault(error: BaseException) -> Fault:
        return _unlike(f"stage {index} does not run by itself: {said(error)}").faults[0]

    with boundary(fault):
        y = part(*given)
    if not isinstance(y, Tensor):
        raise _unlike(f"stage {index} hands on a {type(y).__name__}, not one tensor")
    return y


def _require_written_alike(part: nn.Module, index: int, buffers: Mapping[str, Tensor]) -> None:
    for name, buffer in part.named_buffers():
        if name in buffers and not _is_alike(buffer, buffers[name]):
            finding = f"the forward pass writes into {name}, and on stage {index} other numbers"
            raise _unlike(finding)


def _is_alike(own: Tensor, whole: Tensor) -> bool:
    if own.dtype != whole.dtype or own.shape != whole.shape:
        return False
    if not own.is_floating_point():
        return torch.equal(own, whole)
    bound = _ROUNDINGS * torch.finfo(whole.dtype).eps * whole.abs().nan_to_num().max().item()
    return torch.allclose(own, whole, rtol=0.0, atol=bound, equal_nan=True)


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
        "choose a model whose layers hand on hidden states alone, or write no pp",
    )
