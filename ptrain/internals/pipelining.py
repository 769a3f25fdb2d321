"""Backward passes of a pipeline stage (torch/distributed/pipelining/_backward.py).

Nothing else of torch's pipelining is used. Its stages are not, since `fwd_cache` is gone in 2.15.
"""

from __future__ import annotations

from torch.distributed.pipelining._backward import (
    _get_grad_fn_or_grad_acc,
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)

from ptrain.internals.part import PrivatePart

__all__ = ["node_of", "stage_backward", "stage_backward_input", "stage_backward_weight"]

PARTS = (
    PrivatePart(owner=stage_backward, arguments=("stage_output", "output_grads", "input_values")),
    PrivatePart(
        owner=stage_backward_input,
        arguments=("stage_outputs_or_loss", "output_grads", "input_values", "weights"),
    ),
    PrivatePart(owner=stage_backward_weight, arguments=("weights", "param_groups")),
    PrivatePart(owner=_get_grad_fn_or_grad_acc, arguments=("t",)),
)

node_of = _get_grad_fn_or_grad_acc  # returns the node at which a tensor's gradient arrives
