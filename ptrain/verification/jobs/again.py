"""A step of the loop once more, from the state that it began with: as it was, to see that it gives
the same bits, or with plain modules in the place of some of its own; and torch's random state
around passes that nobody shall notice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map

from ptrain.models.arguments import is_real
from ptrain.verification.jobs.shards import ParameterShard
from ptrain.verification.names import canonical_modules
from ptrain.verification.parts import held


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
