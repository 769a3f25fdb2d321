"""An optimizer's step once more, on other tensors: what it was given, by parameter, through the
code of its own class. Nothing of the optimizer that trains is touched.

A rule that looks at more than an element at a time (a matrix's norm, a Newton–Schulz iteration)
makes something else of a rank's piece than of a DTensor: whoever repeats it compares with what the
step made.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from ptrain.errors import Fault
from ptrain.models.boundary import CodeRaised, boundary, said
from ptrain.verification.jobs.conditions import Alone
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
            name: tree_map(lambda leaf: leaf if id(leaf) in known else _local(leaf), value)
            for name, value in vars(optimizer).items()
            if name not in _LEFT_OUT and not isinstance(value, FunctionType | MethodType)
        }
        try:
            with boundary(_refusal):
                copied = copy.deepcopy(attributes, {id(tensor): tensor for tensor in tensors})
        except CodeRaised as error:
            return cls(type(optimizer), {}, f"its attributes cannot be copied ({_cause(error)})")
        return cls(type(optimizer), copied)

    def attribute(self, name: str) -> object:
        """Return an attribute that is a plain value; None of what is none."""
        value = self.attributes.get(name)
        return value if isinstance(value, bool | int | float | str | tuple) else None

    def with_attribute(self, name: str, value: object) -> Rule:
        return replace(self, attributes=self.attributes | {name: value})


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
                _bare_step(rule.kind)(optimizer)
    except CodeRaised as error:
        if isinstance(error.__cause__, CannotRepeat):
            raise error.__cause__ from error
        raise CannotRepeat(f"{rule.kind.__name__} cannot be repeated: {_cause(error)}") from error
    return {
        name: UpdateOutcome(
            piece.detach().flatten(),
            {
                key: value.flatten() if is_alike(value, piece) else value
                for key, value in optimizer.state.get(piece, {}).items()
            },
        )
        for name, piece in pieces.items()
    }


def _give(optimizer: Optimizer, piece: nn.Parameter, own: Ingredients) -> None:
    if own.gradient is not None:
        piece.grad = own.gradient.to(piece.dtype, copy=True).view(own.shape)
    optimizer.param_groups.append({**_settings(own.settings), "params": [piece]})
    if own.state:
        optimizer.state[piece] = {
            key: copied(value.view(own.shape) if is_row(value, own.value) else value)
            for key, value in own.state.items()
        }


def _bare_step(kind: type[Optimizer]) -> Any:
    """Return the class's step without the hooks that torch puts around it (Optimizer.__init__):
    those of a user must not run again."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: False if key == "capturable" else copied(value)
        for key, value in settings.items()
        if key not in _OF_TENSORS
    }


def copied(value: Any) -> Any:
    """Return a copy that nobody else writes to."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.deepcopy(value)


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group without its tensors."""
    return {key: copied(value) for key, value in group.items() if key not in _OF_TENSORS}


def _refusal(error: BaseException) -> Fault:
    return Fault(place="optimizer", finding=said(error))


def _local(leaf: Any) -> Any:
    return held(leaf) if isinstance(leaf, DTensor) else leaf


def _cause(error: CodeRaised) -> str:
    return str(error.__cause__) or type(error.__cause__).__name__


def as_number(value: Any) -> float | None:
    """Return a scalar of state or settings as a number; None of what is none."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None


def is_alike(value: Any, piece: Tensor) -> bool:
    """Return whether it is a tensor of a piece's shape, element by element."""
    return isinstance(value, Tensor) and value.shape == piece.shape and value.dim() > 0


def is_row(value: Any, row: Tensor) -> bool:
    """Return whether it is kept element by element beside a row."""
    return isinstance(value, Tensor) and value.shape == row.shape and value.dim() == 1


def same(own: Any, other: Any) -> bool:
    """Return whether two settings, or two entries of state, are the same to the bit."""
    if isinstance(own, Tensor) and isinstance(other, Tensor):
        if own.dtype != other.dtype or own.shape != other.shape:
            return as_number(own) is not None and as_number(own) == as_number(other)
        return torch.equal(own, other)
    if isinstance(own, Tensor) or isinstance(other, Tensor):
        return as_number(own) is not None and as_number(own) == as_number(other)
    return bool(own == other)
