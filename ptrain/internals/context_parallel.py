"""Ring attention (torch/distributed/tensor/experimental/_context_parallel/_attention.py).

torch has templates of the ring; their variants are options of the full process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

from ptrain.internals.part import PrivatePart, replace_attributes

_TOKENS = 2  # dimension of tokens in [B, H, T, D]
# One object for the full process, so options are set for each call and restored after it.
_OPTIONS = ring._cp_options

PARTS = (
    PrivatePart(
        owner=ring,
        members=(
            "_cp_options", "_RotateMethod", "_SDPAMerger",
            "_templated_ring_attention", "_templated_ring_attention_backward",
        ),
    ),
    PrivatePart(
        owner=_OPTIONS, members=("convert_to_f32", "enable_load_balance", "rotate_method")
    ),
    PrivatePart(
        owner=ring._templated_ring_attention,
        arguments=("group", "seq_dim", "op", "query", "key", "value", "is_causal"),
    ),
    PrivatePart(
        owner=ring._templated_ring_attention_backward,
        arguments=(
            "group", "seq_dim", "op", "grad_out", "grad_out_name", "query", "key", "value",
            "out", "logsumexp", "is_causal",
        ),
    ),
    PrivatePart(owner=ring._SDPAMerger.__init__, arguments=("convert_to_f32", "seq_dim")),
    PrivatePart(owner=ring._SDPAMerger, members=("step", "results")),
)  # fmt: skip

Op = Callable[..., tuple[torch.Tensor, ...]]


def ring_forward(
    group: dist.ProcessGroup,
    op: Op,
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    is_balanced: bool,
    **given: Any,
) -> tuple[torch.Tensor, ...]:
    """Run causal ring attention forward.

    Args:
        group: The ranks of the ring.
        op: The attention operator for one block of keys.
        heads: Queries, keys and values [B, H, T, D] of this rank.
        is_balanced: Each rank has an early and a late chunk of the tokens (torch's load balancing).
        given: More arguments of `op`.

    Returns:
        The output for this rank's queries, its logsumexp, and any further results of `op`.
    """
    with _temporary_options(heads[0].dtype, is_balanced=is_balanced):
        result: tuple[torch.Tensor, ...] = ring._templated_ring_attention(
            group, _TOKENS, op, *heads, is_causal=True, **given
        )
    return result


def ring_backward(
    group: dist.ProcessGroup,
    op: Op,
    gradient: torch.Tensor,
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    result: tuple[torch.Tensor, torch.Tensor],
    *,
    is_balanced: bool,
    **given: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run causal ring attention backward.

    Args:
        group: The ranks of the ring.
        op: The backward operator for one block of keys.
        gradient: Gradient of the output.
        heads: As in `ring_forward`.
        result: Output and logsumexp of `ring_forward`.
        is_balanced: As in `ring_forward`.
        given: More arguments of `op`.

    Returns:
        The gradients of queries, keys and values.
    """
    with _temporary_options(heads[0].dtype, is_balanced=is_balanced):
        gradients = ring._templated_ring_attention_backward(
            group, _TOKENS, op, gradient, "grad_out", *heads, *result, is_causal=True, **given
        )
    return gradients[0], gradients[1], gradients[2]


def merge_attention(
    parts: Iterator[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention to all keys from the results for disjoint subsets of the keys.

    Each part is an output and its logsumexp; so is the result.
    """
    merger = ring._SDPAMerger(_accumulates_in_fp32(dtype), seq_dim=_TOKENS)
    for output, sums in parts:
        # `partial` merges with the late half of the queries only, which torch's own loop needs for
        # zigzag.
        merger.step(output, sums, partial=False)
    return merger.results()


def _temporary_options(dtype: torch.dtype, *, is_balanced: bool) -> AbstractContextManager[None]:
    """Temporarily set torch's process-wide options for one call.

    Blocks are summed in fp32, in fp64 for fp64 inputs: `convert_to_f32` would lower the precision
    there.
    """
    return replace_attributes(
        _OPTIONS,
        convert_to_f32=_accumulates_in_fp32(dtype),
        enable_load_balance=is_balanced,
        # The other method all-gathers the keys and values of all ranks into one buffer, which takes
        # the memory that a ring avoids (`_AllGatherRotater`, 2.13).
        rotate_method=ring._RotateMethod.ALL_TO_ALL,
    )


def _accumulates_in_fp32(dtype: torch.dtype) -> bool:
    """Return True for dtypes that are accumulated in fp32."""
    return dtype is not torch.float64
