"""The import path of ptrain's processes: installed modules, and nothing from the current folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ptrain import import_path
from ptrain.import_path import leave_current_folder
from ptrain.train import environment

ROOT = Path(__file__).parents[2]
PLANTED = ("yaml", "typing", "json", "__future__", "rich")
INSTALLED = "/lib/site-packages"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(import_path, "own_root", lambda: INSTALLED)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return str(tmp_path.resolve())


def import_path_of(monkeypatch: pytest.MonkeyPatch, *folders: str) -> list[str]:
    """Return the import path made from these folders."""
    monkeypatch.setattr(sys, "path", [*folders])
    leave_current_folder()
    return sys.path


def test_no_file_of_the_current_folder_runs_in_place_of_an_installed_module(tmp_path):
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('planted {name}')")
    ended = subprocess.run(
        [sys.executable, "-m", "ptrain", "specs", "--json"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_folder_that_python_puts_first_is_left(here, monkeypatch):
    assert import_path_of(monkeypatch, here, "/a", INSTALLED) == ["/a", INSTALLED]
    assert import_path_of(monkeypatch, "", "/a") == ["/a"]
    assert import_path_of(monkeypatch, "/bin", "/a") == ["/bin", "/a"], (
        "a script's folder is another matter"
    )


def test_the_current_folder_stays_where_PYTHONPATH_names_it(here, monkeypatch):
    for named in (here, ".", f":{here}"):
        monkeypatch.setenv("PYTHONPATH", named)
        assert import_path_of(monkeypatch, here, here, "/a") == [here, "/a"]


def test_an_empty_segment_of_PYTHONPATH_names_nothing(here, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ":/b")
    assert import_path_of(monkeypatch, here, here, "/b") == ["/b"]


def test_an_editable_checkout_comes_after_installed_modules(here, monkeypatch):
    monkeypatch.setattr(import_path, "own_root", lambda: here)
    assert import_path_of(monkeypatch, here, "/a") == ["/a", here]
    assert import_path_of(monkeypatch, here, INSTALLED, "/b") == [INSTALLED, here, "/b"]
    monkeypatch.setenv("PYTHONPATH", here)
    assert import_path_of(monkeypatch, here, here, INSTALLED) == [INSTALLED, here]


def test_a_current_folder_that_is_gone_is_no_obstacle(here, monkeypatch):
    os.rmdir(here)
    assert import_path_of(monkeypatch, "", "/a") == ["/a"]


def test_ranks_get_no_empty_segment(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f":/a:{os.pathsep}/b:")
    assert environment.ptrain_environment()["PYTHONPATH"] == f"{ROOT}:/a:/b"
    monkeypatch.delenv("PYTHONPATH")
    assert environment.ptrain_environment()["PYTHONPATH"] == str(ROOT)
