"""The memory meter: resident bytes by state, and the exact peak of live bytes by phase.

It watches one whole step: every storage that is born, resized or freed. It knows storages and their
states, never a plan, a degree or an expected count.

Note: what an operator allocates and frees inside itself is not seen (on CUDA the allocator's own
peak, `Peak.allocator_bytes`, includes it); neither is the rounding of an allocator. Single numbers
that a GPU's operators leave on the host (seed and offset of attention's dropout) are no state.

The finder of roles: which state a storage holds by what is done with it in a step, whatever a
program says of it.

A parameter is what a module computes with, and what that was copied or gathered from in the same
dtype. The optimizer's is what torch's optimizers hold as state in their steps, what that was
brought from, and master copies: what is updated, or parameters come from, in another dtype than
modules compute with. A gradient is what an optimizer is given as `grad`, and what that was reduced,
added up or copied from. `Finder` follows these copies through one step, so that a program that
declares a storage as what it is not is noticed: `ObservableProgram.storages` is compared and never
used.

Note: of a storage that nothing read or wrote in the step no role is known; `RoleRow.role` is None.
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
    is_tagged,
    storage_of,
    tensors_of,
    tier_of,
)
from ptrain.models.watch import listening, watching
from ptrain.rooms.comm import Registry
from ptrain.spec.placement import Tier
from ptrain.units import format_bytes

# gloo's threads let go of the buffers of a finished collective a little late, and at random: the
# operator after a collective waits, and a new maximum counts if it stands after a pause, a longer
# one where several processes share a core and a thread waits for its turn. None of its threads
# keeps what is sent and received between two ranks (ProcessGroupGloo::send, recv), and who waited
# for it may: a stage's hidden states live until its backward pass.
_BETWEEN_TWO = ("send", "recv_", "recv_any_source_")
_RELEASE_SECONDS = 1e-3
_SETTLE_SECONDS = 2e-4
_NUMBER_BYTES = 8  # of one number
_LONGEST_RELEASE_SECONDS = 5e-2  # of a pause, and that the begin of a phase waits for them


class Metered(Protocol):
    """What a meter needs of a program."""

    @property
    def registry(self) -> Registry: ...

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        """Every tensor that lives now and the state it belongs to."""
        ...


def _processes_on_a_core() -> float:
    """How many wait for their turn on one core here, of whatever kind, or have it; at least 1."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    with suppress(OSError, AttributeError):  # where a system does not say
        return max(1.0, os.getloadavg()[0] / cores)
    return 1.0


def _is_of_threads(operator: Any, device: str) -> bool:
    """Whether threads of the backend may keep the operator's tensors a little."""
    name = operator._schema.name.partition("::")[2]
    is_dropped = device == "cpu" and name in _BETWEEN_TWO
    return operator.namespace in ("c10d", "_c10d_functional") and not is_dropped


