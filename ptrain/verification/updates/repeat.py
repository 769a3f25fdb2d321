"""Repeat an optimizer's step on other tensors, by parameter, through the code of its own class, and
record what the optimizers of one side's step are given and leave. The optimizer that trains is
not touched.

A rule that reads more than one element (a matrix's norm, a Newton–Schulz iteration) gives another
result for a rank's piece than for a DTensor: compare with what the step made.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import FunctionType, MethodType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_map

from ptrain.errors import Fault
from ptrain.models.boundary import CodeRaised, boundary, said
from ptrain.verification.jobs.job import Alone
from ptrain.verification.jobs.shards import ParameterShard
from ptrain.verification.parts import held

_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
# `step`: a scheduler's wrapper around it. `grad_scale`: gradients are taken without it.
_LEFT_OUT = {"param_groups", "state", "step", "grad_scale", *_HOOKS}
# Of a group: its tensors.
_OF_TENSORS = ("params", "param_names")


class CannotRepeat(Exception):
    """Why an update cannot be repeated, in words."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What an optimizer is beside its tensors, their state and their settings."""

    kind: type[Optimizer]
    attributes: dict[str, Any]
    obstacle: str = ""

    @classmethod
    def of(cls, optimizer: Optimizer) -> Rule:
        """Copy it as it is now; the parameters that its attributes name stay what they are."""
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        known = {id(tensor) for tensor in tensors}
        attributes = {
            name: tree_map(
                lambda leaf: (
                    held(leaf) if isinstance(leaf, DTensor) and id(leaf) not in known else leaf
                ),
                value,
            )
            for name, value in vars(optimizer).items()
            if name not in _LEFT_OUT and not isinstance(value, FunctionType | MethodType)
        }
        try:
            with boundary(_refusal):
                copied = copy.deepcopy(attributes, {id(tensor): tensor for tensor in tensors})
        except CodeRaised as error:
            return cls(type(optimizer), {}, f"its attributes cannot be copied ({_cause(error)})")
        return cls(type(optimizer), copied)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingredients:
    """What the update of one parameter is made of, as this rank's elements in a row [n].

    `tensor` is what the optimizer itself updates, a parameter or its master copy, and `shape` that
    of this rank's piece of it. `state`: rows of what is kept beside it, and scalars; `settings`:
    those of its group; `group`: the number of that, over all optimizers."""

    rule: Rule
    tensor: Tensor
    shape: torch.Size
    value: Tensor
    gradient: Tensor | None
    state: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    group: int = 0

    def with_state(self, **changed: Any) -> Ingredients:
        """Return the same with other state; what is None is not there."""
        state = {k: v for k, v in (self.state | changed).items() if v is not None}
        return replace(self, state=state)


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """What an update leaves: the values in a row [n], and the state."""

    value: Tensor
    state: dict[str, Any]


def repeat(taken: Mapping[str, Ingredients]) -> dict[str, UpdateOutcome]:
    """Return what one step of each rule makes of its parameters, by name; of those without a
    gradient what they were. Raises CannotRepeat where the rule's own code does not run on rows."""
    rules: dict[int, dict[str, Ingredients]] = {}
    for name, ingredients in taken.items():
        rules.setdefault(id(ingredients.rule), {})[name] = ingredients
    outcomes: dict[str, UpdateOutcome] = {}
    for of_rule in rules.values():
        outcomes |= _stepped(of_rule)
    return {name: outcomes[name] for name in taken}


def _stepped(taken: Mapping[str, Ingredients]) -> dict[str, UpdateOutcome]:
    rule = next(iter(taken.values())).rule
    if rule.obstacle:
        raise CannotRepeat(f"{rule.kind.__name__}: {rule.obstacle}")
    pieces = {
        name: nn.Parameter(own.value.detach().clone().view(own.shape))
        for name, own in taken.items()
    }
    optimizer = object.__new__(rule.kind)
    known = {id(own.tensor): pieces[name] for name, own in taken.items()}
    optimizer.state = defaultdict(dict)
    optimizer.param_groups = []
    vars(optimizer).update({name: OrderedDict() for name in _HOOKS})
    try:
        with boundary(_refusal):
            vars(optimizer).update(copy.deepcopy(rule.attributes, known))
            for name, own in taken.items():
                _give(optimizer, pieces[name], own)
            with Alone(lambda words: CannotRepeat(f"its {words}")):
                # without the hooks that torch puts around it: a user's must not run again
                step: Any = rule.kind.step
                (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)
    except CodeRaised as error:
        if isinstance(error.__cause__, CannotRepeat):
            raise error.__cause__ from error
        raise CannotRepeat(f"{rule.kind.__name__} cannot be replayed: {_cause(error)}") from error
    return {
        name: UpdateOutcome(
            piece.detach().flatten(),
            {
                key: value.flatten()
                if isinstance(value, Tensor) and value.dim() and value.shape == piece.shape
                else value
                for key, value in optimizer.state.get(piece, {}).items()
            },
        )
        for name, piece in pieces.items()
    }


def _give(optimizer: Optimizer, piece: nn.Parameter, own: Ingredients) -> None:
    if own.gradient is not None:
        piece.grad = own.gradient.to(piece.dtype, copy=True).view(own.shape)
    optimizer.param_groups.append({**settings_of(own.settings), "params": [piece]})
    if own.state:
        optimizer.state[piece] = {
            key: copied(value.view(own.shape) if is_row(value, own.value) else value)
            for key, value in own.state.items()
        }


