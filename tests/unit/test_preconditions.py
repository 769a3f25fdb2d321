"""The same run twice: what is the same, and what is not."""

from __future__ import annotations

import math

from ptrain.rooms.world import World
from ptrain.train.exchange import Exchange
from ptrain.verification.preconditions import _same_bits, _same_tensors


def test_a_loss_that_is_no_number_twice_is_the_same_twice() -> None:
    assert _same_bits([1.0, math.nan], [1.0, math.nan]).holds
    found = _same_bits([1.0, math.nan], [1.0, 2.0])
    assert found.why == "step 1: nan the first time, 2.0 the second"


def test_a_tensor_that_only_one_of_two_runs_has_is_another() -> None:
    alone = Exchange(World())
    for first, second in (({}, {"a": "x"}), ({"a": "x"}, {})):
        found = _same_tensors(first, second, alone)
        assert not found.holds
        assert (found.predicted, found.measured) == (1, 0)
        assert found.why.startswith("a has other bits on rank 0")
    assert _same_tensors({"a": "x"}, {"a": "x"}, alone).holds
