"""Which state a storage holds by what is done with it in a step, whatever a program says of it.

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

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol, Self
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_iter

from ptrain.cost import State
from ptrain.models.ledger import OfStorages, OperatorMode, storage_of
from ptrain.models.watch import watching
from ptrain.units import format_bytes

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

    def __init__(self, program: ObservableProgram) -> None:
        super().__init__()
        self._program = program
        self._numbers: OfStorages[int] = WeakKeyDictionary()
        self._next = itertools.count()
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
        self._program.gradient_observers.append(self)
        self._stack.callback(self._program.gradient_observers.remove, self)
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
        for leaf in _leaves(optimizer):
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

    def operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        if (ends := _ends(function, args, kwargs, result)) is not None:
            read = {self._number(tensor) for tensor in ends[0]}
            for tensor in ends[1]:
                number = self._number(tensor)
                self._sources.setdefault(number, set()).update(read - {number})
        return result


def _ends(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
    """What an operator that hands elements on reads, and what it writes; None of any other."""
    name = function._schema.name.partition("::")[2]
    if function.namespace == "c10d":  # the output stands first, where it is not the input itself
        return _tensors(args[1:2]) or _tensors(args[:1]), _tensors(args[:1])
    if function.namespace in _COLLECTIVES:
        return _tensors(args), _tensors(result)
    if name not in _COPIES:
        return None
    written = [
        value
        for argument, value in zip(function._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    written += [value for key, value in kwargs.items() if key == "out"]
    return _tensors((args, kwargs)), _tensors([*written, result])


def _leaves(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for options in optimizer.param_groups:
        yield from options["params"]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [
        leaf
        for leaf in tree_iter(tree)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    ]
