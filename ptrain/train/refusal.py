"""How a rank refuses: what the user got wrong is said once on a node, by its first rank.
Torch-free, since an unsupported torch is refused before anything imports it."""

from __future__ import annotations

import sys
import time

from ptrain.errors import PtrainError
from ptrain.installed import require_torch
from ptrain.report.screen import paint
from ptrain.train import environment

_LET_RANK_0_SPEAK = 2.0  # seconds: torchrun ends all ranks as soon as one has gone


def code_of(error: PtrainError) -> int:
    """Return the exit code of what the user got wrong, once it is printed: by the first rank of a
    node, which may lack a file that others have."""
    if environment.is_first_of_node():
        print(paint(str(error), sys.stderr), file=sys.stderr, flush=True)
    else:
        time.sleep(_LET_RANK_0_SPEAK)
    return error.exit_code


def leave_without_torch() -> None:
    """Ends this rank with its message and exit code 2 where `require_torch` raises."""
    try:
        require_torch()
    except PtrainError as error:
        sys.exit(code_of(error))
