"""An unsupported torch is rejected at the start by its version, without importing it; commands
without torch work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import ptrain
from ptrain import installed
from ptrain.cli.main import main
from ptrain.cli.train import load_checked
from ptrain.errors import Fault, SpecError
from ptrain.installed import require_torch, runs_with
from ptrain.testing import on_ranks
from ptrain.train import rank_start
from ptrain.train.options import Options
from ptrain.version import REFERENCE_TORCH, TESTED_TORCH, TORCH_RANGE

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REMEDY = f"Run `pip install 'torch{TORCH_RANGE}'`."
UNSUPPORTED = "2.16.0+cpu"
MESSAGE = (
    f"error: torch: {UNSUPPORTED} is installed; ptrain needs {TORCH_RANGE}\n  remedy: {REMEDY}\n"
)
VERBS = (  # what starts ranks, or reads a model
    ["train"],
    ["train", "zero3", "--max-restarts", "1"],
    ["validate", "zero3"],
    ["verify", "zero3"],
    ["simulate", "zero3"],
    ["predict", "zero3", "model={hf: LlamaForCausalLM}"],
    ["plan", "zero3", "model={hf: LlamaForCausalLM}"],
    ["predict", "zero3", "cluster.preset=h100-8", "--reserved"],
)


def with_torch(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporarily pretend that torch has this version; None for not installed."""
    monkeypatch.setattr(installed, "torch_version", lambda: version or "")
    monkeypatch.setattr(installed, "find_spec", lambda _name: version)


