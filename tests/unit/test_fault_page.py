"""What the page of planted faults claims: nothing of what was not run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tests.faults.catalogue import FAULTS

ASKED = [("zero3", "its own", 0), ("zero3", "its own", 1)]


@pytest.fixture(scope="module")
def page(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("faults")


def tried(**told: bool) -> dict[str, Any]:
    found = {"caught": True, "localised": True, "named": True, "line": "a culprit", "seconds": 1.0}
    return {**found, "commit": "abc", **told}


def calm(line: str = "") -> dict[str, Any]:
    return {"layout": "fp32", "line": line, "seconds": 1.0, "commit": "abc"}


def every() -> dict[str, dict[str, Any]]:
    return {name: tried() for name in FAULTS}


def test_a_claim_of_which_all_was_run_and_found_holds(page: ModuleType) -> None:
    alarms = {key: calm() for key in ASKED}
    assert list(page._failed(every(), alarms, ASKED)) == []
    assert "not run" not in "\n".join(page.page(every(), alarms, len(ASKED)))


def test_what_was_not_run_fails_and_is_counted(page: ModuleType) -> None:
    faults, alarms = every(), {ASKED[0]: calm()}
    del faults["duplicate sample"]
    assert list(page._failed(faults, alarms, ASKED)) == [
        "duplicate sample: was not run",
        "zero3 its own 1: was not run",
    ]
    text = "\n".join(page.page(faults, alarms, len(ASKED)))
    assert f"(1 of {len(FAULTS)} were not run)" in text and "(1 of 2 were not run)" in text


@pytest.mark.parametrize("lacking", ["caught", "localised", "named"])
def test_a_fault_is_to_be_caught_localised_and_named(page: ModuleType, lacking: str) -> None:
    faults = every() | {"duplicate sample": tried(**{lacking: False})}
    assert list(page._failed(faults, {}, [])) == [f"duplicate sample: not {lacking}: a culprit"]


def test_a_false_alarm_fails(page: ModuleType) -> None:
    alarms = {key: calm("gradients: depart") for key in ASKED[:1]}
    assert list(page._failed(every(), alarms, ASKED[:1])) == ["zero3 its own 0: gradients: depart"]


def test_an_axis_is_named_only_where_the_fault_has_one(page: ModuleType) -> None:
    found = {}
    for name, fault in FAULTS.items():
        kind = "yes" if fault.factor else "state and axis" if fault.axis else "state"
        found.setdefault(kind, set()).add(page._named(name, tried()))
    assert all(said == {kind} for kind, said in found.items())
    assert "state" in found


def test_how_sure_the_culprits_are_is_counted(page: ModuleType) -> None:
    sure = ["proven by trying", "fits", "not explained", "proven by trying"]
    names = [name for name in FAULTS if not FAULTS[name].undetectable]
    faults = {name: tried() | {"certainty": its} for name, its in zip(names, sure, strict=False)}
    said = "How sure the 4 culprits are: 2 proven by trying, 1 fits, 1 not explained."
    assert said in page.page(faults, {}, 0)


def test_a_part_is_every_nth(page: ModuleType) -> None:
    assert page._part("2/5") == (1, 5)
    with pytest.raises(argparse.ArgumentTypeError):
        page._part("6/5")
