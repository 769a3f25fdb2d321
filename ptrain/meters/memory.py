"""The memory meter: resident bytes by state, and the exact peak of live bytes by phase.

It watches one full step: every storage that is allocated, resized or freed. It uses storages and
their declared states only, never a plan, a degree or an expected count.

Two things are not counted. The first is memory that an operator allocates and frees internally, and
an allocator's rounding; on CUDA, `Peak.allocator_bytes` includes both. The second is single numbers
that GPU operators leave on the host, such as the seed and offset of attention's dropout.

The role finder: infer the state of each storage from the operators that use it in a step,
independent of the program's declaration.

- A parameter is a tensor that modules compute with, or a source in the same dtype from which it was
  copied or all-gathered.
- Optimizer state is the state of torch's optimizers, any source of a copy of it, and master copies:
  tensors that are updated, or that parameters are cast from, in a dtype that modules do not compute
  with.
- A gradient is a tensor that an optimizer receives as `grad`, or a source from which it was
  reduced, accumulated or copied.

`RoleFinder` follows these copies through one step, and so detects a program that declares a
storage as the wrong state. It compares `ObservableProgram.storages` with the roles and never uses
it to find them. A storage that nothing reads or writes in the step has no role (`RoleRow.role` is
None).
"""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, Protocol, Self
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves

from ptrain.cost import Footprint, Peak, Phase, State
from ptrain.models.ledger import (
    Ledger,
    OfStorages,
    OperatorMode,
    add_listeners,
    has_tier,
    storage_of,
    tensors_of,
    tier_of,
    watch_modules,
)
from ptrain.runtime.comm import TagRegistry
from ptrain.spec.placement import Tier
from ptrain.units import format_bytes

# gloo's threads free the buffers of a finished collective with a small random delay. So the
# operator after a collective waits, and a new maximum counts only if it persists after a pause,
# which is longer if several processes share a core. Send and receive (ProcessGroupGloo::send, recv)
# need no pause: gloo's threads keep no reference to their tensors, while the caller may keep them,
# as a pipeline stage keeps hidden states until its backward pass.
_BETWEEN_TWO = ("send", "recv_", "recv_any_source_")
_RELEASE_SECONDS = 1e-3
_SETTLE_SECONDS = 2e-4
_NUMBER_BYTES = 8  # one int64 or float64
_LONGEST_RELEASE_SECONDS = 5e-2  # of a pause, and of the wait at the begin of a phase


class MeteredProgram(Protocol):
    """The part of a program that the memory meter reads."""

    @property
    def registry(self) -> TagRegistry: ...

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        """Yield every live tensor with the state that it belongs to."""
        ...


