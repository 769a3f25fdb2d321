"""Standard output: a stream for child processes, and processes that outlive their reader."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from threading import Thread
from typing import TextIO

_GONE_READER_ERRORS = (errno.EPIPE, errno.EIO)  # EIO: of a terminal that hung up
# Seconds to wait for the last lines: a process that a rank started may keep the pipe open longer.
_RELAY_TIMEOUT = 10.0


@contextmanager
def standard_output() -> Iterator[int | None]:
    """Yield the standard output for child processes.

    This is None, which lets them inherit the output of this process. If `sys.stdout` was replaced,
    as in a notebook, no process can inherit it: then it is the descriptor of a pipe, and a thread
    copies the pipe to `sys.stdout`.
    """
    if sys.stdout is sys.__stdout__:
        yield None
        return
    reading, writing = os.pipe()
    relay = Thread(target=_relay_lines, args=(reading, sys.stdout), daemon=True)
    relay.start()
    try:
        yield writing
    finally:
        os.close(writing)
        relay.join(_RELAY_TIMEOUT)


def _relay_lines(reading: int, stream: TextIO) -> None:
    """Copy lines from a pipe to a stream.

    Once the stream fails (its cell is gone, its file is closed) the rest is read and discarded:
    otherwise the writers would fail with a broken pipe.
    """
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
        with self._discard_output():
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with self._discard_output():
            super().flush()

    @contextmanager
    def _discard_output(self) -> Iterator[None]:
        """Suppress OSError. If the reader is gone, redirect the descriptor to /dev/null."""
        try:
            yield
        except OSError as error:
            if error.errno not in _GONE_READER_ERRORS:
                return  # such as a full disk: this text is lost, later text may be written again
            # From now on all writes of this process to the descriptor succeed.
            null = os.open(os.devnull, os.O_WRONLY)
            # dup2 keeps the number of the descriptor, which other code and child processes use.
            os.dup2(null, self.fileno())
            os.close(null)


def outlive_readers() -> None:
    """Replace the standard streams, so that this process continues after its reader is gone.

    The reader may be `| head`, or a terminal that was closed.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, TextIOWrapper) and not isinstance(stream, _DetachableStream):
            how = {key: getattr(stream, key) for key in _SETTINGS}
            setattr(sys, name, _DetachableStream(stream.buffer, **how))
