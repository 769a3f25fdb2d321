"""What kernels of GPUs take within themselves, which no operator speaks of: beside what is derived,
simulated and reserved.

Note: read in copies of torch's sources, not in those of each version, and no GPU has confirmed it.
`CublasHandlePool.cpp` has a workspace for each thread and stream, and a thread of autograd computes
the backward pass; `flash_api.cpp` sums the gradient of the queries in fp32, in whole tiles, while
that operator runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ptrain.derivation.attention import attention_of, may_be_fused
from ptrain.spec.axis import Axis
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec
from ptrain.units import ceil_div

_KIB = 1024
_CUBLAS = {80: (2 * 4096 + 8 * 16) * _KIB, 90: 8 * 4096 * _KIB}  # by compute capability
_THREADS = 2  # the one that computes forward, and autograd's
_FP32 = 4
_TILE = 128  # rows of queries
_WIDTH, _WIDEST = 32, 128  # the multiple of head_dim; beyond 128 copies of the source differ


@dataclass(frozen=True, slots=True)
class Workspace:
    """`device_bytes` is None where nobody knows them."""

    what: str
    device_bytes: int | None


def workspaces(spec: Spec) -> tuple[Workspace, ...]:
    """Return what kernels of a spec's GPUs take within themselves, in bytes of one rank; nothing of
    other devices."""
    return tuple(_of_gpus(spec)) if spec.is_for_cuda else ()


def _of_gpus(spec: Spec) -> Iterator[Workspace]:
    sm = spec.cluster.sm if spec.cluster else None
    # Deterministic products need a workspace that CUBLAS_WORKSPACE_CONFIG names.
    of_thread = None if spec.deterministic else _CUBLAS.get(sm or 0)
    yield Workspace(
        "products (cuBLAS, without cuBLASLt's), all the time",
        None if of_thread is None else _THREADS * of_thread,
    )
    if may_be_fused(spec):
        attention = attention_of(spec)
        kernel = attention.kernel(sm) if attention else None
        name = f" ({kernel})" if kernel else ""
        size = _of_flash(spec) if kernel == "flash" else None
        yield Workspace(f"attention's backward pass{name}, while it runs", size)
    if spec.world_size > 1:
        yield Workspace("collectives (NCCL)", None)


def _of_flash(spec: Spec) -> int | None:
    """Return the sum of the queries' gradient, and a number a row. Where sums are deterministic
    there are as many of them as the GPU has processors for, which nobody says."""
    shape = spec.model
    if not isinstance(shape, ModelShape) or spec.deterministic or shape.head_dim > _WIDEST:
        return None
    rows = ceil_div(spec.batch.sequence, _TILE) * _TILE
    width = ceil_div(shape.head_dim, _WIDTH) * _WIDTH
    heads = ceil_div(shape.heads, spec.degree(Axis.TP))
    return _FP32 * spec.batch.micro * heads * rows * (width + 1)
