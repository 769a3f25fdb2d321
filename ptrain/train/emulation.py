"""Whether this processor computes in the layout's dtype by itself, or emulates it slowly."""

from __future__ import annotations

import torch

from ptrain.spec.precision import DType
from ptrain.spec.spec import Spec


def emulated_line(spec: Spec, device: torch.device) -> str:
    """One line where the processor has no instructions for the dtype that the model computes in,
    "" where it has, and for other devices."""
    dtype = spec.precision.effective.parameters
    if device.type != "cpu" or is_native(dtype):
        return ""
    return f"precision  {dtype} is emulated on this processor: slow"


def is_native(dtype: DType) -> bool:
    """Return whether the processor itself multiplies matrices of this dtype, as torch sees it."""
    match dtype:
        case DType.BF16:
            return _has("_is_avx512_bf16_supported") or _has("_is_amx_tile_supported")
        case DType.FP16:
            return _has("_is_amx_fp16_supported")
        case DType.FP32 | DType.FP64:
            return True


def _has(query: str) -> bool:
    """torch.cpu asks the processor; a version of torch without the question has no such kernels."""
    ask = getattr(torch.cpu, query, None)
    return bool(ask and ask())
