"""The kernels of attention that give the logarithm of the sums, which blocks of keys are joined by,
and take fewer heads of keys and values than of queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ptrain.errors import refused

_ATEN = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Kernel:
    """`forward` and `backward` as torch's ring calls them, and what both are given beside."""

    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor, ...]]
    given: dict[str, Any]


def kernel_of(query: Tensor, scale: float | None, *, is_masked: bool = False) -> Kernel:
    """Return the kernel for queries like these; `is_masked`: each call is given an `attn_mask` too.
    Raises SpecError where there is none."""
    given: dict[str, Any] = {"dropout_p": 0.0, "scale": scale}
    if not query.is_cuda:
        return Kernel(
            _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
            _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default,
            given,
        )
    if is_masked:
        finding = "not yet: documents over keys of other ranks on cuda, whose flash takes no mask"
        raise refused("model", finding, "write context.attention=ulysses")
    if query.dtype in (torch.float16, torch.bfloat16):
        return Kernel(
            _ATEN._scaled_dot_product_flash_attention.default,
            _ATEN._scaled_dot_product_flash_attention_backward.default,
            given,
        )
    finding = f"not yet: attention over cp in {query.dtype} on cuda, which flash does not take"
    raise refused(
        "precision", finding, "compute in bf16 or fp16, or take context.attention=ulysses"
    )
