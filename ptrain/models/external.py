"""A model of the user's own, and whatever else a spec names by `package.module:function`.

The function is imported like any installed module, and, where no other is of its name, from the
folder of the spec that names it. That of a model is called with the spec's `arguments` and returns
an nn.Module.
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

from ptrain.errors import Fault, refused
from ptrain.internals.fakes import unset_fake_temporarily
from ptrain.models.boundary import boundary, said
from ptrain.spec import slips
from ptrain.spec.function import UserFunction
from ptrain.spec.model import ExternalModel

_KINDS = {
    "model": "a function that returns a torch.nn.Module",
    "data": "a function that returns a map-style dataset",
    "loss": "a function(output, batch) that returns the mean loss of a micro-batch",
    "step": "a function(model, batch) that returns the mean loss of a micro-batch",
}


def build_external(model: ExternalModel) -> nn.Module:
    """Call the target. Only after the user has allowed it: importing runs the module's code. Raises
    SpecError for a target that is none, and for whatever its code raises."""
    function = model.function
    module = called(function)
    if not isinstance(module, nn.Module):
        raise refused(
            function.place,
            f"{model.target} returned {type(module).__name__}, not a torch.nn.Module",
            _remedy(function),
        )
    return module


def called(function: UserFunction) -> object:
    """Return what a target gives, called with the spec's arguments. Raises SpecError as
    `build_external`."""
    target = resolved(function)
    with boundary(lambda error: raised(function, error)):
        return target(**function.arguments)


def resolved(function: UserFunction, *given: str) -> Callable[..., object]:
    """Return a target, which can be called with the arguments of these names and then the spec's,
    by keyword. Raises SpecError where it cannot, and for a target that is none."""
    target = _imported(function)
    try:
        signature = inspect.signature(target)
        signature.bind(*given, **function.arguments)
    except TypeError as error:
        names = ", ".join((*given, *function.arguments)) or "no arguments"
        finding = f"{function.target} cannot be called with {names}: {error}"
        place = f"{function.section}.arguments"
        raise refused(
            place, finding, f"Set `{place}` to arguments that the function accepts: `{signature}`."
        ) from error
    except ValueError:
        pass  # a builtin may have no signature to compare with
    return target


def raised(function: UserFunction, error: BaseException, given: str = "") -> Fault:
    """Return the fault of a target that raised."""
    more = (
        f" and accepts {function.section}.arguments"
        if function.section in ("model", "data")
        else ""
    )
    needed = f"The target must be {_KINDS[function.section]}{more}."
    return _fault(function, f"{function.target}{given} raised {said(error)}", needed)


def _remedy(function: UserFunction) -> str:
    return f"Use {_KINDS[function.section]}, written as `package.module:function`."


def _imported(function: UserFunction) -> Callable[..., object]:
    target, remedy = function.target, _remedy(function)
    module_name, colon, attribute = target.partition(":")
    names = (*module_name.split("."), attribute)
    if not (colon and all(name.isidentifier() for name in names)):
        raise refused(
            function.place, f"{target!r} does not have the form package.module:function", remedy
        )
    module = _import(module_name, function)
    with boundary(lambda error: _fault(function, f"{module_name} raised {said(error)}", remedy)):
        value = getattr(module, attribute, None)
    if value is None:
        raise refused(
            function.place, f"module {module_name} has no attribute {attribute!r}", remedy
        )
    if not callable(value):
        raise refused(
            function.place, f"{target} is {slips.a(type(value).__name__)}, not a function", remedy
        )
    named: Callable[..., object] = value
    return named


def _import(name: str, function: UserFunction) -> ModuleType:
    """Tensors that a module has of its own are real, whatever the model is built of."""
    if (folder := function.folder) is not None:
        importlib.invalidate_caches()  # a file may be younger than what was read of its folder
        _require_alone(name, folder, function)
        if folder not in sys.path and os.path.isdir(folder):
            sys.path.append(folder)  # the last: no file beside a spec hides an installed module
    with unset_fake_temporarily(), boundary(lambda error: _unimportable(name, function, error)):
        return importlib.import_module(name)


def _require_alone(name: str, folder: str, function: UserFunction) -> None:
    """Raises SpecError where the folder has a module of the name, and another one would run."""
    top = name.partition(".")[0]
    here = _first_file(name, PathFinder.find_spec(top, [folder]))
    there = _first_file(name, _elsewhere(top))
    if here and there and os.path.realpath(here) != os.path.realpath(there):
        finding = f"two modules are named {top}: {here} next to the spec, and {there}"
        remedy = "Rename the one next to the spec. To use the other one, set "
        remedy += f"`{function.section}.folder` to a folder without it."
        raise refused(function.place, finding, remedy)


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


def _unimportable(name: str, function: UserFunction, error: BaseException) -> Fault:
    folder = function.folder
    if not isinstance(error, ModuleNotFoundError) or not f"{name}.".startswith(f"{error.name}."):
        return _fault(
            function,
            f"importing {name} raised {said(error)}",
            f"Make `python -c 'import {name}'` succeed.",
        )
    finding = f"no module named {error.name!r}"
    if folder is None:
        remedy = "Install it, add its directory to PYTHONPATH, or set "
        return _fault(function, finding, f"{remedy}`{function.section}.folder` to that directory.")
    is_there = "" if os.path.isdir(folder) else " (no such folder)"
    remedy = f"Put it next to the spec, into {folder}{is_there}, or install it, or add "
    return _fault(function, finding, f"{remedy}its directory to PYTHONPATH.")


def _fault(function: UserFunction, finding: str, remedy: str) -> Fault:
    return Fault(place=function.place, finding=finding, remedy=remedy)
