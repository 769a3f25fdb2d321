"""The memory meter: resident bytes by state, and the exact peak of live bytes by phase.

`resident` reads the storages that a program declares. `MemoryMeter` watches one whole step: every
storage that is born, resized or freed. It knows storages and their states, never a plan, a degree
or an expected count.

Note: what an operator allocates and frees inside itself is not seen (on CUDA the allocator's own
peak, `allocator_peak`, includes it); neither is the rounding of an allocator.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ptrain.costs import Footprint, Peak, Phase, State
from ptrain.interpreter.tiers import tier_of
from ptrain.spec.placement import Tier


class Metered(Protocol):
    """What a meter needs of a program."""

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        """Every tensor that lives now and the state it belongs to."""
        ...


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that this rank stores."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The bytes behind a tensor, shared by all its views."""
    return local(tensor).untyped_storage()


def resident(program: Metered, rank: int = 0) -> dict[State, Footprint]:
    """Bytes by state and tier of the unique storages that the program declares; a storage counts
    once, for the first state that names it."""
    seen: set[int] = set()
    sizes = {state: dict.fromkeys(Tier, 0) for state in State}
    for state, tensor in program.storages():
        storage = storage_of(tensor)
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            sizes[state][tier_of(storage)] += storage.nbytes()
    return {state: _footprint(state, rank, tiers) for state, tiers in sizes.items()}


def _footprint(state: State, rank: int, tiers: dict[Tier, int]) -> Footprint:
    return Footprint(
        state=state,
        rank=rank,
        device_bytes=tiers[Tier.DEVICE],
        host_bytes=tiers[Tier.HOST],
        file_bytes=tiers[Tier.FILE],
    )


class Ledger(TorchDispatchMode):
    """Follows every storage from birth to death while it is entered.

    Operators give birth, `UntypedStorage.resize_` grows and shrinks (FSDP2 frees by resizing to
    zero), a weak reference reports the death. Storages that an operator reads and nobody declared
    existed before; `found` is told of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._resize: Callable[[torch.UntypedStorage, int], Any] | None = None
        self._collecting = False

    def found(self, key: int, storage: torch.UntypedStorage) -> None:
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
            self.found(storage._cdata, storage)

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

    def __torch_dispatch__(
        self,
        function: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor turns into operators on local tensors first
        for tensor in _tensors((args, kwargs)):
            self.watch(tensor)
        result = function(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = storage_of(tensor)
            if self._follow(storage):
                self.born(storage._cdata, storage, function._schema.name)
        return result

    def _resize_storage(self, storage: torch.UntypedStorage, size: int) -> Any:
        assert self._resize is not None
        if self._follow(storage):
            self.found(storage._cdata, storage)
        key, before = storage._cdata, storage.nbytes()
        result = self._resize(storage, size)
        self.sizes[key] = storage.nbytes()
        self.resized(key, storage, before)
        return result

    def __enter__(self) -> Self:
        """Cycles are collected now and not during the step, so that a storage dies when its last
        reference goes."""
        gc.collect()
        self._collecting = gc.isenabled()
        gc.disable()
        self._resize = torch.UntypedStorage.resize_
        ledger = self

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            return ledger._resize_storage(storage, size)

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign,assignment]
        self._references.clear()
        if self._collecting:
            gc.enable()


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors with bytes of their own among an operator's arguments or results."""
    return (
        leaf
        for leaf in tree_iter(tree)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    )


class MemoryMeter(Ledger):
    """Measures one steady step of `program`: live bytes, their peak by phase, and bytes by state.

    It is an observer of the program: `phase` marks where a phase begins. Each state is read at
    its moment: activations and transient at the end of the last micro-batch's forward, gradients
    at the end of the last backward, the others after the update.
    """

    def __init__(self, program: Metered, *, rank: int = 0, device: str = "cpu") -> None:
        super().__init__()
        self.live = 0
        self._program, self._rank, self._device = program, rank, device
        self._phase: Phase | None = None
        self._peaks: dict[Phase, int] = {}
        self._states: dict[int, State] = {}
        self._tiers: dict[int, Tier] = {}
        self._resizable: set[int] = set()
        self._read: dict[State, Footprint] = {}
        self.unregistered = 0
        self.allocator_peak: int | None = None

    def found(self, key: int, storage: torch.UntypedStorage) -> None:
        """Bytes that lived all along count in every peak so far."""
        self._tiers[key] = tier_of(storage)
        size = storage.nbytes() if self._tiers[key] is Tier.DEVICE else 0
        self.live += size
        self._peaks = {phase: peak + size for phase, peak in self._peaks.items()}

    def born(self, key: int, storage: torch.UntypedStorage, operator: str) -> None:
        self._tiers[key] = tier_of(storage)
        self._add(key, storage.nbytes())

    def resized(self, key: int, storage: torch.UntypedStorage, before: int) -> None:
        self._resizable.add(key)
        self._add(key, storage.nbytes() - before)

    def died(self, key: int, size: int) -> None:
        self._add(key, -size)
        self._states.pop(key, None)
        self._tiers.pop(key)
        self._resizable.discard(key)

    def _add(self, key: int, size: int) -> None:
        if self._tiers[key] is Tier.DEVICE:
            self.live += size
            if self._phase and self.live > self._peaks[self._phase]:
                self._peaks[self._phase] = self.live

    def phase(self, phase: Phase, micro_batch: int) -> None:
        """The program says that a phase begins; what it declares is looked up anew."""
        self._register()
        if phase is Phase.BACKWARD:
            self._note(State.ACTIVATIONS, State.TRANSIENT)
        elif phase is Phase.UPDATE:
            self._note(State.GRADIENTS)
        self._phase = phase
        self._peaks[phase] = max(self._peaks.get(phase, 0), self.live)

    def _register(self) -> None:
        declared: dict[int, State] = {}
        for state, tensor in self._program.storages():
            self.watch(tensor)
            declared.setdefault(storage_of(tensor)._cdata, state)
        self._states |= declared

    def _note(self, *states: State) -> None:
        sizes = {state: dict.fromkeys(Tier, 0) for state in State}
        for key, size in self.sizes.items():
            sizes[self._state(key)][self._tiers[key]] += size
        for state in states:
            self._read[state] = _footprint(state, self._rank, sizes[state])

    def _state(self, key: int) -> State:
        """What is freed by resizing is transient: a gathered unit, though it stands in for the
        parameters. What nobody declared is an activation."""
        if key in self._resizable:
            return State.TRANSIENT
        return self._states.get(key, State.ACTIVATIONS)

    def footprints(self) -> tuple[Footprint, ...]:
        """One row per state."""
        return tuple(self._read[state] for state in State if state in self._read)

    def peaks(self) -> tuple[Peak, ...]:
        """One row per phase that the step had."""
        return tuple(
            Peak(phase=phase, rank=self._rank, device_bytes=size)
            for phase, size in self._peaks.items()
        )

    def __enter__(self) -> Self:
        self._register()
        if self._device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        return super().__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._register()
        self._note(State.PARAMETERS, State.OPTIMIZER, State.OTHER)
        if self._device == "cuda":
            self.allocator_peak = torch.cuda.max_memory_allocated()
        super().__exit__(kind, error, trace)
