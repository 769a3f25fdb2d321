"""Standard output: of the processes that are started here (where this one prints, be it a
notebook's cell), and after its reader is gone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from threading import Thread
from typing import TextIO

_LAST_LINES = 10.0  # seconds: what a rank started itself may outlive it and hold its output open


@contextmanager
def standard_output() -> Iterator[int | None]:
    """Yield the standard output of processes that are started within: this process's own (None), or
    where `sys.stdout` is another, which no process can inherit, a pipe to it."""
    if sys.stdout is sys.__stdout__:
        yield None
        return
    reading, writing = os.pipe()
    relay = Thread(target=_print_lines, args=(reading, sys.stdout), daemon=True)
    relay.start()
    try:
        yield writing
    finally:
        os.close(writing)
        relay.join(_LAST_LINES)


def _print_lines(reading: int, stream: TextIO) -> None:
    """Print what comes, until a stream takes no more (a cell that is gone, a file that is closed):
    the rest is read all the same, or who writes it would die of that."""
    with open(reading, errors="replace", newline="") as lines:
        is_open = True
        for line in lines:
            try:
                if is_open:
                    stream.write(line)
                    stream.flush()
            except (OSError, ValueError):
                is_open = False


class _DetachableStream(TextIOWrapper):
    """A text stream that discards its output once its reader is gone."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:  # a broken pipe, or EIO of a terminal that hung up
            _discard(self)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            _discard(self)


def outlive_readers() -> None:
    """Let this process continue after the reader of its output goes (`| head`, a closed terminal).

    Each standard stream is replaced, so prints of the user's code are covered too.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, TextIOWrapper):
            lasting = _DetachableStream(
                stream.buffer,
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, lasting)


def discard_closed_output() -> None:
    """Discard the unwritten output of standard streams whose reader is gone. Otherwise the
    interpreter's flush at exit fails, and prints a traceback."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None where it was closed at the start
        try:
            stream.flush()
        except OSError:
            _discard(stream)


def _discard(stream: TextIO) -> None:
    """Send a stream's output to the null device, including the text that it has buffered."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
