"""The specs that verification runs beside the user's own: in fp64 without dropout, on one device,
and in other micro-batches. Each is made of the resolved spec, so that what was chosen stays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ptrain.algebra.legality import check, executed
from ptrain.selection.alternatives import with_micro
from ptrain.spec.model import ModelShape
from ptrain.spec.precision import DType, Precision
from ptrain.spec.spec import Spec

_FIXED = (DType.FP32, DType.FP64)


def without_dropout(spec: Spec) -> Spec:
    """The same where the model's shape gives no dropout: a mask drawn by one device is no mask that
    several draw."""
    if isinstance(spec.model, ModelShape) and spec.model.drops:
        return replace(spec, model=spec.model.without_dropout())
    return spec


def exactly(spec: Spec) -> Spec:
    """Return the spec without dropout, in fp64, in which a sum in another order differs by 1e-15
    and a fault by 1e-5."""
    return replace(without_dropout(spec), precision=replace(spec.precision, compute_fp64=True))


def in_fp32(spec: Spec) -> Spec:
    """Return the spec with every state in fp32 and without dropout: what rounding grows to is
    measured there."""
    return replace(without_dropout(spec), precision=Precision())


def on_one_device(spec: Spec) -> Spec:
    """All micro-batches of the global batch on one rank: the reference of every mesh that has
    them."""
    batch = replace(spec.batch, accumulate=spec.batch.accumulate * spec.data_degree)
    return replace(spec, factors=(), batch=batch)


def is_banded(spec: Spec) -> bool:
    """Return whether two orders of summation part by more than fixed tolerances say: some state is
    in 16 bits, or the update enlarges rounding (unless in fp64)."""
    layout = spec.precision.effective
    dtypes = (layout.parameters, layout.reduced, layout.gradients, layout.updated, layout.moments)
    coarse = any(dtype not in _FIXED for dtype in dtypes)
    return coarse or (spec.optimizer.row.enlarges_rounding and layout.updated is not DType.FP64)


def in_other_batches(spec: Spec) -> tuple[Spec | None, str]:
    """The same global batch in one micro-batch a rank, or in the fewest (but not as many as now)
    that are legal. None and why, where there are no others."""
    why = "one sample a rank is one micro-batch"
    for accumulate in _divisors(spec.batch.micro * spec.batch.accumulate):
        if accumulate == spec.batch.accumulate:
            continue
        other = with_micro(spec, spec.batch.micro * spec.batch.accumulate // accumulate)
        faults = (*check(other), *executed(other))
        if not faults:
            return other, ""
        why = f"{accumulate} micro-batches: {faults[0].place}: {faults[0].finding}"
    return None, why


def _divisors(number: int) -> Iterator[int]:
    return (divisor for divisor in range(1, number + 1) if number % divisor == 0)
