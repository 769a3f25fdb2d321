"""What a mutant does to predictions, as tests for the runner of mutants: the first fails on one
that raises, and so is no waste but an error, the second on one that changes a prediction. One that
passes both is equivalent as far as these specs go.

`PREDICTED` is there when the tests are collected, before anything is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ptrain.algebra.legality import check, find_unsupported
from ptrain.cost import Estimate
from ptrain.derivation.estimate import derive
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from tests.pure.test_drawn import random_spec

NUMBER = 400  # drawn; of these about a third is legal
STRATEGIES = Path(__file__).parents[1] / "specs" / "strategies"


def specs() -> Iterator[Spec]:
    """Every strategy, then the legal ones of those drawn."""
    written = (load(path).spec for path in sorted(STRATEGIES.glob("*.yaml")))
    for spec in (*written, *(random_spec(seed) for seed in range(NUMBER))):
        if not check(spec) and not find_unsupported(spec):
            yield spec


SPECS = list(specs())
PREDICTED: list[Estimate | None] = [derive(spec).exact for spec in SPECS]


def test_no_prediction_raises():
    for spec in SPECS:
        derive(spec)


def test_no_prediction_differs():
    for spec, predicted in zip(SPECS, PREDICTED, strict=True):
        assert derive(spec).exact == predicted, spec.name
