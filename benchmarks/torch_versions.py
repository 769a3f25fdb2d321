"""The default tests and `simulate`, with several versions of torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from _machine import ROOT, commit
from _script import Script, table_head, table_row

# By suite, what pytest is given: the default tests of each folder, and of `simulate` those at night
# too, in which every distinct rank of every strategy holds and sends what was derived.
SUITES = {suite: [f"tests/{suite}"] for suite in ("pure", "unit", "gloo", "faults", "cuda")}
SUITES["simulate"] = ["-m", "nightly or not nightly", "tests/unit/test_simulation.py"]
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|error)")
_FAILED = re.compile(r"(?:FAILED|ERROR) (tests/\S+)")
_ASKED = (
    "import json, sys, torch, numpy, transformers, platform; print(json.dumps({'torch': "
    "torch.__version__, 'Python': platform.python_version(), 'numpy': numpy.__version__, "
    "'transformers': transformers.__version__}))"
)
Result = dict[str, Any]
SCRIPT = Script("torch_versions")


def environment() -> dict[str, str]:
    """Return the environment in which an interpreter has this tree's ptrain."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def versions(python: str) -> dict[str, str]:
    """Return the versions of an interpreter's packages."""
    said = subprocess.run(
        [python, "-c", _ASKED], capture_output=True, text=True, check=True, env=environment()
    )
    answer: dict[str, str] = json.loads(said.stdout)
    return answer


def tested(python: str, suite: str) -> Result:
    """Run the tests of a suite; return their counts and the names of those that failed."""
    words = [python, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *SUITES[suite]]
    ended = subprocess.run(
        words, capture_output=True, text=True, check=False, cwd=ROOT, env=environment()
    )
    return summary(ended.stdout)


def summary(text: str) -> Result:
    """Return what pytest's output says: counts, and the names of what failed."""
    lines = [line for line in text.splitlines() if re.search(r"\d+ \w+.* in [\d.]+s", line)]
    counts = {kind: int(number) for number, kind in _COUNT.findall(lines[-1])} if lines else {}
    failures = sorted({*_FAILED.findall(text)})
    return {"counts": counts, "failed": failures if lines else ["pytest gave no summary"]}


def measured(pythons: Sequence[str], suites: Sequence[str], kept: Path | None) -> list[Result]:
    """Run every suite with every interpreter, in turn; what is kept of it is not run again."""
    results: list[Result] = json.loads(kept.read_text()) if kept and kept.exists() else []
    for python in pythons:
        packages = versions(python)
        for suite in suites:
            if any((r["torch"], r["suite"]) == (packages["torch"], suite) for r in results):
                continue
            begun = time.monotonic()
            outcome = tested(python, suite)
            results.append(
                {
                    **packages,
                    "suite": suite,
                    "commit": commit(),
                    "seconds": round(time.monotonic() - begun),
                    **outcome,
                }
            )
            print(row(results[-1]), flush=True)
            if kept:
                kept.write_text(json.dumps(results, indent=1))
    return results


def row(result: Result) -> str:
    """Return a result as a row of the page's table."""
    counts = result["counts"]
    failed = counts.get("failed", 0) + counts.get("error", 0)
    cells = (
        *(result["torch"], result["suite"], counts.get("passed", 0), failed),
        *(counts.get("skipped", 0), result["seconds"], result["commit"]),
    )
    return table_row(*cells)


def table(results: Sequence[Result]) -> Iterator[str]:
    """Yield the page's tables: packages by version of torch, and counts by suite."""
    yield from table_head("torch", "Python", "numpy", "transformers")
    packages = {(r["torch"], r["Python"], r["numpy"], r["transformers"]) for r in results}
    yield from (table_row(*of) for of in sorted(packages))
    yield ""
    yield from table_head("torch", "suite", "passed", "failed", "skipped", "seconds", "commit")
    yield from map(row, sorted(results, key=lambda r: (r["torch"], r["suite"])))
    yield ""
    yield "`simulate`: the tests of simulated ranks beside what was derived, those at night too."


def main(arguments: Sequence[str]) -> int:
    """Run all, print tables and verdict; return 1 where anything fails."""
    parser = SCRIPT.parser()
    parser.add_argument("pythons", nargs="+", metavar="PYTHON")
    parser.add_argument("--suites", nargs="+", choices=(*SUITES,), default=[*SUITES])
    parser.add_argument("--kept", type=Path, help="a file of results, which is added to")
    options = parser.parse_args(arguments)
    head = SCRIPT.head()
    results = measured(options.pythons, options.suites, options.kept)
    failed = [
        f"torch {result['torch']}, {result['suite']}: {name}"
        for result in results
        for name in result["failed"]
    ]
    return SCRIPT.conclude([*head, *table(results)], failed, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
