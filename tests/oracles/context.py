"""The cost of the context axis in closed form, independent of the derivation.

Counted from what the variants mean, of one layer, one micro-batch and one rank. s tokens of a
sample, b samples, n_q heads and n_kv of keys and values on the rank (of those that tp leaves it), d
features of a head, e bytes an element of what the model computes in, a bytes an element of what dK
and dV are summed in. Of N ranks, U of Ulysses times R of a ring, a rank has s/N tokens;

    kappa = 2 · b · s/N · n_kv · d · e      its keys and values
    theta = b · s/N · n_q · d · e           its queries

Of packed documents it gets once a micro-batch, a byte a token, which tokens the others have that
begin or end one.

Sources: Liu et al. 2023 (a ring: keys and values go round in forward, and again in backward, where
their gradients go with them and once more, home), Jacobs et al. 2023 (Ulysses: queries, keys,
values and what was attended to are exchanged, both ways), Llama 3, section 3.3.2 (keys and values
gathered, their gradients scattered), Fang and Zhao 2024 (both).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from math import lcm

from ptrain.cost import Collective, Phase
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from ptrain.steps.step import ContextParallel

Exchange = tuple[Collective, Phase]
Exchanged = tuple[int, int]  # calls, and the bytes that a rank sends in all of them
_ACCUMULATED = 4  # bytes: sums of gradients are in fp32, or in the compute dtype if wider


def tokens(step: ContextParallel) -> int:
    """Return the number of tokens per sample on a rank."""
    return step.sequence // (step.ulysses * step.ring)


def layer_exchange(spec: Spec, step: ContextParallel) -> Mapping[Exchange, Exchanged] | None:
    """Return a layer's traffic over cp in a micro-batch by collective and phase: calls and sent
    bytes. A hop of a ring is an all-to-all that sends everything to the next rank. None for a user
    model."""
    if not isinstance(spec.model, ModelShape):
        return None
    sums: dict[Exchange, Exchanged] = {}
    for collective, phase, calls, size in _exchanges(spec, spec.model, step):
        if calls:
            known_calls, known = sums.get((collective, phase), (0, 0))
            sums[collective, phase] = known_calls + calls, known + size
    return sums


def _exchanges(
    spec: Spec, shape: ModelShape, step: ContextParallel
) -> Iterator[tuple[Collective, Phase, int, int]]:
    ulysses, ring = step.ulysses, step.ring
    theta, kappa = queries(spec, shape, step), keys_and_values(spec, shape, step)
    both = Phase.FORWARD, Phase.BACKWARD
    if ulysses > 1:
        for phase in both:  # q, k, v sent; the attention output returned
            size = (2 * theta + kappa) * (ulysses - 1) // ulysses
            yield Collective.ALL_TO_ALL, phase, 4, size
    if step.gathers:
        yield Collective.ALL_GATHER, Phase.FORWARD, 1, (ring - 1) * kappa
        yield Collective.REDUCE_SCATTER, Phase.BACKWARD, 1, (ring - 1) * kappa
    elif ring > 1:
        size = _itemsize(spec)
        for phase in both:
            yield Collective.ALL_TO_ALL, phase, ring - 1, (ring - 1) * kappa
        home = ring * kappa * max(size, _ACCUMULATED) // size
        yield Collective.ALL_TO_ALL, Phase.BACKWARD, ring, home


def document_traffic(spec: Spec, step: ContextParallel) -> Exchanged:
    """Return the traffic that gathers document starts and ends for all micro-batches of a step."""
    ranks, count = step.ulysses * step.ring, spec.batch.accumulate
    return count, count * (ranks - 1) * spec.batch.micro * tokens(step)


def keys_and_values(spec: Spec, shape: ModelShape, step: ContextParallel) -> int:
    """Return kappa, the bytes of a rank's keys and values in a layer, with grouped heads. Ranks of
    Ulysses have full heads, as many as both numbers divide."""
    heads = lcm(shape.kv_heads // spec.degree(Axis.TP), step.ulysses)
    return 2 * _features(spec, step) * heads * shape.head_dim


def queries(spec: Spec, shape: ModelShape, step: ContextParallel) -> int:
    """Return theta, the bytes of a rank's queries in a layer."""
    return _features(spec, step) * shape.heads // spec.degree(Axis.TP) * shape.head_dim


def _features(spec: Spec, step: ContextParallel) -> int:
    """Return the bytes of one feature of a rank's tokens."""
    return spec.batch.micro * tokens(step) * _itemsize(spec)


def _itemsize(spec: Spec) -> int:
    return spec.precision.effective_layout.parameters.itemsize


def gathered_bytes(spec: Spec, shape: ModelShape, step: ContextParallel) -> int:
    """Return the bytes of all ranks' keys and values that a layer saves for backward; 0 if they are
    passed around a ring."""
    return step.ring * keys_and_values(spec, shape, step) if step.gathers else 0


def slowest(step: ContextParallel) -> Fraction:
    """Return how many scores the rank with most of them computes under a causal mask, over the mean
    of all ranks.

    Token t meets t + 1. The last of R contiguous slices of c tokens has (2R - 1) · c + 1 where the
    mean is R · c + 1, which tends to (2R - 1) / R. An early and a late chunk have as much as any
    other two, and Ulysses' ranks all tokens of as many heads: 1.
    """
    ring, length = step.ring, step.sequence // step.ring
    if step.is_balanced:
        return Fraction(1)
    return Fraction((2 * ring - 1) * length + 1, ring * length + 1)
