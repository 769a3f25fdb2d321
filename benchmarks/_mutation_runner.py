"""A pytest plugin: which tests run which lines, and which test fails on a mutant.

`python -m pytest -p _mutation_runner` collects the tests once. Told to make a map, it runs them all
and writes what each runs and how long it takes. Told to judge mutants, it forks itself for each:
the child puts the changed code into the functions that live, forgets what was cached, and runs the
tests that reach the change, quickest first, up to the first that fails. The changed file is written
to the copy meanwhile, for tests that start processes.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import coverage
import pytest
from _pytest.runner import runtestprotocol
from hypothesis import settings

# Examples that failed on one mutant must not be tried first on the next, and every run draws alike.
settings.register_profile("mutation", database=None, derandomize=True, deadline=None)
settings.load_profile("mutation")

MAP = os.environ.get("MUTATION_MAP", "")  # the file to write a map to
ONLY = os.environ.get("MUTATION_ONLY", "")  # the file with the tests to run, in their order
JOBS = os.environ.get("MUTATION_JOBS", "")  # the file with the mutants to judge
VERDICTS = os.environ.get("MUTATION_VERDICTS", "")  # the file to write their verdicts to
LINES_OF = tuple(
    f"ptrain/{name}/*"
    for name in ("spec", "algebra", "derivation", "axes", "optimizers", "runtime")
)

# Processor seconds of a mutant: so many times those of its tests, and
# some to spare. Wall: a child that waits.
TIMES, SPARE, _WALL = 3, 10, 600
_BYTES = 8 << 30  # of address space, against a mutant that allocates without end
Job = dict[str, object]
_SURVIVED, _KILLED, _BROKEN = 0, 1, 70
_WORDS = {_SURVIVED: "survived", _KILLED: "killed"}
_CACHE = type(lru_cache(lambda: None))

_coverage = coverage.Coverage(data_file=None, include=LINES_OF, config_file=False)
if MAP:
    _coverage.start()  # before the first import of what is measured


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if ONLY:
        place = {name: i for i, name in enumerate(json.loads(Path(ONLY).read_text()))}
        items[:] = sorted((i for i in items if i.nodeid in place), key=lambda i: place[i.nodeid])


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if MAP:
        _make_map(session)
    elif JOBS and not session.testsfailed:
        _judge_all(session)
    else:
        return None  # pytest's own loop
    return True


def _make_map(session: pytest.Session) -> None:
    seconds = {}
    for item, after in _with_next(session.items):
        _coverage.switch_context(item.nodeid)
        began = time.process_time()
        if any(report.failed for report in runtestprotocol(item, nextitem=after)):
            print(f"{item.nodeid} fails without any change: it judges nothing")
        else:
            seconds[item.nodeid] = time.process_time() - began
    _coverage.stop()
    data, root = _coverage.get_data(), str(Path.cwd())
    number = {name: place for place, name in enumerate(seconds)}
    lines = {
        os.path.relpath(file, root): {
            line: sorted(number[name] for name in names if name in number)
            for line, names in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }
    content = {"tests": list(seconds), "seconds": list(seconds.values()), "lines": lines}
    Path(MAP).write_text(json.dumps(content), encoding="utf-8")


def _with_next(items: Sequence[pytest.Item]) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    """pytest takes down what the next test does not need."""
    return zip(items, [*items[1:], None], strict=True)


def _judge_all(session: pytest.Session) -> None:
    """Run all mutants. A test that kills its first mutant must also pass without a change, or it is
    excluded."""
    items = {item.nodeid: item for item in session.items}
    alive = _Alive()
    gc.freeze()  # children do not touch the pages of what the parent made
    passes: dict[str, bool] = {}  # without any change, by the name of a test that killed a mutant
    with Path(VERDICTS).open("a", encoding="utf-8") as out, Path(JOBS).open() as jobs:
        for line in jobs:
            job = json.loads(line)
            while True:
                names = (name for name in job["tests"] if passes.get(name, True))
                found = _judge(job, [items[name] for name in names if name in items], alive)
                by = str(found["by"])
                if found["verdict"] != "killed" or passes.get(by):
                    break
                source = Path(job["file"]).read_text(encoding="utf-8")
                same = _judge(job | {"source": source}, [items[by]], alive)
                passes[by] = same["verdict"] == "survived"
            out.write(json.dumps({"name": job["name"], **found}) + "\n")
            out.flush()


def _judge(job: Job, tests: Sequence[pytest.Item], alive: _Alive) -> dict[str, object]:
    """Return the result of a mutant: `survived`, `killed` with the test, or `timeout`."""
    path = Path(str(job["file"]))
    text, times = path.read_bytes(), path.stat()
    read, write = os.pipe()
    began = time.time()
    path.write_text(str(job["source"]), encoding="utf-8")
    try:
        child = os.fork()
        if child == 0:
            os.close(read)
            _child(job, tests, alive, write)
        os.close(write)
        status = _wait(child, began + _WALL)
        told = os.read(read, 65536).decode()
    finally:
        os.close(read)
        path.write_bytes(text)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    seconds = round(time.time() - began, 2)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return {"verdict": "timeout", "by": name, "seconds": seconds}
    verdict = _WORDS.get(os.WEXITSTATUS(status), "broken")
    return {"verdict": verdict, "by": told, "seconds": seconds}


def _wait(child: int, until: float) -> int:
    """Return the child's status; kill it after the time limit."""
    while time.time() < until:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status
        time.sleep(0.005)
    os.killpg(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def _child(job: Job, tests: Sequence[pytest.Item], alive: _Alive, told: int) -> None:
    """Run the tests and exit with 0 if all pass, else with 1 and the failed test."""
    code, name = _BROKEN, ""
    try:
        os.setpgid(0, 0)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        limit = int(used + SPARE + TIMES * float(str(job["seconds"])))
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
        resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
        # two mutants may have the same size and second, by which byte code is told to be stale
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        file = str(Path(str(job["file"])).resolve())
        alive.replace(file, str(job["function"]), str(job["source"]))
        code, name = _SURVIVED, ""
        for item, after in _with_next(tests):
            if any(report.failed for report in runtestprotocol(item, log=False, nextitem=after)):
                code, name = _KILLED, item.nodeid
                break
    except BaseException as error:  # noqa: BLE001 - a child must never run on as its parent
        code, name = _BROKEN, f"{type(error).__name__}: {error}"
    finally:
        os.write(told, name.encode()[:4000])
        os._exit(code)


class _Alive:
    """The functions and caches of this repository that exist after the collection of the tests."""

    def __init__(self) -> None:
        self.functions: dict[tuple[str, str], list[FunctionType]] = {}
        self.files: set[str] = set()
        self.caches: list[Any] = []
        for each in gc.get_objects():
            if isinstance(each, FunctionType):
                code = each.__code__
                self.functions.setdefault((code.co_filename, code.co_qualname), []).append(each)
                self.files.add(code.co_filename)
            elif type(each) is _CACHE and each.__module__.split(".")[0] in ("ptrain", "tests"):
                self.caches.append(each)

    def replace(self, file: str, function: str, source: str) -> None:
        """Gives the changed code to the function; a file not yet imported is read as it stands."""
        if file not in self.files:
            return
        codes = list(_codes(compile(source, file, "exec", dont_inherit=True), function))
        alive = self.functions[file, function]
        first = sorted({each.__code__.co_firstlineno for each in alive})
        assert len(first) == len(codes), f"{len(first)} functions, {len(codes)} changed"
        for each in alive:
            each.__code__ = codes[first.index(each.__code__.co_firstlineno)]
        for cache in self.caches:
            cache.cache_clear()


def _codes(code: CodeType, name: str) -> Iterator[CodeType]:
    """Return the code objects of that name in the order of the file: a property and its setter
    share one."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_qualname == name:
                yield inner
            else:
                yield from _codes(inner, name)
