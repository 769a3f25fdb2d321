"""Records of optimizer steps, and their repetition on other tensors.

A recorder keeps the inputs and outcomes of all optimizers in one step, by parameter. `repeat` runs
the step of the optimizer's class on other tensors; the optimizer that trains stays unchanged.

A rule that reads more than one element (a matrix norm, a Newton–Schulz iteration) has another
result on a rank's shard than on a DTensor. So compare a repetition with the step's outcome first.
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
from ptrain.models.boundary import UserCodeError, convert_exceptions, describe_error
from ptrain.verification.jobs.job import NoComms
from ptrain.verification.jobs.shards import ParameterShard
from ptrain.verification.parts import local_cpu

# The attributes for hooks that the constructor of Optimizer creates (torch/optim/optimizer.py,
# torch 2.13).
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
# `step` is a scheduler's wrapper of the method. `grad_scale` is not needed, because recorded
# gradients are unscaled.
_LEFT_OUT = {"param_groups", "state", "step", "grad_scale", *_HOOKS}
# The entries of a parameter group that hold tensors or their names.
_OF_TENSORS = ("params", "param_names")


class CannotRepeat(Exception):
    """The reason why an update cannot be repeated."""


@dataclass(frozen=True, slots=True)
class OptimizerRule:
    """An optimizer without its parameters, their state and their settings.

    Attributes:
        kind: The class of the optimizer.
        attributes: Copies of its other attributes.
        obstacle: The reason why it cannot be copied; "" if it can.
    """

    kind: type[Optimizer]
    attributes: dict[str, Any]
    obstacle: str = ""

    @classmethod
    def copy_of(cls, optimizer: Optimizer) -> OptimizerRule:
        """Copy an optimizer's present attributes. Parameters that they refer to are not copied."""
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        known = {id(tensor) for tensor in tensors}
        attributes = {
            name: tree_map(
                lambda leaf: (
                    local_cpu(leaf) if isinstance(leaf, DTensor) and id(leaf) not in known else leaf
                ),
                value,
            )
            for name, value in vars(optimizer).items()
            if name not in _LEFT_OUT and not isinstance(value, FunctionType | MethodType)
        }
        try:
            with convert_exceptions(_optimizer_fault):
                # The memo makes deepcopy keep these tensors.
                copied = copy.deepcopy(attributes, {id(tensor): tensor for tensor in tensors})
        except UserCodeError as error:
            return cls(
                type(optimizer), {}, f"its attributes cannot be copied ({_cause_text(error)})"
            )
        return cls(type(optimizer), copied)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingredients:
    """The inputs of the update of one parameter, with this rank's elements as rows [n].

    Attributes:
        rule: The optimizer without its tensors.
        tensor: The tensor that the optimizer updates: a parameter or its master copy.
        shape: The shape of this rank's piece of it.
        value: The elements before the update.
        gradient: The gradient; None if there is none.
        state: The optimizer state: rows for elementwise state, and scalars.
        settings: The settings of the parameter group.
        group: The index of the group over all optimizers.
    """

    rule: OptimizerRule
    tensor: Tensor
    shape: torch.Size
    value: Tensor
    gradient: Tensor | None
    state: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    group: int = 0

    def with_state(self, **changed: Any) -> Ingredients:
        """Return a copy with changed state; an entry that is None is removed."""
        state = {k: v for k, v in (self.state | changed).items() if v is not None}
        return replace(self, state=state)


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """The outcome of an update: the values as a row [n], and the state."""

    value: Tensor
    state: dict[str, Any]


def repeat_updates(taken: Mapping[str, Ingredients]) -> dict[str, UpdateOutcome]:
    """Run one optimizer step on the given ingredients.

    Args:
        taken: The ingredients by parameter name.

    Returns:
        The outcome of each parameter; unchanged values for one without a gradient.

    Raises:
        CannotRepeat: The optimizer cannot be copied, or its code fails.
    """
    rules: dict[int, dict[str, Ingredients]] = {}
    for name, ingredients in taken.items():
        rules.setdefault(id(ingredients.rule), {})[name] = ingredients
    outcomes: dict[str, UpdateOutcome] = {}
    for of_rule in rules.values():
        outcomes |= _run_optimizer_step(of_rule)
    return {name: outcomes[name] for name in taken}