def _load_per_core() -> float:
    """Return the load average per usable core, at least 1."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    with suppress(OSError, AttributeError):  # systems without a load average
        return max(1.0, os.getloadavg()[0] / cores)
    return 1.0


def _is_held_by_threads(operator: Any, device: str) -> bool:
    """Return True if the backend's threads may hold the operator's tensors after it returns."""
    name = operator._schema.name.partition("::")[2]
    is_dropped = device == "cpu" and name in _BETWEEN_TWO
    return operator.namespace in ("c10d", "_c10d_functional") and not is_dropped


class MemoryMeter(Ledger):
    """The meter of one steady step: live bytes, their peak by phase, and bytes by state.

    It is an observer of the program: `phase` marks where a phase begins. Each state is read at a
    fixed moment:

    - activations at the begin of the backward pass at which they are largest: the end of a forward
      pass or, in a pipeline, the point with the most micro-batches in flight;
    - transient state at the last begin of a backward pass;
    - gradients at the end of the last backward pass;
    - all other states after the update.
    """

    def __init__(
        self, program: MeteredProgram, *, rank: int = 0, device: str = "cpu", waits: bool = True
    ) -> None:
        """Prepare a measurement.

        Args:
            program: The program that declares its storages.
            rank: The rank that the rows are reported for.
            device: Device type whose bytes are device bytes; the allocator is read on `cuda`.
            waits: Wait for the backend's threads to free their tensors. Fake ranks have no threads.
        """
        super().__init__()
        self.live = 0
        self._program, self._rank, self._device, self._waits = program, rank, device, waits
        self._crowd = _load_per_core()
        self._phase: Phase | None = None
        self._peaks: dict[Phase, int] = {}
        self._states: dict[int, State] = {}
        self._tiers: dict[int, Tier] = {}
        self._resizable: set[int] = set()
        self._inner: set[int] = set()
        self._after_collective = False
        # Weak: the meter must not keep alive the tensors whose release it waits for.
        self._communicated: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._newborn: dict[int, int] = {}
        self._dead: list[tuple[int, int]] = []
        self._footprints: dict[State, Footprint] = {}
        self._allocator: dict[Phase, int] = {}
        self._alive: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._older: set[int] = set()

    def run_operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator; note if the backend's threads may hold its tensors afterwards."""
        self._count_pending()
        self._pause_after_collective()
        result = super().run_operator(function, args, kwargs)
        self._after_collective = _is_held_by_threads(function, self._device)
        if self._after_collective:
            leaves = tree_leaves((args, kwargs))
            tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
            self._communicated.update(map(storage_of, tensors))
        return result

    def run_higher_order(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._count_pending()
        self._pause_after_collective()
        return super().run_higher_order(function, args, kwargs)

    def _resize_storage(self, storage: torch.UntypedStorage, size: int) -> Any:
        self._count_pending()
        self._pause_after_collective()
        return super()._resize_storage(storage, size)

    def _pause_after_collective(self) -> None:
        """Pause after a collective, so that the backend's threads can free its tensors."""
        if self._after_collective:
            self._after_collective = False
            self._pause(_RELEASE_SECONDS)

    def on_existing(self, key: int, storage: torch.UntypedStorage) -> None:
        """Count a storage that is older than the first operator that uses it.

        A storage that was declared, tagged or reachable before the step counts in every peak so
        far. Any other is internal to an operator (gloo's reduce-scatter works on a copy of its
        input) and is not counted.
        """
        self._tiers[key] = tier_of(storage, self._device)
        if storage in self._alive:
            self._older.add(key)
        known = key in self._states or key in self._older or self._program.registry.has_tag(storage)
        if storage.nbytes() and not known:
            self._inner.add(key)
            return
        self._add_to_all(key, storage.nbytes())

    def _add_to_all(self, key: int, size: int) -> None:
        """Add bytes to the live bytes and to the peaks of all phases so far."""
        if self._tiers[key] is Tier.DEVICE:
            self.live += size
            self._peaks = {phase: peak + size for phase, peak in self._peaks.items()}

    def on_allocation(self, key: int, storage: torch.UntypedStorage, operator: str) -> None:
        self._newborn[key] = storage.nbytes()

    def _count_pending(self) -> None:
        """Count the storages that were allocated and freed since the last operator.

        A tensor is tagged after its allocation, so its tier is read at the next operator. A storage
        that was freed in between (an argument, or one that another thread held) was live together
        with the new ones, so the new ones are added first.
        """
        newborn, self._newborn = self._newborn, {}
        dead, self._dead = self._dead, []
        for key, size in newborn.items():
            reference = self._references.get(key)
            storage = reference() if reference else None
            tier = self._tiers[key] = (
                Tier.DEVICE if storage is None else tier_of(storage, self._device)
            )
            # seed and offset of attention's dropout, which GPU operators leave on the host
            if tier is Tier.HOST and size <= _NUMBER_BYTES and not has_tier(storage):
                self._inner.add(key)
                continue
            self._add_live_bytes(key, size)
        for key, size in dead:
            self._count_free(key, size)

    def on_resize(self, key: int, storage: torch.UntypedStorage, before: int) -> None:
        self._resizable.add(key)
        self._add_live_bytes(key, storage.nbytes() - before)

    def on_free(self, key: int, size: int) -> None:
        if self._newborn:
            self._dead.append((key, size))
        else:
            self._count_free(key, size)

    def _count_free(self, key: int, size: int) -> None:
        """Stop counting a storage that was freed."""
        if key not in self._inner:
            self._add_live_bytes(key, -size)
        self._inner.discard(key)
        self._older.discard(key)
        self._states.pop(key, None)
        self._tiers.pop(key)
        self._resizable.discard(key)

    def _add_live_bytes(self, key: int, size: int) -> None:
        """Add bytes to the live bytes, and raise the peak if they are still live after a pause."""
        if self._tiers[key] is Tier.DEVICE:
            self.live += size
            if self._phase and self.live > self._peaks[self._phase]:
                self._pause(_RELEASE_SECONDS if len(self._communicated) else _SETTLE_SECONDS)
                self._peaks[self._phase] = max(self.live, self._peaks[self._phase])

    def phase(self, phase: Phase, micro_batch: int) -> None:
        """Enter a phase: read the states of this moment and the program's declared storages."""
        self._wait_for_release()
        self._read_declared()
        self._note_allocator()
        if phase is Phase.BACKWARD:
            self._record_states(State.ACTIVATIONS, State.TRANSIENT)
        elif phase is Phase.UPDATE:
            self._record_states(State.GRADIENTS)
        self._phase = phase
        self._peaks[phase] = max(self._peaks.get(phase, 0), self.live)

    def _wait_for_release(self) -> None:
        """Wait until undeclared tensors of finished collectives have been freed.

        The wait ends after `_LONGEST_RELEASE_SECONDS`: a collective may still be running.
        """
        waiting = self._communicated
        # Declared storages stay alive, so waiting for them would always last the full time.
        waiting.difference_update(storage_of(tensor) for _, tensor in self._program.storages())
        self._communicated = weakref.WeakSet()
        give_up = time.monotonic() + (_LONGEST_RELEASE_SECONDS if self._waits else 0)
        self._pause(_RELEASE_SECONDS)
        while len(waiting) and time.monotonic() < give_up:
            time.sleep(_RELEASE_SECONDS)

    def _pause(self, seconds: float) -> None:
        """Sleep, for longer if several processes share a core."""
        if self._waits:
            time.sleep(min(seconds * self._crowd, _LONGEST_RELEASE_SECONDS))

    def _read_declared(self) -> None:
        """Read the declared storages and their states.

        Declared storages that were taken for internal ones are counted from now on.
        """
        self._count_pending()
        declared = list(self._program.storages())
        states: dict[int, State] = {}
        for state, tensor in declared:
            states.setdefault(storage_of(tensor)._cdata, state)
        self._states |= states
        for key in self._inner & states.keys():  # first seen in an operator, before its declaration
            self._inner.remove(key)
            self._add_to_all(key, self.sizes[key])
        for _, tensor in declared:
            self.watch(tensor)
        self._exclude_inputs()

    def _exclude_inputs(self) -> None:
        """Stop counting the caller's batches, including those allocated within the step."""
        unseen = self.sizes.keys() - self._states.keys() - self._inner
        for key in unseen & {storage._cdata for storage in self._program.registry.inputs}:
            self._inner.add(key)
            self._add_to_all(key, -self.sizes[key])

    def _record_states(self, *states: State) -> None:
        """Record the bytes of some states; activations only if they exceed the earlier record."""
        sizes = {state: dict.fromkeys(Tier, 0) for state in State}
        for key, size in self.sizes.items():
            if key not in self._inner:
                sizes[self._state_of(key)][self._tiers[key]] += size
        for state in states:
            footprint = Footprint(
                state=state,
                rank=self._rank,
                device_bytes=sizes[state][Tier.DEVICE],
                host_bytes=sizes[state][Tier.HOST],
                file_bytes=sizes[state][Tier.FILE],
            )
            # In a pipeline, backward passes begin with different numbers of micro-batches in
            # flight.
            most = self._footprints.get(state)
            if state is State.ACTIVATIONS and most and most.device_bytes > footprint.device_bytes:
                continue
            self._footprints[state] = footprint

    def _state_of(self, key: int) -> State:
        """Return the state of a storage.

        A storage that is resized is transient: it is an all-gathered unit, even if declared as
        parameters. An undeclared storage is an activation, or OTHER if it is older than the step.
        """
        if key in self._resizable:
            return State.TRANSIENT
        undeclared = State.OTHER if key in self._older else State.ACTIVATIONS
        return self._states.get(key, undeclared)

    def footprints(self) -> tuple[Footprint, ...]:
        """Return one row per state."""
        return tuple(self._footprints[state] for state in State if state in self._footprints)

    def peaks(self) -> tuple[Peak, ...]:
        """Return one row per phase of the step."""
        return tuple(
            Peak(
                phase=phase,
                rank=self._rank,
                device_bytes=size,
                allocator_bytes=self._allocator.get(phase, 0),
            )
            for phase, size in self._peaks.items()
        )

    def __enter__(self) -> Self:
        self._read_declared()
        self._alive = weakref.WeakSet(_reachable_storages())
        self._note_allocator()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self._read_declared()
        self._record_states(State.PARAMETERS, State.OPTIMIZER, State.OTHER)
        self._note_allocator()
        super().__exit__(*error)

    def _note_allocator(self) -> None:
        """Record the CUDA allocator's peak since the last call, and reset it."""
        if self._device != "cuda":
            return
        if self._phase:
            highest = torch.cuda.max_memory_allocated()
            self._allocator[self._phase] = max(highest, self._allocator.get(self._phase, 0))
        torch.cuda.reset_peak_memory_stats()


def _reachable_storages() -> Iterator[torch.UntypedStorage]:
    """Yield the storages of all tensors that Python can reach. Costs about 0.1 s."""
    for thing in gc.get_objects():
        # `isinstance` reads `__class__`, which runs code of proxies and mocks. Sparse tensors have
        # no storage.
        if issubclass(type(thing), torch.Tensor) and thing.layout is torch.strided:
            yield storage_of(thing)


# Operators that only copy, join or add elements: their outputs derive from all their inputs.
_COPIES = frozenset(
    {
        "copy_", "_foreach_copy_", "_to_copy", "clone", "cat", "split_with_sizes_copy", "stack",
        "add", "add_", "_foreach_add_", "sum", "_chunk_cat", "chunk_cat", "all_gather_copy_in",
    }
)  # fmt: skip
_COLLECTIVES = ("c10d", "_c10d_functional")
_STATES = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS)


