"""User models: imported only with the user's permission, with one message per mistake."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from ptrain.errors import PtrainError, SpecError
from ptrain.models.initialize import build_model
from ptrain.runtime.world import fake_tensors
from ptrain.spec.model import ExternalModel

SEQUENCE = 8
BAD_TARGETS = [
    ("no_colon", "does not have the form package.module:function"),
    (".relative:make", "does not have the form package.module:function"),
    ("package:", "does not have the form package.module:function"),
    ("no_such_package_anywhere.models:make", "no module named 'no_such_package_anywhere'"),
    ("tests.models_external:nobody", "has no attribute 'nobody'"),
    ("math:pi", "is a float, not a function"),
    ("sys:maxsize", "is an int, not a function"),
    ("builtins:dict", "returned dict, not a torch.nn.Module"),
]


def test_user_code_runs_only_if_allowed():
    with pytest.raises(PtrainError, match="--allow-import"):
        build_model(ExternalModel(target="tests.models_external:necks"), sequence=SEQUENCE)


@pytest.mark.parametrize(("target", "finding"), BAD_TARGETS)
def test_a_target_that_is_no_model_is_rejected_with_its_reason(target, finding):
    with pytest.raises(PtrainError, match=finding):
        build_model(ExternalModel(target=target), sequence=SEQUENCE, allow_import=True)


def test_arguments_that_do_not_fit_the_function_are_named():
    model = ExternalModel(target="tests.models_external:necks", arguments={"width": 3})
    with pytest.raises(PtrainError, match="unexpected keyword argument 'width'"):
        build_model(model, sequence=SEQUENCE, allow_import=True)


def test_an_error_inside_the_users_code_is_one_message_with_its_line():
    model = ExternalModel(target="tests.models_external:necks", arguments={"hidden": -1})
    with pytest.raises(
        PtrainError, match=r"necks raised RuntimeError: .*models_external\.py:\d+\)"
    ):
        build_model(model, sequence=SEQUENCE, allow_import=True)


def test_the_import_path_stays_as_it_was():
    before = list(sys.path)
    build_model(
        ExternalModel(target="tests.models_external:necks"), sequence=SEQUENCE, allow_import=True
    )
    assert sys.path == before


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """That of a spec. What is imported from it is forgotten, and the path is as it was."""
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path.resolve()
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def module_next_to_spec(
    folder: Path, name: str, text: str = "from tests.models_external import necks"
) -> str:
    """A module in the folder; the target in it."""
    file = folder.joinpath(*name.split(".")).with_suffix(".py")
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return f"{name}:necks"


def build_target(target: str, folder: Path) -> torch.nn.Module:
    model = ExternalModel(target=target, folder=str(folder))
    return build_model(model, sequence=SEQUENCE, allow_import=True)


@pytest.mark.parametrize("name", ["beside_the_spec", "beside_it.model"])
def test_a_module_next_to_the_spec_is_imported_after_installed_ones(folder, name):
    before = list(sys.path)
    module_next_to_spec(folder, "yaml", "raise SystemExit('planted')")
    assert isinstance(build_target(module_next_to_spec(folder, name), folder), torch.nn.Module)
    assert sys.path == [*before, str(folder)]
    build_target(module_next_to_spec(folder, name), folder)
    assert sys.path == [*before, str(folder)]


def test_the_current_folder_is_not_searched(folder, monkeypatch, tmp_path_factory):
    monkeypatch.chdir(tmp_path_factory.mktemp("current"))
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    target = module_next_to_spec(Path.cwd(), "in_the_current_folder")
    with pytest.raises(SpecError) as raised:
        build_target(target, folder)
    (fault,) = raised.value.faults
    assert fault.finding == "no module named 'in_the_current_folder'"
    assert str(folder) in fault.remedy and "PYTHONPATH" in fault.remedy


@pytest.mark.parametrize("name", ["calendar", "sys", "tests.models_external"])
def test_a_name_that_is_taken_elsewhere_is_rejected_with_both_places(folder, name):
    target = module_next_to_spec(folder, name)
    with pytest.raises(SpecError) as raised:
        build_target(target, folder)
    (fault,) = raised.value.faults
    top = name.partition(".")[0]
    there = "built-in" if name == "sys" else sys.modules[top].__file__
    assert f"two modules are named {top}: {folder}" in fault.finding
    assert fault.finding.endswith(f" next to the spec, and {there}")
    assert str(folder) not in sys.path, "nothing was imported"


def test_a_module_next_to_the_spec_and_on_the_path_is_one_module(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    build_target(module_next_to_spec(folder, "on_the_path"), folder)


IMPORTS = [
    ("import no_such_thing_at_all", "raised ModuleNotFoundError: No module named 'no_such_thing"),
    ("from math import no_such_name", "raised ImportError: cannot import name"),
    ("def build(:", "raised SyntaxError: invalid syntax"),
    ("raise SystemExit(3)", "raised SystemExit: 3"),
    ("import json\njson.loads('{')", "raised JSONDecodeError: "),
]


@pytest.mark.parametrize(("text", "finding"), IMPORTS)
def test_an_import_that_raises_is_one_message_with_its_line(folder, text, finding):
    line = 1 + text.count("\n")
    with pytest.raises(SpecError, match=rf"failing_import\.py:{line}\)\n") as raised:
        build_target(module_next_to_spec(folder, "failing_import", text), folder)
    (fault,) = raised.value.faults
    assert fault.finding.startswith("importing failing_import ") and finding in fault.finding


def test_tensors_of_a_module_are_real_whatever_the_model_is_built_of(folder):
    text = "import torch\nfrom tests.models_external import necks\nMASK = torch.ones(2)"
    with fake_tensors():
        build_target(module_next_to_spec(folder, "with_a_tensor", text), folder)
    assert not isinstance(sys.modules["with_a_tensor"].MASK, FakeTensor)
