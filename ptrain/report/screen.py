"""Screens of the command line: their width, colour and closing `Next: COMMAND`.

A table is as wide as the terminal, or as COLUMNS states; a pipe and a file have PIPE_WIDTH columns.
Sentences are folded at a stated width alone: in a pipe they stay on one line, so that a search for
their words finds them. Colour is for terminals, and NO_COLOR turns it off.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable
from typing import TextIO

PIPE_WIDTH = 100
_PART = " · "
_FIELDS = re.compile(r"(?<=\S)  (?=\S)")  # between figures of a step: `loss 5.61  |g| 4.78`
_GREEN, _RED, _YELLOW, _RESET = "\x1b[1;32m", "\x1b[1;31m", "\x1b[1;33m", "\x1b[0m"
_STYLES = (  # of words at the start of a line, and of cells between two blanks
    (_YELLOW, r"^(?:Fits, but tight|Unknown|warning)\b|(?<=  )(?:tight|unknown)(?=  |$)"),
    (
        _GREEN,
        r"^(?:Fits|Best|(?:Fastest|Most efficient) that fits|verdict: holds)\b|(?<=  )yes(?=  |$)",
    ),
    (
        _RED,
        r"^(?:Does not fit|None fits|Nothing fits|verdict: fails|rejected|root cause)\b"
        r"|(?<=  )(?:no|rejected)(?=  |$)|\b(?:error|fails)(?=:)",
    ),
)


def screen_width(unknown: int = PIPE_WIDTH) -> int:
    """Return the columns that COLUMNS or the terminal states, or else the default."""
    if (columns := os.environ.get("COLUMNS", "")).isdecimal():
        return int(columns) or unknown
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (AttributeError, OSError, ValueError):  # a pipe, or a stream of a notebook
        return unknown


def show(*texts: str) -> None:
    """Print a screen: sentences folded at the stated width, verdicts in colour on a terminal."""
    width = screen_width(sys.maxsize)
    lines = [line for text in texts for long in text.split("\n") for line in fold(long, width)]
    print(paint("\n".join(lines), sys.stdout), flush=True)


def fold(line: str, width: int) -> list[str]:
    """Break a line that is too wide: between its parts where it has any, else between words.
    Commands and drawings stay whole; a command between backquotes is part of a sentence."""
    is_command = "ptrain " in line.replace("`ptrain ", "")
    if len(line) <= width or is_command or any(mark in line for mark in "█│┌└"):
        return [line]
    inner = line.strip()
    separator = _PART if _PART in inner else "  " if len(_FIELDS.findall(inner)) > 2 else " "
    words = inner.split(separator)
    lines = [line[: len(line) - len(line.lstrip())] + words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(separator) + len(word) <= width:
            lines[-1] += separator + word
        else:
            lines.append(f"{line[: len(line) - len(line.lstrip())]}  {word}")
    return lines


def paint(text: str, stream: TextIO | None) -> str:
    """Return the text with its verdicts, answers and errors in colour, for a terminal."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    for colour, words in () if is_plain or stream is None or not stream.isatty() else _STYLES:
        text = re.sub(f"({words})", rf"{colour}\1{_RESET}", text, flags=re.MULTILINE)
    return text


def command_line(verb: str, words: Iterable[str], *, allow_import: bool = False) -> str:
    """Return `ptrain VERB WORDS` as it is typed, with the flag that lets it import code."""
    return shlex.join(["ptrain", verb, *words, *["--allow-import"] * allow_import])


def next_line(*commands: str) -> str:
    """Return `Next: COMMAND` with the first of the commands that fits the terminal."""
    lines = [f"Next: {command}" for command in commands]
    return next((line for line in lines if len(line) <= screen_width()), lines[-1])