def _run_optimizer_step(taken: Mapping[str, Ingredients]) -> dict[str, UpdateOutcome]:
    """Run one step of a single optimizer."""
    rule = next(iter(taken.values())).rule
    if rule.obstacle:
        raise CannotRepeat(f"{rule.kind.__name__}: {rule.obstacle}")
    pieces = {
        name: nn.Parameter(own.value.detach().clone().view(own.shape))
        for name, own in taken.items()
    }
    # Without the constructor, whose arguments are unknown and which would need the parameters.
    optimizer = object.__new__(rule.kind)
    known = {id(own.tensor): pieces[name] for name, own in taken.items()}
    optimizer.state = defaultdict(dict)
    optimizer.param_groups = []
    vars(optimizer).update({name: OrderedDict() for name in _HOOKS})
    try:
        with convert_exceptions(_optimizer_fault):
            # The memo replaces the loop's tensors by the pieces in all attributes.
            vars(optimizer).update(copy.deepcopy(rule.attributes, known))
            for name, own in taken.items():
                _add_parameter(optimizer, pieces[name], own)
            with NoComms(lambda words: CannotRepeat(f"its {words}")):
                # Optimizer.profile_hook_step (torch/optim/optimizer.py) wraps `step` with hooks;
                # a user's hooks must not run again, so the wrapped method is called
                step: Any = rule.kind.step
                (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)
    except UserCodeError as error:
        if isinstance(error.__cause__, CannotRepeat):
            raise error.__cause__ from error
        raise CannotRepeat(
            f"{rule.kind.__name__} cannot be replayed: {_cause_text(error)}"
        ) from error
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


def _add_parameter(optimizer: Optimizer, piece: nn.Parameter, own: Ingredients) -> None:
    """Add a parameter with its gradient, settings and state to an optimizer."""
    if own.gradient is not None:
        # A copy, because an optimizer may change gradients in place.
        piece.grad = own.gradient.to(piece.dtype, copy=True).view(own.shape)
    optimizer.param_groups.append({**copy_settings(own.settings), "params": [piece]})
    if own.state:
        optimizer.state[piece] = {
            key: copy_value(value.view(own.shape) if is_row(value, own.value) else value)
            for key, value in own.state.items()
        }


def copy_value(value: Any) -> Any:
    """Return a deep copy; of a tensor a detached clone."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.deepcopy(value)


def copy_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group without its tensors, with `capturable` off, because
    no CUDA graph captures the repeated step."""
    return {
        key: False if key == "capturable" else copy_value(value)
        for key, value in group.items()
        if key not in _OF_TENSORS
    }


def _optimizer_fault(error: BaseException) -> Fault:
    return Fault(place="optimizer", finding=describe_error(error))


def _cause_text(error: UserCodeError) -> str:
    return str(error.__cause__) or type(error.__cause__).__name__


def as_number(value: Any) -> float | None:
    """Return a scalar of state or settings as a float; None if the value is not a number."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None


def is_row(value: Any, row: Tensor) -> bool:
    """Return True if a value is elementwise state: a 1-d tensor of the row's shape."""
    return isinstance(value, Tensor) and value.shape == row.shape and value.dim() == 1


def are_equal(own: Any, other: Any) -> bool:
    """Return True if two settings or entries of state are bitwise equal."""
    are_both = isinstance(own, Tensor) and isinstance(other, Tensor)
    if are_both and (own.dtype, own.shape) == (other.dtype, other.shape):
        return torch.equal(own, other)
    if isinstance(own, Tensor) or isinstance(other, Tensor):
        return as_number(own) is not None and as_number(own) == as_number(other)
    return bool(own == other)


@dataclass(slots=True)
class UpdateRecord:
    """The record of one step's updates on this rank, for parameters that an optimizer steps.

    Attributes:
        before: The ingredients of each update.
        after: The outcome of each update.
        shards: The tensor that the optimizer steps: the parameter's shard, or its master copy.
        masters: The parameters with a master copy.
        obstacle: The reason why nothing can be repeated; "" if it can.
    """

    before: dict[str, Ingredients] = field(default_factory=dict)
    after: dict[str, UpdateOutcome] = field(default_factory=dict)
    shards: dict[str, ParameterShard] = field(default_factory=dict)
    masters: set[str] = field(default_factory=set)
    obstacle: str = ""


