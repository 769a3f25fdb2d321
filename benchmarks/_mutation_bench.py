"""The workspace of the mutation benchmark: a clone of HEAD in a separate folder with the
measurements of the tests and the verdicts, so that an interrupted run resumes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _machine import ROOT

if TYPE_CHECKING:
    from _mutant import Mutant
    from mutation import Found


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """The tests of a stage; surviving mutants go to the next stage."""

    stages: Mapping[str, tuple[str, ...]]
    left_out: tuple[str, ...]
    enough: float = 8.0  # processor seconds of tests: what lives through them counts as alive
    slow: float = 2.0  # seconds: a test that takes longer judges only what no quicker one reaches


SUITE = Suite(
    stages={
        "pure": ("tests/pure",),
        "unit": tuple(  # holds derivation against torch
            f"tests/unit/test_{name}.py"
            for name in ("fake", "flat_runs", "operations", "parameters", "replay", "trace")
        ),
    },
    left_out=("tests/pure/test_layers.py",),  # it would see a mutant for its looks
)
FEW = 3  # files of tests that a mutant with processes of its own meets first
ALONE = 600  # seconds, wall, of such a process
PASSED = (0, 5)  # pytest's codes: all passed, or no test has a name that was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The tests, the CPU seconds of each, and the lines that each runs. A line that runs only at
    import has no test."""

    tests: list[str]
    seconds: list[float]
    lines: dict[str, dict[str, list[int]]]
    suite: Suite

    def of(self, mutant: Mutant) -> list[int]:
        """Return the tests that run its statement, limited to `enough` of them."""
        return self._enough({test for tests in self._of_lines(mutant) for test in tests})

    def is_at_import(self, mutant: Mutant) -> bool:
        """Return True if it runs when the file is imported, and in no test."""
        ran = self._of_lines(mutant)
        return not mutant.function or (bool(ran) and not any(ran))

    def of_file(self, mutant: Mutant, *, others: bool) -> list[int]:
        """Return the tests for code that runs at import: those that run code of its file, then the
        others."""
        near = {test for tests in self.lines.get(mutant.file, {}).values() for test in tests}
        rest = set(range(len(self.tests))) - near if others else set()
        return self._enough(near) + self._enough(rest)

    def _of_lines(self, mutant: Mutant) -> list[list[int]]:
        (first, last), lines = mutant.statement, self.lines.get(mutant.file, {})
        return [lines[str(line)] for line in range(first, last + 1) if str(line) in lines]

    def _enough(self, tests: set[int]) -> list[int]:
        """Return the fastest setting of each test function, then further ones: settings of a
        function resemble each other."""
        quick = {test for test in tests if self.seconds[test] <= self.suite.slow} or tests
        functions: dict[str, list[int]] = {}
        for test in sorted(quick, key=lambda test: self.seconds[test]):
            functions.setdefault(self.tests[test].partition("[")[0], []).append(test)
        turns = [test for turn in zip_longest(*functions.values()) for test in turn]
        kept = [test for test in turns if test is not None]
        until = accumulate(self.seconds[test] for test in kept)
        enough = self.suite.enough
        return [test for test, used in zip(kept, until, strict=True) if used <= enough] or kept[:1]


class Bench:
    """A clone of HEAD with its measurements."""

    def __init__(self, folder: Path, suite: Suite = SUITE) -> None:
        self.folder, self.tree, self.suite = folder, folder / "tree", suite
        if not self.tree.exists():
            clone = ["git", "clone", "--quiet", "--local", str(ROOT), str(self.tree)]
            subprocess.run(clone, check=True)

    @property
    def commit(self) -> str:
        command = ["git", "-C", str(self.tree), "describe", "--always"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def judge(self, found: Iterable[Found], stage: str) -> None:
        """Run every mutant that no earlier stage has killed."""
        reach, path = self.reach(stage), self.folder / f"verdicts_{stage}.jsonl"
        packages, known = list(found), dict(_rows(path))
        sampled = [mutant for each in packages for mutant in each.sampled if each.lives(mutant)]
        todo = [mutant for mutant in sampled if mutant.name not in known]
        jobs = [_job(m, reach, reach.of(m)) for m in todo if not reach.is_at_import(m)]
        if jobs := [job for job in jobs if job["tests"]]:
            listed = self.folder / "jobs.jsonl"
            listed.write_text("".join(json.dumps(job) + "\n" for job in jobs), encoding="utf-8")
            self._pytest(self.suite.stages[stage], MUTATION_JOBS=listed, MUTATION_VERDICTS=path)
        for mutant in (mutant for mutant in todo if reach.is_at_import(mutant)):
            tests = reach.of_file(mutant, others=stage == next(iter(self.suite.stages)))
            if tests:
                row = self._alone(mutant, stage, [reach.tests[test] for test in tests])
                with path.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(row) + "\n")
        known = dict(_rows(path))
        for each in packages:
            names = (mutant.name for mutant in each.sampled)
            each.verdicts |= {name: known[name] for name in names if name in known}

    def reach(self, stage: str) -> Reach:
        """Measure once which tests of the stage run which lines."""
        path = self.folder / f"{stage}.json"
        if not path.exists():
            self._pytest(self.suite.stages[stage], MUTATION_MAP=path)
        return Reach(suite=self.suite, **json.loads(path.read_text(encoding="utf-8")))

    def _alone(self, mutant: Mutant, stage: str, tests: Sequence[str]) -> dict[str, Any]:
        """A mutant of what runs at import: it takes processes of its own, of which the first has
        the few files with most of the tests."""
        path, only = self.tree / mutant.file, self.folder / "only.json"
        text, times = path.read_bytes(), path.stat()
        path.write_text(mutant.source, encoding="utf-8")
        files_of = Counter(test.partition("::")[0] for test in tests)
        first = [file for file, _ in files_of.most_common(FEW)]
        near = [test for test in tests if test.partition("::")[0] in first]
        rest = [test for test in tests if test.partition("::")[0] not in first]
        try:
            for files, chosen in ((first, near), (self.suite.stages[stage], rest)):
                only.write_text(json.dumps(chosen), encoding="utf-8")
                if chosen and self._pytest(files, MUTATION_ONLY=only) not in PASSED:
                    return {"name": mutant.name, "verdict": "killed", "by": str(files[0])}
        except subprocess.TimeoutExpired:
            return {"name": mutant.name, "verdict": "timeout", "by": ""}
        finally:
            path.write_bytes(text)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        return {"name": mutant.name, "verdict": "survived", "by": ""}

    def _pytest(self, tests: Sequence[str], **paths: Path) -> int:
        command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "_mutation_runner"]
        command += ["-p", "no:cacheprovider", *tests]
        command += [f"--deselect={file}" for file in self.suite.left_out]
        places = os.pathsep.join([str(self.tree), str(ROOT / "benchmarks")])
        fixed = {"PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
        told = {name: str(path) for name, path in paths.items()}
        return subprocess.run(
            command,
            cwd=self.tree,
            env=os.environ | fixed | told,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=ALONE if "MUTATION_ONLY" in told else None,
            check=False,
        ).returncode


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            yield row["name"], row


def _job(mutant: Mutant, reach: Reach, tests: Sequence[int]) -> dict[str, Any]:
    """What the runner needs to know of a mutant."""
    return {
        "name": mutant.name,
        "file": mutant.file,
        "function": mutant.function,
        "source": mutant.source,
        "tests": [reach.tests[test] for test in tests],
        "seconds": sum(reach.seconds[test] for test in tests),
    }
