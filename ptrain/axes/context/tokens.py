"""Which tokens of a sample a rank of cp has, and which blocks of scores it computes.

The ring's places have contiguous slices, or (zigzag) an early and a late chunk each: of 2R chunks
place r has chunks r and 2R - 1 - r, so that under a causal mask all have as much to do. The ranks
of a Ulysses group share the tokens of their place, in order.

At hop h place p of R has the keys of place (p - h) mod R, and under the causal mask of the whole
sequence its queries attend to those that are not behind them. Where keys and values are gathered
there is one hop. The ranks of a Ulysses group compute the same blocks, each of its own heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from ptrain.steps.step import ContextParallel

Span = tuple[int, int]  # first token, and the one behind the last


def place_spans(sequence: int, ring: int, place: int, *, is_balanced: bool) -> tuple[Span, ...]:
    """Return the tokens of one of the ring's places, in the order in which it has them."""
    if not is_balanced:
        size = sequence // ring
        return ((place * size, (place + 1) * size),)
    size = sequence // (2 * ring)
    late = 2 * ring - 1 - place
    return (place * size, (place + 1) * size), (late * size, (late + 1) * size)


def spans(
    sequence: int, *, ulysses: int, ring: int, index: int, is_balanced: bool
) -> tuple[Span, ...]:
    """Return the tokens of rank `index` of `ulysses * ring`, of which the Ulysses groups are
    neighbours, in the order in which it has them."""
    place, member = divmod(index, ulysses)
    size = sequence // (ulysses * ring)
    whole = place_spans(sequence, ring, place, is_balanced=is_balanced)
    return tuple(_within(whole, member * size, (member + 1) * size))


def _within(whole: tuple[Span, ...], start: int, end: int) -> Iterator[Span]:
    """Yield the tokens from the `start`-th to before the `end`-th of these spans."""
    passed = 0
    for first, behind in whole:
        low, high = max(start - passed, 0), min(end - passed, behind - first)
        if low < high:
            yield first + low, first + high
        passed += behind - first


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


@lru_cache(maxsize=64)  # the variants of a search have few of them
def multiplied(step: ContextParallel) -> tuple[int, ...]:
    """Return by rank of cp how many scores, masked or not, its kernels compute of each head of the
    model on average: a call for the keys of each place, of those queries and keys of which any
    meet."""
    return tuple(_multiplied(step, index // step.ulysses) for index in range(_ranks(step)))


def _multiplied(step: ContextParallel, place: int) -> int:
    if step.gathers and step.has_documents:  # the mask is given to one call, of all keys
        return _total(set(_spans(step, place))) * step.sequence
    calls: dict[int, tuple[set[Span], set[Span]]] = {}
    for block in blocks_of(step, place):
        queries, keys = calls.setdefault(block.source, (set(), set()))
        queries.add(block.queries)
        keys.add(block.keys)
    return sum(_total(queries) * _total(keys) for queries, keys in calls.values()) // step.ulysses


@lru_cache(maxsize=64)
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
