"""The kernels of a spec's GPUs, as a processor runs in their place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from ptrain.derivation.attention import FusedAttention, capability
from ptrain.models.kernels import UnknownKernels, kernels_of
from ptrain.models.numerics import DTYPE_NAMES
from ptrain.spec.spec import Spec


def kernels_for(spec: Spec) -> AbstractContextManager[UnknownKernels]:
    """Return a context within which a processor allocates what the spec's devices do, as far as it
    is known (`derivation.attention`)."""
    return kernels_of(is_for_cuda=spec.is_for_cuda, keeping=_Kept(capability(spec)))


@dataclass(frozen=True, slots=True)
class _Kept:
    """What attention keeps on GPUs of a compute capability; without one it keeps what a
    processor's does, and a warning says what is not counted."""

    sm: int | None

    def __call__(
        self, dtype: torch.dtype, head_dim: int, sequence: int, *, drops: bool, is_grouped: bool
    ) -> Callable[[int], int] | None:
        if dtype not in DTYPE_NAMES:
            return None
        attention = FusedAttention(
            dtype=DTYPE_NAMES[dtype],
            head_dim=head_dim,
            sequence=sequence,
            drops=drops,
            is_grouped=is_grouped,
        )
        if not attention.has_kernel(self.sm):
            return None
        kept = attention.statistics(self.sm)
        return kept.of if kept else lambda size: size