class MemoryMeter(Ledger):
    """Measures one steady step of `program`: live bytes, their peak by phase, and bytes by state.

    It is an observer of the program: `phase` marks where a phase begins. Each state is read at
    its moment: activations where most of them lived when a backward pass began (which is at the
    end of every forward pass, or, in a pipeline, with the most micro-batches in flight), transient
    at the last such moment, gradients at the end of the last backward, the others after the update.
    `waits`: for the threads of a backend to let go of what they worked on; fake ranks have none.
    """

    def __init__(
        self, program: Metered, *, rank: int = 0, device: str = "cpu", waits: bool = True
    ) -> None:
        super().__init__()
        self.live = 0
        self._program, self._rank, self._device, self._waits = program, rank, device, waits
        self._crowd = _processes_on_a_core()
        self._phase: Phase | None = None
        self._peaks: dict[Phase, int] = {}
        self._states: dict[int, State] = {}
        self._tiers: dict[int, Tier] = {}
        self._resizable: set[int] = set()
        self._inner: set[int] = set()
        self._after_collective = False
        self._communicated: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._newborn: dict[int, int] = {}
        self._dead: list[tuple[int, int]] = []
        self._read: dict[State, Footprint] = {}
        self._allocator: dict[Phase, int] = {}
        self._alive: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._older: set[int] = set()

    def operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._settle()
        self._let_go()
        result = super().operator(function, args, kwargs)
        self._after_collective = _is_of_threads(function, self._device)
        if self._after_collective:
            leaves = tree_leaves((args, kwargs))
            tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
            self._communicated.update(map(storage_of, tensors))
        return result

    def higher_order(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._settle()
        self._let_go()
        return super().higher_order(function, args, kwargs)

    def _resize_storage(self, storage: torch.UntypedStorage, size: int) -> Any:
        self._settle()
        self._let_go()
        return super()._resize_storage(storage, size)

    def _let_go(self) -> None:
        if self._after_collective:
            self._after_collective = False
            self._pause(_RELEASE_SECONDS)

    def existing(self, key: int, storage: torch.UntypedStorage) -> None:
        """What the program declared or tagged, or what some tensor held before the step, lived all
        along and counts in every peak so far; any other is the inside of an operator (gloo's
        reduce-scatter works on a copy of its input).
        """
        self._tiers[key] = tier_of(storage, self._device)
        if storage in self._alive:
            self._older.add(key)
        known = key in self._states or key in self._older or self._program.registry.knows(storage)
        if storage.nbytes() and not known:
            self._inner.add(key)
            return
        self._add_to_all(key, storage.nbytes())

    def _add_to_all(self, key: int, size: int) -> None:
        if self._tiers[key] is Tier.DEVICE:
            self.live += size
            self._peaks = {phase: peak + size for phase, peak in self._peaks.items()}

    def born(self, key: int, storage: torch.UntypedStorage, operator: str) -> None:
        self._newborn[key] = storage.nbytes()

    def _settle(self) -> None:
        """A tensor is tagged after its birth, so its tier is asked for at the next operator. What
        died since then, an argument or what another thread let go, lived beside it."""
        newborn, self._newborn = self._newborn, {}
        dead, self._dead = self._dead, []
        for key, size in newborn.items():
            reference = self._references.get(key)
            storage = reference() if reference else None
            tier = self._tiers[key] = (
                Tier.DEVICE if storage is None else tier_of(storage, self._device)
            )
            if tier is Tier.HOST and size <= _NUMBER_BYTES and not is_tagged(storage):
                self._inner.add(key)
                continue
            self._add(key, size)
        for key, size in dead:
            self._bury(key, size)

    def resized(self, key: int, storage: torch.UntypedStorage, before: int) -> None:
        self._resizable.add(key)
        self._add(key, storage.nbytes() - before)

    def died(self, key: int, size: int) -> None:
        if self._newborn:
            self._dead.append((key, size))
        else:
            self._bury(key, size)

    def _bury(self, key: int, size: int) -> None:
        if key not in self._inner:
            self._add(key, -size)
        self._inner.discard(key)
        self._older.discard(key)
        self._states.pop(key, None)
        self._tiers.pop(key)
        self._resizable.discard(key)

    def _add(self, key: int, size: int) -> None:
        if self._tiers[key] is Tier.DEVICE:
            self.live += size
            if self._phase and self.live > self._peaks[self._phase]:
                self._pause(_RELEASE_SECONDS if len(self._communicated) else _SETTLE_SECONDS)
                self._peaks[self._phase] = max(self.live, self._peaks[self._phase])

    def phase(self, phase: Phase, micro_batch: int) -> None:
        """The program says that a phase begins; what it declares is looked up anew."""
        self._await_release()
        self._register()
        self._note_allocator()
        if phase is Phase.BACKWARD:
            self._note(State.ACTIVATIONS, State.TRANSIENT)
        elif phase is Phase.UPDATE:
            self._note(State.GRADIENTS)
        self._phase = phase
        self._peaks[phase] = max(self._peaks.get(phase, 0), self.live)

    def _await_release(self) -> None:
        """A collective that ran beside the phase before may be just over: what it worked on and
        nobody declares is given some time to go."""
        waiting = self._communicated
        waiting.difference_update(storage_of(tensor) for _, tensor in self._program.storages())
        self._communicated = weakref.WeakSet()
        give_up = time.monotonic() + (_LONGEST_RELEASE_SECONDS if self._waits else 0)
        self._pause(_RELEASE_SECONDS)
        while len(waiting) and time.monotonic() < give_up:
            time.sleep(_RELEASE_SECONDS)

    def _pause(self, seconds: float) -> None:
        if self._waits:
            time.sleep(min(seconds * self._crowd, _LONGEST_RELEASE_SECONDS))

    def _register(self) -> None:
        self._settle()
        declared = list(self._program.storages())
        states: dict[int, State] = {}
        for state, tensor in declared:
            states.setdefault(storage_of(tensor)._cdata, state)
        self._states |= states
        for key in self._inner & states.keys():  # an operator read it before it was declared
            self._inner.remove(key)
            self._add_to_all(key, self.sizes[key])
        for _, tensor in declared:
            self.watch(tensor)
        self._exclude_inputs()

    def _exclude_inputs(self) -> None:
        """Stop counting the caller's batches, even those that were born within the step."""
        unseen = self.sizes.keys() - self._states.keys() - self._inner
        for key in unseen & {storage._cdata for storage in self._program.registry.inputs}:
            self._inner.add(key)
            self._add_to_all(key, -self.sizes[key])

    def _note(self, *states: State) -> None:
        sizes = {state: dict.fromkeys(Tier, 0) for state in State}
        for key, size in self.sizes.items():
            if key not in self._inner:
                sizes[self._state(key)][self._tiers[key]] += size
        for state in states:
            footprint = Footprint(
                state=state,
                rank=self._rank,
                device_bytes=sizes[state][Tier.DEVICE],
                host_bytes=sizes[state][Tier.HOST],
                file_bytes=sizes[state][Tier.FILE],
            )
            most = self._read.get(state)
            if state is State.ACTIVATIONS and most and most.device_bytes > footprint.device_bytes:
                continue
            self._read[state] = footprint

    def _state(self, key: int) -> State:
        """What is freed by resizing is transient: a gathered unit, though it stands in for the
        parameters. What nobody declared is an activation, or other if it is older than the step."""
        if key in self._resizable:
            return State.TRANSIENT
        undeclared = State.OTHER if key in self._older else State.ACTIVATIONS
        return self._states.get(key, undeclared)

    def footprints(self) -> tuple[Footprint, ...]:
        """One row per state."""
        return tuple(self._read[state] for state in State if state in self._read)

    def peaks(self) -> tuple[Peak, ...]:
        """One row per phase that the step had."""
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
        self._register()
        self._alive = weakref.WeakSet(_living())
        self._note_allocator()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self._register()
        self._note(State.PARAMETERS, State.OPTIMIZER, State.OTHER)
        self._note_allocator()
        super().__exit__(*error)

    def _note_allocator(self) -> None:
        """What the GPU's allocator held at most since the last look."""
        if self._device != "cuda":
            return
        if self._phase:
            highest = torch.cuda.max_memory_allocated()
            self._allocator[self._phase] = max(highest, self._allocator.get(self._phase, 0))
        torch.cuda.reset_peak_memory_stats()


def _living() -> Iterator[torch.UntypedStorage]:
    """The storages of all tensors that Python can reach. Costs about 0.1 s."""
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.layout is torch.strided:
            yield storage_of(thing)


# Operators that hand elements on: what they write comes from all that they read.
_COPIES = frozenset(
    {
        "copy_", "_foreach_copy_", "_to_copy", "clone", "cat", "split_with_sizes_copy", "stack",
        "add", "add_", "_foreach_add_", "sum", "_chunk_cat", "chunk_cat", "all_gather_copy_in",
    }
)  # fmt: skip
_COLLECTIVES = ("c10d", "_c10d_functional")
_STATES = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS)


