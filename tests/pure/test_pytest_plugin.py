"""The pytest fixtures for users: available without an import, and without torch until a test uses
one."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from ptrain.train import environment

ROOT = Path(__file__).parents[2]

CONFTEST = """
import sys

def pytest_collection_finish(session):
    assert "torch" not in sys.modules, "collecting imports torch"
"""
TESTS = """
def test_has_the_fixtures(trains_like_one_device, verified):
    from ptrain import testing
    assert trains_like_one_device is testing.assert_trains_like_one_device
    assert verified is testing.assert_verified
"""


def test_pytest_finds_the_plugin_where_ptrain_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"ptrain": "ptrain.pytest_plugin"}


def test_fixtures_are_there_and_collecting_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_mine.py").write_text(TESTS)
    # by its module, whether what is installed has the entry point or not
    words = ["-p", "no:cacheprovider", "-p", "no:ptrain", "-p", "ptrain.pytest_plugin", "-q"]
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", *words, "test_mine.py"],
        cwd=tmp_path, env=environment.non_rank_environment(sys.path), capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 passed" in ended.stdout
