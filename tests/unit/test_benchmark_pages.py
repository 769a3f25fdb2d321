"""Benchmarks that predict and measure hold at a small size."""

from __future__ import annotations

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


def test_ranks_that_load_published_weights_read_and_hold_what_they_keep():
    text = quick("loading")
    assert text.count("| holds |\n") == 32  # rows of placements
    assert "Verdict: holds.\n" in text


def test_the_gpu_kit_runs_dry_slice_by_slice_and_goes_on_where_it_stopped(tmp_path):
    def kit() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(ROOT / "benchmarks" / "gpu.sh"), "--dry", str(tmp_path), "kernels", "blocks"],
            capture_output=True,
            text=True,
            timeout=240,
            env=os.environ | {"PYTHON": sys.executable},
            check=False,
        )

    first, second = kit(), kit()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blocks.json", "kernels.json"]
    assert second.stdout.count("done before") == 2
    for ran in (first, second):  # the other slices are left out
        assert ran.returncode == 1
        assert "nothing is proven" in ran.stdout
        assert ran.stdout.count("| +0 |") == 18
