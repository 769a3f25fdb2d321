"""One step of a loop, seen from outside: what its model was given, each parameter's gradient as the
optimizer takes it, and how often one stepped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from ptrain.internals.autograd import is_in_backward
from ptrain.models.arguments import first_real, is_real
from ptrain.verification.jobs.shards import ParameterShard
from ptrain.verification.names import canonical_modules
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


class StepRecorder(UpdateRecorder):
    """`with StepRecorder(model, holds) as seen:` around a step: its update, the model's forward
    passes (`calls`), and the values of the parameters in the first of these (`in_use`)."""

    def __init__(self, model: nn.Module, holds: Mapping[str, ParameterShard]) -> None:
        super().__init__(holds)
        self.model = model
        self.calls: list[ForwardCall] = []
        self.in_use: dict[str, Tensor] = {}

    def __enter__(self) -> Self:
        model = dict(canonical_modules(self.model))[""]
        begins = model.register_forward_pre_hook(self._begins, prepend=True, with_kwargs=True)
        self._stack.callback(begins.remove)
        self._stack.callback(model.register_forward_hook(self._ends).remove)
        return super().__enter__()

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
        first = first_real(output)
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
