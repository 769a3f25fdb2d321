"""What the optimizers of one side's step are given and what they leave, by parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

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
    """`before` and `after` around every optimizer's step. `holds` are the parameters by name as
    this rank has them."""

    def __init__(self, holds: Mapping[str, ParameterShard]) -> None:
        self.record = UpdateRecord()
        self._holds = holds
        self._running: list[tuple[Optimizer, dict[str, Ingredients]]] = []
        self._num_groups = 0
        self._depth = 0  # of a step that calls its base class's, which torch's hooks see too

    def is_within(self, optimizer: Optimizer) -> bool:
        """Return whether this optimizer is in its step already."""
        return any(running is optimizer for running, _ in self._running)

    @torch.no_grad()
    def before(self, optimizer: Optimizer, gradients: Mapping[str, Tensor]) -> None:
        """Keep what it is given; `gradients` by parameter are those that it takes of the model's
        own tensors."""
        if self.is_within(optimizer):
            self._depth += 1
            return
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
                gradient = gradients.get(name) if tensor.grad is not None else None
            else:
                gradient = shard.gradient()
                gradient = gradient / scale if gradient is not None and scale else gradient
                self.record.masters.add(name)
            self.record.shards[name] = shard
            taken[name] = Ingredients(
                rule=rule,
                tensor=tensor,
                shape=piece_shape(shard),
                value=shard.value().clone(),
                gradient=None if gradient is None else held(gradient).clone(),
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
    def after(self, optimizer: Optimizer) -> None:
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


@contextmanager
def recorded(holds: Mapping[str, ParameterShard]) -> Iterator[UpdateRecord]:
    """Record the steps of all optimizers that have some of these."""
    recorder = UpdateRecorder(holds)

    def before(optimizer: Optimizer, args: object, kwargs: object) -> None:
        scale = getattr(optimizer, "grad_scale", None)
        own = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        rows = {n: shard.gradient() for n, shard in holds.items() if id(shard.parameter) in own}
        given = {name: row for name, row in rows.items() if row is not None}
        recorder.before(optimizer, {n: g if scale is None else g / scale for n, g in given.items()})

    def after(optimizer: Optimizer, args: object, kwargs: object) -> None:
        recorder.after(optimizer)

    with ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(before).remove)
        stack.callback(register_optimizer_step_post_hook(after).remove)
        yield recorder.record


def piece_shape(shard: ParameterShard) -> torch.Size:
    """Return the shape of this rank's piece; of one in a flat parameter that of its row."""
    return held(shard.parameter).shape if shard.within is None else shard.value().shape


def _rounds_to(master: Tensor, parameter: Tensor) -> bool:
    own, other = held(master), held(parameter)
    return own.shape == other.shape and torch.equal(own.to(other.dtype), other)


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
