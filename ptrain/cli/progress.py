"""Progress of commands that take longer than two seconds: a line on standard error, for terminals.

The line states the current activity, the completed share and the time left. It is drawn by rich.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any

_SILENT = 2.0  # seconds before the line is drawn; importing rich takes a tenth of a second


@contextmanager
def show_progress(what: str) -> Iterator[Callable[..., None]]:
    """Temporarily show the progress of an activity, starting after two seconds.

    Args:
        what: The activity, in words.

    Yields:
        A function that updates the line. Its arguments are the number of completed parts, the
        number of all parts, and the current activity.

    Example:
        >>> with show_progress("deriving") as step:
        ...     step(1, 10, "deriving the second candidate")
    """
    state: dict[str, Any] = {"description": what, "completed": 0, "total": None}
    bars: list[Any] = []

    def step(done: int, total: int | None = None, what: str = "") -> None:
        state.update(completed=done, total=total, description=what or state["description"])
        for bar in bars:
            bar.update(bar.task_ids[0], **state)

    def draw() -> None:
        from rich import progress as rich_progress
        from rich.console import Console

        columns = (
            rich_progress.SpinnerColumn(),
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(bar_width=20),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TimeRemainingColumn(),
        )
        bar = rich_progress.Progress(*columns, console=Console(stderr=True), transient=True)
        bar.add_task(**state)
        bar.start()
        bars.append(bar)

    timer = Timer(_SILENT, draw)
    timer.daemon = True
    if sys.stderr is not None and sys.stderr.isatty():
        timer.start()
    try:
        yield step
    finally:
        timer.cancel()
        # A timer that has fired may still draw: wait, so that its bar is stopped below.
        if timer.is_alive():
            timer.join()
        for bar in bars:
            bar.stop()
