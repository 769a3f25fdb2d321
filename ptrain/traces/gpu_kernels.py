"""The kernels of a spec's GPUs, as a processor runs in their place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from ptrain.derivation.attention import statistics
from ptrain.models.kernels import UnknownKernels, kernels_of
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.spec.spec import Spec

_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def kernels_for(spec: Spec) -> AbstractContextManager[UnknownKernels]:
    """Return a context within which a processor allocates what the spec's devices do, as far as it
    is known (`derivation.attention`)."""
    sm = spec.cluster.sm if spec.cluster else None
    return kernels_of(is_for_cuda=spec.is_for_cuda, keeping=_Kept(sm))


@dataclass(frozen=True, slots=True)
class _Kept:
    """What attention keeps on GPUs of a compute capability."""

    sm: int | None

    def __call__(
        self, dtype: torch.dtype, head_dim: int, sequence: int, *, drops: bool, is_grouped: bool
    ) -> Callable[[int], int] | None:
        if self.sm is None:
            return _as_it_is
        kept = statistics(
            self.sm, _DTYPES[dtype], head_dim, sequence, drops=drops, is_grouped=is_grouped
        )
        return kept.of if kept else None


def _as_it_is(size: int) -> int:
    """Without a capability a warning says what is not counted."""
    return size
