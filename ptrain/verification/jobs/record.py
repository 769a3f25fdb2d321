"""One step of a loop, seen from outside: what its model was given, each parameter's gradient as the
optimizer takes it, and how often one stepped."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves, tree_map

from ptrain.internals.autograd import is_in_backward
from ptrain.verification.jobs.shards import ParameterShard
from ptrain.verification.names import canonical_modules
from ptrain.verification.outputs import is_real
from ptrain.verification.parts import held
from ptrain.verification.updates.record import UpdateRecorder


@dataclass(slots=True)
class ForwardCall:
    """One forward pass of the model: a micro-batch. `output` is the first floating tensor that it
    returned, `upstream` are the gradients of the loss by all of them, by their place."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: torch.dtype | None
    upstream: dict[int, Tensor] = field(default_factory=dict)
    output: Tensor | None = None


class StepRecorder:
    """`with StepRecorder(model, holds) as seen:` around a step. `holds` are the parameters by name
    as this rank has them; `in_use` their values in the first forward pass; `updated` those that an
    optimizer steps with, `without_state` those of which it kept nothing when it stepped first;
    `has_closure`: an optimizer runs passes itself (LBFGS), each with other parameters."""

    def __init__(self, model: nn.Module, holds: Mapping[str, ParameterShard]) -> None:
        self.model = model
        self.calls: list[ForwardCall] = []
        self.gradients: dict[str, Tensor] = {}
        self.optimizers: list[Optimizer] = []
        self.num_updates: dict[int, int] = {}
        self.in_use: dict[str, Tensor] = {}
        self.has_closure = False
        self.without_state: set[str] = set()
        self.updated: set[str] = set()
        self.updater = UpdateRecorder(holds)
        self._holds = holds
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        keep = self._stack.callback
        model = dict(canonical_modules(self.model))[""]
        begins = model.register_forward_pre_hook(self._begins, prepend=True, with_kwargs=True)
        keep(begins.remove)
        keep(model.register_forward_hook(self._ends).remove)
        keep(register_optimizer_step_pre_hook(self._before_update).remove)
        keep(register_optimizer_step_post_hook(self._after_update).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def updates(self) -> int:
        """How often the optimizer that stepped most did."""
        return max(self.num_updates.values(), default=0)

    @property
    def autocast(self) -> str:
        """Return the dtype in which the model's first forward ran, as far as autocast says."""
        dtype = self.calls[0].autocast if self.calls else None
        return str(dtype).removeprefix("torch.") if dtype else "its own dtype"

    def _begins(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if counts():
            leaves = tree_leaves((args, kwargs))
            device = next((leaf.device.type for leaf in leaves if _is(leaf)), "cpu")
            autocast = torch.is_autocast_enabled(device)
            dtype = torch.get_autocast_dtype(device) if autocast else None
            if not self.calls:
                self.in_use = {
                    name: shard.value().clone()
                    for name, shard in self._holds.items()
                    if shard.within is None  # FSDP1 has gathered its flat parameter already
                }
            kept_args, kept_kwargs = tree_map(_kept, (args, kwargs))
            self.calls.append(ForwardCall(kept_args, kept_kwargs, dtype))

    def _ends(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The outputs as copies of their own (FSDP2 warns of views): what is used of them out there
        is told apart from what the model makes of them itself (a model that returns its loss beside
        the logits)."""
        if not (counts() and self.calls):
            return None
        call = self.calls[-1]
        leaves = tree_leaves(output)
        first = next((leaf for leaf in leaves if is_real(leaf)), None)
        if first is not None and not isinstance(first, DTensor):
            call.output = first.detach().clone()
        places = {id(leaf): place for place, leaf in enumerate(leaves) if _has_gradient(leaf)}

        def seen(leaf: Any) -> Any:
            if id(leaf) not in places:
                return leaf
            copy = leaf.clone()
            copy.register_hook(partial(_keep_upstream, call, places[id(leaf)]))
            return copy

        return tree_map(seen, output)

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
                    self.gradients[name] = taken if scale is None else taken / scale
        if all(optimizer is not other for other in self.optimizers):
            self.optimizers.append(optimizer)
        if not self.updater.is_within(optimizer):  # its base class's step, which it calls
            self.num_updates[id(optimizer)] = self.num_updates.get(id(optimizer), 0) + 1
        self.updater.before(optimizer, self.gradients)

    def _after_update(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self.updater.after(optimizer)


def _has_state(optimizer: Optimizer, shard: ParameterShard) -> bool:
    state = optimizer.state.get(shard.parameter, {})
    return any(isinstance(row, Tensor) and bool(held(row).any()) for row in state.values())


def _keep_upstream(call: ForwardCall, place: int, gradient: Tensor) -> None:
    call.upstream[place] = gradient.detach().clone()


def counts() -> bool:
    """A pass that will have a backward; not one that repeats a checkpointed part of it."""
    return torch.is_grad_enabled() and not is_in_backward()


def _kept(leaf: Any) -> Any:
    return leaf.detach().clone() if _is(leaf) else leaf


def _is(leaf: object) -> bool:
    return isinstance(leaf, Tensor)


def _has_gradient(leaf: object) -> bool:
    """A DTensor has no gradient that one device could be given."""
    return (
        isinstance(leaf, Tensor)
        and is_real(leaf)
        and leaf.requires_grad
        and not isinstance(leaf, DTensor)
    )
