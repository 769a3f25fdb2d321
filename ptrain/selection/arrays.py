"""numpy, imported when a search begins: millions of candidates are scored as arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from ptrain.errors import PtrainError

Array = Any
Columns = dict[str, Array]  # by name, of many choices


@cache
def numpy() -> Any:
    """Return the module. Raises PtrainError where it is not installed."""
    try:
        return import_module("numpy")
    except ImportError as error:
        raise PtrainError("ptrain select needs NumPy. Run `pip install numpy`.") from error


def distinct(values: Any) -> tuple[list[float], Any]:
    """Return the numbers that an array has, once each, and which of them stands at each place: of
    few numbers in a third of the time of `numpy.unique`."""
    listed = values.tolist()
    places = {value: place for place, value in enumerate(dict.fromkeys(listed))}
    return list(places), numpy().array([places[value] for value in listed], dtype=int)


def by_value(values: Any, of: Callable[[float], float]) -> Any:
    """Return what a function gives of each of some numbers, asked once for equal ones."""
    listed = values.tolist()
    known = {value: of(value) for value in dict.fromkeys(listed)}
    return numpy().array([known[value] for value in listed], dtype=float)
