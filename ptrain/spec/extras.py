"""What a spec's model needs beside ptrain's own requirements, and the leave to run its code."""

from __future__ import annotations

from importlib.util import find_spec

from ptrain.errors import refused
from ptrain.spec.function import UserFunction
from ptrain.spec.model import HuggingFaceModel, ModelSpec
from ptrain.spec.spec import Spec


def require_leave(spec: Spec, *, allow_import: bool) -> None:
    """Before a function of the user's is imported."""
    for function in spec.user_functions:
        require_leave_of(function, allow_import=allow_import)


def require_leave_of(function: UserFunction, *, allow_import: bool) -> None:
    """Before this one is."""
    if not allow_import:
        raise refused(
            function.place,
            f"the code of {function.target} is not imported",
            "Add `--allow-import`; in Python, pass `allow_import=True`.",
        )


def require_transformers(model: ModelSpec) -> None:
    """Before anything is built or started of a class of transformers."""
    if isinstance(model, HuggingFaceModel) and find_spec("transformers") is None:
        raise refused(
            "model.hf",
            f"{model.hf} is a class of Transformers, which is not installed",
            "Run `pip install 'transformers>=4.56,<6'`.",
        )
