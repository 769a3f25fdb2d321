"""Screens of the command line: width, colour, and the closing line `Next: COMMAND`.

A table is as wide as the terminal, or as COLUMNS states; output to a pipe or a file has PIPE_WIDTH
columns. Sentences are folded only if the width is known. In a pipe each sentence stays on one line,
so that a search for a phrase finds it. Only terminals get colour, and NO_COLOR turns it off.
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
# C0 and C1 without tab and line feed, and marks that reverse the direction of writing.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
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
    """Return the number of columns of the screen.

    Args:
        unknown: The result if neither COLUMNS nor the terminal gives a width.
    """
    if (columns := os.environ.get("COLUMNS", "")).isdecimal():
        return int(columns) or unknown
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (AttributeError, OSError, ValueError):  # a pipe, or a stream of a notebook
        return unknown


def escape_controls(text: str) -> str:
    """Return a text whose control codes are written as their numbers, as in `\\u001b[2J`.

    A terminal executes the codes in a name, a path or a message of user code: it could hide lines
    or change what an earlier line says. Line breaks and tabs stay. The form is also that of JSON.
    """
    return _CONTROLS.sub(lambda code: f"\\u{ord(code[0]):04x}", text)


def print_lines(*lines: str, stream: TextIO | None = None) -> None:
    """Print lines with their control codes escaped, to standard output or `stream`."""
    print(escape_controls("\n".join(lines)), file=stream, flush=True)


def print_screen(*texts: str) -> None:
    """Print a screen: sentences folded at the known width, verdicts in colour on a terminal."""
    width = screen_width(sys.maxsize)
    lines = [line for text in texts for long in text.split("\n") for line in fold_line(long, width)]
    print(paint("\n".join(lines), sys.stdout), flush=True)


def fold_line(line: str, width: int) -> list[str]:
    """Break a line that is wider than `width`, between its parts if it has any, else between words.

    Commands and drawings are not broken. A command in backquotes is part of a sentence.

    Args:
        line: One line; its indentation is kept, and continuation lines are indented by two more.
        width: The largest number of columns.

    Returns:
        The lines. A single word that is wider than `width` stays as it is.
    """
    is_command = "ptrain " in line.replace("`ptrain ", "")
    if len(line) <= width or is_command or any(mark in line for mark in "█│┌└"):
        return [line]
    inner = line.strip()
    # Prefer breaks between parts, then between the figures of a step, then between words.
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
    """Return the text without control codes, and with verdicts, answers and errors in colour.

    Args:
        text: The lines of a screen.
        stream: The stream it will be written to. If it is not a terminal, or NO_COLOR is set, the
            text has no colour.
    """
    text = escape_controls(text)
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    for colour, words in () if is_plain or stream is None or not stream.isatty() else _STYLES:
        text = re.sub(f"({words})", rf"{colour}\1{_RESET}", text, flags=re.MULTILINE)
    return text


def command_line(verb: str, words: Iterable[str], *, allow_import: bool = False) -> str:
    """Return `ptrain VERB WORDS`, quoted for a shell.

    Args:
        verb: The command.
        words: Its arguments.
        allow_import: Append `--allow-import`.

    Example:
        >>> command_line("train", ["zero3", "batch.global=4M tokens"])
        "ptrain train zero3 'batch.global=4M tokens'"
    """
    return shlex.join(["ptrain", verb, *words, *["--allow-import"] * allow_import])


def next_line(*commands: str) -> str:
    """Return `Next: COMMAND` with the first command that fits the terminal, else the last one."""
    lines = [f"Next: {command}" for command in commands]
    return next((line for line in lines if len(line) <= screen_width()), lines[-1])
