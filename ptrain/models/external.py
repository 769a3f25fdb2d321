"""A model of the user's own, and whatever else a spec names by `package.module:function`.

The function is imported like any installed module, and, where no other is of its name, from the
folder of the spec that names it. That of a model is called with the spec's `arguments` and returns
an nn.Module, that of data a map-style dataset, as torch.utils.data has it.

A dataset's code runs with the generators of torch, numpy and Python at a seed: a sample's own index
while it is read, so that what it draws of them is the same each time, on every rank and in a
resumed run.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any, assert_never

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.data import default_collate

from ptrain.errors import Fault, SpecError, refused
from ptrain.internals.fakes import unset_fake_temporarily
from ptrain.models.boundary import boundary, raising, said
from ptrain.spec import slips
from ptrain.spec.function import UserFunction
from ptrain.spec.model import ExternalModel, HuggingFaceModel, ModelShape
from ptrain.spec.spec import Spec

_KINDS = {
    "model": "a function that returns a torch.nn.Module",
    "data": "a function that returns a map-style dataset",
    "loss": "a function(output, batch) that returns the mean loss of a micro-batch",
    "step": "a function(model, batch) that returns the mean loss of a micro-batch",
}


def named_in_spec(module: nn.Module, spec: Spec) -> tuple[str, str]:
    """Return where the spec says which model it is, and what it is called."""
    match spec.model:
        case HuggingFaceModel(hf=name):
            return "model.hf", name
        case ExternalModel(target=name):
            return "model.target", name
        case ModelShape():  # another module was given in its place
            return "model", type(module).__name__
        case model:
            assert_never(model)


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
    with raising(function.place, module_name, remedy):
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


_NEEDED = (
    "The dataset needs `__len__()` and `__getitem__(index)`, which returns a tensor, or a "
    "tuple or a dictionary of tensors, with the same shapes for every index."
)


class MapDataset:
    """Its samples, collated. `first` is sample 0, as a batch of one."""

    def __init__(self, function: UserFunction) -> None:
        self._function = function
        self._samples = self._opened()
        self.size = self._length()
        self._form: tuple[str, ...] = ()  # of sample 0, which is read first
        self.first = self.read([0])
        if not _equal(self.first, self.read([0])):
            raise self._refused(
                "sample 0 has different values when it is read again",
                "Compute a sample from its index only, or from the global random generators "
                "without seeding them.",
            )

    @property
    def name(self) -> str:
        return self._function.target

    def read(self, indices: Sequence[int]) -> Any:
        """Return these samples, collated: a tree of tensors with the samples in dimension 0. Raises
        SpecError for what the user's code raises, and for a sample of another form than sample
        0."""
        with _apart():
            return default_collate([self._sample(index) for index in indices])

    def digests(self) -> dict[int, str]:
        """Return one of the values of the first sample and of the last, by their indices."""
        return {index: _digest(self.read([index])) for index in (0, self.size - 1)}

    def _opened(self) -> Any:
        with _apart(), _seeded(0):
            dataset = called(self._function)
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise self._refused(
                f"{self.name} returned {type(dataset).__name__}, not a map-style dataset"
            )
        return dataset

    def _length(self) -> int:
        with raising(self._function.place, f"__len__ of {self.name}", _NEEDED):
            size = len(self._samples)
        if size < 1:
            raise self._refused(f"{self.name} has no samples: its length is {size}")
        return size

    def _sample(self, index: int) -> Any:
        code = raising(self._function.place, f"sample {index} of {self.name}", _NEEDED)
        with _seeded(index), code:
            sample = default_collate([self._samples[index]])
        form = _form(sample)
        if not form or not all(form):
            raise self._refused(f"sample {index} of {self.name} is {_described(sample)}")
        self._form = self._form or form
        if form != self._form:
            finding = f"sample {index} of {self.name} has {' and '.join(form)}, but sample 0 has "
            raise self._refused(f"{finding}{' and '.join(self._form)}")
        return tree_map(lambda leaf: leaf[0], sample)

    def _refused(self, finding: str, remedy: str = _NEEDED) -> SpecError:
        return refused(self._function.place, finding, remedy)


def dataset_of(function: UserFunction) -> MapDataset:
    """Return what a spec's function gives, opened once in a process. Raises SpecError for one that
    gives no dataset."""
    return _opened_once(function, function.folder)


@cache
def _opened_once(function: UserFunction, _folder: str | None) -> MapDataset:
    return MapDataset(function)


@contextmanager
def _apart() -> Iterator[None]:
    """Real tensors on the processor, whatever the model is built of."""
    with unset_fake_temporarily(), torch.device("cpu"):
        yield


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The generators that code draws of without seeding them, at this seed; as they were
    afterwards."""
    python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(of_numpy)


def _digest(samples: Any) -> str:
    digest = hashlib.sha256()
    for leaf in tree_iter(samples):
        digest.update(f"{leaf.dtype} {list(leaf.shape)}".encode())
        digest.update(leaf.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _form(sample: Any) -> tuple[str, ...]:
    """A word for each tensor of a sample; empty for what is none."""
    return tuple(
        f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape[1:])}"
        if isinstance(leaf, Tensor)
        else ""
        for leaf in tree_iter(sample)
    )


def _described(sample: Any) -> str:
    kinds = [type(leaf).__name__ for leaf in tree_iter(sample) if not isinstance(leaf, Tensor)]
    return f"not made of tensors only: it contains a {kinds[0]}" if kinds else "empty"


def _equal(one: Any, other: Any) -> bool:
    pairs = zip(tree_iter(one), tree_iter(other), strict=True)
    return all(torch.equal(leaf.nan_to_num(), its.nan_to_num()) for leaf, its in pairs)
