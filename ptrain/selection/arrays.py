"""numpy, imported when a search begins: millions of candidates are scored as arrays."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from ptrain.errors import PtrainError


@cache
def numpy() -> Any:
    """Return the module. Raises PtrainError where it is not installed."""
    try:
        return import_module("numpy")
    except ImportError as error:
        raise PtrainError("ptrain select needs numpy: pip install numpy") from error
