"""The rank that the parent blames when torch's agent reports failures."""

from __future__ import annotations

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ptrain.train.elastic import _root_cause


def failure_of_rank(rank: int, second: int, message: str) -> ProcessFailure:
    failure = ProcessFailure(local_rank=rank, pid=1, exitcode=3, error_file="")
    failure.timestamp, failure.message = second, {"message": message}
    return failure


LOST = "RankFailed: stage 0: waiting for rank 1 (stage 1) to send micro-batch 2: Connection reset"
KILLED = "Signal 9 (SIGKILL) received by PID 4711"


def test_a_killed_rank_is_blamed_before_an_earlier_report_of_its_loss():
    error = ChildFailedError(
        "ptrain.train", {0: failure_of_rank(0, 1, LOST), 1: failure_of_rank(1, 2, KILLED)}
    )
    assert _root_cause(error) == (1, KILLED)


def test_if_all_ranks_lost_a_peer_the_first_report_is_shown():
    error = ChildFailedError(
        "ptrain.train", {2: failure_of_rank(2, 5, LOST), 0: failure_of_rank(0, 4, LOST)}
    )
    assert _root_cause(error) == (0, LOST)