class ObservableProgram(Protocol):
    """The part of a program that the role finder reads."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def gradient_observers(self) -> list[Any]: ...

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        """Yield every live tensor with the state that the program declares."""
        ...


@dataclass(frozen=True, slots=True)
class RoleRow:
    """Bytes with one declared state and one role.

    Attributes:
        declared: The state that the program declares.
        role: The state inferred from use, None if the storages were not used in the step.
        nbytes: Bytes of these storages.
    """

    declared: State
    role: State | None
    nbytes: int

    @property
    def agrees(self) -> bool:
        """True if the use does not contradict the declaration."""
        return self.role in (None, self.declared)

    def __str__(self) -> str:
        used = f"used as {self.role}" if self.role else "not used"
        return f"{format_bytes(self.nbytes)} declared as {self.declared}, but {used}"


class RoleFinder(OperatorMode):
    """The mode that infers the roles of storages in a step.

    Enter it around one steady step, from its forward pass to its update.

    Storages are numbered in order of first use; the finder keeps none of them alive.
    """

    sees_compiled = True

    def __init__(self, program: ObservableProgram) -> None:
        super().__init__()
        self._program = program
        self._numbers: OfStorages[int] = WeakKeyDictionary()
        self._next = count()
        self._sources: dict[int, set[int]] = {}
        # dtypes in which modules compute with a storage
        self._used_dtypes: dict[int, set[torch.dtype]] = {}
        self._dtypes: dict[int, torch.dtype] = {}
        self._updated: set[int] = set()
        self._optimizer_tensors: set[int] = set()  # tensors of optimizer state
        self._gradients_received: set[int] = set()  # tensors that optimizers received as `grad`
        self._declared: dict[int, tuple[State, int]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        super().__enter__()
        self._declare()
        self._stack.enter_context(add_listeners(self._program.gradient_observers, self))
        self._hook_updates()
        modules = self._program.model.named_modules()
        self._stack.enter_context(watch_modules(modules, before=self._before_use))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._declare()
        super().__exit__(*error)

    def _hook_updates(self) -> None:
        """Watch the updates of all optimizers until the finder exits."""
        # Hooks of all optimizers (torch/optim/optimizer.py, torch 2.13): a program may have one
        # optimizer per unit and rule.
        self._stack.callback(register_optimizer_step_pre_hook(self._before_update).remove)
        self._stack.callback(register_optimizer_step_post_hook(self._after_update).remove)

    def on_reduced(self) -> None:
        """Read the declarations when gradients are reduced and in their final storages."""
        self._declare()

    def on_clipped(self, norm: torch.Tensor | None) -> None:
        """Read the declarations just before the update."""
        self._declare()

    def rows(self) -> tuple[RoleRow, ...]:
        """Return bytes by declared state and role, for the states that can have a role."""
        roles = self._find_roles()
        sizes: dict[tuple[State, State | None], int] = {}
        for number, (declared, nbytes) in self._declared.items():
            key = declared, roles.get(number)
            sizes[key] = sizes.get(key, 0) + nbytes
        return tuple(RoleRow(*key, nbytes) for key, nbytes in sizes.items() if nbytes)

    def _find_roles(self) -> dict[int, State]:
        """Return the role of each storage; the role of gradients overrides all others."""
        of_parameters = self._copy_origins(set(self._used_dtypes))
        computed = set().union(*self._used_dtypes.values())  # a master has another dtype
        masters = {
            number
            for number in of_parameters | self._copy_origins(self._updated)
            if self._dtypes[number] not in computed
        }
        roles = dict.fromkeys(of_parameters - masters, State.PARAMETERS)
        roles |= dict.fromkeys(
            masters | self._copy_origins(self._optimizer_tensors), State.OPTIMIZER
        )
        roles |= dict.fromkeys(self._copy_origins(self._gradients_received), State.GRADIENTS)
        return roles

    def _copy_origins(self, numbers: set[int]) -> set[int]:
        """Return these storages and all storages that they were copied from, transitively."""
        known, to_come = set(numbers), list(numbers)
        while to_come:
            before = self._sources.get(to_come.pop(), set()) - known
            known |= before
            to_come += before
        return known

    def _declare(self) -> None:
        """Record state and bytes of each declared storage; its first declaration counts."""
        seen: set[int] = set()
        for state, tensor in self._program.storages():
            number = self._storage_number(tensor)
            if state in _STATES and number not in seen:
                self._declared[number] = state, storage_of(tensor).nbytes()
            seen.add(number)

    def _before_use(self, _: str, module: nn.Module, *__: object) -> None:
        """Record the parameters that a module is about to compute with."""
        for parameter in module._parameters.values():
            if parameter is not None:
                self._used_dtypes.setdefault(self._storage_number(parameter), set()).add(
                    parameter.dtype
                )

    def _before_update(self, optimizer: Optimizer, *_: object) -> None:
        """Record the parameters and gradients that an optimizer is about to update with."""
        for leaf in chain.from_iterable(group["params"] for group in optimizer.param_groups):
            if leaf.grad is not None:
                self._gradients_received.add(self._storage_number(leaf.grad))
                self._updated.add(self._storage_number(leaf))

    def _after_update(self, optimizer: Optimizer, *_: object) -> None:
        """Record the tensors in an optimizer's state."""
        for values in list(optimizer.state.values()):
            tensors = values.values() if isinstance(values, dict) else ()
            self._optimizer_tensors |= {
                self._storage_number(v) for v in tensors if isinstance(v, torch.Tensor)
            }

    def _storage_number(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's storage, a new one on its first use."""
        if (number := self._numbers.get(storage := storage_of(tensor))) is None:
            number = self._numbers[storage] = next(self._next)
        self._dtypes.setdefault(number, tensor.dtype)
        return number

    def on_operator(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        if (ends := _copy_ends(function, args, kwargs, result)) is not None:
            read = {self._storage_number(tensor) for tensor in ends[0]}
            for tensor in ends[1]:
                number = self._storage_number(tensor)
                self._sources.setdefault(number, set()).update(read - {number})


def _copy_ends(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
    """Return the tensors that a copying operator reads and writes, None for other operators."""
    name = function._schema.name.partition("::")[2]
    # c10d operators take the output first; in-place ones have no second tensor
    if function.namespace == "c10d":
        written = [*tensors_of(args[:1])]
        return [*tensors_of(args[1:2])] or written, written
    if function.namespace in _COLLECTIVES:
        return [*tensors_of(args)], [*tensors_of(result)]
    if name not in _COPIES:
        return None
    written = [
        value
        for argument, value in zip(function._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    written += [value for key, value in kwargs.items() if key == "out"]
    return [*tensors_of((args, kwargs))], [*tensors_of([*written, result])]
