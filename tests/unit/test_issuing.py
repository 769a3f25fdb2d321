"""What the host takes to issue an operator, as a calibration beside a GPU measures it."""

from __future__ import annotations

import torch

from ptrain.calibration.bench import Bench
from ptrain.calibration.host import issuing_seconds
from ptrain.rooms.world import World


def test_a_pass_is_issued_in_its_seconds_by_the_number_of_its_operators_without_what_is_before_it():
    class Sum(Bench):
        """Counts a thousandth of a second for what comes before, and a hundredth for the pass."""

        def issuing_seconds(self, work):
            calls.clear()
            work()
            return sum(calls)

    calls: list[float] = []

    def before() -> torch.Tensor:
        calls.append(1e-3)
        return torch.ones(4)

    def work(x: torch.Tensor) -> torch.Tensor:
        calls.append(1e-2)
        return (x * x + x).view(2, 2)

    bench = Sum(World(device=torch.device("cpu")), deadline=1.0)
    taken = issuing_seconds(bench, before, work)
    assert abs(taken - 1e-2 / 3) < 1e-12  # a product, a sum, a view
