"""A CPU rank reuses freed memory without page faults."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

_FAULTS = """
import ctypes, resource
from ptrain.runtime.queue import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def touch():
    blocks = [libc.malloc({size}) for _ in range({number})]
    for block in blocks: ctypes.memset(block, 1, {size})
    for block in reversed(blocks): libc.free(block)

{line}
for _ in range(3): touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
SIZE, NUMBER, PAGE = 24 * 2**20, 5, 4096
PAGES = NUMBER * SIZE // PAGE


def faults_of(line: str) -> int:
    """Return the page faults of blocks that are asked for again after all of them were freed."""
    program = _FAULTS.format(size=SIZE, number=NUMBER, line=line)
    return int(subprocess.check_output([sys.executable, "-c", program], text=True))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_freed_memory_is_reused_without_a_page_fault():
    assert faults_of("keep_freed_memory()") < PAGES // 100
    assert faults_of("") > PAGES // 4  # by itself glibc gives the end of its heap back
