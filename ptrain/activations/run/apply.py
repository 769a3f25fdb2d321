"""Make a module's blocks keep, recompute or offload what backward needs, as the plan says. Module
and parameter names do not change.

This is applied after operators are cut over tp and before a data axis wraps the module: what a
wrapper does before a block runs is then not repeated by a recomputation unless it has to be.

M: a module's results are computed again in backward, by torch's composable checkpoint, but for what
a policy keeps. A product over a dimension that tp shards is a partial sum of full size on each
rank. The sum over the ranks is kept in its place: with sharded tokens it is smaller, and it is not
sent twice.

O: the storages that autograd saves while a module runs move to host memory or files, once however
many views are saved, and return when the first view is needed until the last is released.
Parameters, buffers and integers (tokens and positions, which stay alive anyway) do not move. On an
accelerator copies use pinned memory and streams of their own, and the first use of one module's
tensors prefetches those of the module before it. On a CPU a copy is made on demand. A file is
written and read by the thread that computes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor, Placement
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as checkpoint_function

from ptrain.cost import State
from ptrain.errors import refused
from ptrain.internals.checkpoint import checkpoint
from ptrain.internals.dispatch import operator_names
from ptrain.internals.functional_collectives import AsyncCollectiveTensor
from ptrain.models.ledger import OfStorages, has_tier, storage_of
from ptrain.models.transformer import Transformer
from ptrain.models.watch import is_recomputing
from ptrain.rooms.comm import TagRegistry
from ptrain.rooms.torch import Tiers
from ptrain.spec.activations import ActivationMode, Operators, Policy, Scope
from ptrain.spec.placement import Tier
from ptrain.steps.step import Keep

# M: a module's results are computed again in backward, by torch's composable checkpoint; what a
# policy keeps is not.
#
# A product over a dimension that tp shards is a partial sum of full size on each rank. In its
# place the sum over the ranks is kept: sharded tokens make it smaller, and no rank sends it twice.


# Operators by class; a name that ends in * stands for all that begin so.
_NAMES = {
    Operators.MATMUL: ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"),
    Operators.ATTENTION: (
        "aten::_scaled_dot_product_*",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
    ),
    Operators.SOFTMAX: ("aten::_softmax", "aten::_safe_softmax"),
    # Llama's norm is written out: what it reduces to is kept, a number for each token
    Operators.NORM: (
        "aten::native_layer_norm",
        "aten::_fused_rms_norm",
        "ptrain::fused_rms_norm",  # which stands in for it
        "aten::rsqrt",
    ),
    # a wait of what is there already costs nothing, and how many there are may differ
    Operators.COLLECTIVE: (
        "_c10d_functional::all_gather_into_tensor",
        "_c10d_functional::reduce_scatter_tensor",
        "_c10d_functional::all_reduce",
        "_c10d_functional::all_to_all_single",
    ),
}


def apply_recomputation(
    module: nn.Module, policy: Policy, *, draws: bool, is_compiled: bool = False
) -> None:
    """Make `module`'s forward pass run again in backward, until all that was not kept is there.
    With `draws` it may draw random numbers, which are then the same. `is_compiled`: the compiler
    is to plan it, which reads the function, and no hooks of a composable checkpoint."""
    options: dict[str, Any] = {"preserve_rng_state": draws}
    if policy.keep:
        options["context_fn"] = _contexts_keeping(policy.keep)
    if is_compiled:
        options["use_reentrant"] = False
        module.forward = partial(checkpoint_function, module.forward, **options)
    else:
        checkpoint(module, **options)


@cache
def _contexts_keeping(kinds: tuple[Operators, ...]) -> Any:
    """One for all modules: a compiled program is of this very object."""
    return partial(_create_contexts, frozenset(chain.from_iterable(map(operators_of_kind, kinds))))


def _create_contexts(kept: frozenset[Any]) -> Any:
    return create_selective_checkpoint_contexts(_SavePolicy(kept))


class _SavePolicy:
    """The choice of the results that one pass of a module keeps, in the order of its operators."""

    def __init__(self, kept: frozenset[Any]) -> None:
        self.kept = kept
        self._has_partial = False

    def __call__(self, _: Any, operator: Any, *args: Any, **__: Any) -> CheckpointPolicy:
        """Return whether the result of `operator` is kept; forward and backward agree on it."""
        if self._has_partial and operator in _reduction_operators():
            self._has_partial = False
            return CheckpointPolicy.MUST_SAVE
        if operator not in self.kept:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if operator in operators_of_kind(Operators.MATMUL) and _is_partial(args):
            self._has_partial = True
            return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE


def _is_partial(args: tuple[Any, ...]) -> bool:
    """Return True if the product of the last two arguments sums over a sharded dimension."""
    left = args[-2]
    return isinstance(left, DTensor) and any(p.is_shard(left.dim() - 1) for p in left.placements)


@cache
def _reduction_operators() -> tuple[Any, ...]:
    names = ("reduce_scatter_tensor", "all_reduce")
    return tuple(_default_overload(f"_c10d_functional::{name}") for name in names)


@cache
def operators_of_kind(kind: Operators) -> tuple[Any, ...]:
    """Return the operators of a kind that this torch has."""
    overloads: list[Any] = []
    for name in _NAMES[kind]:
        overloads += [_default_overload(full_name) for full_name in _matching_operators(name)]
    if kind is Operators.ATTENTION:
        overloads.append(torch.ops.higher_order.flex_attention)
    return tuple(overloads)


def _matching_operators(name: str) -> Iterator[str]:
    stem = name.removesuffix("*")
    for full_name in operator_names():
        is_forward = "." not in full_name and not full_name.endswith("_backward")
        if is_forward and (full_name == name or (stem != name and full_name.startswith(stem))):
            yield full_name


def _default_overload(name: str) -> Any:
    space, _, operator = name.partition("::")
    return getattr(getattr(torch.ops, space), operator).default


# O: what autograd saves while a module runs is moved to host memory or to files, and brought back
# for backward.
#
# What moves is a storage, once however many tensors saved of it are views; it comes back when the
# first of them is asked for, and stays until the last one is gone. Parameters, buffers and whole
# numbers (tokens and places, which live anyway) stay.
#
# Note: on an accelerator copies run on streams of their own, in and out of pinned memory, and with
# the first tensor that is asked for of one module all those of the module before it set out. On a
# processor a copy is made where it is asked for. A file is written and read by the one that
# computes.


_SMALL = (torch.bool, torch.uint8)  # masks: not floating, and as many as activations


class OffloadHooks:
    """Hooks on what autograd saves within the modules of one model."""

    def __init__(self, model: nn.Module, tiers: Tiers) -> None:
        self.model = model
        self.tiers = tiers
        self.streams = _Streams(tiers.device) if tiers.device.type == "cuda" else None
        self._known: OfStorages[tuple[int, weakref.ref[OffloadedStorage]]] = (
            weakref.WeakKeyDictionary()
        )
        self._last: _ModulePass | None = None
        self._buffers: list[_Home] | None = None  # of a forward pass
        model.register_forward_pre_hook(self._reset_pass)
        model.register_forward_hook(self._reset_pass, always_call=True)

    def register_on(self, module: nn.Module, tier: Tier) -> None:
        """What autograd saves while `module` runs is kept on `tier`."""
        entered: list[saved_tensors_hooks] = []

        def enter(_: nn.Module, __: object) -> None:
            if not torch.is_grad_enabled() or is_recomputing():
                return
            homes = _tensor_dicts(module, "_parameters", "_buffers")
            self._last = _ModulePass(tier, self._last, homes)
            hooks = saved_tensors_hooks(partial(self._pack, self._last), _unpack)
            hooks.__enter__()
            entered.append(hooks)

        def leave(*_: object) -> None:
            if entered and not is_recomputing():
                entered.pop().__exit__(None, None, None)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)

    def _reset_pass(self, *_: object) -> None:
        """A micro-batch's forward pass begins or ends: no module is before the first one."""
        if not is_recomputing():
            self._last = self._buffers = None

    def _pack(self, owner: _ModulePass, saved: torch.Tensor) -> Any:
        with torch.no_grad():
            held = _local_tensor(saved)
            if not self._should_offload(held, owner):
                return saved
            return _SavedView(
                storage=self._offload(held, owner),
                owner=owner,
                dtype=held.dtype,
                geometry=(tuple(held.shape), held.stride(), held.storage_offset()),
                layout=_ShardLayout.from_dtensor(saved),
            )

    def _should_offload(self, held: torch.Tensor, owner: _ModulePass) -> bool:
        if held.layout is not torch.strided or held.device.type != self.tiers.device.type:
            return False
        if not held.is_floating_point() and held.dtype not in _SMALL:
            return False
        storage = held.untyped_storage()
        size = storage.nbytes()
        is_whole = bool(size) and size % held.itemsize == 0
        if not is_whole or has_tier(storage):
            return False
        return self._find_offloaded(held) is not None or not self._is_parameter_or_buffer(
            storage, owner
        )

    def _is_parameter_or_buffer(self, storage: torch.UntypedStorage, owner: _ModulePass) -> bool:
        """Whether it is of the module's parameters, as they are now: parts of it may be gathered
        for their own time only; or of buffers, which a model hands to its modules."""
        if self._buffers is None:
            self._buffers = _tensor_dicts(self.model, "_buffers")
        homes = (*owner.tensor_dicts, *self._buffers)
        tensors = (tensor for home in homes for tensor in home.values() if tensor is not None)
        return any(storage_of(tensor) is storage for tensor in tensors)

    def _offload(self, held: torch.Tensor, owner: _ModulePass) -> OffloadedStorage:
        """The tensor's storage off the device."""
        if away := self._find_offloaded(held):
            return away
        away = OffloadedStorage(held, owner.tier, self.tiers, self.streams)
        owner.offloaded.append(weakref.ref(away))
        self._known[held.untyped_storage()] = held._version, weakref.ref(away)
        return away

    def _find_offloaded(self, held: torch.Tensor) -> OffloadedStorage | None:
        """As it was moved before, if it has not been written to since."""
        version, reference = self._known.get(held.untyped_storage(), (None, None))
        return reference() if reference is not None and version == held._version else None


