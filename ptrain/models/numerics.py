"""Where models leave the compute dtype: only upwards, and only inside norms, RoPE and the loss."""

from __future__ import annotations

import torch
from torch import Tensor


def widen(x: Tensor) -> Tensor:
    """`x` in at least fp32; fp64 stays fp64, and a tensor that is wide already is not copied."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
