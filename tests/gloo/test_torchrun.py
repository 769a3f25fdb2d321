"""torchrun, on one node and on two, trains exactly like ptrain's launcher."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import jobs
from tests.gloo import sessions
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

SPEC = ("zero3", "train.steps=4", *jobs.TINY, "--quiet")
TORCHRUN = "torch.distributed.run"


@pytest.fixture(scope="module")
def pool_losses(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the losses of ranks that torchrun has not started."""
    folder = tmp_path_factory.mktemp("pool") / "run"
    assert [end.code for end in sessions.train_on_ranks(ranks, 2, *SPEC, folder=folder)] == [0, 0]
    return jobs.losses(folder)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.nightly  # by default ptrain starts two such agents, below
def test_torchrun_standalone_gives_the_same_losses(tmp_path, pool_losses):
    arguments = ["--standalone", "--nproc-per-node", "2", "-m", "ptrain.train", *SPEC]
    code, job = jobs.run_job([*arguments, "--run-dir", "run"], cwd=tmp_path, module=TORCHRUN)
    assert code == 0, job.error
    assert jobs.losses(tmp_path / "run") == pool_losses
    assert job.output.count("verdict: ") == 1, "only rank 0 speaks"


@pytest.mark.parametrize("module", ["ptrain", pytest.param(TORCHRUN, marks=pytest.mark.nightly)])
def test_two_agents_as_two_nodes_give_the_same_losses(tmp_path, pool_losses, module):
    agent = ["--nproc-per-node", "1", "--rdzv-backend", "c10d", "--local-addr", "127.0.0.1"]
    agent += ["-m", "ptrain.train"]
    meeting = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    words = [*meeting, "--rdzv-id", "0123456789abcdef", *(agent if module == TORCHRUN else [])]
    words = [*(["train"] if module == "ptrain" else []), *words, *SPEC, "--run-dir", "run"]
    addresses: set[str] = set()
    with ExitStack() as stack:
        agents = [
            stack.enter_context(jobs.job(words, cwd=tmp_path, module=module)) for _ in range(2)
        ]
        while any(job.process.poll() is None for job in agents):
            addresses = addresses.union(
                *(jobs.listening_addresses(job.process.pid) for job in agents)
            )
            time.sleep(0.5)
        codes = [job.wait() for job in agents]
        assert codes == [0, 0], [job.error for job in agents]
    said = "".join(job.output for job in agents)
    assert said.count("rank 1 of 2 run") == 1 and said.count("verdict: ") == 1
    assert module == TORCHRUN or addresses == {"127.0.0.1"}
    assert jobs.losses(tmp_path / "run") == pool_losses
    assert {path.name for path in Path(tmp_path / "run" / "logs").iterdir()} == {
        "rank0.log",
        "rank1.log",
    }


@pytest.mark.nightly
@pytest.mark.parametrize("victim", [0, 1])
def test_two_agents_resume_their_run_after_a_rank_is_killed(tmp_path, victim):
    spec = ("zero3", *jobs.TINY, "train.steps=60", "checkpoint.every=20", "--run-dir", "run")
    meeting = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    words = ["train", *spec, *meeting, "--rdzv-id", "0123456789abcdef", "--max-restarts", "2"]
    with ExitStack() as stack:
        agents = [stack.enter_context(jobs.job(words, cwd=tmp_path)) for _ in range(2)]
        while not (tmp_path / "run/checkpoints/step-00000020/manifest.json").exists():
            assert all(job.process.poll() is None for job in agents), [job.error for job in agents]
            time.sleep(0.02)
        ranks = {rank: pid for job in agents for rank, pid in job.ranks().items()}
        os.kill(ranks[victim], signal.SIGKILL)
        codes = [job.wait() for job in agents]
        assert codes == [0, 0], [job.error for job in agents]
    assert any(re.search(r"resume  step (20|40) of ", job.output) for job in agents)
    assert list(jobs.losses(tmp_path / "run")) == list(range(1, 61))


def test_too_few_ranks_are_rejected_once_with_both_numbers(ranks, tmp_path):
    words = ("zero3", "mesh.dp_shard=4", "--run-dir", str(tmp_path / "run"))
    ends = ranks.run(2, sessions.train_as_torchrun, words)
    assert [end.code for end in ends] == [2, 2]
    lines = "\n".join(end.error for end in ends).splitlines()
    assert sum("needs 4 ranks, but 2 were started" in line for line in lines) == 1, lines
    assert not (tmp_path / "run").exists()