class OffloadedStorage:
    """One storage off the device; on it too from its first use to its last."""

    def __init__(
        self, held: torch.Tensor, tier: Tier, tiers: Tiers, streams: _Streams | None
    ) -> None:
        numel = held.untyped_storage().nbytes() // held.itemsize
        self.tiers = tiers
        self.streams = streams if tier is Tier.HOST else None
        self.stored = tiers.empty(numel, held.dtype, tier, State.ACTIVATIONS)
        self.loaded: torch.Tensor | None = None
        self._event: Any = None
        whole = held.detach().as_strided((numel,), (1,), 0)
        if self.streams is None:
            self.stored.copy_(whole)
        else:
            self._event = self.streams.offload(self.stored, whole)

    def start_load(self) -> None:
        """It is needed next."""
        if self.streams is None:
            self.tiers.prefetch(self.stored)
        elif self.loaded is None:
            self.loaded = self._allocate_on_device()
            self._event = self.streams.load(self.loaded, self.stored, self._event)

    def loaded_storage(self) -> torch.Tensor:
        """On the device, in one dimension."""
        if self.streams is not None:
            self.start_load()
            self.streams.wait_for(self._event)
        elif self.loaded is None:
            self.loaded = self._allocate_on_device().copy_(self.stored)
        assert self.loaded is not None
        return self.loaded

    def _allocate_on_device(self) -> torch.Tensor:
        return self.tiers.empty(
            self.stored.numel(), self.stored.dtype, Tier.DEVICE, State.ACTIVATIONS
        )


