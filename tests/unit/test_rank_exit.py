"""How a rank ends when the reader of its output has gone."""

from __future__ import annotations

import subprocess
import sys

import pytest

RANK = """
import os, sys
from ptrain.train.rank_exit import run_and_exit
read, write = os.pipe()
os.close(read)
for descriptor in {descriptors}:
    os.dup2(write, descriptor)

def run():
    for line in range(3):
        print("a line", flush=True)
        print("a warning", file=sys.stderr, flush=True)
    print("a line that is flushed at the end")
    return 1

run_and_exit(run)
"""


@pytest.mark.parametrize("descriptors", [[1], [1, 2]])
def test_a_rank_outlives_the_reader_of_its_output(descriptors: list[int]) -> None:
    code = RANK.format(descriptors=descriptors)
    words = [sys.executable, "-W", "ignore", "-c", code]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert ended.stderr == ("" if 2 in descriptors else "a warning\n" * 3)
