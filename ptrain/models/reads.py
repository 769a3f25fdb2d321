"""What of a tensor's values is given to Python, or to NumPy, without an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import Tensor

_METHODS = ("tolist", "numpy")  # which `numpy.asarray` calls too


@contextmanager
def seeing_reads(note: Callable[[Tensor], None]) -> Iterator[None]:
    """While entered, `note` is called with each tensor whose values are read so."""
    inherited = [name for name in _METHODS if name not in vars(Tensor)]
    methods = {name: getattr(Tensor, name) for name in _METHODS}
    for name, method in methods.items():
        setattr(Tensor, name, _noted(method, note))
    try:
        yield
    finally:
        for name, method in methods.items():
            if name in inherited:
                delattr(Tensor, name)
            else:
                setattr(Tensor, name, method)


def _noted(method: Callable[..., Any], note: Callable[[Tensor], None]) -> Callable[..., Any]:
    @wraps(method)
    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        note(tensor)
        return method(tensor, *args, **kwargs)

    return noted
