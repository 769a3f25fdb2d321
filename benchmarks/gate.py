"""The duration of the gate by step, suite and file."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from _machine import ROOT
from _script import Script, table_head, table_row

SCRIPT = Script("gate")
BUDGET = 9 * 60  # seconds of README's test command, with the install
TESTS = "README's test command"  # as `.ci/run` marks it
_OURS = {"PYTHONPATH", "PYTEST_ADDOPTS", "PTRAIN_SEED", "VIRTUAL_ENV"}  # not of a new environment
_MARK = re.compile(r"== (?P<step>.*) \((?P<seconds>\d+) s\)")
_SHARE = re.compile(r" *(?P<seconds>[\d.]+) s +(?P<tests>\d+) tests +(?P<place>tests/\S+)")
_SUMMARY = re.compile(r"\d+ (passed|failed).* in [\d.]+s")


def run(clone: Path) -> tuple[int, list[str]]:
    """Return the exit code of the gate in a clone and its lines, printed as they come."""
    lines = []
    outside = {name: text for name, text in os.environ.items() if name not in _OURS}
    with subprocess.Popen(
        [clone / ".ci/run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=outside,
    ) as gate:
        assert gate.stdout
        for line in gate.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    return gate.returncode, lines


def seconds_by_step(lines: Sequence[str]) -> dict[str, int]:
    """Return the seconds from each step's mark to the next one; the last mark says "done"."""
    marks = [(mark["step"], int(mark["seconds"])) for mark in map(_MARK.fullmatch, lines) if mark]
    return {step: following - begun for (step, begun), (_, following) in itertools.pairwise(marks)}


def tables(lines: Sequence[str]) -> list[str]:
    """Return the page's tables: seconds by step, and seconds and tests by suite and by file."""
    steps = seconds_by_step(lines)
    shares = [share for share in map(_SHARE.fullmatch, lines) if share]
    return [
        next((match[0] for match in map(_SUMMARY.search, lines) if match), "no summary"),
        "",
        *table_head("step", "seconds"),
        *(table_row(*step) for step in steps.items()),
        "",
        "Of the tests, added up over the workers, by suite and by the files that take most:",
        "",
        *table_head("suite or file", "seconds", "tests"),
        *(table_row(*share.group("place", "seconds", "tests")) for share in shares),
    ]


def faults(code: int, steps: dict[str, int]) -> list[str]:
    """Return violations of the claim."""
    tests = steps.get(TESTS, 0)
    return [
        *([f"exit code {code}"] if code else []),
        *([] if TESTS in steps else ["no seconds of README's test command were printed"]),
        *([f"{TESTS} took {tests} s, more than {BUDGET}"] if tests > BUDGET else []),
    ]


def main(arguments: Sequence[str]) -> int:
    """Run the gate, print its times and the verdict, and return 1 where the claim fails."""
    parser = SCRIPT.parser()
    options = parser.parse_args(arguments)
    head = SCRIPT.head()
    with tempfile.TemporaryDirectory(prefix="ptrain-gate-") as folder:
        clone = Path(folder, "ptrain")
        subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
        code, lines = run(clone)
    failed = faults(code, seconds_by_step(lines))
    return SCRIPT.conclude([*head, *tables(lines)], failed, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
