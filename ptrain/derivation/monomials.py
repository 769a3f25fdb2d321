"""Sizes and events of the committed tables: a size is a coefficient times powers of batch, sequence
and a model's dimensions, an event an allocation, a free, a boundary or a completed gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ptrain.derivation.attention import Statistics
from ptrain.spec.model import ModelShape
from ptrain.timeline import Mark, Run, run

# What the first number of a size says, as flags.
IN_ELEMENTS, IS_STATISTICS = 1, 2

_MARKS = {">": Mark.ENTER, "<": Mark.LEAVE, "[": Mark.PRE_BACKWARD, "]": Mark.POST_BACKWARD}


@dataclass(frozen=True, slots=True, kw_only=True)
class Monomial:
    """`coefficient · Π symbol^exponent`, in elements of the compute dtype or in bytes.
    `is_statistics`: it is what attention keeps beside its output, which depends on its kernel."""

    in_elements: bool
    coefficient: int
    exponents: tuple[tuple[str, int], ...]
    is_statistics: bool = False

    def bytes(self, values: Mapping[str, int], itemsize: int) -> int:
        """The size at these dimensions, of a CPU's kernels."""
        size = self.coefficient * (itemsize if self.in_elements else 1)
        for symbol, exponent in self.exponents:
            size *= math.prod([values[symbol]] * exponent)
        return size

    def __str__(self) -> str:
        unit = ("e",) if self.in_elements else ()
        powers = (s if e == 1 else f"{s}^{e}" for s, e in self.exponents)
        factors = (*((str(self.coefficient),) if self.coefficient != 1 else ()), *unit, *powers)
        return "·".join(factors) or "1"


def evaluated(
    sizes: Iterable[Monomial],
    values: Mapping[str, int],
    itemsize: int,
    statistics: Statistics | None = None,
) -> tuple[int, ...]:
    """Return the bytes of each size; `statistics` are those of a GPU's attention."""
    plain = ((size, size.bytes(values, itemsize)) for size in sizes)
    return tuple(
        statistics.of(count) if statistics and size.is_statistics else count
        for size, count in plain
    )


def monomials(table: dict[str, Any]) -> tuple[Monomial, ...]:
    """The sizes of a table, in its order."""
    return tuple(
        Monomial(
            in_elements=bool(kind & IN_ELEMENTS),
            is_statistics=bool(kind & IS_STATISTICS),
            coefficient=coefficient,
            exponents=tuple((s, e) for s, e in zip(table["symbols"], exponents, strict=True) if e),
        )
        for kind, coefficient, exponents in table["sizes"]
    )


def dimensions(shape: ModelShape, *, batch: int, sequence: int) -> dict[str, int]:
    """Return the value of every symbol."""
    return {
        "batch": batch,
        "sequence": sequence,
        "heads": shape.heads,
        "repeats": shape.heads // shape.kv_heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "pairs": shape.head_dim // 2,
        "ffn": shape.ffn,
        "vocab": shape.vocab,
    }


def merged(events: Iterable[Any], sizes: Sequence[int]) -> Iterator[Any]:
    """Signed size numbers become runs; marks and completions stay as they are."""
    deltas: list[int] = []
    for event in events:
        if isinstance(event, int):
            deltas.append(sizes[event - 1] if event > 0 else -sizes[-event - 1])
            continue
        yield from _flush(deltas)
        deltas = []
        if isinstance(event, str):
            yield (_MARKS[event[0]], event[1:].replace("*", "blocks.*", 1))
        else:
            name, index, cloned = event
            yield (name, sizes[index], bool(cloned))
    yield from _flush(deltas)


def _flush(deltas: list[int]) -> Iterator[Run]:
    combined = run(deltas)
    if combined:
        yield combined
