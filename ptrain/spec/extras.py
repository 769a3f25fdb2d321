"""Checks of what a spec needs at run time: optional packages, writable folders, and permission to
import the user's code."""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec

from ptrain.cost import PLACED
from ptrain.errors import SpecError, refused
from ptrain.spec.dials import Compiled
from ptrain.spec.function import UserFunction
from ptrain.spec.model import HuggingFaceModel, ModelSpec
from ptrain.spec.placement import Tier
from ptrain.spec.precision import Matmul
from ptrain.spec.spec import Spec


def require_leave(spec: Spec, *, allow_import: bool) -> None:
    """Before a function of the user's is imported."""
    for function in spec.user_functions:
        require_leave_of(function, allow_import=allow_import)


def require_leave_of(function: UserFunction, *, allow_import: bool) -> None:
    """Before this one is."""
    if not allow_import:
        raise refused(
            function.target_key,
            f"the code of {function.target} is not imported",
            "Add `--allow-import`; in Python, pass `allow_import=True`.",
        )


def require_eager(spec: Spec, command: str) -> None:
    """Reject compiled blocks, which `command` does not support.

    Raises:
        SpecError: The spec compiles blocks.
    """
    if spec.compile is not Compiled.NONE:
        raise refused(
            "compile",
            f"not supported yet: ptrain {command} with compile={spec.compile}",
            "Use `compile=none`; `ptrain predict` derives compiled blocks.",
        )


def require_listed_operators(spec: Spec, command: str) -> None:
    """Raises SpecError for fp8 products, of which `command` has no table of operators."""
    if spec.precision.matmul is not Matmul.NONE:
        raise refused(
            "precision.matmul",
            f"not supported yet: ptrain {command} with precision.matmul={spec.precision.matmul}",
            "Use `precision.matmul=none`; `ptrain predict` derives fp8 products.",
        )


def require_transformers(model: ModelSpec) -> None:
    """Before anything is built or started of a class of transformers."""
    if isinstance(model, HuggingFaceModel) and find_spec("transformers") is None:
        raise refused(
            "model.hf",
            f"{model.hf} is a class of Transformers, which is not installed",
            "Run `pip install 'transformers>=4.56,<6'`.",
        )


def require_file_tier(spec: Spec) -> None:
    """Raises SpecError where a state goes to files and no file can be made in their folder."""
    tiers = {factor.placement[state].tier for factor in spec.factors for state in PLACED}
    if Tier.FILE not in tiers | spec.activations.tiers:
        return
    try:
        tempfile.TemporaryFile(prefix="ptrain-", dir=spec.offload.path).close()
    except OSError as error:
        raise unusable_folder_error(spec.offload.path, error) from error


def unusable_folder_error(path: str | None, error: OSError | RuntimeError) -> SpecError:
    """Return the SpecError for a folder that cannot be used.

    A folder that exists but accepts no files (such as /proc) reports ENOENT, so the path is checked
    first.

    Args:
        path: The folder; None for the system's temporary folder.
        error: The operating system's error.
    """
    folder = path or tempfile.gettempdir()
    reason = getattr(error, "strerror", None) or str(error)
    if not os.path.lexists(folder):
        finding = "no such folder"
    elif not os.path.isdir(folder):
        finding = "is not a folder"
    elif isinstance(error, FileNotFoundError):
        finding = "is not writable"
    else:
        finding = f"is not writable: {reason}"
    return refused(
        "offload.path",
        f"{folder}: {finding}",
        "Use an existing, writable folder with enough space for the file tier.",
    )
