"""Signals on a rank: remembered here, acted upon at the next step boundary by all ranks at once."""

from __future__ import annotations

import faulthandler
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Slurm announces the end of a job by SIGUSR1: stop, save, and be queued again.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Interrupts:
    """Which of SIGNALS has come; the strongest wins when ranks saw different ones."""

    def __init__(self) -> None:
        self.received: set[int] = set()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received.add(number)

    def flags(self) -> list[float]:
        """One number per member of SIGNALS, to be added up over the ranks."""
        return [float(number in self.received) for number in SIGNALS]


def strongest(flags: list[float]) -> signal.Signals | None:
    """The signal to obey, from the ranks' summed flags."""
    return next((number for number, seen in zip(SIGNALS, flags, strict=True) if seen), None)


def exit_code(number: signal.Signals) -> int:
    """130 for Ctrl-C, 143 for everything that asks the job to end."""
    return 130 if number is signal.SIGINT else 143


def caught_here() -> tuple[signal.Signals, ...]:
    """SIGNALS, but a hang-up that `nohup` has told us to ignore."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return tuple(number for number in SIGNALS if number is not signal.SIGHUP)
    return SIGNALS


@contextmanager
def caught() -> Iterator[Interrupts]:
    """Catch SIGNALS inside; SIGUSR2 writes every thread's stack to the log."""
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts  # signals are the main thread's
        return
    before = {number: signal.signal(number, interrupts) for number in caught_here()}
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
    try:
        yield interrupts
    finally:
        faulthandler.unregister(signal.SIGUSR2)
        for number, handler in before.items():
            signal.signal(number, handler)
