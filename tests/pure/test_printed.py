"""Results of the Python API print like the command line, and their `repr` is short."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import ptrain as api
from ptrain.report.predict import prediction_of, prediction_screen

SPECS = ["zero3", "8b-ddp", "pp-1f1b", "tp-sp"]


@pytest.mark.parametrize("name", SPECS)
def test_a_value_prints_the_output_of_its_command(ptrain: Callable[..., str], name: str) -> None:
    document = api.load(name)
    derivation = api.derive(document.spec)
    assert f"{derivation}\n" == _without_next(ptrain("predict", name))
    assert f"{document}\n" == f"{document.spec}\n" == ptrain("specs", "show", name)
    assert f"{derivation.plan}" == f"{api.lower(document.spec)}"
    warnings = [f"warning: {warning}" for warning in derivation.exact.warnings]
    printed = _without_next(ptrain("plan", name))
    assert "\n".join([str(derivation.plan), *warnings, ""]) == printed


def _without_next(text: str) -> str:
    """Return a screen without its last line, the next command."""
    screen, _, command = text.rpartition("\nNext: ptrain ")
    assert command.count("\n") == 1
    return screen


@pytest.mark.parametrize("column", ["paper", "exact"])
def test_an_estimate_prints_its_column_alone(column: str) -> None:
    derivation = api.derive(api.load("zero3").spec)
    lines = str(getattr(derivation, column)).splitlines()
    assert lines[0].split() == ["memory", "per", "rank", column]
    sent = next(line for line in lines if line.startswith("total")).split()
    screen = prediction_screen(prediction_of(derivation), explain=True)
    whole = next(line for line in screen.splitlines() if line.startswith("total"))
    assert " ".join(sent[-2:]) in whole


def test_a_repr_is_a_line() -> None:
    document = api.load("70b-zero3")
    derivation = api.derive(document.spec)
    for value in (document, document.spec, derivation, derivation.exact, derivation.plan):
        assert "\n" not in repr(value) and len(repr(value)) < 120


def test_the_python_api_asks_for_the_same_facts_of_a_models_code() -> None:
    spec = api.load("zero3", ["model={target: tests.models_external:necks}"]).spec
    with pytest.raises(Exception, match=r"read_facts\(spec, allow_import=True\)"):
        api.derive(spec)