class ObservableProgram(Protocol):
    """What the finder needs of a program."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def gradient_observers(self) -> list[Any]: ...

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        """Every tensor that lives now and the state that the program says it belongs to."""
        ...


@dataclass(frozen=True, slots=True)
class RoleRow:
    """Bytes that the program declares as `declared` and that are `role` by what was done with them;
    None where nothing was."""

    declared: State
    role: State | None
    nbytes: int

    @property
    def agrees(self) -> bool:
        """Whether nothing speaks against what is declared."""
        return self.role in (None, self.declared)

    def __str__(self) -> str:
        used = f"used as {self.role}" if self.role else "not used"
        return f"{format_bytes(self.nbytes)} declared as {self.declared}, but {used}"


class Finder(OperatorMode):
    """Enter it around one steady step, from its forward pass to its update. Storages are numbered
    as they are met; none is kept alive."""

    sees_compiled = True

    def __init__(self, program: ObservableProgram) -> None:
        super().__init__()
        self._program = program
        self._numbers: OfStorages[int] = WeakKeyDictionary()
        self._next = count()
        self._sources: dict[int, set[int]] = {}
        self._used: dict[int, set[torch.dtype]] = {}  # by modules, and in which dtypes
        self._dtypes: dict[int, torch.dtype] = {}
        self._updated: set[int] = set()
        self._held: set[int] = set()  # as an optimizer's state
        self._given: set[int] = set()  # as gradients
        self._declared: dict[int, tuple[State, int]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        super().__enter__()
        self._declare()
        self._stack.enter_context(listening(self._program.gradient_observers, self))
        self._stack.callback(register_optimizer_step_pre_hook(self._before_update).remove)
        self._stack.callback(register_optimizer_step_post_hook(self._after_update).remove)
        modules = self._program.model.named_modules()
        self._stack.enter_context(watching(modules, before=self._before_use))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._declare()
        super().__exit__(*error)

    def reduced(self) -> None:
        """Gradients are where and as they are kept."""
        self._declare()

    def clipped(self, norm: torch.Tensor | None) -> None:
        """The update is next."""
        self._declare()

    def rows(self) -> tuple[RoleRow, ...]:
        """Bytes by what is declared and what was seen, of the states that have a role."""
        roles = self._roles()
        sizes: dict[tuple[State, State | None], int] = {}
        for number, (declared, nbytes) in self._declared.items():
            key = declared, roles.get(number)
            sizes[key] = sizes.get(key, 0) + nbytes
        return tuple(RoleRow(*key, nbytes) for key, nbytes in sizes.items() if nbytes)

    def _roles(self) -> dict[int, State]:
        """Gradients last: what is given to an optimizer as one is one, whatever else it is."""
        of_parameters = self._origins(set(self._used))
        computed = set().union(*self._used.values())  # a master has another dtype
        masters = {
            number
            for number in of_parameters | self._origins(self._updated)
            if self._dtypes[number] not in computed
        }
        roles = dict.fromkeys(of_parameters - masters, State.PARAMETERS)
        roles |= dict.fromkeys(masters | self._origins(self._held), State.OPTIMIZER)
        roles |= dict.fromkeys(self._origins(self._given), State.GRADIENTS)
        return roles

    def _origins(self, numbers: set[int]) -> set[int]:
        """These, and all that they were copied from."""
        known, to_come = set(numbers), list(numbers)
        while to_come:
            before = self._sources.get(to_come.pop(), set()) - known
            known |= before
            to_come += before
        return known

    def _declare(self) -> None:
        seen: set[int] = set()
        for state, tensor in self._program.storages():
            number = self._number(tensor)
            if state in _STATES and number not in seen:
                self._declared[number] = state, storage_of(tensor).nbytes()
            seen.add(number)

    def _before_use(self, _: str, module: nn.Module, *__: object) -> None:
        for parameter in module._parameters.values():
            if parameter is not None:
                self._used.setdefault(self._number(parameter), set()).add(parameter.dtype)

    def _before_update(self, optimizer: Optimizer, *_: object) -> None:
        for leaf in chain.from_iterable(group["params"] for group in optimizer.param_groups):
            if leaf.grad is not None:
                self._given.add(self._number(leaf.grad))
                self._updated.add(self._number(leaf))

    def _after_update(self, optimizer: Optimizer, *_: object) -> None:
        for values in list(optimizer.state.values()):
            tensors = values.values() if isinstance(values, dict) else ()
            self._held |= {self._number(v) for v in tensors if isinstance(v, torch.Tensor)}

    def _number(self, tensor: torch.Tensor) -> int:
        if (number := self._numbers.get(storage := storage_of(tensor))) is None:
            number = self._numbers[storage] = next(self._next)
        self._dtypes.setdefault(number, tensor.dtype)
        return number

    def ran(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        if (ends := _ends(function, args, kwargs, result)) is not None:
            read = {self._number(tensor) for tensor in ends[0]}
            for tensor in ends[1]:
                number = self._number(tensor)
                self._sources.setdefault(number, set()).update(read - {number})


def _ends(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
    """What an operator that hands elements on reads, and what it writes; None of any other."""
    name = function._schema.name.partition("::")[2]
    if function.namespace == "c10d":  # the output stands first, where it is not the input itself
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
