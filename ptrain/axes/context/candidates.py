"""What the context axis offers to a search: degrees that leave a rank a long stretch of a sample,
and every attention that is legal of so many ranks.

Theta, Omega and G are placed over cp as over the innermost data axis, so that both are one group.
Of fewer tokens a rank has too little to do while they travel: a search of shorter samples is not
made longer. A degree that is written is tried whatever it leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import gcd
from typing import Any

from ptrain.axes.candidates import AxisChoice, AxisSpace, Written, divisors
from ptrain.spec.context import ContextAttention, ContextSpec, Hybrid
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import S_STAR, Axis, Factor, Placement, R, S
from ptrain.spec.spec import Spec

LEAST_TOKENS = 2**13  # of a sample, that a rank has
_SLICES, _GATHERED = (
    Placement(parameters=R, optimizer=R, gradients=R, activations=activations)
    for activations in (S, S_STAR)
)
_SECTION = "context"


def _sizes(spec: Spec, devices: int, written: Written) -> Iterable[int]:
    tokens = spec.batch.sequence
    offered = (
        size
        for size in divisors(devices)
        if size == 1 or (tokens % size == 0 and tokens // size >= LEAST_TOKENS)
    )
    return written.sizes(Axis.CP, devices, offered)


def _choices(spec: Spec, ranks: int, written: Written) -> Iterator[AxisChoice]:
    if ranks == 1:
        yield AxisChoice()
        return
    is_written = Axis.CP in dict(written.tuples)
    offered = (
        ((_GATHERED if attention is ContextAttention.ALL_GATHER else _SLICES,), _says(attention))
        for attention in _attentions(spec, ranks)
    )
    for (placement,), changes in written.held((Axis.CP,), offered):
        yield AxisChoice(
            factors=(Factor(axis=Axis.CP, degree=ranks, placement=placement),),
            changes=changes,
            follows=not is_written,
        )


def _says(attention: ContextAttention | Hybrid) -> tuple[tuple[str, Any], ...]:
    return ((_SECTION, ContextSpec(attention=attention)),)


def _attentions(spec: Spec, ranks: int) -> Iterator[ContextAttention | Hybrid]:
    """A ring is balanced where the tokens let it be: contiguous it sends as much, and waits."""
    is_even = spec.batch.sequence % (2 * ranks) == 0
    yield ContextAttention.ZIGZAG if is_even else ContextAttention.RING
    yield ContextAttention.ALL_GATHER
    shape = spec.model
    common = gcd(shape.heads, shape.kv_heads) if isinstance(shape, ModelShape) else 1
    for ulysses in divisors(gcd(common, ranks))[1:]:
        hybrid = Hybrid(ulysses=ulysses, ring=ranks // ulysses)
        yield ContextAttention.ULYSSES if ulysses == ranks else hybrid


SPACE = AxisSpace(
    axes=(Axis.CP,),
    sizes=_sizes,
    choices=_choices,
    tuples={Axis.CP: (_SLICES, _GATHERED)},
)
