"""The stopwatch of the bench with simulated clocks: ranks that take turns on a core."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from ptrain.calibration import bench as bench_module
from ptrain.calibration.bench import Bench, Work
from ptrain.calibration.session import _ends_first
from ptrain.runtime.world import World


class Clocks:
    """The seconds of a wall clock and of a CPU clock."""

    def __init__(self) -> None:
        self.wall = self.processor = 0.0

    def pass_by(self, wall: float, processor: float) -> None:
        self.wall, self.processor = self.wall + wall, self.processor + processor

    def perf_counter(self) -> float:
        return self.wall

    monotonic = perf_counter

    def process_time(self) -> float:
        return self.processor

    thread_time = process_time


@pytest.fixture
def clocks(monkeypatch) -> Clocks:
    """A rank computes 2 ms between what is measured, which take it 5 ms where it has to wait for
    its turn."""
    clocks = Clocks()
    monkeypatch.setattr(bench_module, "time", clocks)
    monkeypatch.setattr(bench_module, "compute", lambda _: clocks.pass_by(5e-3, 2e-3))
    return clocks


def of_turns(turns: float) -> Bench:
    return Bench(World(device=torch.device("cpu")), turns=turns, deadline=1000.0)


@pytest.mark.parametrize(("turns", "seconds"), [(1.0, 7e-3), (2.0, 4e-3), (1.5, 3e-3)])
def test_of_ranks_that_share_cores_a_processors_seconds_count_as_often_as_there_are_turns(
    clocks, turns, seconds
):
    """However long the wall's are, in which others had the core."""
    taken = of_turns(turns).busy_seconds(lambda: clocks.pass_by(7e-3, 2e-3))
    assert taken == pytest.approx(seconds)


def test_a_patient_bench_measures_more_rounds(clocks):
    """More meetings of equal length, up to a larger limit."""
    patient = Bench(World(device=torch.device("cpu")), deadline=1000.0, patience=3.0)
    usual = of_turns(1.0)
    assert (len([*usual.iter_rounds(9)]), len([*patient.iter_rounds(9)])) == (9, 27)
    calls = [0, 0]
    for number, bench in enumerate((usual, patient)):

        def meet(number: int = number) -> None:
            calls[number] += 1
            clocks.pass_by(1e-3, 1e-3)

        bench.meeting_seconds(meet)
    assert calls[1] == pytest.approx(3 * calls[0], rel=0.15)


def test_host_issue_time_ends_when_the_call_is_issued(clocks, monkeypatch):
    """The device finishes later and is awaited before a single call."""
    monkeypatch.setattr(Bench, "synchronize_device", lambda _: clocks.pass_by(9e-3, 0.0))
    issued = of_turns(1.0).issuing_seconds(lambda: clocks.pass_by(3e-3, 3e-3))
    assert issued == pytest.approx(3e-3)


def test_who_waits_in_a_meeting_leaves_its_core_to_those_that_compute(clocks):
    """Of 5 ms between meetings that take 3 ms a rank computes 2 ms twice, while another does."""

    def meet() -> None:
        clocks.pass_by(3e-3, 0.0)

    assert of_turns(2.0).meeting_seconds(meet) == pytest.approx(4e-3)
    assert of_turns(1.0).meeting_seconds(meet) == pytest.approx(3e-3)


def test_messages_take_the_time_by_which_they_slow_compute(clocks):
    """Messages in flight at the end of a round count too."""
    pending = []

    @contextmanager
    def messages() -> Iterator[Work]:
        yield lambda: pending.append(1)
        clocks.pass_by(1e-3 * len(pending), 0.0)
        pending.clear()

    assert of_turns(1.0).added_seconds(messages) == pytest.approx(4e-3)
    assert of_turns(1.0).added_seconds(messages, parts=2) == pytest.approx(2e-3)


def test_points_without_a_measurement_are_interpolated():
    assert [*_ends_first((1, 2, 3, 4))] == [1, 4, 3, 2]
    assert [*_ends_first((1,))] == [1]
