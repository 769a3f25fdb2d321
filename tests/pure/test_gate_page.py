"""The page of the gate, made from lines in the gate's format."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

LINES = """\
== README's test command (0 s)
..... [100%]
============ shares of the time ============
   310.5 s     120 tests  tests/gloo
    19.1 s      53 tests  tests/gloo/test_equality.py
= 12 passed, 1 skipped in 640.10s (0:10:40) =
== layers (700 s)
3 passed in 12.00s
== style (715 s)
== done (750 s)""".splitlines()


@pytest.fixture(scope="module")
def gate(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("gate")


def test_a_step_takes_the_seconds_from_its_mark_to_the_next(gate):
    assert gate.seconds_by_step(LINES) == {"README's test command": 700, "layers": 15, "style": 35}


def test_the_page_has_the_tests_in_all_and_every_share(gate):
    page = gate.tables(LINES)
    assert page[0] == "12 passed, 1 skipped in 640.10s"
    assert page[-2:] == [
        "| tests/gloo | 310.5 | 120 |",
        "| tests/gloo/test_equality.py | 19.1 | 53 |",
    ]


def test_a_gate_fails_by_its_exit_code_and_by_more_than_nine_minutes_of_tests(gate):
    steps = {"README's first command": 60, gate.TESTS: 540}
    assert not gate.faults(0, steps)
    assert gate.faults(1, steps) == ["exit code 1"]
    too_long = "README's test command took 541 s, more than 540"
    assert gate.faults(0, {**steps, gate.TESTS: 541}) == [too_long]


def test_a_gate_that_printed_nothing_fails_by_its_exit_code(gate):
    no_times = "no seconds of README's test command were printed"
    assert gate.faults(2, gate.seconds_by_step([])) == ["exit code 2", no_times]
    assert gate.faults(0, {}) == [no_times]
    assert gate.tables([])[0] == "no summary"
