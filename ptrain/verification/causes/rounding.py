"""Differences that are the rounding of a dtype, and bits that were flipped."""

from __future__ import annotations

import math

import torch
from torch import Tensor

COARSER = (torch.bfloat16, torch.float16, torch.float32)
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
# Rounding to nearest errs by eps/2 at most, by about eps/4 in the root mean square over values
# that fill their octave; sums and products of rounded numbers by some times that.
_USUAL, _TIMES = 0.25, 16.0


def rounded_to(found: Tensor, expected: Tensor) -> str:
    """The name of the coarser dtype whose rounding the difference is; "" where it is none."""
    coarser = [dtype for dtype in COARSER if dtype.itemsize < expected.dtype.itemsize]
    for dtype in coarser:
        if torch.equal(expected.to(dtype).to(expected.dtype), found.to(expected.dtype)):
            return _name(dtype)
    length = float(torch.linalg.vector_norm(expected.double()))
    difference = float(torch.linalg.vector_norm(found.double() - expected.double()))
    if not length or not math.isfinite(difference) or not difference:
        return ""
    apart = {
        dtype: abs(math.log(difference / length / torch.finfo(dtype).eps / _USUAL))
        for dtype in coarser
    }
    nearest = min(apart, key=lambda dtype: apart[dtype], default=None)
    return _name(nearest) if nearest and apart[nearest] <= math.log(_TIMES) else ""


def flipped_bit(found: Tensor, expected: Tensor) -> int | None:
    """The one bit of the one element in which they differ, 0 the lowest; None where there are
    others."""
    if found.dtype != expected.dtype:
        return None
    integers = _INTEGERS[found.dtype.itemsize]
    one, other = found.contiguous().view(integers), expected.contiguous().view(integers)
    places = (one != other).reshape(-1).nonzero()
    if len(places) != 1:
        return None
    place = int(places[0])
    both = int(one.reshape(-1)[place]) ^ int(other.reshape(-1)[place])
    mask = both & (2 ** (8 * found.dtype.itemsize) - 1)
    return mask.bit_length() - 1 if mask.bit_count() == 1 else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
