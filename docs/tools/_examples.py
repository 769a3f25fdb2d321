"""The Python examples of a page, and what they print.

A block of Python whose first line is `# NAME.py` is that file. A command that a page shows the
output of runs in a folder that has the files of its page and nothing else, exactly as printed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from _machine import environment

from ptrain.report.screen import PIPE_WIDTH

_FILE = re.compile(r"^```python\n(# (\w+\.py)\n.*?)^```", re.DOTALL | re.MULTILINE)
_LAUNCHED = re.compile(r"torchrun[^`\n]*? (\w+\.py)")
PROGRAMS = {"ptrain": "ptrain", "torchrun": "torch.distributed.run"}


def files(text: str) -> dict[str, str]:
    """Return the files that a page has, by name."""
    return {name: code for code, name in _FILE.findall(text)}


def launched(text: str) -> dict[str, str]:
    """Return the commands by which a page starts its files, by the file's name."""
    return {match[1]: match[0] for match in _LAUNCHED.finditer(text)}


def printed(command: str, text: str) -> str:
    """Return the output of a command that runs next to the files of a page. Raises
    CalledProcessError if the command fails."""
    with tempfile.TemporaryDirectory() as folder:
        for name, code in files(text).items():
            (Path(folder) / name).write_text(code, encoding="utf-8")
        return run(command.split(), folder).rstrip()


def run(words: Sequence[str], folder: str | Path) -> str:
    """Run a command in a folder and return its output."""
    program, *arguments = words
    ended = subprocess.run(
        [sys.executable, "-m", PROGRAMS[program], *arguments],
        cwd=folder,
        env=environment() | {"COLUMNS": str(PIPE_WIDTH)},
        capture_output=True,
        text=True,
        check=True,
    )
    return ended.stdout
