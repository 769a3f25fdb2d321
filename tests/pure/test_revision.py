"""The commit in a run's env.json: read from files, because `git` runs what a repository names."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from ptrain.train.environment import find_commit as revision
from tests.pure.run_folders import open_folder

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(folder: Path, *words: str) -> str:
    author = ("-c", "user.name=x", "-c", "user.email=x@x.invalid")
    command = ["git", "-C", str(folder), *author, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    git(folder, "commit", "-q", "--allow-empty", "-m", "first")
    return folder


def test_a_run_runs_nothing_that_the_repository_configures(repository, monkeypatch):
    ran = repository.parent / "ran"
    monitor = repository.parent / "monitor.sh"
    monitor.write_text(f"#!/bin/sh\ntouch {ran}\n")
    monitor.chmod(0o755)
    git(repository, "config", "core.fsmonitor", str(monitor))
    monkeypatch.chdir(repository)
    claim = open_folder()
    recorded = json.loads((claim.folder.path / "env.json").read_text())
    claim.lock.release()
    assert not ran.exists()
    assert recorded["git"] == git(repository, "-c", "core.fsmonitor=false", "rev-parse", "HEAD")


@pytest.mark.parametrize(
    "words",
    [
        ("status",),
        ("pack-refs", "--all"),
        ("checkout", "-q", "--detach"),
        ("checkout", "-q", "-b", "feature/a"),
        ("symbolic-ref", "refs/heads/alias", "refs/heads/main"),
    ],
)
def test_the_commit_is_found_however_it_is_named(repository, words):
    git(repository, *words)
    (repository / "inner").mkdir()
    head = git(repository, "rev-parse", "HEAD")
    assert revision(repository) == revision(repository / "inner") == head


def test_a_worktree_has_its_commit(repository):
    tree = repository.parent / "tree"
    git(repository, "worktree", "add", "-q", str(tree), "-b", "other")
    git(tree, "commit", "-q", "--allow-empty", "-m", "second")
    git(repository, "pack-refs", "--all")
    heads = [git(folder, "rev-parse", "HEAD") for folder in (repository, tree)]
    assert [revision(repository), revision(tree)] == heads
    assert heads[0] != heads[1]


@pytest.mark.parametrize(
    "head", ["", "ref: refs/heads/none", "ref: ../../secret", "no commit", "ref: HEAD", "\0"]
)
def test_an_invalid_reference_gives_no_commit(repository, head):
    (repository.parent / "secret").write_text("a" * 40)
    (repository / ".git" / "HEAD").write_text(head)
    assert revision(repository) is None


def test_a_folder_outside_of_a_repository_has_no_commit(tmp_path):
    assert revision(tmp_path) is None
