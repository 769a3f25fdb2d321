"""Locks of run folders, and the state that restarted ranks resume from."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from pathlib import Path

import pytest

from ptrain.cli import train
from ptrain.cli.main import main
from ptrain.errors import RankFailed, SpecError
from ptrain.train import folder, launch, options
from ptrain.train.folder import RunFolder, apply_agent_restart, is_run_of_agent, mark_as_latest
from ptrain.train.options import Options
from tests.pure.run_folders import open_folder, write_run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_lock_lasts_as_long_as_the_last_process_that_holds_it(tmp_path):
    taken = folder.take_lock(tmp_path)
    rank = subprocess.Popen(["sleep", "60"], pass_fds=[taken.descriptor])
    os.close(taken.descriptor)  # as if this process were killed
    with pytest.raises(SpecError, match="another training uses this folder"):
        folder.take_lock(tmp_path)
    rank.kill()
    rank.wait()
    folder.take_lock(tmp_path).release()
    assert not any(tmp_path.iterdir())


def test_a_file_system_without_locks_does_not_prevent_training(tmp_path, monkeypatch):
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folder.fcntl, "flock", unsupported)
    folder.take_lock(tmp_path).release()
    assert not any(tmp_path.iterdir())


EIGHT_NODES = ("hsdp", "mesh={dp_replicate: 8, dp_shard: 8}", "batch.global=128")


def test_the_ranks_of_several_nodes_of_gpus_do_not_start_on_one_machine(capsys, here, monkeypatch):
    monkeypatch.setattr(train, "start_ranks", lambda *_: pytest.fail("ranks were started"))
    assert main(["train", *EIGHT_NODES, "cluster.preset=h100-64"]) == 2
    told = capsys.readouterr().err
    assert (
        "64 ranks would start on this machine; a node of h100-64 has 8 GPUs" in told
        and "--nnodes 8 " in told
    )
    assert not any(here.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ("cluster.preset=h100-64", "--force"),
        ("cluster.preset=h100-64", "device=cpu"),
        ("cluster.preset=laptop", "cluster.devices=64", "cluster.devices_per_node=8"),
        ("cluster.preset=h100-64", "mesh={dp_replicate: 2, dp_shard: 4}"),
    ],
    ids=["force", "on the processor", "a cluster of processors", "as many as a node has"],
)
def test_any_other_ranks_start_on_this_machine(words, monkeypatch):
    started = []
    monkeypatch.setattr(train, "start_ranks", lambda spec, *_: started.append(spec.world_size) or 0)
    assert main(["train", *EIGHT_NODES, *words]) == 0
    assert started in ([8], [64])


@pytest.fixture
def by_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is a rank that torch's agent has started. The count is that of an agent whose
    own ranks have never failed."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")


@pytest.mark.usefixtures("by_agent")
def test_a_rank_restarted_by_an_agent_resumes_the_run_of_that_agent(here, monkeypatch):
    first = open_folder()
    first.lock.release()
    mark_as_latest(first.folder)
    (here / "runs" / "z").mkdir()
    (here / "runs" / "z" / "env.json").write_text("[]")
    assert (
        apply_agent_restart(Options(spec="zero3")).run_dir == Path("runs") / first.folder.path.name
    )
    assert apply_agent_restart(Options(spec="zero3")).resume == "auto"
    assert apply_agent_restart(Options(spec="zero3", run_dir=Path("a"))).run_dir == Path("a")
    other = os.getppid() + 1
    monkeypatch.setattr(os, "getppid", lambda: other)
    assert apply_agent_restart(Options(spec="zero3")) == Options(spec="zero3")


@pytest.mark.usefixtures("by_agent")
def test_the_record_of_the_environment_has_harmless_variables_only(here, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "secret-of-the-job")
    secret = ("WANDB_API_KEY", "HF_TOKEN", "NCCL_TOKEN", "TORCH_SECRET", "GLOO_KEY", "HTTPS_PROXY")
    for name in secret:
        monkeypatch.setenv(name, "secret-of-the-user")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    claim = open_folder()
    claim.lock.release()
    text = (claim.folder.path / "env.json").read_text()
    assert "secret" not in text and "INFO" in text


@pytest.mark.usefixtures("by_agent")
def test_resume_applies_until_the_run_has_written_checkpoints(here):
    write_run(here / "run", 10, 50)
    for _ in range(2):  # the second attempt starts from the same checkpoint
        open_folder(here / "run", resuming=True).lock.release()
        options = Options(spec="zero3", run_dir=Path("run"), resume="run/checkpoints/step-00000010")
        assert apply_agent_restart(options).resume == options.resume
    write_run(here / "run", 20)
    assert apply_agent_restart(options).resume == "auto"


@pytest.mark.usefixtures("by_agent")
def test_a_folder_that_the_first_attempt_was_rejected_is_not_taken_over(here, monkeypatch):
    with monkeypatch.context() as elsewhere:
        elsewhere.delenv("TORCHELASTIC_RUN_ID")
        open_folder(here / "run").lock.release()
    options = Options(spec="zero3", run_dir=here / "run")
    assert apply_agent_restart(options) == options
    assert not is_run_of_agent(here / "run", "")


def test_a_first_attempt_follows_its_options(here):
    options = Options(spec="zero3", run_dir=Path("run"))
    assert apply_agent_restart(options) is options


def test_a_rejected_run_is_removed_under_its_lock(here, monkeypatch):
    claim = open_folder(here / "run")

    def put_back(*_: object) -> None:
        with pytest.raises(SpecError, match="another training uses this folder"):
            open_folder(here / "run", resuming=True)

    monkeypatch.setattr(folder, "read_latest", put_back)
    claim.withdraw()
    assert not (here / "run").exists()


def test_a_signal_while_a_failed_attempt_is_ended_ends_the_job(tmp_path, monkeypatch):
    def fails(*_: object) -> int:
        signal.raise_signal(signal.SIGINT)
        raise RankFailed("error: rank 1 was killed")

    monkeypatch.setattr(launch, "_watch", fails)
    monkeypatch.setattr(launch, "start_ranks", lambda *_, **__: iter(()))
    assert launch.launch_ranks([], num_ranks=2, folder=RunFolder(tmp_path)) == 130


def test_only_ptrains_launcher_restarts_failed_ranks(here, monkeypatch, capsys):
    resumed = []

    def fails(argv: list[str], **_: object) -> int:
        resumed.append(options.parse_options(argv).resume)
        if len(resumed) == 2:
            write_run(options.parse_options(argv).run_dir, 4)
        raise RankFailed("error: rank 1 was killed")

    monkeypatch.setattr(train, "launch_ranks", fails)
    assert main(["train", "zero3", "train.steps=9", "--max-restarts", "2", "--run-dir", "run"]) == 3
    assert resumed == [None, "auto", "auto"]
    assert "restart 2 of 2" in capsys.readouterr().err
    assert not (here / "run" / folder.LOCK_NAME).exists()
