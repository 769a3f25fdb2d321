"""The GitHub workflow runs as its page prints it, in a repository of two commits."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from ptrain.spec.names import find_spec
from tests.pure.test_compare import verification, write_record

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "howto" / "gate-a-pull-request.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.skipif(
    shutil.which("bash") is None or shutil.which("git") is None, reason="needs bash and git"
)

# A verification starts ranks: here it is a record, of a training that does or does not hold.
PTRAIN = f"""#!/usr/bin/env bash
if [ "$1" != verify ]; then exec {sys.executable} -m ptrain "$@"; fi
echo "$@" >> "$SHIMS/verified"
if grep -q '# zero2$' train.yaml; then cat "$SHIMS/holds.json"; exit; fi
cat "$SHIMS/fails.json"
exit 1
"""
GH = """#!/usr/bin/env bash
echo "$@" > "$SHIMS/said"
"""


def job() -> Mapping[str, Any]:
    (block,) = re.findall(r"^```yml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return yaml.safe_load(block)["jobs"]["compare"]


def commands(name: str) -> str:
    """A step's commands, with what GitHub fills in."""
    (step,) = (step for step in job()["steps"] if step.get("name") == name)
    return step["run"].replace("${{ github.event.number }}", "7")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository whose first commit trains zero2 and whose second trains zero3, and shims."""
    shims = tmp_path / "shims"
    shims.mkdir()
    for name, text in {"ptrain": PTRAIN, "gh": GH}.items():
        (shims / name).write_text(text)
        (shims / name).chmod(0o755)
    write_record(shims / "holds.json", verification("train"))
    write_record(shims / "fails.json", verification("train", holds=False))
    repository = tmp_path / "repository"
    repository.mkdir()
    git(repository, "init", "--quiet")
    for strategy in ("zero2", "zero3"):
        text = re.sub(r"(?m)^name: .*$", "name: train", find_spec(strategy).read_text("utf-8"))
        (repository / "train.yaml").write_text(f"{text}# {strategy}\n", encoding="utf-8")
        git(repository, "add", "train.yaml")
        git(repository, "commit", "--quiet", "--message", strategy)
    return repository


def git(repository: Path, *words: str) -> str:
    ended = subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words],
        cwd=repository,
        capture_output=True,
        text=True,
        check=True,
    )
    return ended.stdout.strip()


def run(repository: Path, name: str) -> subprocess.CompletedProcess[str]:
    """Run a step as GitHub does, by `bash -e`, with its /tmp next to the repository."""
    shims, temporary = repository.parent / "shims", repository.parent
    return subprocess.run(
        ["bash", "-e", "-c", commands(name).replace("/tmp/", f"{temporary}/")],
        cwd=repository,
        env={
            "PATH": f"{shims}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "SHIMS": str(shims),
            "BASE": git(repository, "rev-parse", "HEAD~1"),
            "HEAD": git(repository, "rev-parse", "HEAD"),
            "GITHUB_STEP_SUMMARY": str(temporary / "summary.md"),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_workflow_compares_both_sides_of_a_pull_request_and_comments(checkout):
    head = git(checkout, "rev-parse", "HEAD")
    ended = run(checkout, "records of both sides")
    assert ended.returncode == 0, ended.stderr
    assert git(checkout, "rev-parse", "HEAD") == head
    shims = checkout.parent / "shims"
    assert (shims / "verified").read_text() == "verify train.yaml --quick --json\n" * 2
    ended = run(checkout, "comparison")
    assert (ended.returncode, ended.stderr) == (1, "")
    text = (checkout.parent / "comparison.md").read_text()
    assert (checkout.parent / "summary.md").read_text() == text
    assert "| holds (1 of 1) | fails (0 of 1) | holds → fails |" in text
    assert "| all_gather over dp_shard, calls | 1 | 40 | +39 (+3900.0%) |" in text
    assert text.endswith("exceeded: train: trains like one device: fails (0 of 1)\n")
    assert run(checkout, "comment").returncode == 0
    said = (shims / "said").read_text()
    assert said == f"pr comment 7 --body-file {checkout.parent}/comparison.md\n"


def test_a_spec_that_is_rejected_ends_the_workflow(checkout):
    (checkout / "train.yaml").write_text("mesh: {dp_shard: no}\n")
    git(checkout, "commit", "--quiet", "--all", "--message", "a mistake")
    ended = run(checkout, "records of both sides")
    assert ended.returncode == 2
    assert "mesh.dp_shard" in ended.stderr
