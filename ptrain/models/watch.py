"""Watch the forward calls of modules: the one set of hooks of whoever looks at a pass.

Hooks that a run keeps for good (of wraps and of cut operators) are theirs to register; these are
gone with the look. What a module is given, as its hooks see it, is read here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from ptrain.internals.autograd import is_in_backward

X = TypeVar("X")
Before = Callable[[str, nn.Module, Any, Any], Any]  # path, module, args and kwargs
After = Callable[[str, nn.Module, Any, Any], Any]  # path, module, args and output


# Modules within a compiled block: a hook on one would be part of the block's program, and the
# program another one.
IN_PROGRAMS: WeakSet[nn.Module] = WeakSet()


@contextmanager
def watching(
    modules: Iterable[tuple[str, nn.Module]],
    *,
    before: Before | None = None,
    after: After | None = None,
    is_first: bool = False,
) -> Iterator[list[str]]:
    """Give the paths of the modules that run, outermost first, but of none within a compiled block,
    which is one module. `before` is told what a module is
    given, and `after` what it gave; what they return stands in the place of that, unless it is
    None. `is_first`: ahead of the hooks that a module has."""
    running: list[str] = []

    def begins(path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        running.append(path)
        return None if before is None else before(path, module, args, kwargs)

    def ended(*_: object) -> None:
        running.pop()

    with ExitStack() as stack:
        for path, module in modules:
            if module in IN_PROGRAMS:
                continue
            begun = module.register_forward_pre_hook(
                partial(begins, path), with_kwargs=True, prepend=is_first
            )
            stack.callback(begun.remove)
            if after is not None:
                stack.callback(module.register_forward_hook(partial(after, path)).remove)
            # a module that raises has run, too, and gave nothing
            stack.callback(module.register_forward_hook(ended, always_call=True).remove)
        yield running


@contextmanager
def listening(listeners: list[X], *more: X) -> Iterator[None]:
    """Temporarily let these be among those that are told."""
    listeners.extend(more)
    try:
        yield
    finally:
        for listener in more:
            listeners.remove(listener)


def runs_again() -> bool:
    """Return whether a module's forward runs within a backward pass: only for what it did not keep.
    Its hooks have done their work. The engine's thread knows the pass that it works for."""
    return is_in_backward()


def with_first(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], Any]
) -> Any:
    """The arguments with the first floating tensor changed; None where there is none."""
    for index, value in enumerate(args):
        if is_real(value):
            return (*args[:index], change(value), *args[index + 1 :]), kwargs
    for name, value in kwargs.items():
        if is_real(value):
            return args, kwargs | {name: change(value)}
    return None


def first_real(value: Any) -> torch.Tensor | None:
    """Return the first tensor of reals among the leaves of a value."""
    return next((leaf for leaf in tree_iter(value) if is_real(leaf)), None)


def is_real(value: object) -> bool:
    """Return whether it is a tensor of reals."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()
