"""Standard output: where processes that are started here print (where this one does, be it a
notebook's cell), and how a process outlives its reader."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from threading import Thread
from typing import TextIO

_READER_IS_GONE = (errno.EPIPE, errno.EIO)  # EIO: of a terminal that hung up
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


_SETTINGS = ("encoding", "errors", "line_buffering", "write_through")  # PYTHONUNBUFFERED: the last


class _DetachableStream(TextIOWrapper):
    """A text stream that discards its output once its reader is gone."""

    def write(self, text: str) -> int:
        with self._discarding():
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with self._discarding():
            super().flush()

    @contextmanager
    def _discarding(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _READER_IS_GONE:
                return  # as a full disk: this text is lost, and later text may fit again
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)


def outlive_readers() -> None:
    """Let this process continue after the reader of its output goes (`| head`, a closed terminal),
    whoever prints: the standard streams are replaced."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, TextIOWrapper) and not isinstance(stream, _DetachableStream):
            how = {key: getattr(stream, key) for key in _SETTINGS}
            setattr(sys, name, _DetachableStream(stream.buffer, **how))
