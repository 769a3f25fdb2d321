"""Which tokens of a sample a rank of cp has, and which blocks of scores it computes.

The ring's places have contiguous slices, or (zigzag) an early and a late chunk each: of 2R chunks
place r has chunks r and 2R - 1 - r, so that under a causal mask all have as much to do. The ranks
of a Ulysses group share the tokens of their place, in order.
"""

from __future__ import annotations

from collections.abc import Iterator

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
