"""Modules that are built without values of parameters: these are on meta, everything else is what
the constructor makes of it.

A constructor that reads a parameter's values ends there, or leaves something beside parameters that
has none. One that draws what is no parameter would draw other numbers here: values that parameters
do not get are not drawn either. Both are found out, and no module is given in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_leaves

from ptrain.models.boundary import CodeRaised

Build = Callable[[int], nn.Module]  # given how much is added to the seed
_STATE = ("_parameters", "_buffers", "_modules")  # of a module's own attributes


class NeedsValues(Exception):
    """A constructor that cannot do without values of parameters; the message says why."""


def hollow(build: Build) -> nn.Module:
    """Return what `build` gives, its parameters on meta. Raises NeedsValues where something beside
    them would be other than it is with values, or the constructor raises."""
    draws = _ConstructorDraws()
    with without_values(), draws:
        module = run_constructor(build, 0)
    require_hollow(module)
    if draws.by_own_generator:
        raise NeedsValues("its constructor draws from a generator of its own")
    if draws.of_values:
        with without_values():
            other = run_constructor(build, 1)
        if not _are_equal(_left_by(module), _left_by(other)):
            raise NeedsValues("its constructor draws more than parameters")
    return module


@torch.no_grad()
def empty_parameter(parameter: nn.Parameter) -> None:
    """Take a parameter's values; it stays the same object, which may have several names."""
    if parameter.is_meta:
        return
    bare = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    vars(bare).update(vars(parameter))
    swap_tensors(parameter, bare)


@contextmanager
def without_values(
    empty: Callable[[nn.Parameter], None] = empty_parameter,
) -> Iterator[None]:
    """Temporarily build modules without values of parameters, which `empty` puts on meta as soon as
    a module has them; buffers are computed."""
    register = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and type(param) is nn.Parameter:
            empty(param)
        register(module, name, param)

    nn.Module.register_parameter = registered
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def has_memory(tensor: Tensor) -> bool:
    """Return False on meta, whatever the tensor's device is while `models.drawn` records."""
    return tensor.untyped_storage().device.type != "meta"


def run_constructor(build: Build, more: int) -> nn.Module:
    """Return what `build` gives. Raises NeedsValues where it raises."""
    try:
        return build(more)
    except CodeRaised as error:
        cause = error.__cause__
        if isinstance(cause, NeedsValues):
            raise cause from None
        raise NeedsValues(f"without values its constructor ends: {_message(error)}") from error


def _message(error: CodeRaised) -> str:
    cause = error.__cause__
    return " ".join(f"{type(cause).__name__}: {cause}".split())


def require_hollow(module: nn.Module) -> None:
    """Raises NeedsValues for a parameter with values, or something else without."""
    parameters = [*module.parameters()]
    if not parameters or not all(parameter.is_meta for parameter in parameters):
        raise NeedsValues("a parameter of it is no torch.nn.Parameter of a module")
    for name, child in module.named_modules():
        for attribute, value in _beside_parameters(child):
            if any(isinstance(x, Tensor) and x.is_meta for x in tree_iter(value)):
                path = f"{name}.{attribute}".lstrip(".")
                raise NeedsValues(f"its constructor makes {path} of a parameter")


def _beside_parameters(module: nn.Module) -> Iterable[tuple[str, Any]]:
    """Yield what a module itself has, parameters and modules left out, by attribute."""
    yield from ((name, value) for name, value in vars(module).items() if name not in _STATE)
    yield from module._buffers.items()


def _left_by(module: nn.Module) -> list[Any]:
    """Return all tensors, numbers and texts that a module and those in it have, in their order."""
    return [
        leaf
        for child in module.modules()
        for leaf in tree_leaves(dict(_beside_parameters(child)))
        if isinstance(leaf, Tensor | bool | int | float | complex | str)
    ]


def _are_equal(these: list[Any], those: list[Any]) -> bool:
    if [type(leaf) for leaf in these] != [type(leaf) for leaf in those]:
        return False
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(these, those, strict=True)
    )


class _ConstructorDraws(TorchDispatchMode):
    """Sees which random numbers are drawn: `of_values`, for a tensor that has some;
    `by_own_generator`, of one that the code made itself."""

    def __init__(self) -> None:
        super().__init__()
        self.of_values = self.by_own_generator = False

    def __torch_dispatch__(
        self,
        function: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in function.tags:
            leaves = tree_leaves((args, kwargs, result))
            self.by_own_generator |= any(isinstance(x, torch.Generator) for x in leaves)
            self.of_values |= any(isinstance(x, Tensor) and not x.is_meta for x in leaves)
        return result
