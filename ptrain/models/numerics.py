"""The torch dtypes of a spec's dtypes, and operations outside of the compute dtype.

Models leave the compute dtype only upwards, and only inside norms, RoPE and the loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ptrain.spec.precision import DType

TORCH_DTYPES = {
    DType.FP64: torch.float64,
    DType.FP32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def widen(x: Tensor) -> Tensor:
    """Return `x` in at least fp32; fp32 and fp64 tensors are returned without a copy."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def cap_values(x: Tensor, cap: float | None) -> Tensor:
    """Return `x` bounded to ±cap by tanh, or `x` itself if `cap` is None.

    Args:
        x: A tensor of any shape, usually logits or attention scores.
        cap: The bound, above 0.
    """
    return x if cap is None else torch.tanh(x / cap) * cap


def is_native(dtype: DType) -> bool:
    """Return True if the CPU has instructions for matrix products in this dtype."""
    match dtype:
        case DType.BF16:
            return _cpu_supports("_is_avx512_bf16_supported") or _cpu_supports(
                "_is_amx_tile_supported"
            )
        case DType.FP16:
            return _cpu_supports("_is_amx_fp16_supported")
        case DType.FP32 | DType.FP64:
            return True
        case DType.FP8:
            return False


def _cpu_supports(query: str) -> bool:
    """Return the answer of a query in `torch.cpu`.

    It is False if this version of torch lacks the query: it has no such kernels either.
    """
    ask = getattr(torch.cpu, query, None)
    return bool(ask and ask())
