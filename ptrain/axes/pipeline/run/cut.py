"""A stage's part of a model: the model itself, with stand-ins for the layers of the others and for
what it lacks of the ends.

The first stage takes tokens, the others hidden states and tokens; the last one gives what the model
gives, the others hidden states. All that is left keeps its name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ptrain.axes.pipeline.run.stand_ins import (
    CalledOnce,
    Crossing,
    InFront,
    LayerBefore,
    LayerBehind,
    as_part,
    run_stage,
)
from ptrain.errors import Fault, SpecError, refused
from ptrain.facts.stages import Chain, Stage
from ptrain.models.boundary import boundary, said
from ptrain.models.chain import probe
from ptrain.models.modes import copied_buffers, drawn_state, forked, in_mode, without_dropout
from ptrain.models.objective import SampleBatch, TokenPair, objective_of
from ptrain.models.transformer import Transformer
from ptrain.spec.spec import Spec


@torch.no_grad()
def part_of(model: nn.Module, stages: Sequence[Stage], index: int, chain: Chain) -> nn.Module:
    """Return the part of stage `index`. It shares its parameters with `model`, but for what another
    stage has too, and has buffers of its own."""
    stage, crossing = stages[index], Crossing(is_written=chain.is_written)
    known, parameters = dict(model.named_modules()), dict(model.named_parameters())
    front, behind = chain.absent_ends(stage)
    gone: dict[int, nn.Module] = {
        id(known[name]): _stand_in(known[name], name, stage, chain, crossing)
        for name in chain.lacking(stage)
        if name in known  # a tied head may be no module
    }
    part = copy.deepcopy(model, {**{id(own): own for own in parameters.values()}, **gone})
    for name in behind:
        if name in parameters:
            owner, _, attribute = name.rpartition(".")
            setattr(part.get_submodule(owner), attribute, None)
    bare = [name for name in front if name in parameters]
    as_part(part, crossing, first=stage.layers[0] if index else "", front=bare)
    for name, copied in stage.copied:
        _copy(part, copied, model.get_parameter(name))
    return part


def _stand_in(
    module: nn.Module, name: str, stage: Stage, chain: Chain, crossing: Crossing
) -> nn.Module:
    if name in chain.ends.front:
        return InFront(module, crossing)
    if name in chain.ends.behind:
        return nn.Identity()  # no forward pass gets there
    is_before = chain.layers.index(name) < chain.layers.index(stage.layers[0])
    return LayerBefore(crossing, chain.returns) if is_before else LayerBehind()


def apart(output: torch.Tensor) -> torch.Tensor:
    """Return what a stage hands on: in one piece, as it is sent, and not as a view of what it was
    made of, since torch detaches it in place. If it was in one piece it has the same memory."""
    output = output.contiguous()
    return _Apart.apply(output) if output._is_view() else output


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _copy(part: nn.Module, name: str, source: nn.Parameter) -> None:
    """Put the stage's own copy of a tensor in the module that it belongs to; a built-in model,
    whose tied head is none, makes a new one."""
    path, _, attribute = name.rpartition(".")
    if path == "head" and isinstance(part, Transformer):
        part.head = part.new_head(device="meta", dtype=source.dtype)
    own = nn.Parameter(source.detach().clone(), source.requires_grad)
    setattr(part.get_submodule(path), attribute, own)


# Whether a model's stages, one after the other, compute what the model computes.
#
# A stage may need more of the ones before than their hidden states: a number that no gradient
# flows through, or that is written into a buffer. Every stage runs the model's own forward, with
# numbers that nobody needs in place of what is in front of its layers.


Forward = Callable[[Any], Any]

_ROUNDINGS = 4  # of the largest logit: the operators are the same, on tensors of the same sizes


def require_alike(model: nn.Module, stages: Sequence[Stage], chain: Chain, spec: Spec) -> None:
    """Raises SpecError where they do not: in training mode without dropout, or in evaluation mode
    where the model still draws random numbers. Costs three forward passes of a few tokens, or of a
    micro-batch of the user's."""
    samples = probe(model, spec)
    forward = partial(objective_of(spec.loss).forward, samples=samples)
    with torch.no_grad(), forked(), without_dropout(model):
        draws = _draws(model, forward)
        with in_mode(model, training=not draws):
            with copied_buffers(model):
                whole = forward(model)
                written = {name: buffer.clone() for name, buffer in model.named_buffers()}
            hidden = _through(model, stages, chain, samples, forward, written)
    if not _is_alike(hidden, whole):
        more = "layers pass more than hidden states to each other (tensors without gradients)"
        raise _unlike(f"{more}: the stages compute different outputs than the model")


def _draws(model: nn.Module, forward: Forward) -> bool:
    """Whether a forward pass in training mode draws random numbers."""
    before = drawn_state()
    with in_mode(model, training=True), copied_buffers(model):
        forward(model)
    return bool(drawn_state() != before)


def _through(
    model: nn.Module,
    stages: Sequence[Stage],
    chain: Chain,
    samples: SampleBatch,
    forward: Forward,
    written: Mapping[str, Tensor],
) -> Tensor:
    """Return what the last stage gives, each given what the one before does. Raises SpecError for
    other numbers than `written` in a buffer."""
    hidden, last = None, len(stages) - 1
    for index in range(len(stages)):
        part = part_of(model, stages, index, chain)
        hidden = _output(CalledOnce(part, hidden, is_last=index == last), index, forward)
        _require_written_alike(part, index, written)
        if index < last:
            _require_shape(hidden, index, chain, samples)
    assert hidden is not None, "there is a stage"
    return hidden


def _output(called: CalledOnce, index: int, forward: Forward) -> Tensor:
    def fault(error: BaseException) -> Fault:
        return _unlike(f"stage {index} does not run on its own inputs: {said(error)}").faults[0]

    with boundary(fault):
        output = run_stage(called, forward)
    if not isinstance(output, Tensor):
        raise _unlike(f"stage {index} returns a {type(output).__name__} instead of one tensor")
    return output


def _require_shape(hidden: Tensor, index: int, chain: Chain, samples: SampleBatch) -> None:
    tokens = samples.inputs.shape[1] if isinstance(samples.data, TokenPair) else 0
    wanted = [samples.rows, *chain.sample_shape(tokens)]
    if list(hidden.shape) != wanted:
        finding = f"stage {index} returns {list(hidden.shape)}, but hidden states are {wanted}"
        raise _unlike(finding)


def _require_written_alike(part: nn.Module, index: int, buffers: Mapping[str, Tensor]) -> None:
    for name, buffer in part.named_buffers():
        if name in buffers and not _is_alike(buffer, buffers[name]):
            finding = f"the forward pass modifies {name}, and stage {index} writes different values"
            raise _unlike(finding)


def _is_alike(own: Tensor, whole: Tensor) -> bool:
    if own.dtype != whole.dtype or own.shape != whole.shape:
        return False
    if not own.is_floating_point():
        return torch.equal(own, whole)
    bound = _ROUNDINGS * torch.finfo(whole.dtype).eps * whole.abs().nan_to_num().max().item()
    return torch.allclose(own, whole, rtol=0.0, atol=bound, equal_nan=True)


def _unlike(finding: str) -> SpecError:
    return refused(
        "mesh.pp",
        f"the model cannot be split into stages by its modules: {finding}",
        "Use a model whose layers pass only hidden states to each other, or remove `mesh.pp`.",
    )
