"""The lifetimes of storages (birth, change of size, death) while operators run, and their tiers.

`OfStorages` is a registry by storage. Its keys are the storages themselves and not their addresses,
because an address is reused once a storage is freed; an entry disappears with its storage. torch
keeps one Python object per live storage.

A registry here holds the tier of offloaded storages: on a machine without an accelerator every
tensor is on the CPU, so only a tag distinguishes host memory from device memory.

Note: memory that an operator allocates and frees internally is not seen.

`watch_modules` adds temporary hooks to the forward calls of modules. Permanent hooks of a run
(wrappers, sharded operators) are registered in their modules.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self, TypeAlias, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ptrain.internals.autograd import is_in_backward
from ptrain.internals.compiled import is_buffer, is_higher_order, is_tracing, seen_buffers
from ptrain.internals.fakes import is_device_query
from ptrain.internals.functional_collectives import AsyncCollectiveTensor
from ptrain.internals.part import replace_attributes
from ptrain.spec.placement import Tier

X = TypeVar("X")
OfStorages: TypeAlias = weakref.WeakKeyDictionary[torch.UntypedStorage, X]
_TIERS: OfStorages[Tier] = weakref.WeakKeyDictionary()


def set_tier(tensor: torch.Tensor, tier: Tier) -> None:
    """Set the tier on which the tensor's storage is counted."""
    _TIERS[tensor.untyped_storage()] = tier


def tier_of(storage: torch.UntypedStorage, device: str = "cpu") -> Tier:
    """Return the tier of a storage.

    Args:
        storage: The storage.
        device: The type of the run's device.

    Returns:
        The tagged tier. Without a tag, HOST for a CPU storage of a run on another type of device,
        else DEVICE.
    """
    untagged = Tier.HOST if storage.device.type == "cpu" != device else Tier.DEVICE
    return _TIERS.get(storage, untagged)


def has_tier(storage: torch.UntypedStorage) -> bool:
    """Return True if the storage has a tag."""
    return storage in _TIERS


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor that this rank stores, without DTensor and async wrappers."""
    # With gradients enabled, `to_local` would add a node to the graph.
    held = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return held.elem if isinstance(held, AsyncCollectiveTensor) else held


def is_wrapper(kind: type) -> bool:
    """Return True if torch replaces operators on tensors of this class by operators on plain
    tensors."""
    return issubclass(kind, DTensor | AsyncCollectiveTensor)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return the storage of a rank's local tensor, which all views share."""
    return local_tensor(tensor).untyped_storage()


