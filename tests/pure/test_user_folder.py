"""The folder in which a spec's `target:` is imported from: the folder of the spec file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ptrain.errors import SpecError
from ptrain.report.sweep import _settings
from ptrain.spec.load import load
from ptrain.spec.model import ExternalModel
from ptrain.spec.write import to_yaml
from ptrain.train.manifest import model_fault, trained_sections

OWN: dict[str, Any] = {
    "model": {"target": "my_model:build"},
    "mesh": {"dp_shard": 2},
    "placement": "zero2",
    "batch": {"global": 4, "micro": 2, "sequence": 16},
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path.resolve() / "home"
    folder.mkdir()
    (folder / "mine.yaml").write_text(yaml.safe_dump(OWN))
    return folder


def folder_of(source: Any, *overrides: str) -> str | None:
    model = load(source, overrides).spec.model
    assert isinstance(model, ExternalModel)
    return model.folder


def test_the_folder_does_not_depend_on_the_path_notation(home, monkeypatch):
    monkeypatch.chdir(home)
    (home.parent / "link.yaml").symlink_to(home / "mine.yaml")
    (home.parent / "linked").symlink_to(home, target_is_directory=True)
    for source in (
        "mine.yaml",
        "./mine.yaml",
        "../link.yaml",
        "../linked/mine.yaml",
        home / "mine.yaml",
    ):
        assert folder_of(source) == str(home), source


def test_a_built_in_spec_has_no_folder(home, monkeypatch):
    monkeypatch.chdir(home)
    assert folder_of(OWN) is None
    assert folder_of("ddp", "model={target: my_model:build}") is None


def test_a_written_folder_is_relative_to_the_specs_folder(home, monkeypatch):
    monkeypatch.chdir(home.parent)
    assert folder_of("home/mine.yaml", "model.folder=models") == str(home / "models")
    assert folder_of("home/mine.yaml", "model.folder=/models") == "/models"
    assert folder_of("home/mine.yaml", "model.folder=null") is None


def test_the_resolved_spec_keeps_the_folder(home, tmp_path):
    for source in (home / "mine.yaml", OWN):
        spec = load(source).spec
        written = tmp_path / "spec.resolved.yaml"
        written.write_text(to_yaml(spec.resolved))
        assert folder_of(written) == folder_of(source)
        assert load(written).spec.resolved == spec.resolved


def test_the_folder_requires_a_target():
    for model in ({"hf": "llama", "folder": "/a"}, {"preset": "llama-tiny", "folder": "/a"}):
        with pytest.raises(SpecError, match="model\\.folder: folder requires `target`"):
            load(OWN | {"model": model})


def test_the_model_does_not_depend_on_the_specs_location(home):
    here = load(home / "mine.yaml").spec
    there = load(home / "mine.yaml", ["model.folder=/elsewhere"]).spec
    assert model_fault(trained_sections(here), there) is None
    assert here.model == there.model and not list(_settings(here, there))
    assert (
        model_fault(trained_sections(here), load(OWN, ["model.target=other:build"]).spec)
        is not None
    )
    assert replace(here, model=there.model) == here
