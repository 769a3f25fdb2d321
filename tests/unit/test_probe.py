"""Which step of a run is the steady one that is measured."""

from __future__ import annotations

import pytest

from ptrain.algebra.legality import require
from ptrain.spec.load import load
from ptrain.train.probe import first_steady


@pytest.mark.parametrize(
    ("overrides", "steady"),
    [
        ((), 2),
        (("eval.every=2",), 2),
        (("gather_after_update=next-forward",), 2),
        (("gather_after_update=next-forward", "eval.every=2"), 3),
        (("gather_after_update=next-forward", "eval.every=2", "checkpoint.every=3"), 5),
        (("gather_after_update=next-forward", "eval.every=1"), 2),
    ],
)
def test_the_steady_step_begins_where_the_update_before_it_ended(overrides, steady):
    spec = require(load("zero1", overrides))
    assert first_steady(spec, 0) == steady
