"""torch's backward passes of a stage, whole and in halves: all that is used of torch's pipelining
(`internals.pipelining`; `tests/unit/test_stage_passes.py` fails when torch changes what they do).

Gradients of parameters are added to what `.grad` holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ptrain.internals.autograd import number_of
from ptrain.internals.pipelining import (
    node_of,
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from ptrain.models.ledger import local

Groups = list[dict[str, Any]]  # parameters, and where their half of a backward pass goes on


def backward(root: Tensor, gradient: Tensor | None, given: Tensor) -> Tensor | None:
    """Run the whole backward pass of what a stage made of `given`, from its output or the last
    stage's loss, with its gradient (None for 1, of a loss). Return the gradient of `given`, None of
    tokens."""
    if gradient is None:
        gradients = stage_backward(root, None, (given,))
    else:
        gradients = stage_backward((root,), (gradient,), (given,))
    (of_given,) = gradients
    return of_given


def backward_input(
    root: Tensor, gradient: Tensor | None, given: Tensor, parameters: Iterable[Tensor]
) -> tuple[Tensor | None, Groups]:
    """Compute what the stage before waits for, the gradient of `given`, and what `backward_weight`
    goes on from. `root` is detached in place."""
    gradients = None if gradient is None else [gradient]
    of_inputs, groups = stage_backward_input([root], gradients, [given], iter(parameters))
    (of_given,) = of_inputs
    return of_given, groups


def backward_weight(parameters: Sequence[Tensor], groups: Groups) -> None:
    """The half that nobody waits for. torch keeps the nodes and parameters of a group in sets,
    whose order is that of addresses: what lives at once would be anybody's. Here it is the
    model's order."""
    in_model_order(groups, parameters)
    stage_backward_weight(iter(parameters), groups)
    for parameter in parameters:
        _lay_out(parameter)


def _lay_out(parameter: Tensor) -> None:
    """Let a gradient lie as its parameter does. autograd sees to it where it keeps one, and fused
    optimizers rely on it; torch's half of the weights keeps what comes, which of a matrix that is
    multiplied transposed is transposed."""
    gradient = parameter.grad
    if (
        gradient is not None
        and not local(gradient).is_contiguous()
        and local(parameter).is_contiguous()
    ):
        parameter.grad = gradient.clone(memory_format=torch.contiguous_format)


def in_model_order(groups: Groups, parameters: Sequence[Tensor]) -> None:
    """Sort what `backward_input` gave, in place."""
    places = {node_of(parameter): place for place, parameter in enumerate(parameters)}
    for group in groups:
        group["params"] = sorted(group["params"], key=places.__getitem__)
        group["intermediates"] = nodes = list(group["intermediates"])
        order = sorted(range(len(nodes)), key=lambda place: number_of(nodes[place]))
        for key in ("intermediates", "grads"):
            group[key] = [group[key][place] for place in order]
