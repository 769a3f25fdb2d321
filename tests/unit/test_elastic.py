"""Whom the parent blames when torch's agent tells it which ranks failed."""

from __future__ import annotations

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ptrain.train.elastic import _root_cause


def failed(rank: int, second: int, message: str) -> ProcessFailure:
    failure = ProcessFailure(local_rank=rank, pid=1, exitcode=3, error_file="")
    failure.timestamp, failure.message = second, {"message": message}
    return failure


LOST = "RankFailed: stage 0: waiting for rank 1 (stage 1) to send micro-batch 2: Connection reset"
KILLED = "Signal 9 (SIGKILL) received by PID 4711"


def test_a_rank_that_was_killed_is_blamed_before_one_that_lost_it_and_said_so_first():
    error = ChildFailedError("ptrain.train", {0: failed(0, 1, LOST), 1: failed(1, 2, KILLED)})
    assert _root_cause(error) == (1, KILLED)


def test_where_all_lost_somebody_the_first_to_say_so_is_told():
    error = ChildFailedError("ptrain.train", {2: failed(2, 5, LOST), 0: failed(0, 4, LOST)})
    assert _root_cause(error) == (0, LOST)
