"""A stage's part of a model: the model itself without the layers of the others.

What a stage lacks of the ends hands on what it is given (`nn.Identity`), so that the first stage
takes tokens, the last one gives logits, and the others take and give hidden states. All that is
left keeps its name.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ptrain.facts.stages import Ends, Stage
from ptrain.models.transformer import Transformer


@torch.no_grad()
def part_of(model: nn.Module, stages: Sequence[Stage], index: int, ends: Ends) -> nn.Module:
    """Return the part of stage `index`. It shares its parameters with `model`, but for what another
    stage has too, and has buffers of its own."""
    stage = stages[index]
    foreign = [layer for other in stages if other.index != index for layer in other.layers]
    lacking = [*foreign, *_lacking(stages, index, ends)]
    own = {id(parameter): parameter for parameter in model.parameters()}
    gone = {id(module): nn.Identity() for module in _there(model, lacking)}
    part = copy.deepcopy(model, {**own, **gone})
    for layer in foreign:
        path, _, name = layer.rpartition(".")
        delattr(part.get_submodule(path), name)
    _say_whose(part, stages, index)
    for name in _lacking(stages, index, ends):
        path, _, attribute = name.rpartition(".")
        setattr(part.get_submodule(path), attribute, nn.Identity())
    for name, copied in stage.copied:
        _copy(part, copied, model.get_parameter(name))
    return part


def _say_whose(part: nn.Module, stages: Sequence[Stage], index: int) -> None:
    """transformers' models ask their config which kind of layer the i-th of their list is."""
    every = [layer for stage in stages for layer in stage.layers]
    config = getattr(part.get_submodule(_above(_above(every[0]))), "config", None)
    kinds = getattr(config, "layer_types", None)
    if config is not None and isinstance(kinds, list | tuple) and len(kinds) == len(every):
        own = stages[index].layers
        config.layer_types = [
            kind for kind, layer in zip(kinds, every, strict=True) if layer in own
        ]


def _above(name: str) -> str:
    return name.rpartition(".")[0]


def apart(output: torch.Tensor) -> torch.Tensor:
    """Return what a stage hands on, not as a view of what it was made of: torch detaches it in
    place. It has the same memory."""
    return _Apart.apply(output) if output._is_view() else output


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _lacking(stages: Sequence[Stage], index: int, ends: Ends) -> tuple[str, ...]:
    """Modules of the ends that belong to other stages."""
    return (*(ends.front if index else ()), *(ends.behind if index < len(stages) - 1 else ()))


def _there(model: nn.Module, names: Sequence[str]) -> Iterator[nn.Module]:
    """A tied head may be no module."""
    known = dict(model.named_modules())
    yield from (known[name] for name in names if name in known)


def _copy(part: nn.Module, name: str, source: nn.Parameter) -> None:
    """Put the stage's own copy of a tensor in the module that it belongs to; a built-in model,
    whose tied head is none, makes a new one."""
    path, _, attribute = name.rpartition(".")
    if path == "head" and isinstance(part, Transformer):
        part.head = part.new_head(device="meta", dtype=source.dtype)
    setattr(part.get_submodule(path), attribute, nn.Parameter(source.detach().clone()))
