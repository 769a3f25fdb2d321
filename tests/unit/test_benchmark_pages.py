"""Benchmarks that predict and measure hold at a small size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.nightly


def quick(name: str) -> str:
    """Return what `benchmarks/NAME.py --quick` prints; fail where its claim does."""
    found = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--quick"],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_ranks_that_load_published_weights_read_only_their_shards():
    text = quick("loading")
    assert text.count("| holds |\n") == 32  # rows of placements
    assert "Verdict: holds.\n" in text


def kit(folder: Path, *slices: str) -> subprocess.CompletedProcess[str]:
    """Run slices of the GPU kit on the CPU."""
    return subprocess.run(
        [str(ROOT / "benchmarks" / "gpu.sh"), "--dry", str(folder), *slices],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHON": sys.executable},
        check=False,
    )


def test_the_gpu_kit_runs_dry_slice_by_slice_and_resumes(tmp_path):
    first, second = (kit(tmp_path, "kernels", "blocks") for _ in range(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blocks.json", "kernels.json"]
    assert second.stdout.count("done before") == 2
    for ran in (first, second):
        assert ran.returncode == 1
        assert "nothing is proven" in ran.stdout
        assert ran.stdout.count("| +0 |") == 18


def test_every_kind_of_steps_of_the_gpu_kit_runs_dry_and_stays_unproven(tmp_path):
    slices = ("parts", "steps-3b", "steps-replicas", "fp8")
    ran = kit(tmp_path, *slices)
    assert sorted(path.stem for path in tmp_path.iterdir()) == sorted(slices), ran.stderr
    losses = {}
    for name in ("steps-3b", "steps-replicas"):
        for case, entry in json.loads((tmp_path / f"{name}.json").read_text())["real"].items():
            losses[case] = {run: taken["losses"] for run, taken in entry["runs"].items()}
    assert len(losses) == 10  # of three sizes by three strategies, and of one
    for case, runs in losses.items():
        of_ptrain, by_hand = runs[[*runs][-2]], runs["by hand"]
        assert by_hand[0] == pytest.approx(of_ptrain[0], rel=1e-3), case
    assert "| C++ compiler | ok |" in ran.stdout
    assert ran.stdout.count("| – | unproven |") == 7
    assert "| holds |" not in ran.stdout and "nothing is proven" in ran.stdout
