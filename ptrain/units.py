"""Sizes, counts and durations as text, and small helpers for integers and grouped values."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import reduce
from operator import add
from typing import Any, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")
NumberT = TypeVar("NumberT", int, float)

_BYTES = {
    "B": 1,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_COUNTS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_bytes(text: str | int) -> int:
    """Return the bytes of a size such as `80 GiB` or `16 GB`. An int is returned unchanged.

    Raises:
        ValueError: The text is not a size.

    Example:
        >>> parse_bytes("80 GiB")
        85899345920
    """
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if not match or (match[2] or "B") not in _BYTES:
        raise ValueError(
            f"{text!r} is not a size. Use a number with a unit, such as `80 GiB` or `16 GB`."
        )
    return round(float(match[1]) * _BYTES[match[2] or "B"])


def parse_count(text: str | int) -> int:
    """Return the number of a count such as `4M`. An int is returned unchanged.

    Raises:
        ValueError: The text is not a count.
    """
    if isinstance(text, int):
        return text
    if not (match := re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKMBT]?)\s*", text)):
        raise ValueError(f"{text!r} is not a count. Use a number, such as `4M`.")
    return round(float(match[1]) * _COUNTS[match[2]])


def format_bytes(size: int | float) -> str:
    """Format traffic or a file size in decimal units: 1120 GB, 61.3 MB, 512 B."""
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(size) >= (10 * scale if unit == "TB" else scale):  # up to 10 TB in GB
            return f"{size / scale:.4g} {unit}"
    return f"{int(size)} B"


def format_memory(size: int | float) -> str:
    """Format memory of a device or a host in binary units: 79.1 GiB, 61.3 MiB, 512 B."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= (10 * scale if unit == "TiB" else scale):  # up to 10 TiB in GiB
            return f"{size / scale:.4g} {unit}"
    return f"{int(size)} B"


def format_operations(number: int) -> str:
    """Format floating-point operations: 1.2 TFLOP, 53 MFLOP."""
    scales = {"E": 10**18, "P": 10**15, "T": 10**12, "G": 10**9, "M": 10**6, "k": 10**3}
    for prefix, scale in scales.items():
        if number >= scale:
            return f"{number / scale:.4g} {prefix}FLOP"
    return f"{number} FLOP"


def format_count(number: int | float) -> str:
    """Format a count with three digits: 0.92M, 70B, 512."""
    for unit, scale in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if abs(number) >= scale * (0.1 if unit == "M" else 1):  # 0.92M, not 920k
            return f"{number / scale:.3g}{unit}"
    return f"{number:.3g}"


def with_noun(number: int, noun: str) -> str:
    """Return a number and its noun.

    Example:
        >>> with_noun(1, "stage"), counted(2, "stage"), counted(3, "micro-batch")
        ('1 stage', '2 stages', '3 micro-batches')
    """
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{ending}"


def format_seconds(seconds: float) -> str:
    """Format a duration with three digits: `1.23 s`, `4.56 ms`, `78.9 µs`."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * factor:
            # The bounds are half a unit of the last digit below 10 and 100, which round up.
            digits = 2 if seconds < 9.995 * factor else 1 if seconds < 99.95 * factor else 0
            return f"{seconds / factor:.{digits}f} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def group_by_key(pairs: Iterable[tuple[KeyT, ValueT]]) -> dict[KeyT, list[ValueT]]:
    """Group pairs by key. Keys and values keep the order of the pairs."""
    values: dict[KeyT, list[ValueT]] = {}
    for key, value in pairs:
        values.setdefault(key, []).append(value)
    return values


def sum_by_key(pairs: Iterable[tuple[KeyT, NumberT]]) -> dict[KeyT, NumberT]:
    """Return the sum of the values of each key, added from left to right.

    Since Python 3.12 `sum` compensates rounding errors of floats, so its result differs between
    versions.
    """
    return {key: reduce(add, values) for key, values in group_by_key(pairs).items()}


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings, each with its dotted key.

    Example:
        >>> list(leaves({"mesh": {"dp_shard": 4}, "name": "zero3"}))
        [('mesh.dp_shard', 4), ('name', 'zero3')]
    """
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def row_major(places: Iterable[tuple[int, int]]) -> int:
    """Return the row-major index of a place in an array; 0 without dimensions.

    Args:
        places: Pairs (index, size) along the dimensions, outermost first.
    """
    index = 0
    for place, size in places:
        index = index * size + place
    return index


def ceil_div(numerator: int, denominator: int) -> int:
    """Divide and round up: the size of the largest of `denominator` shards."""
    return -(-numerator // denominator)


def as_bytes(value: object, *, rate: bool = False) -> int | None:
    """Return the bytes of a number or a text, None if it is no size.

    Args:
        value: A number of bytes, or a text such as `80 GiB`.
        rate: Accept bytes per second, such as `80 GB/s`.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    if isinstance(value, int | float):
        return round(value) if abs(value) < 10**300 else None  # not for inf and nan
    try:
        return parse_bytes(value.removesuffix("/s") if rate else value)
    except (ValueError, OverflowError):
        return None


def positive(text: str) -> int:
    """Parse an integer of 1 or more."""
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"must be an integer of 1 or more; got {text!r}")
    return int(text)


def part(text: str) -> float:
    """Parse a fraction below one half, written `5%` or `0.05`."""
    digits = text.removesuffix("%")
    try:
        value = float(digits) / (100 if digits != text else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 0.5:
        raise ArgumentTypeError(f"must be a part below 50%, for example 5%; got {text!r}")
    return value


def count(text: str) -> int:
    """Parse an integer of 0 or more."""
    if not text.isdecimal():
        raise ArgumentTypeError(f"must be an integer of 0 or more; got {text!r}")
    return int(text)


def sequence_length(text: str) -> int:
    """Parse a number of tokens, from 1 to 10**8."""
    if not text.isdecimal() or not 1 <= int(text) <= 10**8:
        raise ArgumentTypeError(f"must be an integer in 1..{10**8}; got {text!r}")
    return int(text)


def temperature(text: str) -> float:
    """Parse a finite number of 0 or more."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0.0 <= number < float("inf"):
        raise ArgumentTypeError(f"must be a number of 0 or more; got {text!r}")
    return number