class OperatorMode(TorchDispatchMode):
    """A dispatch mode that sees operators on plain tensors.

    Operators on wrappers (DTensor, AsyncCollectiveTensor) are first replaced by operators on plain
    tensors. If `sees_compiled` is true, Dynamo compiles regions while the mode is entered, and the
    mode sees the operators that a generated program calls.
    """

    sees_compiled = False
    # Recomputation within a compiled region saves the random state by a higher-order operator.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True if Dynamo may compile under this mode; otherwise it runs regions eagerly."""
        return cls.sees_compiled

    def __torch_dispatch__(
        self,
        function: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if is_device_query(function, args):
            return args[0].device
        # NotImplemented makes torch call the wrapper class, whose operators on plain tensors reach
        # this mode again.
        if any(map(is_wrapper, types)):
            return NotImplemented
        if is_tracing():  # operators that the compiler traces do not run
            return function(*args, **(kwargs or {}))
        if is_higher_order(function):
            return self.run_higher_order(function, args, kwargs or {})
        return self.run_operator(function, args, kwargs or {})

    def run_higher_order(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a higher-order operator, and return its result.

        torch removes the mode from the stack meanwhile, so the operators inside are not seen.

        Args:
            function: The operator, which has a `name()` but no schema.
            args: Its positional arguments.
            kwargs: Its keyword arguments, {} if it has none.
        """
        return function(*args, **kwargs)

    def run_operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and return its result.

        Args:
            function: The operator, an `OpOverload` of aten or of a library.
            args: Its positional arguments, with plain tensors instead of wrappers.
            kwargs: Its keyword arguments, {} if it has none.
        """
        result = function(*args, **kwargs)
        self.on_operator(function, args, kwargs, result)
        return result

    def on_operator(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Handle an operator that has run. Modes that only observe override this method.

        Args:
            function: The operator, an `OpOverload` of aten or of a library.
            args: Its positional arguments; in-place operators have changed them.
            kwargs: Its keyword arguments, {} if it has none.
            result: Its result: a tensor, a tree of tensors and numbers, or None.
        """


class Ledger(OperatorMode):
    """A mode that follows every storage from allocation to free.

    Operators allocate; `UntypedStorage.resize_` changes sizes (FSDP2 frees by resizing to zero); a
    weak reference reports the free. `on_existing` is called for a storage that an operator reads
    but that was neither allocated under the mode nor passed to `watch`.
    """

    sees_compiled = True

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._resize: Callable[[torch.UntypedStorage, int], Any] | None = None
        self._patches = ExitStack()

    def on_existing(self, key: int, storage: torch.UntypedStorage) -> None:
        """Handle a storage that existed before the mode saw it.

        Args:
            key: The address of the C++ storage, unique while the storage is alive.
            storage: The storage.
        """

    def on_allocation(self, key: int, storage: torch.UntypedStorage, operator: str) -> None:
        """Handle a storage that an operator allocated.

        Args:
            key: The address of the C++ storage, unique while the storage is alive.
            storage: The storage; `sizes[key]` is its size in bytes.
            operator: The operator's name: `aten::add`, or `inductor::buffer` for a buffer of a
                compiled program.
        """

    def on_resize(self, key: int, storage: torch.UntypedStorage, before: int) -> None:
        """Handle a storage whose size has changed.

        Args:
            key: The address of the C++ storage, unique while the storage is alive.
            storage: The storage; `sizes[key]` is its new size in bytes.
            before: Its size before, in bytes.
        """

    def on_free(self, key: int, size: int) -> None:
        """Handle a storage that was freed.

        Args:
            key: The address of the C++ storage, which a later storage may reuse.
            size: Its last size, in bytes; 0 if it was resized to zero before.
        """

    def watch(self, tensor: torch.Tensor) -> None:
        """Follow the storage of a tensor that exists already."""
        storage = storage_of(tensor)
        if self._follow(storage):
            self.on_existing(storage._cdata, storage)

    def _follow(self, storage: torch.UntypedStorage) -> bool:
        """Start to follow a storage; return False if it is followed already."""
        # The address of the C++ storage: unique while it lives, and `_forget` removes it when it
        # dies.
        key = storage._cdata
        if key in self.sizes:
            return False
        self.sizes[key] = storage.nbytes()
        # torch keeps one Python object per live storage, so the callback runs when the memory is
        # freed.
        self._references[key] = weakref.ref(storage, lambda _: self._forget(key))
        return True

    def _forget(self, key: int) -> None:
        del self._references[key]
        self.on_free(key, self.sizes.pop(key))

    def run_operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = "inductor::buffer" if is_buffer() else function._schema.name
        return self._run_and_follow(function, args, kwargs, name)

    def run_higher_order(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a higher-order operator, and follow its results like an operator's.

        Args:
            function: The operator, whose name is reported to `on_allocation`.
            args: Its positional arguments; unknown storages among them are reported to
                `on_existing`.
            kwargs: Its keyword arguments, likewise.
        """
        return self._run_and_follow(function, args, kwargs, function.name())

    def _run_and_follow(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str
    ) -> Any:
        # Before the operator: a storage that it only reads would otherwise count as allocated by
        # it.
        for tensor in tensors_of((args, kwargs)):
            self.watch(tensor)
        result = function(*args, **kwargs)
        for tensor in tensors_of(result):
            storage = storage_of(tensor)
            if self._follow(storage):
                self.on_allocation(storage._cdata, storage, name)
        return result

    def _resize_storage(self, storage: torch.UntypedStorage, size: int) -> Any:
        assert self._resize is not None
        if is_tracing():  # the compiler's own
            return self._resize(storage, size)
        if self._follow(storage):
            self.on_existing(storage._cdata, storage)
        key = storage._cdata
        # The recorded size, because viewing an empty fake storage changes its size.
        before = self.sizes[key]
        result = self._resize(storage, size)
        self.sizes[key] = storage.nbytes()
        self.on_resize(key, storage, before)
        return result

    def __enter__(self) -> Self:
        """Start to follow storages. The cyclic garbage collector runs once and is disabled until
        the end, so that a storage is freed with its last reference."""
        # Garbage from earlier code must not be freed in the middle of the record.
        gc.collect()
        # Resizing is no operator, so a dispatch mode does not see it.
        self._resize = torch.UntypedStorage.resize_
        ledger = self

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            return ledger._resize_storage(storage, size)

        with ExitStack() as patches:
            if gc.isenabled():
                gc.disable()
                patches.callback(gc.enable)
            # Storages that outlive the record must not call back into it.
            patches.callback(self._references.clear)
            patches.enter_context(replace_attributes(torch.UntypedStorage, resize_=resize_))
            patches.enter_context(seen_buffers())
            super().__enter__()
            self._patches = patches.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        with self._patches:
            super().__exit__(*error)


# Types of non-tensor arguments, which need no `tree_iter`, a slow walk with a lookup per object.
_LEAVES = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout}


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the strided tensors among an operator's arguments or results; other layouts have no
    single storage."""
    if isinstance(tree, torch.Tensor):
        if tree.layout is torch.strided:
            yield tree
    elif type(tree) in (tuple, list):
        for branch in tree:
            if branch is not None:
                yield from tensors_of(branch)
    elif type(tree) is dict:
        yield from tensors_of(list(tree.values()))
    elif type(tree) not in _LEAVES:
        leaves = tree_iter(tree)
        yield from (leaf for leaf in leaves if leaf is not tree for leaf in tensors_of(leaf))


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

    def leave_module(*_: object) -> None:
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
            stack.callback(module.register_forward_hook(leave_module, always_call=True).remove)
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
