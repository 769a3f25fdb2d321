"""Which storages live: every birth, change of size and death, as operators run; and what is known
of one, for as long as it lives.

`OfStorages` is the registry that all use who keep something by storage: entries are found by the
storage itself, not by its address, which may be another's as soon as a storage is gone, and leave
with it. torch gives a storage one Python object for as long as it lives.

Which storages stand off the device by decision is written in such a registry here: on a machine
without an accelerator every tensor is on the CPU, so a tag tells what counts as device memory.

Note: what an operator allocates and frees inside itself is not seen.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, Self, TypeAlias, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ptrain.internals.compiled import is_buffer, is_higher_order, is_tracing, seen_buffers
from ptrain.internals.functional_collectives import AsyncCollectiveTensor
from ptrain.internals.part import replaced
from ptrain.spec.placement import Tier

X = TypeVar("X")
OfStorages: TypeAlias = weakref.WeakKeyDictionary[torch.UntypedStorage, X]
_TIERS: OfStorages[Tier] = weakref.WeakKeyDictionary()


def tag(tensor: torch.Tensor, tier: Tier) -> None:
    """Says on which tier the tensor's storage counts."""
    _TIERS[tensor.untyped_storage()] = tier


def tier_of(storage: torch.UntypedStorage, device: str = "cpu") -> Tier:
    """Return the tagged tier; without a tag a CPU storage beside another kind of device is the
    host's, and anything else device memory."""
    untagged = Tier.HOST if storage.device.type == "cpu" != device else Tier.DEVICE
    return _TIERS.get(storage, untagged)


def is_tagged(storage: torch.UntypedStorage) -> bool:
    """Return whether somebody decided where this storage counts."""
    return storage in _TIERS


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that this rank stores."""
    held = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return held.elem if isinstance(held, AsyncCollectiveTensor) else held


def is_wrapper(kind: type) -> bool:
    """Return whether operators on such tensors turn into operators on plain ones."""
    return issubclass(kind, DTensor | AsyncCollectiveTensor)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The bytes behind a tensor, shared by all its views."""
    return local(tensor).untyped_storage()


class OperatorMode(TorchDispatchMode):
    """Sees the operators on plain tensors while it is entered: those on others turn into them, or
    wait, first. `sees_compiled`: Dynamo compiles and runs regions while it is entered, and it sees
    the operators that a generated program calls."""

    sees_compiled = False
    # Recomputation within a compiled region saves the state of random numbers by such an operator.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return whether Dynamo may compile; else it runs the region operator by operator."""
        return cls.sees_compiled

    def __torch_dispatch__(
        self,
        function: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(map(is_wrapper, types)):
            return NotImplemented
        if is_tracing():  # operators that the compiler traces do not run
            return function(*args, **(kwargs or {}))
        if is_higher_order(function):
            return self.higher_order(function, args, kwargs or {})
        return self.operator(function, args, kwargs or {})

    def higher_order(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that takes functions, and return its result. torch takes the mode off the
        stack meanwhile: what it consists of is not seen."""
        return function(*args, **kwargs)

    def operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and return its result."""
        result = function(*args, **kwargs)
        self.ran(function, args, kwargs, result)
        return result

    def ran(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """An operator has run. Modes that only look define this one."""


class Ledger(OperatorMode):
    """Follows every storage from birth to death while it is entered.

    Operators give birth, `UntypedStorage.resize_` grows and shrinks (FSDP2 frees by resizing to
    zero), a weak reference reports the death. Storages that an operator reads and nobody declared
    existed before: `existing` is called for them.
    """

    sees_compiled = True

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._resize: Callable[[torch.UntypedStorage, int], Any] | None = None
        self._patches = ExitStack()

    def existing(self, key: int, storage: torch.UntypedStorage) -> None:
        """A storage that existed before it was seen."""

    def born(self, key: int, storage: torch.UntypedStorage, operator: str) -> None:
        """An operator allocated a storage."""

    def resized(self, key: int, storage: torch.UntypedStorage, before: int) -> None:
        """A storage has another size now."""

    def died(self, key: int, size: int) -> None:
        """A storage was freed."""

    def watch(self, tensor: torch.Tensor) -> None:
        """Declares a tensor that lives already."""
        storage = storage_of(tensor)
        if self._follow(storage):
            self.existing(storage._cdata, storage)

    def _follow(self, storage: torch.UntypedStorage) -> bool:
        key = storage._cdata
        if key in self.sizes:
            return False
        self.sizes[key] = storage.nbytes()
        self._references[key] = weakref.ref(storage, lambda _: self._forget(key))
        return True

    def _forget(self, key: int) -> None:
        del self._references[key]
        self.died(key, self.sizes.pop(key))

    def operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = "inductor::buffer" if is_buffer() else function._schema.name
        return self._followed(function, args, kwargs, name)

    def higher_order(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it, and follow its results as those of one operator."""
        return self._followed(function, args, kwargs, function.name())

    def _followed(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str
    ) -> Any:
        for tensor in tensors_of((args, kwargs)):
            self.watch(tensor)
        result = function(*args, **kwargs)
        for tensor in tensors_of(result):
            storage = storage_of(tensor)
            if self._follow(storage):
                self.born(storage._cdata, storage, name)
        return result

    def _resize_storage(self, storage: torch.UntypedStorage, size: int) -> Any:
        assert self._resize is not None
        if is_tracing():  # the compiler's own
            return self._resize(storage, size)
        if self._follow(storage):
            self.existing(storage._cdata, storage)
        key = storage._cdata
        # What was counted, not what it has: to view an empty storage fills it where it is fake.
        before = self.sizes[key]
        result = self._resize(storage, size)
        self.sizes[key] = storage.nbytes()
        self.resized(key, storage, before)
        return result

    def __enter__(self) -> Self:
        """Cycles are collected now and not during the step, so that a storage dies when its last
        reference goes."""
        gc.collect()
        self._resize = torch.UntypedStorage.resize_
        ledger = self

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            return ledger._resize_storage(storage, size)

        with ExitStack() as patches:
            if gc.isenabled():
                gc.disable()
                patches.callback(gc.enable)
            patches.callback(self._references.clear)
            patches.enter_context(replaced(torch.UntypedStorage, resize_=resize_))
            patches.enter_context(seen_buffers())
            super().__enter__()
            self._patches = patches.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        with self._patches:
            super().__exit__(*error)


# What operators are given beside tensors: torch's own walk asks of each what it is made of.
_LEAVES = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout}


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors with bytes of their own among an operator's arguments or results."""
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
