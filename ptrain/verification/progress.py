"""The progress of a verification: one line with the time left on a terminal, and lines for a log.
Torch-free."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TextIO

SECONDS = 10.0  # between two lines of a log
_SILENT, _REDRAWN = 2.0, 0.2  # seconds before a terminal's line, and between two drawings
_CLEAR = "\r\x1b[2K"


@dataclass(slots=True)
class Progress:
    """Draws a line on a terminal that rank 0 prints to, and writes a line every SECONDS to
    `stream`, which is a log. Without a stream it does neither."""

    stream: TextIO | None = None
    stage: str = ""
    _last: float = field(default_factory=time.monotonic)
    _began: float = field(default_factory=time.monotonic)
    _drawn: float = 0.0
    _what: str = ""

    def begin(self, stage: str) -> None:
        """A stage begins."""
        self.stage, self._what, self._last = stage, "", time.monotonic()

    def step(self, what: str, done: int, count: int) -> None:
        """`done` of `count` steps of something are over."""
        now = time.monotonic()
        if what != self._what:
            self._what, self._began = what, now
        if self.stream is None:
            return
        text = f"{self.stage}: {what}, step {done} of {count}"
        if now - self._last >= SECONDS:
            self._last = now
            print(text, file=self.stream, flush=True)
        is_due = now - self._began >= _SILENT and now - self._drawn >= _REDRAWN
        if is_due and sys.stdout.isatty():
            left = (now - self._began) / max(1, done) * (count - done)
            self._drawn = now
            print(f"{_CLEAR}{text}, {left:.0f} s left", end="", flush=True)

    def clear(self) -> None:
        """Remove the line from the terminal."""
        if self._drawn:
            self._drawn = 0.0
            print(_CLEAR, end="", flush=True)
