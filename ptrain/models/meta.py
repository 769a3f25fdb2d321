"""Modules whose tensors have no values, and the values that a module built on meta gives itself."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ptrain.errors import refused
from ptrain.internals.dispatch import without_modes
from ptrain.models.boundary import boundary
from ptrain.models.external import raised
from ptrain.spec.function import UserFunction

_RESETS = ("reset_parameters", "_reset_parameters")  # torch's layers have one or the other


@torch.no_grad()
def on_meta(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose tensors have no values."""
    with without_modes():
        tensors: dict[int, Any] = {id(buffer): as_meta(buffer) for buffer in module.buffers()}
        for parameter in module.parameters():
            tensors[id(parameter)] = nn.Parameter(as_meta(parameter), parameter.requires_grad)
        return copy.deepcopy(module, tensors)


def as_meta(value: object) -> object:
    """Return a tensor of the same shape and dtype without values; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


@torch.no_grad()
def materialize_built_on_meta(module: nn.Module, function: UserFunction) -> None:
    """Allocate the meta tensors of a module on the default device, and let it initialize itself.

    `init_weights()` of the module does all of it, as in torchtitan and nanochat. A module without
    one runs `reset_parameters()` of every layer, then its `_init_weights(layer)` for every layer.

    Args:
        module: What `function` returned; without meta tensors it stays unchanged.
        function: The user's function, for messages.

    Raises:
        SpecError: The initialization raises, or leaves a tensor without values.
    """
    device = torch.get_default_device()
    empty = _allocate_meta_tensors(module, device)
    if not empty:
        return
    given = ", whose model was built on meta and initialized itself,"
    with boundary(lambda error: raised(function, error, given)), WrittenStorages() as seen:
        way = _run_own_initialization(module, device)
    named = (*module.named_parameters(), *module.named_buffers())
    unset = [
        name
        for name, tensor in named
        if (key := storage_key(tensor)) in empty and key not in seen.keys and tensor.numel()
    ]
    if unset:
        more = f" and {len(unset) - 1} more" if unset[1:] else ""
        finding = f"{function.target} returned a model on the meta device, and {way} "
        remedy = "Fill every parameter and buffer in a method `init_weights(self)` of the model, "
        remedy += 'or build the model without `torch.device("meta")`.'
        raise refused(function.place, f"{finding}{unset[0]}{more}", remedy)


def _allocate_meta_tensors(module: nn.Module, device: torch.device) -> dict[int, Tensor]:
    """Replace the meta tensors of a module by empty ones, ties kept; return these by storage.

    While `models.hollow` builds, every parameter stays on meta: its values come from a folder.
    """
    new: dict[int, tuple[Tensor, Tensor]] = {}  # the old one is kept, so that no id comes twice
    for child in module.modules():
        for name, tensor in [*child._parameters.items(), *child._buffers.items()]:
            if tensor is None or tensor.device.type != "meta":
                continue
            if id(tensor) not in new:
                new[id(tensor)] = tensor, _empty_like(tensor, device)
            _, replacement = new[id(tensor)]
            if isinstance(replacement, nn.Parameter):
                child.register_parameter(name, replacement)
            else:
                child._buffers[name] = replacement
    allocated = [tensor for _, tensor in new.values() if tensor.device.type == device.type]
    return {storage_key(tensor): tensor for tensor in allocated}


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    empty = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        empty = nn.Parameter(empty, tensor.requires_grad)
    for name, value in vars(tensor).items():
        vars(empty).setdefault(name, value)  # a fake tensor has its device among these
    return empty


def _run_own_initialization(module: nn.Module, device: torch.device) -> str:
    """Let a module initialize itself; return how a message begins about what it omits."""
    initialize: Any = getattr(module, "init_weights", None)
    if callable(initialize):
        names = inspect.signature(initialize).parameters
        initialize(**({"buffer_device": device} if "buffer_device" in names else {}))
        return "its init_weights() gives no values to"
    for child in module.modules():
        for name in _RESETS:
            if callable(reset := getattr(child, name, None)):
                reset()
                break
    if callable(by_layer := getattr(module, "_init_weights", None)):
        module.apply(by_layer)
    return "neither init_weights() nor reset_parameters() gives values to"


class WrittenStorages(TorchDispatchMode):
    """The storages that operators write to: an in-place operator, and one with `out`."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: set[int] = set()

    def __torch_dispatch__(
        self,
        function: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.keys.update(map(storage_key, written_tensors(function, args, kwargs or {})))
        return function(*args, **(kwargs or {}))


def written_tensors(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Tensor]:
    """Yield the arguments that an operator changes in place, by its schema."""
    for index, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (tensor for tensor in tree_iter(given) if isinstance(tensor, Tensor))


def storage_key(tensor: Tensor) -> int:
    """Return a number that all views of one living storage share, on meta too."""
    return tensor.untyped_storage()._cdata
