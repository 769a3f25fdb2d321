"""Whether a machine is as fast as it was a while ago: the same work again, on all its cores.

A virtual machine shares its host: for minutes its cores lose a part of their time, their caches or
their memory to others, which neither its own load nor its clock shows. `python _pace.py` is what
runs on a core: it answers each line that it reads.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass

import numpy as np
from _machine import ROOT, cores, environment

_SIDE, _ELEMENTS = 384, 2**24  # of a product's factors; of what memory moves: 64 MiB
_SECONDS = 0.4  # of one kind of work
# No huge pages, which an array has or has not as memory happens to be.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "NUMPY_MADVISE_HUGEPAGE": "0"}
_WARM_UP = 2  # times: cores that were idle take twice as long for half a second


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds of a product and of a pass over memory, on all cores at once. How long a process
    takes to wake is left out: on a quiet machine it is half as long again from one look to the
    next."""

    product: float
    memory: float

    def apart(self, other: Pace) -> float:
        """Return by how much the slower takes longer, of that work in which they differ most."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return max(max(pair) / min(pair) - 1 for pair in pairs)


class Machine:
    """A process for each core, which waits between two looks at the machine's pace."""

    def __init__(self) -> None:
        self.workers = [
            subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
                env=environment(ROOT) | _ENVIRONMENT,
            )
            for _ in range(cores())
        ]
        self.look()  # memory is touched for the first time

    def close(self) -> None:
        """End them."""
        for worker in self.workers:
            worker.terminate()
            worker.wait()

    def look(self) -> Pace:
        """Return its pace now."""
        for _ in range(_WARM_UP):
            self._all("product")
        product, memory = (self._all(word) for word in _WORKS)
        return Pace(product=product, memory=memory)

    def _all(self, word: str) -> float:
        for worker in self.workers:
            _say(worker, word)
        return statistics.fmean(float(_heard(worker)) for worker in self.workers)


def _say(worker: subprocess.Popen[str], word: str) -> None:
    assert worker.stdin is not None
    worker.stdin.write(word + "\n")
    worker.stdin.flush()


def _heard(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    return worker.stdout.readline()


def _products() -> Callable[[], object]:
    factor = np.ones((_SIDE, _SIDE), dtype=np.float32)
    return lambda: factor @ factor


def _passes() -> Callable[[], object]:
    numbers = np.ones(_ELEMENTS, dtype=np.float32)
    return lambda: np.negative(numbers, out=numbers)


_WORKS = {"product": _products, "memory": _passes}


def _median_seconds(work: Callable[[], object]) -> float:
    samples = []
    end = time.perf_counter() + _SECONDS
    while (began := time.perf_counter()) < end:
        work()
        samples.append(time.perf_counter() - began)
    return statistics.median(samples)


def answer() -> None:
    """Answer each line with the seconds of the work that it names."""
    works = {word: make() for word, make in _WORKS.items()}
    for line in sys.stdin:
        print(_median_seconds(works[line.strip()]), flush=True)


if __name__ == "__main__":
    answer()
