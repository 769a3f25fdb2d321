"""A model of the user's own, by `package.module:function`.

The function is imported like any installed module (nothing is added to the import path) and called
with the spec's `arguments`; it returns an nn.Module with forward(tokens_BT) -> logits_BTV.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

from torch import nn

from ptrain.errors import PtrainError
from ptrain.spec.model import ExternalModel


def build_external(model: ExternalModel) -> nn.Module:
    """Call the target. Only after the user has allowed it: importing runs the module's code."""
    function = _resolve(model.target)
    try:
        inspect.signature(function).bind(**model.arguments)
    except TypeError as error:
        raise PtrainError(
            f"model.arguments: {model.target} cannot be called with "
            f"{', '.join(model.arguments) or 'no arguments'}: {error}"
        ) from error
    except ValueError:
        pass  # a builtin may have no signature to compare with
    module = function(**model.arguments)
    if not isinstance(module, nn.Module):
        raise PtrainError(
            f"model.target: {model.target} returned {type(module).__name__}, not a torch.nn.Module"
        )
    return module


def _resolve(target: str) -> Callable[..., object]:
    module_name, colon, attribute = target.partition(":")
    names = (*module_name.split("."), attribute)
    if not (colon and all(name.isidentifier() for name in names)):
        raise PtrainError(f"model.target: {target!r} is not of the form package.module:function")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise PtrainError(
            f"model.target: no module named {error.name!r}; install it, or put the directory that "
            f"holds it on PYTHONPATH"
        ) from error
    except ImportError as error:
        raise PtrainError(f"model.target: cannot import {module_name}: {error}") from error
    function = getattr(module, attribute, None)
    if function is None:
        raise PtrainError(f"model.target: module {module_name} has no attribute {attribute!r}")
    if not callable(function):
        raise PtrainError(
            f"model.target: {target} is a {type(function).__name__}, not a function that returns "
            f"a torch.nn.Module"
        )
    resolved: Callable[..., object] = function
    return resolved
