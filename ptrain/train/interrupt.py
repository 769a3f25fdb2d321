"""Signals on a rank: recorded here, handled at the next step boundary by all ranks together."""

from __future__ import annotations

import faulthandler
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# In order of precedence. Slurm announces the end of a job by SIGUSR1 (`--signal`): stop and save.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Interrupts:
    """The handler that records the SIGNALS that a rank received."""

    def __init__(self) -> None:
        self.received: set[int] = set()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # Nothing else happens here: Python may run the handler in the middle of a step, and a rank
        # that stopped alone would make the others wait for it.
        self.received.add(number)

    def flags(self) -> list[float]:
        """Return one number per member of SIGNALS, to be summed over the ranks."""
        return [float(number in self.received) for number in SIGNALS]


def strongest_signal(flags: list[float]) -> signal.Signals | None:
    """Return the first of SIGNALS that any rank received, None without one.

    Args:
        flags: The sums of `Interrupts.flags` over the ranks.
    """
    return next((number for number, seen in zip(SIGNALS, flags, strict=True) if seen), None)


def exit_code(number: signal.Signals) -> int:
    """Return the exit code after a signal: 130 for Ctrl-C, 143 for all others."""
    return 130 if number is signal.SIGINT else 143


def handled_signals() -> tuple[signal.Signals, ...]:
    """Return SIGNALS, without SIGHUP if `nohup` made this process ignore it."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return tuple(number for number in SIGNALS if number is not signal.SIGHUP)
    return SIGNALS


@contextmanager
def record_signals() -> Iterator[Interrupts]:
    """Temporarily record SIGNALS. SIGUSR2 writes the stacks of all threads to standard error."""
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts  # only the main thread may set handlers
        return
    before = {number: signal.signal(number, interrupts) for number in handled_signals()}
    # Descriptor 2, because sys.stderr may have been replaced by an object without a descriptor.
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
    try:
        yield interrupts
    finally:
        faulthandler.unregister(signal.SIGUSR2)
        for number, handler in before.items():
            signal.signal(number, handler)
