"""The start-up cost of commands, excluding imports that all such commands need
(benchmarks/start_up)."""

from __future__ import annotations

from itertools import islice

import pytest

ROUNDS = 12  # of a command and an import in turns, fewer where the ratio is found


@pytest.mark.parametrize("number", range(4))
def test_a_command_costs_at_most_a_multiple_of_an_import(number, benchmark_module):
    """The least of each is what it takes without what else the machine does."""
    start_up = benchmark_module("start_up")
    claim = start_up.CLAIMS[number]
    least_own = least_other = float("inf")
    for own, other in islice(start_up.pairs(claim), ROUNDS):
        least_own, least_other = min(own, least_own), min(other, least_other)
        if least_own <= claim.guarded * least_other:
            return
    pytest.fail(f"{claim.name}: {least_own / least_other:.2f} times, at most {claim.guarded}")
