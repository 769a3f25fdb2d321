"""How far a stage is, in lines that a terminal and a log can have alike. Torch-free."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TextIO

SECONDS = 10.0  # between two lines


@dataclass(slots=True)
class Progress:
    """Writes a line where the last one is older than SECONDS; to `stream`, or to none."""

    stream: TextIO | None = None
    stage: str = ""
    _last: float = field(default_factory=time.monotonic)

    def begin(self, stage: str) -> None:
        """A stage begins."""
        self.stage, self._last = stage, time.monotonic()

    def step(self, what: str, done: int, count: int) -> None:
        """`done` of `count` steps of something are over."""
        now = time.monotonic()
        if self.stream is None or now - self._last < SECONDS:
            return
        self._last = now
        print(f"{self.stage}: {what}, step {done} of {count}", file=self.stream, flush=True)