class UpdateRecorder(ExitStack):
    """The recorder of optimizer steps: `with UpdateRecorder(holds) as updates:` around a step.

    Attributes:
        holds: This rank's shard of each parameter, by name.
        record: The record of the updates.
        gradients: The gradients by name, unscaled, when the optimizer reads them.
        updated: The parameters that an optimizer holds under their name.
        rates: The learning rates of the groups.
        optimizers: The optimizers that stepped.
        num_updates: The number of steps of each optimizer, by its id.
        has_closure: True if an optimizer runs passes itself (LBFGS), each with other parameters.
    """

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
        self._depth = 0  # of nested steps: super().step() triggers the hooks again

    def __enter__(self) -> Self:
        self.callback(register_optimizer_step_pre_hook(self._before_update).remove)
        self.callback(register_optimizer_step_post_hook(self._after_update).remove)
        return self

    @property
    def max_updates(self) -> int:
        """The largest number of steps of one optimizer."""
        return max(self.num_updates.values(), default=0)

    def _before_update(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Record gradients before an optimizer steps.

        A parameter's gradient is read when the optimizer that holds it steps. If no optimizer holds
        the parameter itself (but a copy, or another rank does), it is read at the first step.
        """
        given = [*args[1:], kwargs.get("closure")]
        self.has_closure = self.has_closure or any(callable(argument) for argument in given)
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, shard in self.holds.items():
            self.updated |= {name} if id(shard.parameter) in own else set()
            if id(shard.parameter) in own or name not in self.gradients:
                if (gradient := _read_gradient(optimizer, shard)) is not None:
                    self.gradients[name] = gradient
                elif id(shard.parameter) in own:  # read at another optimizer's step
                    self.gradients.pop(name, None)
        if all(optimizer is not other for other in self.optimizers):
            self.optimizers.append(optimizer)
        if any(running is optimizer for running, _ in self._running):
            self._depth += 1  # its base class's step, which it calls
            return
        self.num_updates[id(optimizer)] = self.num_updates.get(id(optimizer), 0) + 1
        self._record_inputs(optimizer)

    @torch.no_grad()
    def _record_inputs(self, optimizer: Optimizer) -> None:
        """Record the ingredients of an optimizer's step."""
        rule, taken = OptimizerRule.copy_of(optimizer), dict[str, Ingredients]()
        places = {
            id(tensor): (tensor, number, group)
            for number, group in enumerate(optimizer.param_groups, self._num_groups)
            for tensor in group["params"]
        }
        self._num_groups += len(optimizer.param_groups)
        # a tensor that is materialized only for its update stays empty without a gradient
        given = [tensor for tensor, _, _ in places.values() if tensor.numel()]
        for name, shard in self._match_parameters(given):
            tensor, number, group = places[id(shard.parameter)]
            if is_master := shard is not self.holds[name]:
                self.record.masters.add(name)
            is_new = is_master or tensor.grad is None
            gradient = _read_gradient(optimizer, shard) if is_new else self.gradients.get(name)
            self.record.shards[name] = shard
            if "lr" in group:
                self.rates.add(float(group["lr"]))
            taken[name] = Ingredients(
                rule=rule,
                tensor=tensor,
                shape=piece_shape(shard),
                value=shard.value().clone(),
                gradient=gradient,
                state=_copy_state(shard, optimizer),
                settings=copy_settings(group),
                group=number,
            )
        # ZeroRedundancyOptimizer steps another optimizer: the inner step counts, and parameters
        # that the inner optimizer lacks are broadcast from other ranks.
        for _, outer in self._running:
            outer.clear()
        self._running.append((optimizer, taken))

    @torch.no_grad()
    def _after_update(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Record the outcome of an optimizer's step."""
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
            record.after[name] = UpdateOutcome(shard.value().clone(), _copy_state(shard, optimizer))

    def _match_parameters(self, tensors: list[Tensor]) -> Iterator[tuple[str, ParameterShard]]:
        """Yield the parameters that these tensors are or are master copies of.

        A master copy is a tensor of the parameter's shape that rounds to its value.
        """
        known = {id(tensor) for tensor in tensors}
        own = [name for name, shard in self.holds.items() if id(shard.parameter) in known]
        yield from ((name, self.holds[name]) for name in own)
        of_model = {id(shard.parameter) for shard in self.holds.values()}
        masters = [tensor for tensor in tensors if id(tensor) not in of_model]
        left = [name for name in self.holds if name not in own]
        for master in masters:
            for name in left:
                shard = self.holds[name]
                own, other = local_cpu(master), local_cpu(shard.parameter)
                is_equal = own.shape == other.shape and torch.equal(own.to(other.dtype), other)
                if shard.flat_index is None and is_equal:
                    left.remove(name)
                    yield name, replace(shard, parameter=master)
                    break


def piece_shape(shard: ParameterShard) -> torch.Size:
    """Return the shape of this rank's piece; [n] for a piece inside a flat parameter."""
    return local_cpu(shard.parameter).shape if shard.flat_index is None else shard.value().shape


def _read_gradient(optimizer: Optimizer, shard: ParameterShard) -> Tensor | None:
    """Return a copy of the unscaled gradient; a fused optimizer divides by `grad_scale` itself."""
    gradient, scale = shard.gradient(), getattr(optimizer, "grad_scale", None)
    if gradient is None:
        return None
    return gradient.clone() if scale is None else gradient / float(scale)


def _copy_state(shard: ParameterShard, optimizer: Optimizer) -> dict[str, object]:
    """Return a copy of a parameter's optimizer state: this rank's elements of elementwise state,
    and all other entries in full."""
    entries = optimizer.state.get(shard.parameter, {})
    state: dict[str, object] = {}
    for key, value in entries.items():
        row = shard.select_state(value) if isinstance(value, Tensor) and value.dim() else None
        state[key] = copy_value(
            local_cpu(value) if isinstance(value, Tensor) and row is None else value
        )
        if row is not None:
            state[key] = row.clone()
    return state
