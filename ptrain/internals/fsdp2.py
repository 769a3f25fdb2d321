"""FSDP2 (torch/distributed/fsdp/_fully_shard): the groups of parameters of a module, what each
parameter holds, and the order and the end of a backward pass. How long it holds what, by version,
is `axes.data.fsdp2`."""

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

CHUNKS = _fsdp_param, "_chunk_with_empty"  # a view for every rank of a group

# Streams that FSDP2 allocates in: reduced gradients in one or two, what is gathered in another.
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
    """Return the groups of parameters that FSDP2 gathers together: a list of them, or before torch
    had one, one or none."""
    state = module._get_fsdp_state()
    if (groups := getattr(state, "_fsdp_param_groups", None)) is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return groups


def parameters(module: FSDPModule) -> Iterator[FSDPParam]:
    """Yield the parameters that are sharded with a module."""
    for group in parameter_groups(module):
        yield from group.fsdp_params


def policies(group: FSDPParamGroup) -> Iterator[object]:
    """Yield the policies of precision and of offload that a group was given; from 2.15 on each
    parameter has one of precision by itself."""
    if (shared := getattr(group, "mp_policy", None)) is not None:
        yield shared
    else:
        yield from (part.mp_policy for part in group.fsdp_params)
    yield group.offload_policy


def backward_order(root: FSDPModule) -> list[FSDPParamGroup]:
    """Return torch's own list of the groups in the order in which their forward passes ended, which
    backward gathers from its end; an empty one before the first pass, that torch does not see."""
    order: list[FSDPParamGroup] = getattr(
        root._get_fsdp_state()._comm_ctx, "post_forward_order", []
    )
    return order


def gather_behind_computation(root: nn.Module) -> None:
    """What is gathered for a unit waits for all that was computed before it."""
    root._set_unshard_async_op(True)


def end_backward(root: FSDPModule) -> None:
    """Do what torch does when a backward pass of the root is over. From 2.15 on it asks first who
    ends the pass, which a hook of the pass would have answered."""
    state = root._get_fsdp_state()
    shared = state._state_ctx
    if getattr(shared, "manual_backward_finalization_active", False) is None:
        shared.manual_backward_finalization_active = False
    state._root_post_backward_final_callback()


def smaller_shard(part: FSDPParam) -> torch.Tensor | None:
    """Return what the ranks of a smaller group keep of a parameter between forward and backward."""
    return getattr(part, "_sharded_post_forward_param_data", None)


def forget_smaller_shard(part: FSDPParam) -> None:
    """Let it go: no backward pass follows."""
    part._sharded_post_forward_param_data = None
    part._sharded_post_forward_param = None


def smaller_group(group: FSDPParamGroup) -> dist.ProcessGroup | None:
    """Return the ranks that keep a unit between forward and backward, where they are fewer than
    all."""
    between = group.post_forward_mesh_info
    if between is None or between is group.mesh_info:
        return None
    return between.shard_process_group


def gradients(part: FSDPParam) -> Iterator[torch.Tensor]:
    """Yield a parameter's gradients: reduced ones of the shard, unreduced ones of the gathered
    parameter, and before 2.15 those in another dtype than it has."""
    gathered = getattr(part, "_unsharded_param", None)
    added = vars(part).get("unsharded_accumulated_grad")  # in 2.15 another name of the gathered's
    kept = (holder.grad for holder in (part.sharded_param, gathered) if holder is not None)
    yield from (gradient for gradient in (added, *kept) if gradient is not None)


def streams(module: FSDPModule) -> Iterator[tuple[Any, str]]:
    """Yield the streams that FSDP2 allocates in, with its own names of them."""
    context = module._get_fsdp_state()._comm_ctx
    for name in _STREAMS:
        yield getattr(context, name), name
