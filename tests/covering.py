"""Parametrized test matrices that run a covering subset by default."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def covering(names: str, *columns: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize over all combinations of the columns' values. The default subset has the
    combinations with an even sum of indices: with three columns or more of two values or more it
    covers every pair of values."""
    rows = []
    for cells in product(*(tuple(enumerate(column)) for column in columns)):
        is_default = sum(place for place, _ in cells) % 2 == 0
        values = [value for _, value in cells]
        rows.append(
            pytest.param(
                *values,
                id="-".join(map(str, values)),
                marks=() if is_default else pytest.mark.nightly,
            )
        )
    return pytest.mark.parametrize(names, rows)
