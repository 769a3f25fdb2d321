"""The boundary to user code: any exception raised while a model is built or first run becomes one
message."""

from __future__ import annotations

import resource
import signal
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
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


# Errors that Python itself raises for mistakes in code. Not included: errors that fake tensors
# cause, since they have no values and some operators have no fake implementation.
PYTHONS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError)


class UserCodeError(SpecError):
    """Code named in a spec raised an exception, which is the `__cause__` of this error."""

    @property
    def is_certain(self) -> bool:
        """True if real tensors would raise this error too, not only fake ones."""
        cause = self.__cause__
        return isinstance(cause, PYTHONS) or (cause is not None and _is_of_shapes(cause))


def _is_of_shapes(error: BaseException) -> bool:
    """Return True if `torch._check` raised the error: an operator's check of shapes and dtypes."""
    return [frame.name for frame in extract_tb(error.__traceback__)[-1:]] == ["_check_with"]


@contextmanager
def convert_exceptions(refusal: Callable[[BaseException], Fault]) -> Iterator[None]:
    """Temporarily turn exceptions into UserCodeError, with the fault that `refusal` builds.

    PtrainError and reads of values from fake tensors pass through unchanged.

    Args:
        refusal: Builds the fault from the exception.

    Raises:
        UserCodeError: The body raised any other exception, or SystemExit.
    """
    try:
        yield
    # A read of a fake tensor's value is no fault of the code: callers handle it by using real
    # tensors.
    except (PtrainError, *READ):
        raise
    except (Exception, SystemExit) as error:  # whatever comes out
        raise UserCodeError(refusal(error)) from error


@contextmanager
def limit_work(seconds: float, size: int) -> Iterator[None]:
    """Temporarily limit the CPU time and the additional memory of this process.

    The time is limited in the main thread only, where signals are handled, and the memory on Linux.

    Args:
        seconds: CPU time of all threads.
        size: Bytes of address space in addition to what is in use.

    Raises:
        TimeoutError: The time is over.
        MemoryError: More memory was requested.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = _STATM.read_text(encoding="ascii").split()[:1] if _STATM.exists() else []
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGVTALRM, partial(_raise_timeout, seconds)) if is_main else None
    try:
        for used in pages:
            most = int(used) * resource.getpagesize() + size
            resource.setrlimit(resource.RLIMIT_AS, (most if hard < 0 else min(most, hard), hard))
        if is_main:
            # Again and again: Jinja catches all exceptions while it compiles constants.
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.05)
        yield
    finally:
        if is_main:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


_STATM = Path("/proc/self/statm")  # its first number is the pages of the address space


def _raise_timeout(seconds: float, *_: object) -> None:
    """Raise TimeoutError from a signal handler."""
    raise TimeoutError(f"it takes more than {seconds:g} s")


def report_exceptions(place: str, what: str, remedy: str) -> AbstractContextManager[None]:
    """Return `convert_exceptions` with the fault "`what` raised …" at a place of the spec.

    Args:
        place: The key of the spec.
        what: The code that is called, as a noun.
        remedy: The remedy of the fault.
    """
    return convert_exceptions(
        lambda error: Fault(place, f"{what} raised {describe_error(error)}", remedy)
    )


def describe_error(error: BaseException) -> str:
    """Return the error as text: `ValueError: no such width (model.py:12)`.

    The place is the innermost line of the user's code. If a library raised the exception and no
    user code is on the stack, it is the innermost line of library code other than torch's.
    """
    text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    where = _error_location(error)
    return f"{type(error).__name__}{f': {text}' if text else ''}{f' ({where})' if where else ''}"


def _error_location(error: BaseException) -> str:
    """Return `file:line` of the innermost frame in user code, else in an installed library; else
    ""."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [frame for frame in extract_tb(error.__traceback__) if _is_code(frame.filename)]
    theirs = [frame for frame in frames if not any(part in frame.filename for part in _INSTALLED)]
    for frame in reversed(theirs or frames):
        return f"{frame.filename}:{frame.lineno}"
    return ""


def _is_code(file: str) -> bool:
    """Return True if the file belongs neither to ptrain, torch nor Python's standard library."""
    is_standard = file.startswith(f"{_STANDARD}/") and not any(part in file for part in _INSTALLED)
    is_known = any(file.startswith(f"{folder}/") for folder in _NOT_THEIRS)
    return not (file.startswith("<") or is_standard or is_known)


def describe_value(value: Any) -> str:
    """Return types and shapes of a value without its data: `tuple (float32 [2, 16, 260],
    NoneType)`.

    Collections show at most four items.
    """
    match value:
        case Tensor():
            return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        case dict():
            inner = ", ".join(
                f"{key}: {describe_value(item)}" for key, item in list(value.items())[:4]
            )
        case tuple() | list():
            inner = ", ".join(map(describe_value, value[:4]))
        case _:
            return type(value).__name__
    more = ", …" if len(value) > 4 else ""
    return f"{type(value).__name__} ({inner}{more})"
