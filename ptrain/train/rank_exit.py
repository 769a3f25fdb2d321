"""The end of a rank: an exit code with a meaning, without the interpreter's exit handlers.

A gloo process may abort in the interpreter's exit handlers after a successful run (7 of 12 in one
script). So a rank leaves by `os._exit`, after its group is destroyed and its output flushed.
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
from ptrain.train.rank_start import report_error


def run_and_exit(run: Callable[[], int]) -> NoReturn:
    """Run a rank from start to end, and exit with the code that `run` returns.

    A reader that closes the output of the rank does not make it fail.
    """
    # First: also an error below is printed, perhaps to a reader that is gone.
    outlive_readers()
    # Without the hook, an exception would end the interpreter with its exit handlers.
    sys.excepthook = _exit_failed
    exit_process(run_for_exit_code(run))


def run_for_exit_code(run: Callable[[], int]) -> int:
    """Call `run` and return its exit code. A PtrainError other than RankFailed is printed.

    Raises:
        Exception: Any other error. torch's @record has written it to the error file that the
            launcher requested.
    """
    try:
        # @record returns None if `run` raises SystemExit(0) (`wrapper` in
        # torch/distributed/elastic/multiprocessing/errors/__init__.py, torch 2.13).
        return int(record(run)() or 0)
    except RankFailed:
        raise
    except PtrainError as error:
        return report_error(error)


def exit_process(code: int) -> NoReturn:
    """Flush the output and exit without the interpreter's exit handlers."""
    # `os._exit` discards the buffers.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _exit_failed(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> NoReturn:
    """Print the traceback and exit with the code of a failed rank. Installed as sys.excepthook."""
    traceback.print_exception(kind, error, trace)
    exit_process(RankFailed.exit_code)
