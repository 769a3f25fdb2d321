"""The process of a rank: it ends with its parent, and records signals, which all ranks handle
together at the next step boundary. Errors of the user are printed once per node.

Linux signals a process when the thread that started it ends. On other systems a rank continues
after its launcher was killed. This module imports no torch: an unsupported torch must be rejected
before it is imported.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ptrain.errors import PtrainError
from ptrain.installed import require_torch
from ptrain.report.screen import paint
from ptrain.train import environment

_PRINT_SECONDS = 2.0  # seconds to print: torchrun ends all ranks as soon as one has ended
_PR_SET_PDEATHSIG = 1  # in <linux/prctl.h>
# Resolved at import: `die_with_parent` runs between fork and exec, where another thread of the
# parent may have held the lock of the dynamic loader.
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def begin_rank() -> None:
    """Begin a rank, before torch is imported.

    Importing torch takes seconds, in which torch's agent may be killed; its ranks must end with it.
    If `require_torch` raises, the rank prints the message and exits with code 2.
    """
    if environment.agent_id():
        die_with_parent(os.getppid())
    try:
        require_torch()
    except PtrainError as error:
        sys.exit(report_error(error))


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends; at once if the parent has changed.

    Args:
        parent: The process id of the expected parent.
    """
    if _PRCTL is None:
        return
    _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Checked after the call: a parent that ended before it sends no signal.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def report_error(error: PtrainError) -> int:
    """Print an error and return its exit code.

    Only the first rank of a node prints. Another node may have another error, such as a missing
    file.
    """
    if environment.is_first_of_node():
        print(paint(str(error), sys.stderr), file=sys.stderr, flush=True)
    else:
        time.sleep(_PRINT_SECONDS)
    return error.exit_code


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
