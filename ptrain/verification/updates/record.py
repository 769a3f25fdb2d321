"""What the optimizers of one side's step are given and what they leave, by parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ptrain.verification.jobs.shards import ParameterShard
from ptrain.verification.parts import held
from ptrain.verification.updates.repeat import Ingredients, Rule, UpdateOutcome, copied, settings_of


@dataclass(slots=True)
class UpdateRecord:
    """`shards`: each parameter as its optimizer has it, of a master copy that. `obstacle`: why
    nothing of it can be repeated; "" where it can. Parameters that no optimizer of this rank
    steps are not in it."""

    before: dict[str, Ingredients] = field(default_factory=dict)
    after: dict[str, UpdateOutcome] = field(default_factory=dict)
    shards: dict[str, ParameterShard] = field(default_factory=dict)
    masters: set[str] = field(default_factory=set)
    obstacle: str = ""


class UpdateRecorder:
    """`with UpdateRecorder(holds) as updates:` around a step. `holds` are the parameters by name as
    this rank has them; `gradients` theirs as an optimizer takes them; `updated` those that one
    steps with, at these `rates`, `without_state` those of which it kept nothing when it stepped
    first; `has_closure`: an optimizer runs passes itself (LBFGS), each with other parameters."""

    def __init__(self, holds: Mapping[str, ParameterShard]) -> None:
        self.record = UpdateRecord()
        self.gradients: dict[str, Tensor] = {}
        self.optimizers: list[Optimizer] = []
        self.num_updates: dict[int, int] = {}
        self.has_closure = False
        self.without_state: set[str] = set()
        self.updated: set[str] = set()
        self.rates: set[float] = set()
        self._holds = holds
        self._running: list[tuple[Optimizer, dict[str, Ingredients]]] = []
        self._num_groups = 0
        self._depth = 0  # of a step that calls its base class's, which torch's hooks see too
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.callback(register_optimizer_step_pre_hook(self._before_update).remove)
        self._stack.callback(register_optimizer_step_post_hook(self._after_update).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def updates(self) -> int:
        """How often the optimizer that stepped most did."""
        return max(self.num_updates.values(), default=0)

    def _before_update(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A parameter's gradient is taken when the optimizer that has it steps; where none has it
        under its own name (a copy, another rank's share) when the first one does."""
        given = [*args[1:], kwargs.get("closure")]
        self.has_closure = self.has_closure or any(callable(argument) for argument in given)
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer undoes it itself
        for name, shard in self._holds.items():
            is_first = id(optimizer) not in self.num_updates
            self.updated |= {name} if id(shard.parameter) in own else set()
            if id(shard.parameter) in own and is_first and not _has_state(optimizer, shard):
                self.without_state.add(name)
            if id(shard.parameter) in own or name not in self.gradients:
                gradient = shard.gradient()
                if gradient is not None:
                    taken = gradient.clone()  # `+` would give the very tensor
                    self.gradients[name] = taken if scale is None else taken / float(scale)
                elif id(shard.parameter) in own:  # another optimizer, before, is not its own
                    self.gradients.pop(name, None)
        if all(optimizer is not other for other in self.optimizers):
            self.optimizers.append(optimizer)
        if any(running is optimizer for running, _ in self._running):
            self._depth += 1  # its base class's step, which it calls
            return
        self.num_updates[id(optimizer)] = self.num_updates.get(id(optimizer), 0) + 1
        self._keep(optimizer)

    @torch.no_grad()
    def _keep(self, optimizer: Optimizer) -> None:
        """Keep what it is given."""
        rule, scale = Rule.of(optimizer), getattr(optimizer, "grad_scale", None)
        taken: dict[str, Ingredients] = {}
        places = {
            id(tensor): (tensor, number, group)
            for number, group in enumerate(optimizer.param_groups, self._num_groups)
            for tensor in group["params"]
        }
        self._num_groups += len(optimizer.param_groups)
        for name, shard in self._named([tensor for tensor, _, _ in places.values()]):
            tensor, number, group = places[id(shard.parameter)]
            if shard is self._holds[name]:
                gradient = self.gradients.get(name) if tensor.grad is not None else None
            else:
                gradient = shard.gradient()
                if gradient is not None:
                    gradient = gradient.clone() if scale is None else gradient / float(scale)
                self.record.masters.add(name)
            self.record.shards[name] = shard
            if "lr" in group:
                self.rates.add(float(group["lr"]))
            taken[name] = Ingredients(
                rule=rule,
                tensor=tensor,
                shape=piece_shape(shard),
                value=shard.value().clone(),
                gradient=gradient,
                state=_state(shard, optimizer),
                settings=settings_of(group),
                group=number,
            )
        # An optimizer around another one (ZeroRedundancyOptimizer): the inner one's step counts,
        # and what that does not have is brought from another rank.
        for _, outer in self._running:
            outer.clear()
        self._running.append((optimizer, taken))

    @torch.no_grad()
    def _after_update(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Keep what the step left."""
        if self._depth:
            self._depth -= 1
            return
        _, taken = self._running.pop()
        record = self.record
        if again := sorted(set(taken) & set(record.before)):
            record.obstacle = f"{again[0]} is updated several times in a step"
        for name, ingredients in taken.items():
            shard = record.shards[name]
            record.before[name] = ingredients
            record.after[name] = UpdateOutcome(shard.value().clone(), _state(shard, optimizer))

    def _named(self, tensors: list[Tensor]) -> Iterator[tuple[str, ParameterShard]]:
        """Yield which parameters these tensors are, or are the master copies of: those have the
        parameter's shape and round to what it is."""
        known = {id(tensor) for tensor in tensors}
        own = [name for name, shard in self._holds.items() if id(shard.parameter) in known]
        yield from ((name, self._holds[name]) for name in own)
        of_model = {id(shard.parameter) for shard in self._holds.values()}
        masters = [tensor for tensor in tensors if id(tensor) not in of_model]
        left = [name for name in self._holds if name not in own]
        for master in masters:
            for name in left:
                shard = self._holds[name]
                if shard.within is None and _rounds_to(master, shard.parameter):
                    left.remove(name)
                    yield name, replace(shard, parameter=master)
                    break


def wholes(tensors: Mapping[str, Tensor]) -> dict[str, ParameterShard]:
    """Return tensors as shards that are all of what they stand for."""
    return {name: ParameterShard(name, tensor, tensor.shape) for name, tensor in tensors.items()}


def piece_shape(shard: ParameterShard) -> torch.Size:
    """Return the shape of this rank's piece; of one in a flat parameter that of its row."""
    return held(shard.parameter).shape if shard.within is None else shard.value().shape


def _rounds_to(master: Tensor, parameter: Tensor) -> bool:
    own, other = held(master), held(parameter)
    return own.shape == other.shape and torch.equal(own.to(other.dtype), other)


def _has_state(optimizer: Optimizer, shard: ParameterShard) -> bool:
    state = optimizer.state.get(shard.parameter, {})
    return any(isinstance(row, Tensor) and bool(held(row).any()) for row in state.values())


def _state(shard: ParameterShard, optimizer: Optimizer) -> dict[str, object]:
    """What is kept beside the parameter: this rank's elements of what is alike, all of the rest."""
    entries = optimizer.state.get(shard.parameter, {})
    state: dict[str, object] = {}
    for key, value in entries.items():
        if isinstance(value, Tensor):
            row = shard.like(value) if value.dim() else None
            state[key] = (held(value) if row is None else row).clone()
        else:
            state[key] = copied(value)
    return state