_Home = dict[str, torch.Tensor | None]


def _tensor_dicts(module: nn.Module, *kinds: str) -> list[_Home]:
    """Where a module and those within it have their tensors: what is there changes, and these
    dictionaries do not."""
    return [getattr(inner, kind) for inner in module.modules() for kind in kinds]


class _ModulePass:
    """One module in one forward pass: what was moved, the module before it, and where it has its
    own tensors."""

    def __init__(self, tier: Tier, previous: _ModulePass | None, homes: list[_Home]) -> None:
        self.tier = tier
        self.previous = previous
        self.tensor_dicts = homes
        self.offloaded: list[weakref.ref[OffloadedStorage]] = []
        self._is_back = False

    def begin_backward(self) -> None:
        """The first of its tensors is asked for."""
        if self._is_back:
            return
        self._is_back = True
        self.start_loads()
        if self.previous is not None:
            self.previous.start_loads()

    def start_loads(self) -> None:
        """What it moved last is needed first."""
        for reference in reversed(self.offloaded):
            away = reference()
            if away is not None:
                away.start_load()


@dataclass(frozen=True, slots=True)
class _ShardLayout:
    """What makes a rank's part a DTensor again."""

    device_mesh: torch.distributed.DeviceMesh
    placements: Sequence[Placement]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def from_dtensor(cls, saved: torch.Tensor) -> _ShardLayout | None:
        if not isinstance(saved, DTensor):
            return None
        return cls(saved.device_mesh, saved.placements, saved.shape, saved.stride())

    def to_dtensor(self, part: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            part,
            self.device_mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _SavedView:
    """A saved tensor; `place`: size, strides and offset in its storage."""

    storage: OffloadedStorage
    owner: _ModulePass
    dtype: torch.dtype
    geometry: tuple[tuple[int, ...], tuple[int, ...], int]
    layout: _ShardLayout | None

    def restore(self) -> torch.Tensor:
        self.owner.begin_backward()
        part = self.storage.loaded_storage().view(self.dtype).as_strided(*self.geometry)
        return part if self.layout is None else self.layout.to_dtensor(part)


def _unpack(packed: Any) -> torch.Tensor:
    if not isinstance(packed, _SavedView):
        held: torch.Tensor = packed
        return held
    with torch.no_grad():
        return packed.restore()


def _local_tensor(saved: torch.Tensor) -> torch.Tensor:
    """What this rank stores of it, when it is there."""
    held = saved._local_tensor if isinstance(saved, DTensor) else saved
    if isinstance(held, AsyncCollectiveTensor):
        arrived: torch.Tensor = held.trigger_wait()
        return arrived
    return held


class _Streams:
    """Copies between an accelerator and pinned memory, each way beside what is computed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.offload_stream: Any = torch.cuda.Stream(device)
        self.load_stream: Any = torch.cuda.Stream(device)

    def offload(self, kept: torch.Tensor, whole: torch.Tensor) -> Any:
        """The event when `kept` has the bytes; those of `whole` are not used again before it."""
        self.offload_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.offload_stream):
            kept.copy_(whole, non_blocking=True)
        whole.record_stream(self.offload_stream)
        return self.offload_stream.record_event()

    def load(self, back: torch.Tensor, kept: torch.Tensor, taken: Any) -> Any:
        """The event when `back` has the bytes, which `kept` has at `taken`."""
        self.load_stream.wait_event(taken)
        self.load_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.load_stream):
            back.copy_(kept, non_blocking=True)
        back.record_stream(self.load_stream)
        return self.load_stream.record_event()

    def wait_for(self, event: Any) -> None:
        """Nothing is computed until then."""
        torch.cuda.current_stream(self.device).wait_event(event)


_CORE = "attention.core"  # of a block of the built-in families


def apply_modes(module: nn.Module, step: Keep, tiers: Tiers, *, is_compiled: bool = False) -> None:
    """`module` is a model, or a stage's part of one, which has some of the blocks. `is_compiled`:
    their forward passes are going to be. Raises SpecError where the attention alone is to be
    computed again and is no module."""
    known = dict(module.named_modules())
    offload: OffloadHooks | None = None
    for name, kept in step.blocks:
        if name not in known or next(known[name].parameters(), None) is None:
            continue  # another stage's, for which something stands in
        inner = _module_to_recompute(known, name, kept)
        if kept.tier is not Tier.DEVICE:
            offload = offload or OffloadHooks(module, tiers)
            offload.register_on(
                inner, kept.tier
            )  # first, so that it is around a checkpoint's inputs
        if kept.policy is not None:
            draws = _may_draw(module, known[name])
            apply_recomputation(inner, kept.policy, draws=draws, is_compiled=is_compiled)


def apply_modes_for_trace(
    module: nn.Module, step: Keep | None, *, is_compiled: bool = False
) -> None:
    """The same where nothing but sizes counts: on a processor, and no file is made."""
    if step is not None:
        tiers = _InMemoryTiers(torch.device("cpu"), TagRegistry())
        apply_modes(module, step, tiers, is_compiled=is_compiled)


class _InMemoryTiers(Tiers):
    def _map_file(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device="cpu")


def _module_to_recompute(known: dict[str, nn.Module], name: str, kept: ActivationMode) -> nn.Module:
    if kept.policy is None or kept.policy.scope is Scope.BLOCK:
        return known[name]
    core = f"{name}.{_CORE}"
    if core not in known:
        raise refused(
            "activations",
            f"policy attention needs an attention module, and {name} has none",
            "Use `recompute=full`, `recompute=selective` or `recompute.keep=[matmul, attention]`.",
        )
    return known[core]


def _may_draw(model: nn.Module, block: nn.Module) -> bool:
    """Whether the block may draw random numbers; of a model that is not built in nobody knows.
    Their state is 5 KB on a processor."""
    return not isinstance(model, Transformer) or any(
        getattr(child, "dropout", 0) or (isinstance(child, nn.Dropout) and child.p)
        for child in block.modules()
    )
