"""The one format of the committed tables, as it is written; `derivation.tables` reads it.

A table has `symbols`, `sizes` (flags, a coefficient, the symbols' exponents), and `parts`, lists of
events that other places name by their numbers: n + 1 is a birth and -n - 1 a death of the size
with number n, a text a boundary, a list a completed gradient with its parameter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from ptrain.derivation.tables import IN_ELEMENTS, IS_STATISTICS

Coded = list[object]  # events as JSON
Make = Callable[[], dict[str, object]]  # a table, within seconds

_WIDTH = 4  # bytes of an element of what is traced first


class TableWriter:
    """A table in the making: sizes and parts are numbered as they come, equal ones once."""

    def __init__(self, symbols: Sequence[str]) -> None:
        self.symbols = tuple(symbols)
        self._sizes: dict[tuple[int, int, tuple[int, ...]], int] = {}
        self._parts: dict[str, int] = {}

    def size(
        self,
        num_bytes: int,
        values: Mapping[str, int],
        *,
        follows: bool,
        is_statistics: bool = False,
    ) -> int:
        """Return the number of a size, which `follows` the compute dtype's or not. A symbol that
        `values` lack is no factor."""
        of_unit = num_bytes // _WIDTH if follows else num_bytes
        coefficient, exponents = factorised(of_unit, self.symbols, values)
        assert coefficient & (coefficient - 1) == 0, f"{num_bytes} bytes are not one product"
        flags = IN_ELEMENTS * follows | IS_STATISTICS * is_statistics
        return self._sizes.setdefault((flags, coefficient, exponents), len(self._sizes))

    def part(self, events: Iterable[object]) -> int:
        """Return the number of a part."""
        text = json.dumps(list(events), separators=(",", ":"))
        return self._parts.setdefault(text, len(self._parts))

    def table(self, **content: object) -> dict[str, object]:
        """Return the table as JSON, with what names its parts."""
        return {
            "torch": torch.__version__.split("+")[0],
            "symbols": list(self.symbols),
            "sizes": [[flags, c, list(exponents)] for flags, c, exponents in self._sizes],
            **({"parts": [json.loads(part) for part in self._parts]} if self._parts else {}),
            **content,
        }


def factorised(
    size: int, symbols: Iterable[str], values: Mapping[str, int]
) -> tuple[int, tuple[int, ...]]:
    """Return coefficient and exponents; the coefficient is what no symbol's value divides."""
    exponents = []
    for symbol in symbols:
        value, exponent = values.get(symbol, 0), 0
        while value and size and size % value == 0:
            size, exponent = size // value, exponent + 1
        exponents.append(exponent)
    return size, tuple(exponents)
