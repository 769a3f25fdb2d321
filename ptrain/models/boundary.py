"""The boundary to code that is not ptrain's: whatever it raises while a model is built, or first
run, is the user's to read as one message."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor

import ptrain
from ptrain.errors import Fault, PtrainError, SpecError
from ptrain.internals.fakes import READ

_INSTALLED = ("site-packages", "dist-packages")
_NOT_THEIRS = tuple(str(Path(module.__file__ or "").parent) for module in (ptrain, torch))
_STANDARD = sysconfig.get_path("stdlib")


# Mistakes of Python: not that a fake tensor has no values, or an operator no fake.
PYTHONS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError)


class CodeRaised(SpecError):
    """Code that a spec names raised something, which is the cause. `is_certain`: it would on real
    tensors too."""

    @property
    def is_certain(self) -> bool:
        cause = self.__cause__
        return isinstance(cause, PYTHONS) or (cause is not None and _is_of_shapes(cause))


def _is_of_shapes(error: BaseException) -> bool:
    """Whether an operator's own check of shapes and dtypes raised it: `torch._check`."""
    return [frame.name for frame in extract_tb(error.__traceback__)[-1:]] == ["_check_with"]


@contextmanager
def boundary(refusal: Callable[[BaseException], Fault]) -> Iterator[None]:
    """Raises CodeRaised, with the fault that `refusal` makes of an exception, in place of whatever
    is raised within. ptrain's own errors pass, as does a value that is read off a fake tensor."""
    try:
        yield
    except (PtrainError, *READ):
        raise
    except (Exception, SystemExit) as error:  # whatever comes out
        raise CodeRaised(refusal(error)) from error


def raising(place: str, what: str, remedy: str) -> AbstractContextManager[None]:
    """`boundary` with the fault that `what` raised, at a place of the spec."""
    return boundary(lambda error: Fault(place, f"{what} raised {said(error)}", remedy))


def said(error: BaseException) -> str:
    """`ValueError: no such width (model.py:12)`, with the innermost line of the user's own code; of
    an exception in a library, of the code that called it."""
    text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    where = _place(error)
    return f"{type(error).__name__}{f': {text}' if text else ''}{f' ({where})' if where else ''}"


def _place(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [frame for frame in extract_tb(error.__traceback__) if _is_code(frame.filename)]
    theirs = [frame for frame in frames if not any(part in frame.filename for part in _INSTALLED)]
    for frame in reversed(theirs or frames):
        return f"{frame.filename}:{frame.lineno}"
    return ""


def _is_code(file: str) -> bool:
    """Whether it is neither ptrain's nor torch's nor Python's."""
    is_standard = file.startswith(f"{_STANDARD}/") and not any(part in file for part in _INSTALLED)
    is_known = any(file.startswith(f"{folder}/") for folder in _NOT_THEIRS)
    return not (file.startswith("<") or is_standard or is_known)


def kind_of(value: Any) -> str:
    """`a tuple of (float32 [2, 16, 260], NoneType)`: types and shapes, no values."""
    match value:
        case Tensor():
            return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        case dict():
            inner = ", ".join(f"{key}: {kind_of(item)}" for key, item in list(value.items())[:4])
        case tuple() | list():
            inner = ", ".join(map(kind_of, value[:4]))
        case _:
            return type(value).__name__
    more = ", …" if len(value) > 4 else ""
    return f"{type(value).__name__} ({inner}{more})"
