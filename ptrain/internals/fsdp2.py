"""FSDP2 (torch/distributed/fsdp/_fully_shard): parameter groups, parameters, and backward passes.

The lifetime of each tensor, by version, is in `axes.data.fsdp2`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_param,
    _fsdp_state,
)
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext, FSDPParamGroup

from ptrain.internals.part import PrivatePart

__all__ = ["AllGather", "FSDPParamGroup", "ReduceScatter"]

CHUNKS = _fsdp_param, "_chunk_with_empty"  # creates a view per rank of a group

# Streams that FSDP2 allocates in: one or two for reduced gradients, another for all-gathered units.
_STREAMS = ("reduce_scatter_stream", "all_reduce_stream", "all_gather_copy_in_stream")

PARTS = (
    PrivatePart(
        owner=FSDPModule,
        members=(
            "_get_fsdp_state",
            "_set_unshard_async_op",
            "set_custom_all_gather",
            "set_custom_reduce_scatter",
            "set_force_sum_reduction_for_comms",
            "set_gradient_divide_factor",
            "set_is_last_backward",
            "set_modules_to_backward_prefetch",
            "set_modules_to_forward_prefetch",
            "set_requires_gradient_sync",
            "set_reshard_after_backward",
        ),
    ),
    PrivatePart(
        owner=FSDPParamGroup,
        members=("post_backward", "pre_backward", "reshard", "unshard", "wait_for_unshard"),
    ),
    PrivatePart(owner=_fsdp_state.FSDPState, members=("_root_post_backward_final_callback",)),
    PrivatePart(owner=_fsdp_state.FSDPState, members=("finalize_backward",), since="2.15"),
    PrivatePart(
        owner=FSDPCommContext,
        members=("release_all_gather_state_for_comm_reuse",),
        since="2.15",
    ),
    PrivatePart(owner=FSDPParamGroup, members=("_take_unsharded_grads_to_reduce",), since="2.15"),
    PrivatePart(
        owner=FSDPParam,
        members=("to_accumulated_grad_if_needed", "accumulate_unsharded_grad_if_needed"),
        until="2.14",
    ),
    PrivatePart(owner=_fsdp_param, members=("_chunk_with_empty",)),
    PrivatePart(
        owner=AllGather.__call__, arguments=("output_tensor", "input_tensor", "group", "async_op")
    ),
    PrivatePart(
        owner=ReduceScatter.__call__,
        arguments=("output_tensor", "input_tensor", "group", "op", "async_op"),
    ),
    PrivatePart(owner=AllGather.allocate, arguments=("size", "dtype", "device")),
    PrivatePart(
        owner=_fsdp_collectives.foreach_all_gather,
        arguments=("fsdp_params", "group", "all_gather_comm"),
    ),
    PrivatePart(
        owner=_fsdp_collectives.foreach_reduce,
        arguments=("unsharded_grads", "reduce_dtype", "reduce_scatter_comm"),
    ),
)


def parameter_groups(module: FSDPModule) -> Sequence[FSDPParamGroup]:
    """Return the groups of parameters that FSDP2 all-gathers together for a module.

    Newer versions of torch have a list; older ones have one group or None.
    """
    state = module._get_fsdp_state()
    if (groups := getattr(state, "_fsdp_param_groups", None)) is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return groups


def parameters(module: FSDPModule) -> Iterator[FSDPParam]:
    """Yield the parameters that are sharded with a module."""
    for group in parameter_groups(module):
        yield from group.fsdp_params


def policies(group: FSDPParamGroup) -> Iterator[object]:
    """Yield the mixed-precision and offload policies of a group.

    From torch 2.15 on, each parameter has a precision policy.
    """
    if (shared := getattr(group, "mp_policy", None)) is not None:
        yield shared
    else:
        yield from (part.mp_policy for part in group.fsdp_params)
    yield group.offload_policy


def backward_order(root: FSDPModule) -> list[FSDPParamGroup]:
    """Return torch's list of the groups in the order in which their forward passes ended.

    Backward all-gathers from its end. Before the first pass it is a new empty list that torch does
    not use.
    """
    order: list[FSDPParamGroup] = getattr(
        root._get_fsdp_state()._comm_ctx, "post_forward_order", []
    )
    return order


def all_gather_after_computation(root: nn.Module) -> None:
    """Make the all-gather of a unit wait for all earlier computation."""
    root._set_unshard_async_op(True)


def end_backward(root: FSDPModule) -> None:
    """Run torch's callback at the end of a backward pass of the root.

    From 2.15 on, the callback checks first which code ends the pass; a hook of a real pass would
    have set this.
    """
    state = root._get_fsdp_state()
    shared = state._state_ctx
    if getattr(shared, "manual_backward_finalization_active", False) is None:
        shared.manual_backward_finalization_active = False
    state._root_post_backward_final_callback()


def post_forward_shard(part: FSDPParam) -> torch.Tensor | None:
    """Return a smaller group's shard between forward and backward, None if there is none."""
    return getattr(part, "_sharded_post_forward_param_data", None)


def drop_post_forward_shard(part: FSDPParam) -> None:
    """Drop that shard, since no backward pass follows."""
    part._sharded_post_forward_param_data = None
    part._sharded_post_forward_param = None


def post_forward_group(group: FSDPParamGroup) -> dist.ProcessGroup | None:
    """Return the ranks that shard a unit between forward and backward, None if they are all ranks.

    It is also None if the unit is not resharded after forward.
    """
    between = group.post_forward_mesh_info
    if between is None or between is group.mesh_info:
        return None
    return between.shard_process_group


def gradients(part: FSDPParam) -> Iterator[torch.Tensor]:
    """Yield a parameter's gradients.

    These are the reduced gradient of the shard, the unreduced one of the all-gathered parameter,
    and before 2.15 one that is accumulated in another dtype.
    """
    gathered = getattr(part, "_unsharded_param", None)
    # in 2.15 an alias of the unsharded parameter's gradient, not an instance attribute
    added = vars(part).get("unsharded_accumulated_grad")
    kept = (holder.grad for holder in (part.sharded_param, gathered) if holder is not None)
    yield from (gradient for gradient in (added, *kept) if gradient is not None)


def allocation_streams(module: FSDPModule) -> Iterator[tuple[Any, str]]:
    """Yield the streams that FSDP2 allocates in, with their attribute names."""
    context = module._get_fsdp_state()._comm_ctx
    for name in _STREAMS:
        yield getattr(context, name), name
