"""The host times that a calibration measures: the passes, and the number of operators that share
their time."""

from __future__ import annotations

import pytest
import torch

from ptrain.calibration import host
from ptrain.calibration.bench import Bench
from ptrain.models.ledger import OperatorMode
from ptrain.models.work import sizes_of
from ptrain.runtime.world import World
from ptrain.spec.cluster import Hook, OperatorKind

CPU = torch.device("cpu")


class Counted(OperatorMode):
    """How many operators ran while it was entered, by kind."""

    def __init__(self):
        super().__init__()
        self.kinds = []

    def run_operator(self, function, args, kwargs):
        result = function(*args, **kwargs)
        self.kinds += [ran.kind for ran in sizes_of(function, args, kwargs, result)]
        return result


def ran_in(passes: host.HostPass) -> list[OperatorKind]:
    given, counted = passes.before(), Counted()
    with counted:
        passes.work(given)
    return counted.kinds


@pytest.fixture(scope="module", params=[shape["family"] for shape in host._SHAPES])
def passes(request) -> dict[Hook, host.HostPass]:
    shape = next(shape for shape in host._SHAPES if shape["family"] == request.param)
    return {known.hook: known for known in host.host_passes(shape, CPU)}


@pytest.mark.parametrize(
    "hook",
    [
        *(Hook.FORWARD_OPERATOR, Hook.BACKWARD_OPERATOR),
        *(Hook.RECOMPUTED_OPERATOR, Hook.SELECTED_OPERATOR),
    ],
)
def test_a_clock_counts_the_operators_that_run(passes, hook):
    """But for a few at the ends: the tables of angles, a sum of what comes out."""
    assert len(ran_in(passes[hook])) == pytest.approx(passes[hook].operators, abs=10)


@pytest.mark.parametrize("hook", [Hook.MOVED_OPERATOR, Hook.HALVES_OPERATOR])
def test_time_between_operators_is_included_in_their_time(passes, hook):
    """Offloaded tensors with their copies, and torch's hooks."""
    known = passes[hook]
    assert len(ran_in(known)) > 1.2 * known.operators
    both = passes[Hook.FORWARD_OPERATOR], passes[Hook.BACKWARD_OPERATOR]
    if hook is Hook.MOVED_OPERATOR:
        assert known.operators == sum(plain.operators for plain in both)


def test_the_time_of_a_pass_is_divided_by_its_operators_without_earlier_work():
    class Clock(Bench):
        """Counts a second for what comes before, ten for the pass and four for its operators."""

        def issuing_seconds(self, work):
            calls.clear()
            work()
            return sum(calls)

        busy_seconds = issuing_seconds

    calls: list[float] = []
    known = host.HostPass(
        hook=Hook.FORWARD_OPERATOR,
        operators=3,
        before=lambda: calls.append(1.0),
        work=lambda _: calls.append(10.0),
        computing=lambda: calls.append(4.0),
    )
    bench = Clock(World(device=CPU), deadline=1.0)
    assert host.issuing_seconds(bench, known) == pytest.approx(10 / 3)
    assert host.excess_seconds(bench, known) == pytest.approx(6 / 3)
