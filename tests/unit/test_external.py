"""Models of the user's own: allowed by the user only, and every mistake has its message."""

from __future__ import annotations

import sys

import pytest

from ptrain.errors import PtrainError
from ptrain.models.build import build
from ptrain.spec.model import ExternalModel

SEQUENCE = 8
BAD_TARGETS = [
    ("no_colon", "not of the form package.module:function"),
    (".relative:make", "not of the form package.module:function"),
    ("package:", "not of the form package.module:function"),
    ("no_such_package_anywhere.models:make", "no module named 'no_such_package_anywhere'"),
    ("tests.models_external:nobody", "has no attribute 'nobody'"),
    ("math:pi", "is a float, not a function"),
    ("sys:maxsize", "is an int, not a function"),
    ("builtins:dict", "returned dict, not a torch.nn.Module"),
]


def test_code_of_the_users_own_runs_only_if_allowed():
    with pytest.raises(PtrainError, match="--allow-import"):
        build(ExternalModel(target="tests.models_external:necks"), sequence=SEQUENCE)


@pytest.mark.parametrize(("target", "finding"), BAD_TARGETS)
def test_a_target_that_is_no_model_is_refused_with_its_reason(target, finding):
    with pytest.raises(PtrainError, match=finding):
        build(ExternalModel(target=target), sequence=SEQUENCE, allow_import=True)


def test_arguments_that_do_not_fit_the_function_are_named():
    model = ExternalModel(target="tests.models_external:necks", arguments={"width": 3})
    with pytest.raises(PtrainError, match="unexpected keyword argument 'width'"):
        build(model, sequence=SEQUENCE, allow_import=True)


def test_an_error_inside_the_users_code_is_not_hidden():
    model = ExternalModel(target="tests.models_external:necks", arguments={"hidden": -1})
    with pytest.raises(RuntimeError):
        build(model, sequence=SEQUENCE, allow_import=True)


def test_the_import_path_stays_as_it_was():
    before = list(sys.path)
    build(ExternalModel(target="tests.models_external:necks"), sequence=SEQUENCE, allow_import=True)
    assert sys.path == before
