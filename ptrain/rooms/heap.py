"""What a rank on a processor frees is kept for its next step, as CUDA's caching allocator keeps it.

glibc gives the end of its heap back to the system once more than 64 MiB of it are free, and a page
that comes anew costs a fault: to write 43 MB for the first time took 40 ms, and 5 ms again (two
cores of an AMD EPYC, in a virtual machine). A step frees and asks for the same sizes as the one
before: gradients, what gloo copies of them, activations. Blocks above 32 MiB, the largest threshold
that glibc takes, are mapped one by one and given back still.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as malloc.h numbers them
_NEVER = 2**31 - 1  # bytes: mallopt takes an int
_LARGEST = 32 * 2**20  # bytes: HEAP_MAX_SIZE / 2, where glibc comes by itself as blocks are freed


def keep_freed_memory() -> None:
    """From here on this process keeps what it frees. Nothing happens where its C library is not
    glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _NEVER)
        mallopt(_MMAP_THRESHOLD, _LARGEST)
