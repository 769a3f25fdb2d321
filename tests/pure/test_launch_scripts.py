"""The scripts of `launch/`, run by bash with stubs for Slurm's commands and torchrun."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="the scripts are for bash")

SCONTROL = """#!/usr/bin/env bash
echo "$@" >> "$SHIMS/scontrol.log"
[[ $1 == show ]] && printf 'node-a\\nnode-b\\n'
exit 0
"""
SRUN = """#!/usr/bin/env bash
printf '%s\\n' "$@" > "$SHIMS/srun.log"
env > "$SHIMS/srun.env"
trap 'exit 143' USR1
echo $$ > "$SHIMS/srun.pid"
[[ -n ${SRUN_CODE:-} ]] && exit "$SRUN_CODE"
while :; do sleep 0.05; done
"""
SCANCEL = """#!/usr/bin/env bash
echo "$@" >> "$SHIMS/scancel.log"
kill -USR1 "$(cat "$SHIMS/srun.pid")"
"""
TORCHRUN = """#!/usr/bin/env bash
printf '%s\\n' "$@" > "$SHIMS/torchrun.log"
"""


@pytest.fixture
def shims(tmp_path: Path) -> Path:
    programs = {"scontrol": SCONTROL, "srun": SRUN, "scancel": SCANCEL, "torchrun": TORCHRUN}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def start(shims: Path, script: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", str(LAUNCH / script), *arguments],
        env={"PATH": f"{shims}:{os.environ['PATH']}", "SHIMS": str(shims), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def slurm(shims: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    job = {"SLURM_JOB_ID": "4711", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node-[a-b]"}
    return start(
        shims, "slurm.sbatch", *arguments, **{**job, "SLURM_GPUS_ON_NODE": "8", **variables}
    )


def words(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_slurm_starts_one_agent_per_node_that_meet_on_the_first(shims):
    process = slurm(shims, "zero3", "train.steps=5", SRUN_CODE="0")
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    found = words(shims / "srun.log")
    assert "torchrun" in found
    assert {"--nnodes=2", "--nproc-per-node=8", "--rdzv-backend=c10d"} <= set(found)
    assert "--rdzv-endpoint=node-a:24711" in found
    (run_id,) = [word for word in found if word.startswith("--rdzv-id=")]
    assert re.fullmatch("--rdzv-id=[0-9a-f]{32}", run_id)
    assert found[found.index("ptrain.train") :] == [
        "ptrain.train",
        "zero3",
        "train.steps=5",
        "--run-dir",
        "runs/slurm-4711",
        "--resume",
        "auto",
    ]
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in words(shims / "srun.env")


def test_slurm_jobs_end_with_the_exit_code_of_the_training(shims):
    process = slurm(shims, "zero3", SRUN_CODE="3")
    process.communicate(timeout=30)
    assert process.returncode == 3
    assert not any("requeue" in line for line in words(shims / "scontrol.log"))


def test_before_its_time_limit_a_slurm_job_saves_and_is_queued_again(shims):
    process = slurm(shims, "zero3")
    deadline = time.monotonic() + 20
    while not (shims / "srun.pid").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)  # until the script waits with its traps set
    process.send_signal(signal.SIGUSR1)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert words(shims / "scancel.log") == ["--signal=USR1 4711"]
    assert words(shims / "scontrol.log")[-1] == "requeue 4711"


def test_ranks_per_node_replace_gpus(shims):
    process = slurm(shims, "ddp", SRUN_CODE="0", NPROC="4", SLURM_GPUS_ON_NODE="")
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert "--nproc-per-node=4" in words(shims / "srun.log")


@pytest.mark.parametrize("script", ["local.sh", "slurm.sbatch"])
def test_a_script_without_a_spec_prints_its_usage(shims, script):
    process = start(shims, script)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "SPEC" in output + errors


def test_the_local_script_starts_torchrun_on_request(shims):
    process = start(shims, "local.sh", "zero3", "train.steps=5", LAUNCHER="torchrun", NPROC="2")
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    found = words(shims / "torchrun.log")
    assert found[:3] == ["--standalone", "--nproc-per-node", "2"]
    assert found[-3:] == ["ptrain.train", "zero3", "train.steps=5"]


def test_every_variable_that_a_script_reads_or_sets_is_explained():
    text = (ROOT / "docs" / "howto" / "launch.md").read_text(encoding="utf-8")
    for name in ("LAUNCHER", "NPROC", "MAX_RESTARTS", "RUN_DIR", "MASTER_PORT", "OMP_NUM_THREADS"):
        assert f"`{name}" in text, name
