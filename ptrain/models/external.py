"""Custom models, and other objects that a spec names by `package.module:function`.

The function is imported like any installed module. If no installed module has its name, it is
imported from the folder of the spec. A model function is called with the spec's `arguments` and
returns an nn.Module. A data function returns a map-style dataset, as defined by torch.utils.data.

Dataset code runs with the generators of torch, numpy and Python seeded by the sample's index. A
sample that draws random numbers is therefore the same each time, on every rank and in a resumed
run.
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

from ptrain.errors import Fault, SpecError, input_error
from ptrain.internals.fakes import unset_fake_temporarily
from ptrain.models.boundary import convert_exceptions, describe_error, report_exceptions
from ptrain.spec import slips
from ptrain.spec.model import ExternalModel, HuggingFaceModel, ModelShape, UserFunction
from ptrain.spec.spec import Spec

_KINDS = {
    "model": "a function that returns a torch.nn.Module",
    "data": "a function that returns a map-style dataset",
    "loss": "a function(output, batch) that returns the mean loss of a micro-batch",
    "step": "a function(model, batch) that returns the mean loss of a micro-batch",
}


def named_in_spec(module: nn.Module, spec: Spec) -> tuple[str, str]:
    """Return the key of the spec that names the model, and the name."""
    match spec.model:
        case HuggingFaceModel(hf=name):
            return "model.hf", name
        case ExternalModel(target=name):
            return "model.target", name
        case ModelShape():  # a caller replaced the built-in model
            return "model", type(module).__name__
        case model:
            assert_never(model)


def build_external(model: ExternalModel) -> nn.Module:
    """Build the model by calling the user's function.

    Call it only after the user has allowed imports, since importing runs the module's code.

    Raises:
        SpecError: The target does not exist or is no function, its code raises, or it returns no
            nn.Module.
    """
    function = model.function
    module = call_target(function)
    if not isinstance(module, nn.Module):
        raise input_error(
            function.target_key,
            f"{model.target} returned {type(module).__name__}, not a torch.nn.Module",
            _target_remedy(function),
        )
    return module


def call_target(function: UserFunction) -> object:
    """Return the result of a target, called with the spec's arguments.

    Raises:
        SpecError: See `build_external`.
    """
    target = resolve_target(function)
    with convert_exceptions(lambda error: target_fault(function, error)):
        return target(**function.arguments)


def resolve_target(function: UserFunction, *given: str) -> Callable[..., object]:
    """Import a target and check its signature.

    Args:
        function: The target and its arguments from the spec.
        given: Names of positional arguments that the caller passes before them.

    Returns:
        The target, which accepts these arguments.

    Raises:
        SpecError: The target does not exist, is no function, or does not accept the arguments.
    """
    target = _import_target(function)
    try:
        signature = inspect.signature(target)
        signature.bind(*given, **function.arguments)
    except TypeError as error:
        names = ", ".join((*given, *function.arguments)) or "no arguments"
        finding = f"{function.target} cannot be called with {names}: {error}"
        place = f"{function.section}.arguments"
        raise input_error(
            place, finding, f"Set `{place}` to arguments that the function accepts: `{signature}`."
        ) from error
    except ValueError:
        pass  # a builtin may have no signature to compare with
    return target


def target_fault(function: UserFunction, error: BaseException, given: str = "") -> Fault:
    """Return the fault for an exception of a target; `given` describes its inputs.

    Args:
        function: The user's function.
        error: The exception.
        given: The inputs in words, with a leading comma.
    """
    more = (
        f" and accepts {function.section}.arguments"
        if function.section in ("model", "data")
        else ""
    )
    needed = f"The target must be {_KINDS[function.section]}{more}."
    return _fault(function, f"{function.target}{given} raised {describe_error(error)}", needed)


def _target_remedy(function: UserFunction) -> str:
    return f"Use {_KINDS[function.section]}, written as `package.module:function`."


def _import_target(function: UserFunction) -> Callable[..., object]:
    """Return the function that a target names."""
    target, remedy = function.target, _target_remedy(function)
    module_name, colon, attribute = target.partition(":")
    names = (*module_name.split("."), attribute)
    if not (colon and all(name.isidentifier() for name in names)):
        raise input_error(
            function.target_key,
            f"{target!r} does not have the form package.module:function",
            remedy,
        )
    module = _import_module(module_name, function)
    with report_exceptions(function.target_key, module_name, remedy):
        value = getattr(module, attribute, None)
    if value is None:
        raise input_error(
            function.target_key, f"module {module_name} has no attribute {attribute!r}", remedy
        )
    if not callable(value):
        raise input_error(
            function.target_key,
            f"{target} is {slips.with_article(type(value).__name__)}, not a function",
            remedy,
        )
    named: Callable[..., object] = value
    return named


def _import_module(name: str, function: UserFunction) -> ModuleType:
    """Import a module, from the folder of the spec if it is not installed elsewhere.

    Fake tensors are disabled meanwhile, so that tensors at module level are real.
    """
    if (folder := function.folder) is not None:
        importlib.invalidate_caches()  # the folder may have changed since it was listed
        _require_unique(name, folder, function)
        if folder not in sys.path and os.path.isdir(folder):
            sys.path.append(
                folder
            )  # last, so that no file next to a spec shadows an installed module
    with (
        unset_fake_temporarily(),
        convert_exceptions(lambda error: _import_fault(name, function, error)),
    ):
        return importlib.import_module(name)


def _require_unique(name: str, folder: str, function: UserFunction) -> None:
    """Raise SpecError if the folder has a module of this name, but `import` would load another
    one."""
    top = name.partition(".")[0]
    here = _first_file(name, PathFinder.find_spec(top, [folder]))
    there = _first_file(name, _find_installed(top))
    if here and there and os.path.realpath(here) != os.path.realpath(there):
        finding = f"two modules are named {top}: {here} next to the spec, and {there}"
        remedy = "Rename the one next to the spec. To use the other one, set "
        remedy += f"`{function.section}.folder` to a folder without it."
        raise input_error(function.target_key, finding, remedy)


def _find_installed(top: str) -> ModuleSpec | None:
    """Return the module spec that `import` would use, or None."""
    try:
        return find_spec(top)
    except ValueError:  # it is loaded and its `__spec__` is None
        return None


def _first_file(name: str, top: ModuleSpec | None) -> str:
    """Return the file of the first package on the path to the module that has one, or "".

    A folder without `__init__.py` has no file.
    """
    module, parts = top, name.split(".")
    for depth in range(2, len(parts) + 2):
        if module is None or module.origin:
            break
        places = list(module.submodule_search_locations or ())
        module = PathFinder.find_spec(".".join(parts[:depth]), places) if places else None
    return (module and module.origin) or ""


def _import_fault(name: str, function: UserFunction, error: BaseException) -> Fault:
    """Return the fault for a failed import, with a remedy that depends on the missing module."""
    folder = function.folder
    if not isinstance(error, ModuleNotFoundError) or not f"{name}.".startswith(f"{error.name}."):
        return _fault(
            function,
            f"importing {name} raised {describe_error(error)}",
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
    return Fault(place=function.target_key, finding=finding, remedy=remedy)


_NEEDED = (
    "The dataset needs `__len__()` and `__getitem__(index)`, which returns a tensor, or a "
    "tuple or a dictionary of tensors, with the same shapes for every index."
)


class MapDataset:
    """A user's dataset, whose samples are read and collated by index.

    `first` is sample 0 as a batch of one.
    """

    def __init__(self, function: UserFunction) -> None:
        self._function = function
        self._samples = self._open()
        self.size = self._read_length()
        self._form: tuple[str, ...] = ()  # of sample 0, which is read first
        self.first = self.read([0])
        if not _is_equal(self.first, self.read([0])):
            raise self._make_error(
                "sample 0 has different values when it is read again",
                "Compute a sample from its index only, or from the global random generators "
                "without seeding them.",
            )

    @property
    def name(self) -> str:
        """The target of the dataset's function."""
        return self._function.target

    def read(self, indices: Sequence[int]) -> Any:
        """Return samples, collated into a tree of tensors with samples in dimension 0.

        Args:
            indices: Indices of the dataset, from 0.

        Raises:
            SpecError: The user's code raises, or a sample differs from sample 0 in structure, shape
                or dtype.
        """
        with _create_on_cpu():
            return default_collate([self._read_sample(index) for index in indices])

    def compute_digests(self) -> dict[int, str]:
        """Return SHA-256 digests of the first and the last sample's values, by index."""
        return {index: _digest_tensors(self.read([index])) for index in (0, self.size - 1)}

    def _open(self) -> Any:
        """Call the user's function and return the dataset."""
        with _create_on_cpu(), _seed_generators(0):
            dataset = call_target(self._function)
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise self._make_error(
                f"{self.name} returned {type(dataset).__name__}, not a map-style dataset"
            )
        return dataset

    def _read_length(self) -> int:
        with report_exceptions(self._function.target_key, f"__len__ of {self.name}", _NEEDED):
            size = len(self._samples)
        if size < 1:
            raise self._make_error(f"{self.name} has no samples: its length is {size}")
        return size

    def _read_sample(self, index: int) -> Any:
        """Read one sample with all generators seeded by its index, and check its form."""
        code = report_exceptions(
            self._function.target_key, f"sample {index} of {self.name}", _NEEDED
        )
        with _seed_generators(index), code:
            # A batch of one turns numbers and arrays into tensors, as a batch of several would.
            sample = default_collate([self._samples[index]])
        form = _leaf_types(sample)
        if not form or not all(form):
            raise self._make_error(f"sample {index} of {self.name} is {_describe_sample(sample)}")
        self._form = self._form or form
        if form != self._form:
            finding = f"sample {index} of {self.name} has {' and '.join(form)}, but sample 0 has "
            raise self._make_error(f"{finding}{' and '.join(self._form)}")
        return tree_map(lambda leaf: leaf[0], sample)

    def _make_error(self, finding: str, remedy: str = _NEEDED) -> SpecError:
        return input_error(self._function.target_key, finding, remedy)


