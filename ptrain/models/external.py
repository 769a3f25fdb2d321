"""A model of the user's own, by `package.module:function`.

The function is imported like any installed module (nothing is added to the import path) and called
with the spec's `arguments`; it returns an nn.Module with forward(tokens_BT) -> logits_BTV.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

from torch import nn

from ptrain.errors import refused
from ptrain.spec import slips
from ptrain.spec.model import ExternalModel

_FUNCTION = "name a function that returns a torch.nn.Module, as package.module:function"


def build_external(model: ExternalModel) -> nn.Module:
    """Call the target. Only after the user has allowed it: importing runs the module's code."""
    function = _resolve(model.target)
    try:
        inspect.signature(function).bind(**model.arguments)
    except TypeError as error:
        given = ", ".join(model.arguments) or "no arguments"
        finding = f"{model.target} cannot be called with {given}: {error}"
        raise refused("model.arguments", finding, "give the function's own arguments") from error
    except ValueError:
        pass  # a builtin may have no signature to compare with
    module = function(**model.arguments)
    if not isinstance(module, nn.Module):
        finding = f"{model.target} returned {type(module).__name__}, not a torch.nn.Module"
        raise refused("model.target", finding, _FUNCTION)
    return module


def _resolve(target: str) -> Callable[..., object]:
    module_name, colon, attribute = target.partition(":")
    names = (*module_name.split("."), attribute)
    if not (colon and all(name.isidentifier() for name in names)):
        finding = f"{target!r} is not of the form package.module:function"
        raise refused("model.target", finding, _FUNCTION)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        remedy = "install it, or put the directory that holds it on PYTHONPATH"
        raise refused("model.target", f"no module named {error.name!r}", remedy) from error
    except ImportError as error:
        finding = f"cannot import {module_name}: {error}"
        remedy = f"see that `python -c 'import {module_name}'` succeeds"
        raise refused("model.target", finding, remedy) from error
    function = getattr(module, attribute, None)
    if function is None:
        finding = f"module {module_name} has no attribute {attribute!r}"
        raise refused("model.target", finding, _FUNCTION)
    if not callable(function):
        finding = f"{target} is {slips.a(type(function).__name__)}, not a function"
        raise refused("model.target", finding, _FUNCTION)
    resolved: Callable[..., object] = function
    return resolved
