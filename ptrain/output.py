"""Where processes that are started here print: where this one does, be it a notebook's cell."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
