"""Which state a storage belongs to: written while wrapping and communicating, read by the meters.

A storage is known by its address in the C++ runtime and forgotten when it dies, so that an
address that is used again does not inherit an old tag.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from ptrain.cost import Collective, Phase, State


@dataclass(frozen=True, slots=True)
class Tag:
    """`substitute` names the collective that an exchange stands for (a reduce-scatter executed
    as all-to-all and a local sum). `phase`: of a step, where what is sent belongs to another one
    than the sender has come to. `name`: of the unit whose state it is, where that is known."""

    state: State
    substitute: Collective | None = None
    phase: Phase | None = None
    name: str = ""


class Registry:
    """Tags of the live storages of one program. Costs about 2 microseconds per new storage.
    `listeners` are told of every tag. `executed`: the collective as whose parts the calls of the
    moment are made, where the backend would make them itself, out of sight."""

    def __init__(self) -> None:
        self._tags: dict[int, tuple[weakref.ref[torch.UntypedStorage], Tag]] = {}
        self.inputs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.listeners: list[Callable[[torch.UntypedStorage, Tag], None]] = []
        self.executed: Collective | None = None

    @contextmanager
    def executing(self, collective: Collective) -> Iterator[None]:
        """What is called meanwhile is how `collective` is executed."""
        self.executed = collective
        try:
            yield
        finally:
            self.executed = None

    def tag(
        self,
        tensor: torch.Tensor,
        state: State,
        substitute: Collective | None = None,
        phase: Phase | None = None,
        name: str = "",
    ) -> torch.Tensor:
        """Remember that this tensor's storage holds `state`; return the tensor. A name that it had
        stays."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        alive, before = self._tags.get(key, (None, None))
        if before is not None and not name:
            name = before.name
        label = Tag(state, substitute, phase, name)
        # the reference calls `pop` with itself, which is what is not there any more
        self._tags[key] = alive or weakref.ref(storage, partial(self._tags.pop, key)), label
        for listener in self.listeners:
            listener(storage, label)
        return tensor

    def mark_input(self, tensor: torch.Tensor) -> None:
        """Mark a tensor of the caller's, or a view of one, from which the program only copies: its
        storage, a key of `inputs` while it lives, is no memory of the program."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self.inputs[key] = weakref.ref(storage, lambda _: self.inputs.pop(key, None))

    def of(self, tensor: torch.Tensor) -> Tag | None:
        """The tag of this tensor's storage, if anybody gave it one."""
        return self.of_storage(tensor.untyped_storage())

    def of_storage(self, storage: torch.UntypedStorage) -> Tag | None:
        """The tag of this storage, if anybody gave it one."""
        entry = self._tags.get(storage._cdata)
        return None if entry is None else entry[1]

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """Return whether this storage is tagged."""
        return storage._cdata in self._tags
