"""The public functions have docstrings with arguments, results, errors and an example that runs."""

from __future__ import annotations

import doctest
import inspect

import pytest

import ptrain

PUBLIC = tuple(name for name in ptrain.__all__ if not name.startswith("__"))
STARTS_RANKS = {"run"}  # whose example the gloo tests of notebooks cover


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_docstring_names_every_parameter(name):
    public = getattr(ptrain, name)
    text = inspect.getdoc(public)
    for parameter in inspect.signature(public).parameters:
        assert f"\n    {parameter}: " in text, parameter
    assert "Example" in text and (inspect.isclass(public) or "\nReturns:\n" in text)


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in STARTS_RANKS])
def test_the_example_of_a_public_docstring_prints_its_output(name):
    text = inspect.getdoc(getattr(ptrain, name))
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    if not example.examples:
        shared = text.rpartition("Example: see `ptrain.")[2].partition("`")[0]
        assert shared in PUBLIC
        return
    printed: list[str] = []
    outcome = doctest.DocTestRunner().run(example, out=printed.append)
    assert not outcome.failed, "".join(printed)
