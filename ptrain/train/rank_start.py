"""The start of a rank: it ends with its parent, and errors of the user are printed once per node.

Linux signals a process when the thread that started it ends. On other systems a rank continues
after its launcher was killed. This module imports no torch: an unsupported torch must be rejected
before it is imported.
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
