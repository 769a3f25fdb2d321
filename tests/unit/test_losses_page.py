"""`benchmarks/losses.py --check` compares two runs: the strategy and step that differ."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

ROW = {"losses": ["0x1.4p+2", "0x1.3p+2"], "norms": ["0x1.0p+0", "0x1.1p+0"], "parameters": "a"}


@pytest.fixture(scope="module")
def losses(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("losses")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        (
            {"losses": ["0x1.4p+2", "0x1.3000000000001p+2"]},
            ["x: loss of step 2: 4.75 (0x1.3p+2) -> 4.750000000000001 (0x1.3000000000001p+2)"],
        ),
        (
            {"norms": ["0x1.0p+0"]},
            ["x: norm of the gradients of step 2: 1.0625 (0x1.1p+0) -> –"],
        ),
        ({"parameters": "b"}, ["x: parameters after step 2"]),
    ],
)
def test_the_first_step_that_differs_in_a_bit_is_named_with_both_figures(losses, changed, expected):
    assert list(losses.differences("x", ROW, ROW | changed)) == expected


def test_another_machine_is_named(losses):
    here = losses.platform()
    assert not losses.elsewhere(here)
    (line,) = losses.elsewhere(here | {"torch": "1.0"})
    assert line.startswith("torch: 1.0 on the page, ") and line.endswith(" here")


def test_a_digest_is_of_names_dtypes_and_bytes_and_not_of_their_order(losses):
    first, second = torch.tensor([1.0, 0.0]), torch.tensor([2.0])
    digest = losses.digest({"a": first, "b": second})
    assert digest == losses.digest({"b": second, "a": first})
    others = (
        {"a": first, "c": second},
        {"a": torch.tensor([1.0, -0.0]), "b": second},
        {"a": first, "b": second.double()},
    )
    assert digest not in [losses.digest(other) for other in others]
