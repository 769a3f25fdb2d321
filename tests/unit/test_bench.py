"""A stopwatch's arithmetic, of clocks that a test turns: what ranks take in turns on a core."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from ptrain.calibration import bench as bench_module
from ptrain.calibration.bench import Bench, Work
from ptrain.calibration.session import _ends_first
from ptrain.rooms.world import World


class Clocks:
    """Seconds on the wall and of a processor."""

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


def test_a_patient_bench_measures_what_ranks_do_together_more_often(clocks):
    """In as many more meetings of as long, up to as many more."""
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


def test_what_the_host_issues_ends_when_it_is_issued(clocks, monkeypatch):
    """The device, which is done later, is awaited ahead of a call alone."""
    monkeypatch.setattr(Bench, "synchronize_device", lambda _: clocks.pass_by(9e-3, 0.0))
    issued = of_turns(1.0).issuing_seconds(lambda: clocks.pass_by(3e-3, 3e-3))
    assert issued == pytest.approx(3e-3)


def test_who_waits_in_a_meeting_leaves_its_core_to_those_that_compute(clocks):
    """Of 5 ms between meetings that take 3 ms a rank computes 2 ms twice, while another does."""

    def meet() -> None:
        clocks.pass_by(3e-3, 0.0)

    assert of_turns(2.0).meeting_seconds(meet) == pytest.approx(4e-3)
    assert of_turns(1.0).meeting_seconds(meet) == pytest.approx(3e-3)


def test_messages_take_what_computing_takes_longer_beside_them(clocks):
    """Those that are under way at the end of a round, too."""
    pending = []

    @contextmanager
    def messages() -> Iterator[Work]:
        yield lambda: pending.append(1)
        clocks.pass_by(1e-3 * len(pending), 0.0)
        pending.clear()

    assert of_turns(1.0).added_seconds(messages) == pytest.approx(4e-3)
    assert of_turns(1.0).added_seconds(messages, parts=2) == pytest.approx(2e-3)


def test_what_is_left_out_for_want_of_time_lies_between_sizes_that_are_not():
    assert [*_ends_first((1, 2, 3, 4))] == [1, 4, 3, 2]
    assert [*_ends_first((1,))] == [1]
