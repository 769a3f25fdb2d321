"""The always-on counter: few looks see every collective, and one that came too late says so."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ptrain.meters.traffic import CollectiveCount, CollectiveCounter
from ptrain.rooms.world import flight_recorder_size
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

STEPS, PER_STEP, SHORT_STEPS, NUMEL = 14, 300, 45, 6
SENT = 4 * NUMEL  # by one of two ranks, of an all-reduce
RING = 2000


def looks(steps: int, per_step: int, wanted: bool) -> list[CollectiveCount | None]:
    """What each step's look saw, and a last one."""
    counter, tensor, found = CollectiveCounter(), torch.zeros(NUMEL), []
    for _ in range(steps):
        for _ in range(per_step):
            dist.all_reduce(tensor)
        found.append(counter.read_if_wanted(wanted=wanted))
    return [*found, counter.read()]


def seen(ranks: Ranks, *arguments: object) -> list[CollectiveCount]:
    """By the looks of rank 0 that were taken."""
    return [each for each in ranks.run(2, looks, *arguments)[0] if each is not None]


@pytest.mark.nightly
def test_a_look_that_nobody_wants_comes_before_the_ring_is_full(ranks: Ranks) -> None:
    taken = seen(ranks, STEPS, PER_STEP, False)
    assert sum(each.calls for each in taken) == STEPS * PER_STEP
    assert sum(each.sent_bytes for each in taken) == STEPS * PER_STEP * SENT
    assert not any(each.missed for each in taken)
    assert len(taken) == -(-STEPS // (RING // PER_STEP))


def test_a_wanted_look_waits_until_it_is_cheap_and_counts_what_came_before_it(
    ranks: Ranks,
) -> None:
    taken = seen(ranks, SHORT_STEPS, 2, True)
    assert sum(rows.calls for rows in taken) == SHORT_STEPS * 2
    assert len(taken) < SHORT_STEPS / 2  # a step takes far less than a look / SHARE


def test_what_was_overwritten_is_missed(ranks: Ranks) -> None:
    (last,) = seen(ranks, 1, RING + 7, False)
    assert (last.calls, last.missed) == (RING, 7)


def test_the_rings_size_is_the_one_that_torch_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert flight_recorder_size() == RING
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "50")
    assert flight_recorder_size() == 50
