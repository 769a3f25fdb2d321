"""A rank does not outlive the process that started it, however that went. Torch-free.

Linux signals a process when the thread that started it is gone; elsewhere nothing does, and a rank
whose launcher was killed goes on.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from ptrain.train import environment

_PR_SET_PDEATHSIG = 1
# looked up here: between fork and exec the loader's lock may be another thread's
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def die_with_agent() -> None:
    """The same for a rank of torch's agent, which starts ranks that live on when it is killed."""
    if environment.agent():
        die_with(os.getppid())


def die_with(parent: int) -> None:
    """From here on this process is killed when its parent is gone; at once where that is no longer
    `parent`."""
    if _PRCTL is None:
        return
    _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
