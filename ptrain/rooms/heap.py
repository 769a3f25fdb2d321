"""What a rank on a processor frees is kept for its next step, as CUDA's caching allocator keeps it.

glibc gives the end of its heap back to the system once more than 64 MiB of it are free, and maps
large blocks one by one, which it gives back at once; a page that comes anew costs a fault: to write
43 MB for the first time took 40 ms, and 5 ms again (two cores of an AMD EPYC, in a virtual
machine). A step frees and asks for the same sizes as the one before: gradients, what gloo copies of
them, activations. No threshold above 32 MiB keeps blocks from being mapped, only that none may be.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MAPPED_BLOCKS = -1, -4  # as malloc.h numbers them
_NEVER = 2**31 - 1  # bytes: mallopt takes an int


def keep_freed_memory() -> None:
    """From here on this process keeps what it frees. Nothing happens where its C library is not
    glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _NEVER)
        mallopt(_MAPPED_BLOCKS, 0)
