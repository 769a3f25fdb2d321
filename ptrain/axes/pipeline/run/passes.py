"""torch's backward passes of a stage, full and in halves.

Nothing else of torch's pipelining is used (`internals.pipelining`).
`tests/unit/test_stage_passes.py` fails if torch changes their behavior. Gradients of parameters are
added to `.grad`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ptrain.internals.autograd import sequence_number
from ptrain.internals.pipelining import (
    node_of,
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from ptrain.models.ledger import local_tensor

# parameters, and the nodes from which their half of backward continues
Groups = list[dict[str, Any]]


def backward(root: Tensor, gradient: Tensor | None, given: Tensor) -> Tensor | None:
    """Run the full backward pass of a stage.

    Args:
        root: The stage's output, or the last stage's loss.
        gradient: Gradient of `root`, None for 1.
        given: The stage's input.

    Returns:
        The gradient of `given`, None for tokens.
    """
    # A loss is passed without a tuple, because `stage_backward` skips a tuple of outputs that has
    # no gradients (torch/distributed/pipelining/_backward.py, 2.13).
    if gradient is None:
        gradients = stage_backward(root, None, (given,))
    else:
        gradients = stage_backward((root,), (gradient,), (given,))
    (of_given,) = gradients
    return of_given


def backward_input(
    root: Tensor, gradient: Tensor | None, given: Tensor, parameters: Iterable[Tensor]
) -> tuple[Tensor | None, Groups]:
    """Run the half of a backward pass that the previous stage waits for.

    `root` is detached in place.

    Args:
        root: The stage's output, or the last stage's loss.
        gradient: Gradient of `root`, None for 1.
        given: The stage's input.
        parameters: The stage's parameters.

    Returns:
        The gradient of `given`, and the groups from which `backward_weight` continues.
    """
    gradients = None if gradient is None else [gradient]
    of_inputs, groups = stage_backward_input([root], gradients, [given], iter(parameters))
    (of_given,) = of_inputs
    return of_given, groups


def backward_weight(parameters: Sequence[Tensor], groups: Groups) -> None:
    """Run the half of a backward pass that no stage waits for.

    torch keeps nodes and parameters of a group in sets, whose order depends on addresses, and so
    would the memory that is live at once. They are therefore sorted in model order.
    """
    # Before `stage_backward_weight`, which deletes the nodes of a group as it goes.
    in_model_order(groups, parameters)
    stage_backward_weight(iter(parameters), groups)
    for parameter in parameters:
        _match_layout(parameter)


def _match_layout(parameter: Tensor) -> None:
    """Make a gradient contiguous if its parameter is.

    Autograd's accumulation does this, and fused optimizers rely on it. torch's weight half keeps
    the gradient's layout, which is transposed for a matrix that is multiplied transposed.
    """
    gradient = parameter.grad
    if (
        gradient is not None
        and not local_tensor(gradient).is_contiguous()
        and local_tensor(parameter).is_contiguous()
    ):
        parameter.grad = gradient.clone(memory_format=torch.contiguous_format)


def in_model_order(groups: Groups, parameters: Sequence[Tensor]) -> None:
    """Sort the groups from `backward_input` in place."""
    places = {node_of(parameter): place for place, parameter in enumerate(parameters)}
    for group in groups:
        group["params"] = sorted(group["params"], key=places.__getitem__)
        group["intermediates"] = nodes = list(group["intermediates"])
        # By the order of the forward pass. `grads` has one entry for each node, at the same
        # position.
        order = sorted(range(len(nodes)), key=lambda place: sequence_number(nodes[place]))
        for key in ("intermediates", "grads"):
            group[key] = [group[key][place] for place in order]