def copied(value: Any) -> Any:
    """Return a copy that nobody else writes to."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.deepcopy(value)


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group without its tensors, for a step that no graph of
    CUDA captures."""
    return {
        key: False if key == "capturable" else copied(value)
        for key, value in group.items()
        if key not in _OF_TENSORS
    }


def _refusal(error: BaseException) -> Fault:
    return Fault(place="optimizer", finding=said(error))


def _cause(error: CodeRaised) -> str:
    return str(error.__cause__) or type(error.__cause__).__name__


def as_number(value: Any) -> float | None:
    """Return a scalar of state or settings as a number; None of what is none."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None


def is_row(value: Any, row: Tensor) -> bool:
    """Return whether it is kept element by element beside a row."""
    return isinstance(value, Tensor) and value.shape == row.shape and value.dim() == 1


def same(own: Any, other: Any) -> bool:
    """Return whether two settings, or two entries of state, are the same to the bit."""
    are_both = isinstance(own, Tensor) and isinstance(other, Tensor)
    if are_both and (own.dtype, own.shape) == (other.dtype, other.shape):
        return torch.equal(own, other)
    if isinstance(own, Tensor) or isinstance(other, Tensor):
        return as_number(own) is not None and as_number(own) == as_number(other)
    return bool(own == other)


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


class UpdateRecorder(ExitStack):
    """`with UpdateRecorder(holds) as updates:` around a step. `holds` are the parameters by name as
    this rank has them; `gradients` theirs as an optimizer takes them; `updated` those that one
    steps with, at these `rates`; `has_closure`: an optimizer runs passes itself (LBFGS), each with
    other parameters."""

    def __init__(self, holds: Mapping[str, ParameterShard]) -> None:
        super().__init__()
        self.record = UpdateRecord()
        self.gradients: dict[str, Tensor] = {}
        self.optimizers: list[Optimizer] = []
        self.num_updates: dict[int, int] = {}
        self.has_closure = False
        self.updated: set[str] = set()
        self.rates: set[float] = set()
        self.holds = holds
        self._running: list[tuple[Optimizer, dict[str, Ingredients]]] = []
        self._num_groups = 0
        self._depth = 0  # of a step that calls its base class's, which torch's hooks see too

    def __enter__(self) -> Self:
        self.callback(register_optimizer_step_pre_hook(self._before_update).remove)
        self.callback(register_optimizer_step_post_hook(self._after_update).remove)
        return self

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
        for name, shard in self.holds.items():
            self.updated |= {name} if id(shard.parameter) in own else set()
            if id(shard.parameter) in own or name not in self.gradients:
                if (gradient := _gradient(optimizer, shard)) is not None:
                    self.gradients[name] = gradient
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
        rule, taken = Rule.of(optimizer), dict[str, Ingredients]()
        places = {
            id(tensor): (tensor, number, group)
            for number, group in enumerate(optimizer.param_groups, self._num_groups)
            for tensor in group["params"]
        }
        self._num_groups += len(optimizer.param_groups)
        # a tensor that is brought for its update alone is empty if it has no gradient
        given = [tensor for tensor, _, _ in places.values() if tensor.numel()]
        for name, shard in self._named(given):
            tensor, number, group = places[id(shard.parameter)]
            if is_master := shard is not self.holds[name]:
                self.record.masters.add(name)
            is_new = is_master or tensor.grad is None
            gradient = _gradient(optimizer, shard) if is_new else self.gradients.get(name)
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
        own = [name for name, shard in self.holds.items() if id(shard.parameter) in known]
        yield from ((name, self.holds[name]) for name in own)
        of_model = {id(shard.parameter) for shard in self.holds.values()}
        masters = [tensor for tensor in tensors if id(tensor) not in of_model]
        left = [name for name in self.holds if name not in own]
        for master in masters:
            for name in left:
                shard = self.holds[name]
                if shard.within is None and _rounds_to(master, shard.parameter):
                    left.remove(name)
                    yield name, replace(shard, parameter=master)
                    break


def piece_shape(shard: ParameterShard) -> torch.Size:
    """Return the shape of this rank's piece; of one in a flat parameter that of its row."""
    return held(shard.parameter).shape if shard.within is None else shard.value().shape


def _rounds_to(master: Tensor, parameter: Tensor) -> bool:
    own, other = held(master), held(parameter)
    return own.shape == other.shape and torch.equal(own.to(other.dtype), other)


def _gradient(optimizer: Optimizer, shard: ParameterShard) -> Tensor | None:
    """Return a copy of a gradient as an optimizer takes it: a fused one undoes the scale itself."""
    gradient, scale = shard.gradient(), getattr(optimizer, "grad_scale", None)
    if gradient is None:
        return None
    return gradient.clone() if scale is None else gradient / float(scale)


def _state(shard: ParameterShard, optimizer: Optimizer) -> dict[str, object]:
    """What is kept beside the parameter: this rank's elements of what is alike, all of the rest."""
    entries = optimizer.state.get(shard.parameter, {})
    state: dict[str, object] = {}
    for key, value in entries.items():
        row = shard.like(value) if isinstance(value, Tensor) and value.dim() else None
        state[key] = copied(held(value) if isinstance(value, Tensor) and row is None else value)
        if row is not None:
            state[key] = row.clone()
    return state
