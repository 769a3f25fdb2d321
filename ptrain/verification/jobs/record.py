"""Record one step of a loop from outside (the model's inputs, each parameter's gradient as the
optimizer takes it, how often one stepped), and run the step again from its initial state:
unchanged, to see that it repeats bit by bit, or with plain modules in place of some of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map

from ptrain.internals.autograd import is_in_backward
from ptrain.models.arguments import first_real, is_real
from ptrain.verification.jobs.shards import ParameterShard
from ptrain.verification.parts import canonical_modules, held
from ptrain.verification.updates.repeat import UpdateRecorder


@dataclass(frozen=True, slots=True)
class ModelState:
    """Copies of what a model has: its parameters, its buffers by owner and name (a forward pass may
    put another tensor there), and the gradients that are there."""

    tensors: tuple[tuple[Tensor, Tensor], ...]
    buffers: tuple[tuple[nn.Module, str, Tensor], ...]
    gradients: tuple[tuple[Tensor, Tensor | None], ...]

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        parameters = list(model.parameters())
        return cls(
            tuple((tensor, held(tensor).clone()) for tensor in parameters),
            tuple(
                (module, name, held(buffer).clone())
                for module in model.modules()
                for name, buffer in module.named_buffers(recurse=False)
            ),
            tuple(
                (parameter, None if parameter.grad is None else parameter.grad.detach().clone())
                for parameter in parameters
            ),
        )

    def gradient_rows(self, holds: Mapping[str, ParameterShard]) -> dict[str, Tensor]:
        """Return the gradients that were there, by name, in a row each."""
        known = {id(parameter): gradient for parameter, gradient in self.gradients}
        rows = {name: known.get(id(shard.parameter)) for name, shard in holds.items()}
        return {name: held(row).flatten() for name, row in rows.items() if row is not None}

    @torch.no_grad()
    def restore(self, *, gradients: bool = True) -> None:
        """Put it back, the gradients that were there too, or those alone that lie there now."""
        for tensor, copy in self.tensors:
            _local(tensor).copy_(copy)
        for module, name, copy in self.buffers:
            buffer = module.get_buffer(name)
            if buffer.shape == copy.shape:
                _local(buffer).copy_(copy)
            else:
                setattr(module, name, copy.to(buffer.device))
        if not gradients:
            return
        for parameter, gradient in self.gradients:
            parameter.grad = None if gradient is None else gradient.clone()


def _local(tensor: Tensor) -> Tensor:
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor.detach()


@contextmanager
def swapped(model: nn.Module, plain: Mapping[str, nn.Module]) -> Iterator[None]:
    """Put plain modules in the place of some of a model's, by path. These still run, their
    collectives with them, and what they return counts for nothing."""
    modules = dict(canonical_modules(model))
    with ExitStack() as stack:
        for path, module in plain.items():
            if path not in modules:  # another rank's stage has it
                continue
            given: list[Any] = []  # of the passes that have begun, the latest last
            begins = partial(_take, given)
            hook = modules[path].register_forward_pre_hook(begins, with_kwargs=True)
            stack.callback(hook.remove)
            hook = modules[path].register_forward_hook(partial(_instead, module, given))
            stack.callback(hook.remove)
        yield


def _take(given: list[Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Keep the arguments for the plain module. DTensors are detached for the wrapped one: its zero
    gradient is a partial sum, and DTensor's sum with the plain one's would average over the ranks.
    """
    given.append((args, kwargs))

    def detach(leaf: Any) -> Any:
        is_distributed = isinstance(leaf, DTensor)
        return leaf.detach().requires_grad_(leaf.requires_grad) if is_distributed else leaf

    return tree_map(detach, (args, kwargs))


def _instead(plain: nn.Module, given: list[Any], module: nn.Module, _: Any, output: Any) -> Any:
    dtypes = {parameter.dtype for parameter in plain.parameters()}
    dtype = dtypes.pop() if len(dtypes) == 1 else None

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, DTensor):  # of parallelize_module, whose hooks ran before this one
            leaf = leaf.full_tensor()
        return leaf.to(dtype) if dtype is not None and is_real(leaf) else leaf

    args, kwargs = tree_map(cast, given.pop())
    right = iter(tree_leaves(plain(*args, **kwargs)))

    def put(leaf: Any) -> Any:
        other = next(right, leaf)
        if not (is_real(leaf) and is_real(other)) or leaf.shape != other.shape:
            return leaf
        if isinstance(leaf, DTensor):
            other = _distributed_as(leaf, other)
        # its parameters get gradients of zero, on time; infinities would make them NaN
        return other.to(leaf.dtype) + 0 * torch.nan_to_num(leaf)

    return tree_map(put, output)


def _distributed_as(like: DTensor, full: Tensor) -> DTensor:
    """Return a full tensor, equal on all ranks, with the mesh and placements of a DTensor."""
    mesh = like.device_mesh
    replicated = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=like.placements)


def cuda_devices(model: nn.Module) -> list[int]:
    """Return the indices of the GPUs that a model's tensors are on."""
    tensors = (*model.parameters(), *model.buffers())
    return sorted({tensor.get_device() for tensor in tensors if tensor.is_cuda})


@contextmanager
def seeded(model: nn.Module) -> Iterator[None]:
    """Draw from one seed within, and as before afterwards."""
    with torch.random.fork_rng(devices=cuda_devices(model)):
        torch.manual_seed(0)
        yield


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
