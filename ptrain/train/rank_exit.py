"""How a rank ends: without the interpreter's exit handlers, with an exit code that says why.

A gloo process may abort in the interpreter's exit handlers after everything went well (7 of 12
in one script), so a rank leaves by `os._exit` once its group is destroyed and its output flushed.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import record

from ptrain.errors import PtrainError, RankFailed
from ptrain.output import outlive_readers
from ptrain.train.rank_start import code_of


def live(run: Callable[[], int]) -> NoReturn:
    """Run `run`, which is the rank's whole life, and leave with its exit code. A reader that closes
    the rank's output fails no rank."""
    outlive_readers()
    sys.excepthook = _leave_failed
    leave(coded(run))


def coded(run: Callable[[], int]) -> int:
    """Return the exit code of `run`. What the user got wrong is printed; what a rank raises
    propagates, once torch's @record has written it to the error file that a launcher asked for."""
    try:
        return int(record(run)() or 0)
    except RankFailed:
        raise
    except PtrainError as error:
        return code_of(error)


def leave(code: int) -> NoReturn:
    """Without the interpreter's exit handlers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _leave_failed(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> NoReturn:
    """The excepthook of a rank: its traceback, and the exit code that says that a rank failed."""
    traceback.print_exception(kind, error, trace)
    leave(RankFailed.exit_code)
