"""The collective counter reads the flight recorder rarely, counts every collective, and reports an
overwritten one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ptrain.meters.traffic import CollectiveCount, CollectiveCounter
from ptrain.runtime.world import flight_recorder_size
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

STEPS, PER_STEP, SHORT_STEPS, NUMEL = 14, 300, 45, 6
SENT = 4 * NUMEL  # by one of two ranks, of an all-reduce
RING = 2000


def train_and_read(steps: int, per_step: int, wanted: bool) -> list[CollectiveCount | None]:
    """Return the reading of each step, and a final one."""
    counter, tensor, found = CollectiveCounter(), torch.zeros(NUMEL), []
    for _ in range(steps):
        for _ in range(per_step):
            dist.all_reduce(tensor)
        found.append(counter.read_if_wanted(wanted=wanted))
    return [*found, counter.read()]


def readings_of_rank_0(ranks: Ranks, *arguments: object) -> list[CollectiveCount]:
    """Return the readings of rank 0."""
    return [each for each in ranks.run(2, train_and_read, *arguments)[0] if each is not None]


@pytest.mark.nightly
def test_an_unrequested_reading_happens_before_the_ring_is_full(ranks: Ranks) -> None:
    taken = readings_of_rank_0(ranks, STEPS, PER_STEP, False)
    assert sum(each.calls for each in taken) == STEPS * PER_STEP
    assert sum(each.sent_bytes for each in taken) == STEPS * PER_STEP * SENT
    assert not any(each.missed for each in taken)
    assert len(taken) == -(-STEPS // (RING // PER_STEP))


def test_a_requested_reading_waits_until_it_is_cheap_and_includes_earlier_collectives(
    ranks: Ranks,
) -> None:
    taken = readings_of_rank_0(ranks, SHORT_STEPS, 2, True)
    assert sum(rows.calls for rows in taken) == SHORT_STEPS * 2
    assert len(taken) < SHORT_STEPS / 2  # a step takes far less than a look / SHARE


def test_overwritten_collectives_are_reported_as_missing(ranks: Ranks) -> None:
    (last,) = readings_of_rank_0(ranks, 1, RING + 7, False)
    assert (last.calls, last.missed) == (RING, 7)


def test_the_ring_has_the_size_that_is_passed_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert flight_recorder_size() == RING
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "50")
    assert flight_recorder_size() == 50
