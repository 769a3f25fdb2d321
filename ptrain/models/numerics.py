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