def python(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A process in `folder` for which the unsupported torch is installed, and fails as an import
    of it may."""
    site = folder / "site"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "__init__.py").write_text("raise AttributeError('torch was imported')")
    (site / "torch" / "version.py").write_text(f"__version__ = '{UNSUPPORTED}'\n")
    (folder / "work").mkdir()
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder / "work",
        env=os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def dependency(name: str, requirements: list[str]) -> list[str]:
    """Return the versions that these requirements allow for a package."""
    found = (re.fullmatch(r"([\w.-]+)(.*)", each.replace(" ", "")) for each in requirements)
    return [match[2] for match in found if match and match[1] == name]


def test_the_range_of_torch_is_declared_once():
    assert dependency("torch", PROJECT["dependencies"]) == [TORCH_RANGE]
    assert f"`{TORCH_RANGE}`" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_test_extra_keeps_the_torch_of_the_tables():
    (extra,) = dependency("torch", PROJECT["optional-dependencies"]["test"])
    major, minor = map(int, REFERENCE_TORCH.split("."))
    assert extra == f"<{major}.{minor + 1}"


def test_every_version_of_the_range_is_tested():
    first, last = re.findall(r"2\.(\d+)", TORCH_RANGE)
    assert tuple(f"2.{minor}" for minor in range(int(first), int(last))) == TESTED_TORCH


@pytest.mark.parametrize("version", TESTED_TORCH)
def test_the_tested_versions_are_within_the_range(version):
    assert runs_with(f"{version}.0+cpu")


@pytest.mark.parametrize(
    "version",
    [
        *("2.11.0", "2.11", "2.12.1+cu128", "2.13.0+cpu", "2.13.1.post2", "2.13.0a0+git1234567"),
        *("2.12.0rc3", "2.13.0.dev20260401+cpu", "2.13.0a0+ab12cd.nv26.4"),
        *("2.10.9", "2.11.0a0", "2.11.0rc1", "2.11.0.dev20260101", "2.9.1", "1.13.1", "0.4"),
        *("2.14.0", "2.15.1+cu132", "2.16.0", "2.16.0a0", "2.16.0rc1", "2.16.0.dev20261101"),
        *("2.17.0+cpu", "2.110.0", "3.0"),
    ],
)
def test_a_version_is_within_the_range_if_pip_agrees(version):
    assert runs_with(version) is SpecifierSet(TORCH_RANGE).contains(version, prereleases=True)


@pytest.mark.parametrize("version", ["2.16.0", UNSUPPORTED, "2.16.0a0+git", "2.10.1", "a branch"])
def test_another_torch_is_rejected_with_the_range_and_the_pip_line(version, monkeypatch):
    with_torch(version, monkeypatch)
    with pytest.raises(SpecError) as caught:
        require_torch()
    finding = f"{version} is installed; ptrain needs {TORCH_RANGE}"
    assert caught.value.faults == (Fault(place="torch", finding=finding, remedy=REMEDY),)


def test_without_torch_the_message_has_the_same_pip_line(monkeypatch):
    with_torch(None, monkeypatch)
    with pytest.raises(SpecError) as caught:
        require_torch()
    finding = f"is not installed; ptrain needs {TORCH_RANGE}"
    assert caught.value.faults == (Fault(place="torch", finding=finding, remedy=REMEDY),)


def test_a_torch_without_a_version_is_accepted(monkeypatch):
    with_torch(None, monkeypatch)
    monkeypatch.setattr(installed, "find_spec", lambda _name: "built from source")
    require_torch()


def test_a_torch_within_the_range_is_not_rejected(monkeypatch):
    with_torch("2.12.0+cu126", monkeypatch)
    require_torch()


@pytest.mark.parametrize("version", [UNSUPPORTED, None])
@pytest.mark.parametrize(
    "name", ["interpret", "measure", "read_facts", "share_of", "verify", "Job", "Terms"]
)
def test_a_name_of_the_package_that_needs_torch_is_rejected(name, version, monkeypatch):
    with_torch(version, monkeypatch)
    with pytest.raises(SpecError, match=f"remedy: {re.escape(REMEDY)}"):
        getattr(ptrain, name)


@pytest.mark.parametrize(
    "start",
    [lambda: ptrain.run("zero3"), lambda: on_ranks(test_the_range_of_torch_is_declared_once)],
)
def test_ranks_of_a_script_are_not_started_with_another_torch(start, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with_torch(UNSUPPORTED, monkeypatch)
    with pytest.raises(SpecError, match=f"remedy: {re.escape(REMEDY)}"):
        start()
    assert not list(tmp_path.iterdir())


def test_a_training_is_rejected_before_its_spec_is_looked_at(monkeypatch):
    with_torch(UNSUPPORTED, monkeypatch)
    with pytest.raises(SpecError, match=re.escape(REMEDY)):
        load_checked(Options(spec="no-such-spec"))


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_a_verb_that_needs_torch_ends_with_2_and_the_message(words, monkeypatch, capsys):
    with_torch(UNSUPPORTED, monkeypatch)
    assert main(words) == 2
    assert capsys.readouterr() == ("", MESSAGE)


@pytest.mark.parametrize("module", ["ptrain", "ptrain.train", "ptrain.verification"])
def test_a_process_reports_it_once_without_a_traceback_or_files(module, tmp_path):
    verb = ["train"] if module == "ptrain" else []
    ended = python(["-m", module, *verb, "zero3"], tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", MESSAGE)
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.parametrize("rank", ["0", "1"])
def test_of_the_ranks_of_a_launcher_the_first_one_speaks(rank, monkeypatch, capsys):
    with_torch(UNSUPPORTED, monkeypatch)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    waits = []
    monkeypatch.setattr(rank_start.time, "sleep", waits.append)
    with pytest.raises(SystemExit) as ended:
        rank_start.begin_rank()
    assert ended.value.code == 2
    assert capsys.readouterr().err == (MESSAGE if rank == "0" else "")
    assert bool(waits) is (rank != "0")


@pytest.mark.parametrize("version", [UNSUPPORTED, None])
def test_commands_without_torch_are_not_affected(version, monkeypatch, capsys):
    with_torch(version, monkeypatch)
    for words in (["predict", "zero3"], ["plan", "hsdp"], ["specs"], ["schema"]):
        assert main(words) == 0
    for verb in ("train", "simulate"):
        with pytest.raises(SystemExit) as ended:
            main([verb, "--help"])
        assert ended.value.code == 0
    assert capsys.readouterr().err == ""
