"""A stage's part of a model: the model itself, with stand-ins for the layers of the others and for
what it lacks of the ends.

The first stage takes tokens, the others hidden states and tokens; the last one gives what the model
gives, the others hidden states. All that is left keeps its name.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ptrain.axes.pipeline.run.stand_ins import (
    Crossing,
    InFront,
    LayerBefore,
    LayerBehind,
    as_part,
)
from ptrain.facts.stages import Chain, Stage
from ptrain.models.transformer import Transformer


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
