"""The time of a test run by suite and by file, printed after the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

_MOST_FILES = 12
_LONG = 60  # seconds: below, it was a look at a few tests


def write_shares(terminal: pytest.TerminalReporter) -> None:
    """Print seconds of setup, call and teardown together; the first test that waits for shared
    ranks includes their time."""
    reports = [
        report
        for kind in ("", "passed", "failed", "error", "skipped")
        for report in terminal.getreports(kind)
        if isinstance(report, pytest.TestReport)
    ]
    files, tests = shares(reports)
    if sum(files.values()) < _LONG:
        return
    suites: Counter[str] = Counter()
    for name, seconds in files.items():
        suites[name.split("/")[1] if name.count("/") > 1 else name] += seconds
    line = terminal.write_line
    terminal.section("shares of the time")
    for suite, seconds in suites.most_common():
        number = sum(count for name, count in tests.items() if f"/{suite}/" in name)
        line(f"{seconds:8.1f} s  {number:6} tests  tests/{suite}")
    for name, seconds in files.most_common(_MOST_FILES):
        line(f"{seconds:8.1f} s  {tests[name]:6} tests  {name}")


def shares(reports: Iterable[pytest.TestReport]) -> tuple[Counter[str], Counter[str]]:
    """Return the seconds and the number of tests by file."""
    seconds: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for report in reports:
        name = report.nodeid.partition("::")[0]
        seconds[name] += report.duration
        tests[name] += report.when == "call"
    return seconds, tests
