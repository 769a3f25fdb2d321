"""Modules on the meta device, and the initialization of modules that were built there.

`build_on_meta` builds a module with its parameters on meta, and everything else as its constructor
computes it. A constructor that reads parameter values fails, or leaves another tensor without
values. A constructor that draws other tensors would draw other numbers, since values of parameters
are not drawn. Both cases are detected and raise NeedsValuesError.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors
from torch.utils._pytree import tree_iter, tree_leaves

from ptrain.errors import input_error
from ptrain.internals.dispatch import disable_modes
from ptrain.internals.part import replace_attributes
from ptrain.models.boundary import UserCodeError, convert_exceptions
from ptrain.models.external import target_fault
from ptrain.models.ledger import OperatorMode
from ptrain.spec.model import UserFunction

Build = Callable[[int], nn.Module]  # takes an offset of the seed
_STATE = (
    "_parameters",
    "_buffers",
    "_modules",
)  # attributes of every nn.Module that hold its state


class NeedsValuesError(Exception):
    """A constructor needs values of parameters; the message gives the reason."""


def build_on_meta(build: Build) -> nn.Module:
    """Build a module with its parameters on meta.

    Raises:
        NeedsValuesError: The constructor raises, or another tensor or number would differ from a
            build with real parameters.
    """
    draws = _ConstructorDraws()
    with without_values(), draws:
        module = run_constructor(build, 0)
    require_hollow(module)
    if draws.by_own_generator:
        raise NeedsValuesError("its constructor draws from a custom random generator")
    if draws.of_values:
        with without_values():
            # With another seed: equal results show that no kept value depends on the drawn numbers.
            other = run_constructor(build, 1)
        if not _are_equal(_left_by(module), _left_by(other)):
            raise NeedsValuesError(
                "its constructor draws random numbers for other tensors than parameters"
            )
    return module


@torch.no_grad()
def empty_parameter(parameter: nn.Parameter) -> None:
    """Move a parameter to meta in place; it stays the same object, which may have several names."""
    if parameter.is_meta:
        return
    bare = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    vars(bare).update(vars(parameter))
    # Swapped and not replaced, because the constructor may keep other references to the object.
    swap_tensors(parameter, bare)


@contextmanager
def without_values(
    empty: Callable[[nn.Parameter], None] = empty_parameter,
) -> Iterator[None]:
    """Temporarily build modules without parameter values; buffers are computed.

    Args:
        empty: Moves a parameter to meta, in place. It is called as soon as a module registers the
            parameter.
    """
    register = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and type(param) is nn.Parameter:
            empty(param)
        register(module, name, param)

    with replace_attributes(nn.Module, register_parameter=registered):
        yield


def has_memory(tensor: Tensor) -> bool:
    """Return False on meta, even while `models.drawn` reports the tensor's device as CPU."""
    return tensor.untyped_storage().device.type != "meta"


def run_constructor(build: Build, more: int) -> nn.Module:
    """Return `build(more)`.

    Args:
        build: Calls the constructor.
        more: The number that is added to the seed, so that two builds draw different values.

    Raises:
        NeedsValuesError: The constructor raises.
    """
    try:
        return build(more)
    except UserCodeError as error:
        cause = error.__cause__
        if isinstance(cause, NeedsValuesError):
            raise cause from None
        words = " ".join(f"{type(cause).__name__}: {cause}".split())
        raise NeedsValuesError(f"its constructor fails on the meta device: {words}") from error


def require_hollow(module: nn.Module) -> None:
    """Raise NeedsValuesError for a parameter with values, or another tensor without."""
    parameters = [*module.parameters()]
    if not parameters or not all(parameter.is_meta for parameter in parameters):
        raise NeedsValuesError("one of its parameters is not a torch.nn.Parameter of a module")
    for name, child in module.named_modules():
        for attribute, value in _beside_parameters(child):
            if any(isinstance(x, Tensor) and x.is_meta for x in tree_iter(value)):
                path = f"{name}.{attribute}".lstrip(".")
                raise NeedsValuesError(f"its constructor computes {path} from a parameter")


def _beside_parameters(module: nn.Module) -> Iterable[tuple[str, Any]]:
    """Yield name and value of a module's attributes and buffers, without parameters and
    submodules."""
    yield from ((name, value) for name, value in vars(module).items() if name not in _STATE)
    yield from module._buffers.items()


def _left_by(module: nn.Module) -> list[Any]:
    """Return all tensors, numbers and strings of a module and its submodules, in order."""
    return [
        leaf
        for child in module.modules()
        for leaf in tree_leaves(dict(_beside_parameters(child)))
        if isinstance(leaf, Tensor | bool | int | float | complex | str)
    ]


def _are_equal(these: list[Any], those: list[Any]) -> bool:
    """Return True if two lists of leaves agree in types and values."""
    if [type(leaf) for leaf in these] != [type(leaf) for leaf in those]:
        return False
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(these, those, strict=True)
    )


