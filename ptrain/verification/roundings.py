"""Differences that are the rounding of a dtype; elements and bits that are off by themselves."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ptrain.verification.parts import norm

COARSER = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
# Rounding to nearest errs by eps/2 at most and eps/sqrt(48) in the root mean square (mantissas
# uniform in log); sums and products of rounded numbers by some times that.
_LEAST, _USUAL, _MOST = 0.02, 0.2, 4.0
# What another order of summation does to an element in fp64, with room; relative to the element,
# or to the tensor's root mean square where the element is nearly nothing beside it.
_SAME, _NEARLY_NOTHING = 1e-10, 1e-3


def rounded_to(actual: Tensor, expected: Tensor) -> str:
    """Return the name of the coarser dtype whose rounding the difference is; "" where it is none.

    Rounding moves nearly every element that is not zero, each by itself: what leaves a part of a
    tensor as it is, or moves it along what is expected, is something else of the same size."""
    for dtype in COARSER:
        if dtype.itemsize >= expected.dtype.itemsize:
            continue
        if torch.equal(rounded(expected, dtype), actual.to(expected.dtype)):
            return named(dtype)
    wanted, difference = expected.double().reshape(-1), (actual.double() - expected.double())
    length, size = norm(wanted), norm(difference)
    if not length or not math.isfinite(size) or not size:
        return ""
    if not _is_everywhere(difference.reshape(-1), wanted):
        return ""
    shares = {
        dtype: size / length / torch.finfo(dtype).eps
        for dtype in COARSER
        if dtype.itemsize < expected.dtype.itemsize
    }
    likely = [dtype for dtype, share in shares.items() if _LEAST <= share <= _MOST]
    if not likely:
        return ""
    return named(min(likely, key=lambda dtype: abs(math.log(shares[dtype] / _USUAL))))


def _is_everywhere(difference: Tensor, wanted: Tensor) -> bool:
    """Nearly all elements are off, and not in one direction: the cosine between the difference and
    what is expected is what chance makes of so many elements, 1/sqrt(n) with room."""
    alive = wanted != 0
    count = int(alive.sum())
    if int((difference[alive] != 0).sum()) < 0.97 * count or bool(difference[~alive].any()):
        return False
    cosine = float(torch.dot(difference, wanted)) / (norm(difference) * norm(wanted))
    return abs(cosine) <= 0.1 + 4 / math.sqrt(count)


def odd_element(actual: Tensor, expected: Tensor) -> int | None:
    """Return the one element, in row-major order, in which they differ; None where others do
    too."""
    if actual.shape != expected.shape:
        return None
    wanted = expected.double().reshape(-1)
    difference = (actual.double().reshape(-1) - wanted).abs()
    usual = math.sqrt(float(wanted.square().mean())) if wanted.numel() else 0.0
    allowed = wanted.abs().clamp(min=_NEARLY_NOTHING * usual) * _SAME
    places = (~(difference <= allowed)).nonzero()
    return int(places[0]) if len(places) == 1 else None


def flipped_bit(actual: Tensor, expected: Tensor) -> int | None:
    """Return the one bit of the one element in which they differ, 0 the lowest; None where there
    are others. All elements may have the rounding of another order of summation."""
    if actual.dtype != expected.dtype:
        return None
    integers = INTEGERS[actual.dtype.itemsize]
    one = actual.contiguous().view(integers).reshape(-1)
    other = expected.contiguous().view(integers).reshape(-1)
    places = (one != other).nonzero()
    if len(places) == 1:
        place = int(places[0])
        both = int(one[place]) ^ int(other[place])
        mask = both & (2 ** (8 * actual.dtype.itemsize) - 1)
        return mask.bit_length() - 1 if mask.bit_count() == 1 else None
    odd = odd_element(actual, expected)
    return None if odd is None else _bit_between(one[odd], expected.reshape(-1)[odd])


def _bit_between(actual: Tensor, expected: Tensor) -> int | None:
    """Return the bit of `actual`, an integer's view of a number, without which it is what is
    expected."""
    width, wanted = 8 * actual.dtype.itemsize, float(expected)
    for bit in range(width):
        mask = 1 << bit if bit < width - 1 else -(1 << bit)
        back = float((actual ^ mask).view(expected.dtype))
        if wanted and abs(back - wanted) <= _SAME * abs(wanted):
            return bit
    return None


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor's numbers as another dtype has them, in its own dtype."""
    return tensor.to(dtype).to(tensor.dtype)


def is_number_of(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Return whether every element is a number of this dtype."""
    return torch.equal(rounded(tensor, dtype), tensor)


def named(dtype: torch.dtype) -> str:
    """Return a dtype's name without torch's."""
    return str(dtype).removeprefix("torch.")
