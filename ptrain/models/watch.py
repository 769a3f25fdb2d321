"""Temporary hooks on the forward calls of modules, and helpers to read and change their arguments.

Permanent hooks of a run (wrappers, sharded operators) are registered in their modules.
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


# Modules within compiled blocks. A hook on one would become part of the block's program and change
# it.
IN_PROGRAMS: WeakSet[nn.Module] = WeakSet()


@contextmanager
def watch_modules(
    modules: Iterable[tuple[str, nn.Module]],
    *,
    before: Before | None = None,
    after: After | None = None,
    is_first: bool = False,
) -> Iterator[list[str]]:
    """Temporarily watch the forward calls of modules.

    A compiled block counts as one module; modules within it are not watched.

    Args:
        modules: Pairs of path and module.
        before: Called with path, module, args and kwargs before a forward. A result other than None
            replaces the arguments.
        after: Called with path, module, args and output after a forward. A result other than None
            replaces the output.
        is_first: True to call `before` ahead of the hooks that a module already has.

    Yields:
        The paths of the modules that are running, outermost first; the list changes in place.
    """
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
            # always_call: a module that raises must leave the list too
            stack.callback(module.register_forward_hook(ended, always_call=True).remove)
        yield running


@contextmanager
def add_listeners(listeners: list[X], *more: X) -> Iterator[None]:
    """Temporarily add listeners to a list."""
    listeners.extend(more)
    try:
        yield
    finally:
        for listener in more:
            listeners.remove(listener)


def is_recomputing() -> bool:
    """Return True if the current forward is a recomputation within a backward pass.

    Hooks have already done their work in the first forward. The state belongs to the thread of the
    autograd engine.
    """
    return is_in_backward()


def with_first(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], Any]
) -> Any:
    """Return the arguments with the first floating-point tensor changed; None if there is none.

    Args:
        args: Positional arguments of a forward pass.
        kwargs: Keyword arguments.
        change: Returns the replacement of the tensor.

    Returns:
        Arguments and keyword arguments, in the form that a forward pre-hook returns.
    """
    for index, value in enumerate(args):
        if is_real(value):
            return (*args[:index], change(value), *args[index + 1 :]), kwargs
    for name, value in kwargs.items():
        if is_real(value):
            return args, kwargs | {name: change(value)}
    return None


def first_real(value: Any) -> torch.Tensor | None:
    """Return the first floating-point tensor among the leaves of a value; None without one."""
    return next((leaf for leaf in tree_iter(value) if is_real(leaf)), None)


def is_real(value: object) -> bool:
    """Return True if the value is a floating-point tensor."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()
