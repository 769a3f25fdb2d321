"""A process that measures the CPU milliseconds of `ptrain.derive` for specs, with the ptrain on its
path.

Prints JSON: by spec the median of some calls after a first one, and the prediction for rank 0."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence

import ptrain

AT_LEAST, AT_MOST = 5, 60  # calls of each spec
ENOUGH = 0.5  # seconds


def measure(words: Sequence[str]) -> tuple[float, str]:
    """Return the milliseconds, and the bytes of all states and the peak of rank 0. `words` are a
    spec's name or file, and overrides."""
    spec = ptrain.load(words[0], words[1:]).spec
    exact = ptrain.derive(spec).exact  # reads the tables
    times: list[float] = []
    while len(times) < AT_LEAST or (sum(times) < ENOUGH and len(times) < AT_MOST):
        began = time.process_time()
        ptrain.derive(spec)
        times.append(time.process_time() - began)
    states = sum(row.device_bytes for row in exact.memory if row.rank == 0)
    peak = max(row.device_bytes for row in exact.peak if row.rank == 0)
    return 1e3 * statistics.median(times), f"states {states:,} B, peak {peak:,} B"


def main(root: str, specs: Mapping[str, Sequence[str]]) -> None:
    """Of each spec of these, by what it is called."""
    assert ptrain.__file__ and ptrain.__file__.startswith(root), ptrain.__file__
    print(json.dumps({name: measure(words) for name, words in specs.items()}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
