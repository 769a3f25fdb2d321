"""Screens of the command line: width, colour, progress and the closing `Next: COMMAND`.

A table is as wide as the terminal, or as COLUMNS states; a pipe and a file have PIPE_WIDTH columns.
Sentences are folded at a stated width alone: in a pipe they stay on one line, so that a search for
their words finds them. Colour and progress are for terminals, and NO_COLOR forbids colour.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

PIPE_WIDTH = 100
_SILENT = 2.0  # seconds before progress is shown
_PART = " · "
_GREEN, _RED, _YELLOW, _RESET = "\x1b[1;32m", "\x1b[1;31m", "\x1b[1;33m", "\x1b[0m"
_STYLES = (  # of words at the start of a line, and of cells between two blanks
    (_YELLOW, r"^(?:Fits, but tight|Unknown|warning)\b|(?<=  )(?:tight|unknown)(?=  |$)"),
    (_GREEN, r"^(?:Fits|Best|Fastest that fits|verdict: holds)\b|(?<=  )yes(?=  |$)"),
    (
        _RED,
        r"^(?:Does not fit|None fits|Nothing fits|verdict: fails|rejected|culprit)\b"
        r"|(?<=  )(?:no|rejected)(?=  |$)|\b(?:error|fails)(?=:)",
    ),
)


def screen_width() -> int:
    """Return the columns of a table: COLUMNS, or the terminal's, or those of a pipe."""
    return _stated_width() or PIPE_WIDTH


def _stated_width() -> int:
    """Return the columns that COLUMNS or the terminal states, or 0."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (AttributeError, OSError, ValueError):  # a pipe, or a stream of a notebook
        return 0


def show(*texts: str) -> None:
    """Print a screen: sentences folded at the stated width, verdicts in colour on a terminal."""
    text = "\n".join(texts)
    if width := _stated_width():
        text = "\n".join(line for long in text.split("\n") for line in fold(long, width))
    print(paint(text, sys.stdout), flush=True)


def fold(line: str, width: int) -> list[str]:
    """Break a line that is too wide: between its parts where it has any, else between words.
    Commands and drawings stay whole; a command between backquotes is part of a sentence."""
    is_command = "ptrain " in line.replace("`ptrain ", "")
    if len(line) <= width or is_command or any(mark in line for mark in "█│┌└"):
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    separator = _PART if _PART in line else " "
    lines: list[str] = []
    for word in line.strip().split(separator):
        if lines and len(lines[-1]) + len(separator) + len(word) <= width:
            lines[-1] += separator + word
        else:
            lines.append(f"{indent}{'  ' * bool(lines)}{word}")
    return [
        part for long in lines for part in (fold(long, width) if separator == _PART else [long])
    ]


def paint(text: str, stream: TextIO) -> str:
    """Return the text with its verdicts, answers and errors in colour, for a terminal."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if is_plain or not stream.isatty():
        return text
    import re

    for colour, words in _STYLES:
        text = re.sub(f"({words})", rf"{colour}\1{_RESET}", text, flags=re.MULTILINE)
    return text


def next_line(*commands: str) -> str:
    """Return `Next: COMMAND` with the first of the commands that fits the terminal."""
    lines = [f"Next: {command}" for command in commands]
    return next((line for line in lines if len(line) <= screen_width()), lines[-1])


class Progress:
    """A line on standard error that states what runs, how much of it is done and the time left."""

    def __init__(self, what: str) -> None:
        self._state: dict[str, Any] = {"description": what, "total": None, "completed": 0}
        self._bar: Any = None

    def step(self, done: int, total: int | None = None, what: str = "") -> None:
        """Take that `done` of `total` parts are over; `what` is what runs now."""
        described = {"description": what} if what else {}
        self._state |= {"completed": done, "total": total, **described}
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], **self._state)

    def show(self) -> None:
        """Begin to draw. Importing rich takes a tenth of a second."""
        from rich import progress as parts
        from rich.console import Console

        columns = (
            parts.SpinnerColumn(),
            parts.TextColumn("{task.description}"),
            parts.BarColumn(bar_width=20),
            parts.MofNCompleteColumn(),
            parts.TimeRemainingColumn(elapsed_when_finished=True),
        )
        bar = parts.Progress(*columns, console=Console(stderr=True), transient=True)
        bar.add_task(**self._state)
        bar.start()
        self._bar = bar

    def close(self) -> None:
        """Remove the line."""
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def progress(what: str) -> Iterator[Progress]:
    """Show on a terminal what takes longer than two seconds."""
    bar = Progress(what)
    if not sys.stderr.isatty():
        yield bar
        return
    from threading import Timer

    timer = Timer(_SILENT, bar.show)
    timer.daemon = True
    timer.start()
    try:
        yield bar
    finally:
        timer.cancel()
        timer.join()
        bar.close()
