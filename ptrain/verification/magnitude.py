"""How large a tensor is beside others of its kind, and what is nothing beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ptrain.verification.parts import norm, root_mean_square

# A tensor this small beside the model's root mean square has not moved from zero. Softmax does not
# see a key's bias: its gradient is rounding alone, Adam makes lr * |g| / eps of it, and every order
# of summation has noise of its own.
NOISE = 1e-6
# A rank's elements may be a quiet corner of a tensor, whose rounding is that of the others.
QUIET = 1e-2
# One number may be a sum that cancels (a bias in front of a loss), and rounds as its addends do.
_CANCELLED = 0.1


@dataclass(frozen=True, slots=True)
class Magnitude:
    """How large the tensors of one kind are: the root mean square of all their elements."""

    usual: float

    @classmethod
    def of(cls, tensors: Mapping[Any, Tensor]) -> Magnitude:
        return cls(root_mean_square(tensors.values()))

    def length(self, whole: Tensor, part: Tensor) -> float:
        """Return what a difference of `part` is relative to; of a tensor that is noise beside the
        others it is what the others have."""
        return max(norm(part), self.quiet(whole) * math.sqrt(part.numel()))

    def quiet(self, whole: Tensor) -> float:
        """Return the size of an element of it that is nothing."""
        mean = mean_size(whole)
        least = _CANCELLED * self.usual if whole.numel() == 1 else 0.0
        return self.usual if mean <= NOISE * self.usual else max(QUIET * mean, least)

    def is_noise(self, whole: Tensor) -> bool:
        return mean_size(whole) <= NOISE * self.usual

    @classmethod
    def noise_among(cls, tensors: Mapping[str, Tensor]) -> Callable[[str], bool]:
        """Return whether one, by name, is noise beside the others."""
        scale = cls.of(tensors)
        return lambda name: name in tensors and scale.is_noise(tensors[name])


def mean_size(tensor: Tensor) -> float:
    """Return the root mean square of its elements."""
    return norm(tensor) / math.sqrt(max(tensor.numel(), 1))
