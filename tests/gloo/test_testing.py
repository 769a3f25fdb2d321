"""The test helper for users: it passes, fails with the root cause, shows the first failing rank's
error, and leaves no process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ptrain.errors import PtrainError, RankFailed
from ptrain.testing import assert_trains_like_one_device, assert_verified, on_ranks
from tests.jobs import have_ended

pytestmark = pytest.mark.gloo
nightly = pytest.mark.nightly


def user_function(way: str, fault: str) -> object:
    from tests.gloo.own_loops import verify_loop

    return verify_loop(way, fault)


def failing_function() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("this rank has a fault of its own")
    dist.barrier()


def hanging_function(folder: str) -> None:
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(600)


def function_without_verdict() -> str:
    return "no verdict"


@nightly
def test_a_correct_loop_passes() -> None:
    assert_trains_like_one_device(user_function, "ddp", "")


def test_a_faulty_loop_fails_with_the_root_cause() -> None:
    with pytest.raises(
        AssertionError, match=r"root cause: gradients · changed after backward, × 0\.5"
    ) as caught:
        assert_trains_like_one_device(user_function, "ddp", "divided twice")
    assert "changed by the factor 0.5" in str(caught.value)


@nightly
def test_the_first_failing_rank_is_shown_with_its_error() -> None:
    with pytest.raises(RankFailed, match=r"rank 1(.|\n)*this rank has a fault of its own"):
        on_ranks(failing_function)


@nightly
def test_ranks_that_hang_are_ended_in_time(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed, match="no verdict within 8 s"):
        on_ranks(hanging_function, str(tmp_path), timeout=8)
    assert time.monotonic() - began < 25
    pids = [int(each.name) for each in tmp_path.iterdir()]
    assert len(pids) == 2
    assert have_ended(pids)


@nightly
def test_a_function_that_returns_no_verdict_is_rejected() -> None:
    with pytest.raises(PtrainError, match=r"Return the result of `ptrain\.verify"):
        assert_trains_like_one_device(function_without_verdict, num_ranks=1)


def test_a_function_that_no_rank_can_import_is_rejected() -> None:
    with pytest.raises(PtrainError, match="Define the function at the top level"):
        assert_trains_like_one_device(lambda: None)


@nightly
def test_a_spec_is_verified_and_one_that_cannot_be_is_rejected() -> None:
    sizes = ("model.layers=1", "model.hidden=32", "batch.sequence=16", "batch.global=8")
    assert_verified("ddp", "mesh.dp_replicate=2", *sizes, steps=5)
    with pytest.raises(PtrainError, match="mesh"):
        assert_verified("ddp", "mesh.dp_replicate=no")


def test_the_helper_is_imported_without_torch() -> None:
    code = "import sys, ptrain.testing; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
