"""Fixtures of all tests: one thread per process, and one pool of ranks per worker."""

from __future__ import annotations

import gc
import itertools
import os
import random

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in the ranks
# of the cases that are drawn: another one in each run, one for all of its workers
os.environ["PTRAIN_SEED"] = os.environ.get("PTRAIN_SEED") or str(random.randrange(10_000))

import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest

from ptrain.cli.main import main
from tests.ranks import Ranks
from tests.shares import write_shares

# no test is timed: how long an example takes is the machine's
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Predictions are many small objects and few cycles: by default a collection follows every 700, for
# an eighth of the time. What holds tensors in cycles is collected where memory is measured.
gc.set_threshold(50_000)

MOST_WORKERS = 4
_NUMBERS = itertools.count()
_TRACES = tempfile.TemporaryDirectory(prefix="ptrain-traces-")  # while the tests run


@pytest.fixture(autouse=True)
def _separate_trace_cache() -> None:
    """Give each test a separate trace cache."""
    os.environ["PTRAIN_CACHE"] = str(Path(_TRACES.name, str(next(_NUMBERS))))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record",
        action="store_true",
        help="write what the matrix of specs gave into benchmarks/results/",
    )
    parser.addoption(
        "--settings",
        type=int,
        help="of each row of the data axis only the first so many settings, which hold most pairs",
    )


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return one worker per core, up to four: each has a pool of up to eight ranks of 0.3 GB.
    Return one for single files, which start sooner, and for a record, which is one page of all
    tests."""
    are_files = all(Path(word.partition("::")[0]).is_file() for word in config.args)
    if are_files or config.getoption("--record"):
        return 0
    return min(MOST_WORKERS, len(os.sched_getaffinity(0)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    write_shares(terminalreporter)


@pytest.fixture(scope="module", autouse=True)
def _earlier_objects_are_not_collected() -> None:
    """Traces, simulations and meters begin with a collection. What is imported and what other
    modules left are most that it would look at: a second, where the module's own take 20 ms. What
    is in a cycle at that moment is never freed."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def benchmark_module() -> Iterator[Callable[[str], ModuleType]]:
    """Yield the function that imports a module of benchmarks/ or docs/tools/ by name. Modules of
    these folders import each other as scripts."""
    root = Path(__file__).parents[1]
    folders = [str(root / "benchmarks"), str(root / "docs" / "tools")]
    sys.path[:0] = folders
    yield import_module
    for folder in folders:
        sys.path.remove(folder)


@pytest.fixture(autouse=True, scope="session")
def wide_screens() -> Iterator[None]:
    """Widen all screens: tables keep all columns, and sentences are not folded."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "400"
    yield
    if before is None:
        del os.environ["COLUMNS"]
    else:
        os.environ["COLUMNS"] = before


@pytest.fixture
def ptrain(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a command line in this process and returns its output, or raises
    AssertionError."""

    def run(*arguments: str, code: int = 0) -> str:
        exit_code = main(list(arguments))
        captured = capsys.readouterr()
        assert exit_code == code, captured.err
        return captured.out

    return run


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Return the pools of ranks: `ranks.run(2, function, *args)` returns one result per rank
    (tests/ranks.py)."""
    pool = Ranks()
    yield pool
    pool.close()
