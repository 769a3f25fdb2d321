"""The order of samples: a permutation of an epoch, by a Feistel network. It costs a few integer
operations per sample and no memory, whatever the corpus. (A seeded shuffle would hold one index
per window.)"""

from __future__ import annotations

_ROUNDS = 6
_MASK = 2**64 - 1


def sample(index: int, *, windows: int, seed: int) -> int:
    """The sample at `index` of the endless stream, as epoch · windows + window."""
    epoch, place = divmod(index, windows)
    return epoch * windows + permuted(place, windows, mixed(mixed(seed & _MASK) ^ epoch))


def permuted(place: int, size: int, key: int) -> int:
    """Where a pseudo-random permutation of range(size) sends `place`. The network permutes the next
    power of four; whatever falls outside goes round again (cycle walking)."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (mixed(key + number ^ right << 32) & mask)
        place = left << half | right
        if place < size:
            return place


def mixed(number: int) -> int:
    """splitmix64: every bit of the result depends on every bit of `number`."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK
    return number ^ number >> 31
