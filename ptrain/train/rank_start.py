"""How a rank starts: it does not outlive the process that started it, and refuses once on a node
what the user got wrong. Torch-free, since an unsupported torch is refused before anything imports
it.

Linux signals a process when the thread that started it is gone; elsewhere nothing does, and a rank
whose launcher was killed goes on.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

from ptrain.errors import PtrainError
from ptrain.installed import require_torch
from ptrain.report.screen import paint
from ptrain.train import environment

_LET_RANK_0_SPEAK = 2.0  # seconds: torchrun ends all ranks as soon as one has gone
_PR_SET_PDEATHSIG = 1
# looked up here: between fork and exec the loader's lock may be another thread's
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def begin() -> None:
    """Begin a rank, before torch is imported: that takes seconds, in which torch's agent may be
    killed, whose ranks would live on. Ends the rank with its message and exit code 2 where
    `require_torch` raises."""
    if environment.agent():
        die_with(os.getppid())
    try:
        require_torch()
    except PtrainError as error:
        sys.exit(code_of(error))


def die_with(parent: int) -> None:
    """From here on this process is killed when its parent is gone; at once where that is no longer
    `parent`."""
    if _PRCTL is None:
        return
    _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def code_of(error: PtrainError) -> int:
    """Return the exit code of what the user got wrong, once it is printed: by the first rank of a
    node, which may lack a file that others have."""
    if environment.is_first_of_node():
        print(paint(str(error), sys.stderr), file=sys.stderr, flush=True)
    else:
        time.sleep(_LET_RANK_0_SPEAK)
    return error.exit_code
