"""The dtypes of a spec as torch's, and where models leave the compute dtype: only upwards, and only
inside norms, RoPE and the loss."""

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
    """`x` in at least fp32; fp64 stays fp64, and a tensor that is wide already is not copied."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def capped(x: Tensor, cap: float | None) -> Tensor:
    """Return numbers bound by +-cap, by tanh; as they are, where it is None."""
    return x if cap is None else torch.tanh(x / cap) * cap
