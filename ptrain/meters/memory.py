"""The memory meter: resident bytes by state, and the exact peak of live bytes by phase.

It watches one whole step: every storage that is born, resized or freed. It knows storages and their
states, never a plan, a degree or an expected count.

Note: what an operator allocates and frees inside itself is not seen (on CUDA the allocator's own
peak, `Peak.allocator_bytes`, includes it); neither is the rounding of an allocator. Single numbers
that a GPU's operators leave on the host (seed and offset of attention's dropout) are no state.
"""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Protocol, Self

import torch
from torch.utils._pytree import tree_leaves

from ptrain.cost import Footprint, Peak, Phase, State
from ptrain.models.ledger import Ledger, is_tagged, storage_of, tier_of
from ptrain.rooms.comm import Registry
from ptrain.spec.placement import Tier

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


def _footprint(state: State, rank: int, tiers: dict[Tier, int]) -> Footprint:
    return Footprint(
        state=state,
        rank=rank,
        device_bytes=tiers[Tier.DEVICE],
        host_bytes=tiers[Tier.HOST],
        file_bytes=tiers[Tier.FILE],
    )


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
            footprint = _footprint(state, self._rank, sizes[state])
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
