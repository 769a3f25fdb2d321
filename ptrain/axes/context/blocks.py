"""Which blocks of scores the ranks of cp compute: whose keys a place of the ring meets at which
hop, and which of these its queries attend to. All of it follows from who has which tokens.

At hop h place p of R has the keys of place (p - h) mod R, and under the causal mask of the whole
sequence its queries attend to those that are not behind them. Where keys and values are gathered
there is one hop. The ranks of a Ulysses group have all tokens of their place, of a part of the
heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from ptrain.axes.context.tokens import Span, place_spans
from ptrain.steps.context import ContextParallel


@dataclass(frozen=True, slots=True, kw_only=True)
class MetBlock:
    """A stretch of queries of one of the ring's places meets a stretch of keys of `source`, behind
    `hop` hops. A block on the diagonal is causal, any other one whole."""

    hop: int
    source: int
    queries: Span
    keys: Span

    @property
    def is_causal(self) -> bool:
        """Whether a mask is within it."""
        return self.queries == self.keys

    @property
    def scores(self) -> int:
        """How many of its scores the mask leaves, of one head."""
        rows = _length(self.queries)
        return rows * (rows + 1) // 2 if self.is_causal else rows * _length(self.keys)


def source_at(step: ContextParallel, place: int, hop: int) -> int:
    """Return whose keys a place of the ring has behind so many hops."""
    return (place - hop) % step.ring


def blocks_of(step: ContextParallel, place: int) -> Iterator[MetBlock]:
    """Yield the blocks that one of the ring's places computes, in their order."""
    for hop in range(step.ring):
        source = source_at(step, place, hop)
        for queries in _spans(step, place):
            for keys in _spans(step, source):
                if keys[0] < queries[1]:
                    number = 0 if step.gathers else hop
                    yield MetBlock(hop=number, source=source, queries=queries, keys=keys)


def multiplied(step: ContextParallel) -> tuple[int, ...]:
    """Return by rank of cp how many scores, masked or not, its kernels compute of each head of the
    model on average: a call for the keys of each place, of those queries and keys of which any
    meet."""
    return tuple(_multiplied(step, index // step.ulysses) for index in range(_ranks(step)))


def _multiplied(step: ContextParallel, place: int) -> int:
    calls: dict[int, tuple[set[Span], set[Span]]] = {}
    for block in blocks_of(step, place):
        queries, keys = calls.setdefault(block.source, (set(), set()))
        queries.add(block.queries)
        keys.add(block.keys)
    return sum(_total(queries) * _total(keys) for queries, keys in calls.values()) // step.ulysses


def balance(step: ContextParallel) -> tuple[Fraction, ...]:
    """Return by rank of cp the scores that the mask leaves it, over the mean of all ranks."""
    scores = [
        sum(block.scores for block in blocks_of(step, index // step.ulysses))
        for index in range(_ranks(step))
    ]
    return tuple(Fraction(number * len(scores), sum(scores)) for number in scores)


def _ranks(step: ContextParallel) -> int:
    return step.ulysses * step.ring


def _spans(step: ContextParallel, place: int) -> tuple[Span, ...]:
    return place_spans(step.sequence, step.ring, place, is_balanced=step.is_balanced)


def _length(span: Span) -> int:
    first, behind = span
    return behind - first


def _total(spans: set[Span]) -> int:
    return sum(map(_length, spans))
