"""Whether a model's stages, one after the other, compute what the model computes.

A stage may need more of the ones before than their hidden states: a number that no gradient flows
through, or that is written into a buffer. Every stage runs the model's own forward, with numbers
that nobody needs in place of what is in front of its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ptrain.axes.pipeline.run.cut import part_of
from ptrain.axes.pipeline.run.stand_ins import CalledOnce, run_stage
from ptrain.errors import Fault, SpecError, refused
from ptrain.facts.stages import Chain, Stage
from ptrain.models.batch import SampleBatch, TokenPair
from ptrain.models.boundary import boundary, said
from ptrain.models.buffers import copied_buffers
from ptrain.models.chain import probe
from ptrain.models.objective import objective_of
from ptrain.spec.spec import Spec

_ROUNDINGS = 4  # of the largest logit: the operators are the same, on tensors of the same sizes


def require_alike(model: nn.Module, stages: Sequence[Stage], chain: Chain, spec: Spec) -> None:
    """Raises SpecError where they do not. Costs two forward passes of a few tokens, or of a
    micro-batch of the user's."""
    samples, forward = probe(model, spec), objective_of(spec.loss).forward
    hidden, last = None, len(stages) - 1
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _evaluated(model):
        with copied_buffers(model):
            whole = forward(model, samples)
            written = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for index in range(len(stages)):
            part = part_of(model, stages, index, chain)
            called = CalledOnce(part, hidden, is_last=index == last)
            hidden = _output(called, index, partial(forward, samples=samples))
            _require_written_alike(part, index, written)
            if index < last:
                _require_shape(hidden, index, chain, samples)
    assert hidden is not None, "there is a stage"
    if not _is_alike(hidden, whole):
        more = "more than hidden states goes from layer to layer (numbers without a gradient)"
        raise _unlike(f"{more}: they do not give what the model gives")


def _output(called: CalledOnce, index: int, forward: Callable[[Any], Any]) -> Tensor:
    def fault(error: BaseException) -> Fault:
        return _unlike(f"stage {index} does not run by itself: {said(error)}").faults[0]

    with boundary(fault):
        output = run_stage(called, forward)
    if not isinstance(output, Tensor):
        raise _unlike(f"stage {index} hands on a {type(output).__name__}, not one tensor")
    return output


def _require_shape(hidden: Tensor, index: int, chain: Chain, samples: SampleBatch) -> None:
    tokens = samples.inputs.shape[1] if isinstance(samples.data, TokenPair) else 0
    wanted = [samples.rows, *chain.sample_shape(tokens)]
    if list(hidden.shape) != wanted:
        finding = f"stage {index} hands on {list(hidden.shape)}, and hidden states are {wanted}"
        raise _unlike(finding)


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
