"""What the expert axis costs in closed form: the second opinion on what ranks have, exchange and
hold while they do.

n ranks, E experts of which k are a token's, C places of each of them for a sample, T tokens of a
sample that a rank routes, b samples, h features of e bytes. The rows of a trip are with a capacity
b·E·min(C, T)·h·e; without one b·k·T·h·e, where as many go to each expert. Where N ranks have slices
of a sample in L stretches each, routers count over them: b·E sums for a loss, N·L·k·b·E counts for
places.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from math import ceil

from ptrain.cost import Collective, Phase
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import TOKEN_AXES, Axis
from ptrain.spec.spec import Spec

_COUNT_BYTES = 8  # of rows for an expert: int64


def rows_bytes(spec: Spec, shape: ModelShape) -> int:
    """Return the bytes of a trip's rows: one rank's rows for all experts, including its local
    ones."""
    assert shape.experts is not None, "nothing travels"
    tokens = spec.own_tokens // _folded(spec)
    number = shape.experts_per_token * tokens
    if shape.capacity_factor is not None:
        choices = shape.experts_per_token * spec.batch.sequence
        places = ceil(Fraction(str(shape.capacity_factor)) * choices / shape.experts)
        number = shape.experts * min(places, tokens)
    itemsize = spec.precision.effective_layout.parameters.itemsize
    return spec.batch.micro * number * shape.hidden * itemsize


def of_a_layer(spec: Spec, shape: ModelShape) -> Iterator[tuple[Collective, Phase, int, int]]:
    """Yield collective, phase, calls and the bytes that one rank sends by them for a layer and a
    micro-batch, of which nothing is computed again: there and back, and the same for gradients,
    (n - 1)/n of the rows, in whole rows; and what says how many come, where that depends on
    data."""
    assert shape.experts is not None, "nothing travels"
    ranks, row = (
        ranks_of_experts(spec),
        shape.hidden * spec.precision.effective_layout.parameters.itemsize,
    )
    leaving = rows_bytes(spec, shape) // row * (ranks - 1) // ranks * row
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        yield Collective.ALL_TO_ALL, phase, 2, 2 * leaving
    if shape.capacity_factor is None:
        counts = _COUNT_BYTES * shape.experts * (ranks - 1) // ranks
        yield Collective.ALL_TO_ALL, Phase.FORWARD, 1, counts


def of_a_router(
    spec: Spec, shape: ModelShape, stretches: int
) -> Iterator[tuple[Collective, Phase, int, int]]:
    """Yield the same of what a layer's router asks the ranks of cp, or of a tp that is folded into
    ep, each of which has so many stretches of a sample."""
    assert shape.experts is not None, "nobody is chosen"
    ranks, counts = spec.degree(*TOKEN_AXES) * _folded(spec), spec.batch.micro * shape.experts
    if shape.aux_loss:
        size = counts * max(4, spec.precision.effective_layout.parameters.itemsize)
        yield Collective.ALL_REDUCE, Phase.FORWARD, 1, ceil(Fraction(2 * (ranks - 1) * size, ranks))
    if shape.capacity_factor is not None:
        size = _COUNT_BYTES * stretches * shape.experts_per_token * counts
        yield Collective.ALL_GATHER, Phase.FORWARD, 1, (ranks - 1) * size


def trip_bytes(spec: Spec, shape: ModelShape) -> int:
    """Return the bytes that a trip holds at once: the sent and the received rows. With a capacity a
    rank receives as many places as it sends, without one as many rows, if loads are even."""
    return 2 * rows_bytes(spec, shape)


def ranks_of_experts(spec: Spec) -> int:
    """Return the number of ranks that share a layer's experts: the ranks of ep times the folded
    ranks of tp."""
    return spec.degree(Axis.EP) * _folded(spec)


def _folded(spec: Spec) -> int:
    """Return the number of tp ranks per ep rank that have experts and route tokens."""
    return spec.degree(Axis.TP) if spec.tensor.is_folded else 1


def local_expert_elements(shape: ModelShape, ranks: int) -> int:
    """Return the elements of a layer's experts on one of the given number of ranks."""
    assert shape.experts is not None, "nobody has any"
    matrices = 3 if shape.activation.is_gated else 2
    return shape.experts // ranks * matrices * shape.hidden * shape.width_of_expert
