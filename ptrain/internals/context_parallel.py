"""Ring attention (torch/distributed/tensor/experimental/_context_parallel/_attention.py): torch's
templates, whose ways are options of the whole process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

from ptrain.internals.part import PrivatePart, replaced

_TOKENS = 2  # the dimension of tokens, behind those of samples and heads
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
    """Return what this rank's queries attend to, causally, the logarithms of their sums, and what
    else `op` returns. `heads` are queries, keys and values [B, H, T, D]."""
    with _ways(heads[0].dtype, is_balanced=is_balanced):
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
    """Return the gradients of queries, keys and values; `result` is that of `ring_forward`."""
    with _ways(heads[0].dtype, is_balanced=is_balanced):
        gradients = ring._templated_ring_attention_backward(
            group, _TOKENS, op, gradient, "grad_out", *heads, *result, is_causal=True, **given
        )
    return gradients[0], gradients[1], gradients[2]


def merged(
    parts: Iterator[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention to all keys, of that to some of them each: outputs and the logarithms of
    their sums."""
    merger = ring._SDPAMerger(_is_narrow(dtype), seq_dim=_TOKENS)
    for output, sums in parts:
        merger.step(output, sums, partial=False)
    return merger.results()


def _ways(dtype: torch.dtype, *, is_balanced: bool) -> AbstractContextManager[None]:
    """Sets the process's options while one call runs. Sums of blocks are fp32, but in fp64: that
    option would make them narrower there."""
    return replaced(
        _OPTIONS,
        convert_to_f32=_is_narrow(dtype),
        enable_load_balance=is_balanced,
        rotate_method=ring._RotateMethod.ALL_TO_ALL,
    )


def _is_narrow(dtype: torch.dtype) -> bool:
    return dtype is not torch.float64
