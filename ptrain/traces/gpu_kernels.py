"""The kernels of a spec's GPUs, as a processor runs in their place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from ptrain.derivation.attention import FusedAttention, capability
from ptrain.models.kernels import AttentionCall, UnknownKernels, kernels_of
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

    def __call__(self, call: AttentionCall) -> Callable[[int], int] | None:
        attention = _attention(call)
        if attention is None or not attention.has_kernel(self.sm):
            return None
        kept = attention.statistics(self.sm)
        return kept.of if kept else lambda size: size

    def goes_by_operators(self, call: AttentionCall) -> bool:
        attention = _attention(call)
        return attention is not None and attention.goes_by_operators(self.sm)


def _attention(call: AttentionCall) -> FusedAttention | None:
    if call.dtype not in DTYPE_NAMES:
        return None
    return FusedAttention(
        dtype=DTYPE_NAMES[call.dtype],
        head_dim=call.head_dim,
        sequence=call.sequence,
        drops=call.drops,
        is_grouped=call.is_grouped,
    )
