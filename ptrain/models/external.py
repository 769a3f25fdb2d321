"""A model of the user's own, by `package.module:function`.

The function is imported like any installed module, and, where no other is of its name, from the
folder of the spec that names it; it is called with the spec's `arguments` and returns an nn.Module
with forward(tokens_BT) -> logits_BTV.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType

from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ptrain.errors import Fault, refused
from ptrain.models.boundary import boundary, said
from ptrain.spec import slips
from ptrain.spec.model import ExternalModel

_FUNCTION = "name a function that returns a torch.nn.Module, as package.module:function"
_NEEDED = "what is needed: a function that returns a torch.nn.Module, given model.arguments"


def build_external(model: ExternalModel) -> nn.Module:
    """Call the target. Only after the user has allowed it: importing runs the module's code. Raises
    SpecError for a target that is none, and for whatever its code raises."""
    function = _resolve(model)
    try:
        inspect.signature(function).bind(**model.arguments)
    except TypeError as error:
        given = ", ".join(model.arguments) or "no arguments"
        finding = f"{model.target} cannot be called with {given}: {error}"
        raise refused("model.arguments", finding, "give the function's own arguments") from error
    except ValueError:
        pass  # a builtin may have no signature to compare with
    with boundary(lambda error: _fault(f"{model.target} raised {said(error)}", _NEEDED)):
        module = function(**model.arguments)
    if not isinstance(module, nn.Module):
        finding = f"{model.target} returned {type(module).__name__}, not a torch.nn.Module"
        raise refused("model.target", finding, _FUNCTION)
    return module


def _resolve(model: ExternalModel) -> Callable[..., object]:
    target = model.target
    module_name, colon, attribute = target.partition(":")
    names = (*module_name.split("."), attribute)
    if not (colon and all(name.isidentifier() for name in names)):
        finding = f"{target!r} is not of the form package.module:function"
        raise refused("model.target", finding, _FUNCTION)
    module = _import(module_name, model.folder)
    with boundary(lambda error: _fault(f"{module_name} raised {said(error)}", _FUNCTION)):
        function = getattr(module, attribute, None)
    if function is None:
        finding = f"module {module_name} has no attribute {attribute!r}"
        raise refused("model.target", finding, _FUNCTION)
    if not callable(function):
        finding = f"{target} is {slips.a(type(function).__name__)}, not a function"
        raise refused("model.target", finding, _FUNCTION)
    resolved: Callable[..., object] = function
    return resolved


def _import(name: str, folder: str | None) -> ModuleType:
    """Tensors that a module has of its own are real, whatever the model is built of."""
    if folder is not None:
        importlib.invalidate_caches()  # a file may be younger than what was read of its folder
        _require_alone(name, folder)
        if folder not in sys.path and os.path.isdir(folder):
            sys.path.append(folder)  # the last: no file beside a spec hides an installed module
    with unset_fake_temporarily(), boundary(lambda error: _unimportable(name, folder, error)):
        return importlib.import_module(name)


def _require_alone(name: str, folder: str) -> None:
    """Raises SpecError where the folder has a module of the name, and another one would run."""
    top = name.partition(".")[0]
    here = _first_file(name, PathFinder.find_spec(top, [folder]))
    there = _first_file(name, _elsewhere(top))
    if here and there and os.path.realpath(here) != os.path.realpath(there):
        finding = f"two modules are called {top}: {here} beside the spec, and {there}"
        remedy = "give the one beside the spec another name; or, for the other one, set "
        raise refused("model.target", finding, f"{remedy}model.folder to a folder without it")


def _elsewhere(top: str) -> ModuleSpec | None:
    """What `import` would take by itself."""
    try:
        return find_spec(top)
    except ValueError:  # it is loaded, and nobody says from where
        return None


def _first_file(name: str, top: ModuleSpec | None) -> str:
    """That of the first package on the way to the module that has one: a folder without
    `__init__.py` is none yet."""
    module, parts = top, name.split(".")
    for depth in range(2, len(parts) + 2):
        if module is None or module.origin:
            break
        places = list(module.submodule_search_locations or ())
        module = PathFinder.find_spec(".".join(parts[:depth]), places) if places else None
    return (module and module.origin) or ""


def _unimportable(name: str, folder: str | None, error: BaseException) -> Fault:
    if not isinstance(error, ModuleNotFoundError) or not f"{name}.".startswith(f"{error.name}."):
        remedy = f"see that `python -c 'import {name}'` succeeds"
        return _fault(f"importing {name} raised {said(error)}", remedy)
    if folder is None:
        remedy = "install it, put the directory that holds it on PYTHONPATH, or name that "
        return _fault(f"no module named {error.name!r}", f"{remedy}directory: model.folder")
    is_there = "" if os.path.isdir(folder) else ", which is no folder here"
    remedy = (
        f"put it beside the spec, into {folder}{is_there}; or install it; or put the directory "
    )
    return _fault(f"no module named {error.name!r}", f"{remedy}that holds it on PYTHONPATH")


def _fault(finding: str, remedy: str) -> Fault:
    return Fault(place="model.target", finding=finding, remedy=remedy)