def dataset_of(function: UserFunction) -> MapDataset:
    """Return the dataset of a spec's function, opened once per process.

    Raises:
        SpecError: The function fails or returns no map-style dataset.
    """
    return _opened_once(function, function.folder)


# `_folder` is only a cache key: it decides from where the function is imported.
@cache
def _opened_once(function: UserFunction, _folder: str | None) -> MapDataset:
    return MapDataset(function)


@contextmanager
def _create_on_cpu() -> Iterator[None]:
    """Temporarily create real tensors on the CPU, whatever mode and device the model is built
    with."""
    with unset_fake_temporarily(), torch.device("cpu"):
        yield


@contextmanager
def _seed_generators(seed: int) -> Iterator[None]:
    """Temporarily seed the generators of torch, numpy and Python; restore their states
    afterwards."""
    python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            torch.manual_seed(seed)
            random.seed(seed)
            # numpy accepts 32 bits.
            np.random.seed(seed % 2**32)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(of_numpy)


def _digest_tensors(samples: Any) -> str:
    """Return the SHA-256 digest of dtypes, shapes and values of a tree of tensors."""
    digest = hashlib.sha256()
    for leaf in tree_iter(samples):
        digest.update(f"{leaf.dtype} {list(leaf.shape)}".encode())
        digest.update(leaf.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _leaf_types(sample: Any) -> tuple[str, ...]:
    """Return dtype and shape of each tensor of a batch of one; "" for other leaves."""
    return tuple(
        f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape[1:])}"
        if isinstance(leaf, Tensor)
        else ""
        for leaf in tree_iter(sample)
    )


def _describe_sample(sample: Any) -> str:
    """Describe a sample that is not a non-empty tree of tensors."""
    kinds = [type(leaf).__name__ for leaf in tree_iter(sample) if not isinstance(leaf, Tensor)]
    return f"not made of tensors only: it contains a {kinds[0]}" if kinds else "empty"


def _is_equal(one: Any, other: Any) -> bool:
    """Return True if two trees have equal tensors; NaN counts as equal to NaN."""
    pairs = zip(tree_iter(one), tree_iter(other), strict=True)
    return all(torch.equal(leaf.nan_to_num(), its.nan_to_num()) for leaf, its in pairs)