class _ConstructorDraws(OperatorMode):
    """The mode that notes random draws of a constructor.

    `of_values`: a tensor off meta was drawn. `by_own_generator`: the code passed a generator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.of_values = self.by_own_generator = False

    def on_operator(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        if torch.Tag.nondeterministic_seeded in function.tags:
            leaves = tree_leaves((args, kwargs, result))
            self.by_own_generator |= any(isinstance(x, torch.Generator) for x in leaves)
            self.of_values |= any(isinstance(x, Tensor) and not x.is_meta for x in leaves)


_RESETS = ("reset_parameters", "_reset_parameters")  # torch's layers have one or the other


@torch.no_grad()
def on_meta(module: nn.Module) -> nn.Module:
    """Return a copy of a module with all tensors on meta."""
    with disable_modes():
        tensors: dict[int, Any] = {id(buffer): as_meta(buffer) for buffer in module.buffers()}
        for parameter in module.parameters():
            tensors[id(parameter)] = nn.Parameter(as_meta(parameter), parameter.requires_grad)
        return copy.deepcopy(module, tensors)


def as_meta(value: object) -> object:
    """Return a meta tensor of the same shape and dtype; other objects are returned unchanged."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


@torch.no_grad()
def materialize_built_on_meta(module: nn.Module, function: UserFunction) -> None:
    """Allocate the meta tensors of a module on the default device, and let it initialize itself.

    `init_weights()` of the module does all of it, as in torchtitan and nanochat. A module without
    one runs `reset_parameters()` of every layer, then its `_init_weights(layer)` for every layer.

    Args:
        module: The module that `function` returned; without meta tensors it stays unchanged.
        function: The user's function, for messages.

    Raises:
        SpecError: The initialization raises, or leaves a tensor without values.
    """
    device = torch.get_default_device()
    if not (empty := _allocate_meta_tensors(module, device)):
        return
    given = ", while its model on the meta device initialized itself,"
    with (
        convert_exceptions(lambda error: target_fault(function, error, given)),
        WrittenStorages() as seen,
    ):
        way = _run_own_initialization(module, device)
    unset = [
        name
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if (key := storage_key(tensor)) in empty and key not in seen.keys and tensor.numel()
    ]
    if unset:
        more = f" and {len(unset) - 1} more" if unset[1:] else ""
        finding = f"{function.target} returned a model on the meta device, and {way} "
        remedy = "Fill every parameter and buffer in a method `init_weights(self)` of the model, "
        remedy += 'or build the model without `torch.device("meta")`.'
        raise input_error(function.target_key, f"{finding}{unset[0]}{more}", remedy)


def _allocate_meta_tensors(module: nn.Module, device: torch.device) -> dict[int, Tensor]:
    """Replace the meta tensors of a module by empty ones, keep ties, and return the new ones by
    storage.

    While `without_values` is active, every parameter stays on meta: its values come from a folder.
    """
    new: dict[int, tuple[Tensor, Tensor]] = {}  # the old one is kept, so that ids stay unique
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
    """Return an uninitialized tensor on a device, with the attributes of the old one."""
    empty = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        empty = nn.Parameter(empty, tensor.requires_grad)
    for name, value in vars(tensor).items():
        vars(empty).setdefault(
            name, value
        )  # without overwriting: a fake tensor stores its device here
    return empty


def _run_own_initialization(module: nn.Module, device: torch.device) -> str:
    """Let a module initialize itself, and return the start of the message about tensors it
    omits."""
    initialize: Any = getattr(module, "init_weights", None)
    if callable(initialize):
        names = inspect.signature(initialize).parameters
        initialize(**({"buffer_device": device} if "buffer_device" in names else {}))
        return "its init_weights() sets no values for"
    for child in module.modules():
        for name in _RESETS:
            if callable(reset := getattr(child, name, None)):
                reset()
                break
    if callable(by_layer := getattr(module, "_init_weights", None)):
        module.apply(by_layer)
    return "neither init_weights() nor reset_parameters() sets values for"


class WrittenStorages(OperatorMode):
    """The mode that collects the storages that operators write to, in place or by `out`."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: set[int] = set()

    def on_operator(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        self.keys.update(map(storage_key, written_tensors(function, args, kwargs)))


def written_tensors(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Tensor]:
    """Yield the arguments that an operator's schema marks as written.

    Args:
        function: The operator, an `OpOverload` with a schema.
        args: Its positional arguments. A list of tensors is flattened.
        kwargs: Its keyword arguments.

    Yields:
        The tensors that an in-place or `out=` operator changes; none for other operators.
    """
    for index, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (tensor for tensor in tree_iter(given) if isinstance(tensor, Tensor))


def storage_key(tensor: Tensor) -> int:
    """Return a key that all views of one live storage share, on meta too."""
    return tensor.untyped_storage()._cdata
