"""A process: milliseconds of CPU time of `ptrain.derive` for specs, by the ptrain on its path.

Prints JSON, by spec the median of some calls behind a first one, and what is derived of rank 0; of
a spec that this ptrain does not have, null.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence

import ptrain
from ptrain.errors import PtrainError

AT_LEAST, AT_MOST = 5, 60  # calls of each spec
ENOUGH = 0.5  # seconds


def measure(name: str) -> tuple[float, str] | None:
    """Milliseconds, and of rank 0 the bytes of all states and its peak."""
    try:
        spec = ptrain.load(name).spec
    except PtrainError:
        return None
    exact = ptrain.derive(spec).exact  # reads the tables
    times: list[float] = []
    while len(times) < AT_LEAST or (sum(times) < ENOUGH and len(times) < AT_MOST):
        began = time.process_time()
        ptrain.derive(spec)
        times.append(time.process_time() - began)
    states = sum(row.device_bytes for row in exact.memory if row.rank == 0)
    peak = max(row.device_bytes for row in exact.peak if row.rank == 0)
    return 1e3 * statistics.median(times), f"states {states:,} B, peak {peak:,} B"


def main(root: str, names: Sequence[str]) -> None:
    assert ptrain.__file__ and ptrain.__file__.startswith(root), ptrain.__file__
    print(json.dumps({name: measure(name) for name in names}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
