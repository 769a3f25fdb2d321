"""Activation modes of blocks: save, recompute (M) or offload (O) the tensors that backward needs.

Module and parameter names do not change. The modes are applied after tp shards operators and before
a data axis wraps the module, so that a recomputation repeats a wrapper's work only if it has to.

M: backward recomputes a module's results by torch's composable checkpoint, except those that a
policy saves. A product over a dimension that tp shards is a partial sum of full size on each rank.
The policy saves the sum over the ranks instead: with sharded tokens it is smaller, and it is not
communicated twice.

O: the storages that autograd saves while a module runs move to host memory or files, once however
many views are saved, and return when the first view is needed until the last is released.
Parameters, buffers and integers (tokens and positions, which stay alive anyway) do not move. On an
accelerator copies use pinned memory and separate streams, and the first use of one module's tensors
prefetches the tensors of the module before it. On a CPU a copy is made on demand. A file is
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
from ptrain.errors import input_error
from ptrain.internals.checkpoint import checkpoint
from ptrain.internals.dispatch import operator_names
from ptrain.internals.functional_collectives import AsyncCollectiveTensor
from ptrain.models.ledger import OfStorages, has_tier, is_recomputing, storage_of
from ptrain.models.transformer import Transformer
from ptrain.runtime.comm import TagRegistry
from ptrain.runtime.torch import Tiers
from ptrain.spec.activations import ActivationMode, Operators, Policy, Scope
from ptrain.spec.placement import Tier
from ptrain.steps.step import Keep

# Operators by class; a trailing * matches any suffix.
_NAMES = {
    Operators.MATMUL: (
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::_scaled_mm",
        "ptrain::scaled_mm",  # the same on CPUs
    ),
    Operators.ATTENTION: (
        "aten::_scaled_dot_product_*",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
    ),
    Operators.SOFTMAX: ("aten::_softmax", "aten::_safe_softmax"),
    # Llama's norm runs operator by operator; its rsqrt result is one number per token
    Operators.NORM: (
        "aten::native_layer_norm",
        "aten::_fused_rms_norm",
        "ptrain::fused_rms_norm",  # replaces it in traces of GPUs
        "aten::rsqrt",
    ),
    # without `wait_tensor`: forward and recomputation may issue different numbers of waits
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
    """Make backward recompute a module's forward pass, except results that the policy saves.

    Args:
        module: The module.
        policy: The operators whose results are saved.
        draws: The module may draw random numbers; the recomputation then repeats them.
        is_compiled: The module is compiled afterwards. Dynamo traces the checkpoint function, but
            not the hooks of a composable checkpoint.
    """
    options: dict[str, Any] = {"preserve_rng_state": draws}
    if policy.keep:
        options["context_fn"] = _contexts_keeping(policy.keep)
    if is_compiled:
        # The composable checkpoint is non-reentrant too
        # (torch/distributed/_composable/checkpoint_activation.py, 2.13).
        options["use_reentrant"] = False
        module.forward = partial(checkpoint_function, module.forward, **options)
    else:
        checkpoint(module, **options)


@cache
def _contexts_keeping(kinds: tuple[Operators, ...]) -> Any:
    """Return the context function of a policy, cached.

    All modules share the object, because a compiled program guards on its identity.
    """
    return partial(_create_contexts, frozenset(chain.from_iterable(map(operators_of_kind, kinds))))


def _create_contexts(kept: frozenset[Any]) -> Any:
    return create_selective_checkpoint_contexts(_SavePolicy(kept))


class _SavePolicy:
    """The choice of the results that one pass of a module keeps, in the order of its operators."""

    def __init__(self, kept: frozenset[Any]) -> None:
        self.kept = kept
        # A pass of a module runs its operators one after the other, so the next reduction belongs
        # to the last partial product.
        self._has_partial = False

    def __call__(self, _: Any, operator: Any, *args: Any, **__: Any) -> CheckpointPolicy:
        """Return the policy for an operator's result, equal in forward and recomputation."""
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


_SMALL = (torch.bool, torch.uint8)  # masks, which are as large as activations


class OffloadHooks:
    """The hooks that offload the tensors that autograd saves within modules of one model."""

    def __init__(self, model: nn.Module, tiers: Tiers) -> None:
        self.model = model
        self.tiers = tiers
        self.streams = _Streams(tiers.device) if tiers.device.type == "cuda" else None
        # Weak on both sides: a storage is known while autograd's saved views keep its copy, and
        # must not be kept by this record.
        self._known: OfStorages[tuple[int, weakref.ref[OffloadedStorage]]] = (
            weakref.WeakKeyDictionary()
        )
        self._last: _ModulePass | None = None
        self._buffers: list[_Home] | None = None  # of a forward pass
        model.register_forward_pre_hook(self._reset_pass)
        model.register_forward_hook(self._reset_pass, always_call=True)

    def register_on(self, module: nn.Module, tier: Tier) -> None:
        """Offload the tensors that autograd saves while `module` runs to `tier`."""
        entered: list[saved_tensors_hooks] = []

        def enter(_: nn.Module, __: object) -> None:
            # Without gradients nothing is saved. In a recomputation the tensors are used at once,
            # so a round trip to the host would only cost time.
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
        """Reset the chain of modules when a micro-batch's forward pass begins or ends."""
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
        # A storage with a tier is off the device already.
        if not is_whole or has_tier(storage):
            return False
        return self._find_offloaded(held) is not None or not self._is_parameter_or_buffer(
            storage, owner
        )

    def _is_parameter_or_buffer(self, storage: torch.UntypedStorage, owner: _ModulePass) -> bool:
        """Return True if a storage belongs to a parameter of the module or a buffer of the model.

        The tensors are looked up now, because a wrapper may replace parameters by all-gathered ones
        while the module runs. All buffers count, because a model passes them to its modules.
        """
        if self._buffers is None:
            self._buffers = _tensor_dicts(self.model, "_buffers")
        homes = (*owner.tensor_dicts, *self._buffers)
        tensors = (tensor for home in homes for tensor in home.values() if tensor is not None)
        return any(storage_of(tensor) is storage for tensor in tensors)

    def _offload(self, held: torch.Tensor, owner: _ModulePass) -> OffloadedStorage:
        """Return the offloaded storage of a tensor; offload it on first use."""
        if away := self._find_offloaded(held):
            return away
        away = OffloadedStorage(held, owner.tier, self.tiers, self.streams)
        # Weak: the copy is freed with the last saved view, that is, as backward proceeds.
        owner.offloaded.append(weakref.ref(away))
        # The version shows whether the storage was written to after the copy, for example by an
        # in-place operator on a saved tensor.
        self._known[held.untyped_storage()] = held._version, weakref.ref(away)
        return away

    def _find_offloaded(self, held: torch.Tensor) -> OffloadedStorage | None:
        """Return the tensor's offloaded storage; None without one, or after a write to it."""
        version, reference = self._known.get(held.untyped_storage(), (None, None))
        return reference() if reference is not None and version == held._version else None


class OffloadedStorage:
    """A storage off the device, with a copy on the device from its first use to its last."""

    def __init__(
        self, held: torch.Tensor, tier: Tier, tiers: Tiers, streams: _Streams | None
    ) -> None:
        numel = held.untyped_storage().nbytes() // held.itemsize
        self.tiers = tiers
        self.streams = streams if tier is Tier.HOST else None
        self.stored = tiers.empty(numel, held.dtype, tier, State.ACTIVATIONS)
        self.loaded: torch.Tensor | None = None
        self._event: Any = None
        # The full storage and not the view, because other saved tensors may be other views of it.
        whole = held.detach().as_strided((numel,), (1,), 0)
        if self.streams is None:
            self.stored.copy_(whole)
        else:
            self._event = self.streams.offload(self.stored, whole)

    def start_load(self) -> None:
        """Start to load the storage, because it is needed next."""
        if self.streams is None:
            self.tiers.prefetch(self.stored)
        elif self.loaded is None:
            self.loaded = self._allocate_on_device()
            self._event = self.streams.load(self.loaded, self.stored, self._event)

    def loaded_storage(self) -> torch.Tensor:
        """Return the storage on the device as a 1-d tensor, loaded on first use."""
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
    """Return the dictionaries in which a module and its submodules hold tensors.

    The entries change when a wrapper replaces tensors; the dictionaries stay the same objects.
    """
    return [getattr(inner, kind) for inner in module.modules() for kind in kinds]


class _ModulePass:
    """One forward pass of a module: its offloaded storages, and the pass of the module before."""

    def __init__(self, tier: Tier, previous: _ModulePass | None, homes: list[_Home]) -> None:
        self.tier = tier
        self.previous = previous
        self.tensor_dicts = homes
        self.offloaded: list[weakref.ref[OffloadedStorage]] = []
        self._is_back = False

    def begin_backward(self) -> None:
        """Load the storages of this module and of the module before it, once."""
        if self._is_back:
            return
        self._is_back = True
        self.start_loads()
        # Backward visits modules in reverse, so the module before this one is needed next. Its
        # copies run while this one's backward computes.
        if self.previous is not None:
            self.previous.start_loads()

    def start_loads(self) -> None:
        """Start all loads, last offloaded first: backward needs them in this order."""
        for reference in reversed(self.offloaded):
            away = reference()
            if away is not None:
                away.start_load()


@dataclass(frozen=True, slots=True)
class _ShardLayout:
    """The layout by which a local shard becomes a DTensor again."""

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
    """A saved tensor, as a view of an offloaded storage.

    `geometry` is its size, strides and offset in the storage.
    """

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
    """Return the local tensor of a DTensor or an asynchronous collective, after its wait."""
    held = saved._local_tensor if isinstance(saved, DTensor) else saved
    if isinstance(held, AsyncCollectiveTensor):
        arrived: torch.Tensor = held.trigger_wait()
        return arrived
    return held


class _Streams:
    """The copies between a GPU and pinned memory, on one stream per direction."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.offload_stream: Any = torch.cuda.Stream(device)
        self.load_stream: Any = torch.cuda.Stream(device)

    def offload(self, kept: torch.Tensor, whole: torch.Tensor) -> Any:
        """Copy `whole` to pinned memory `kept`; return the event at the end of the copy."""
        # The tensor may still be computed.
        self.offload_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.offload_stream):
            kept.copy_(whole, non_blocking=True)
        # Autograd does not keep the device tensor. The allocator must not reuse its memory before
        # the copy has read it.
        whole.record_stream(self.offload_stream)
        return self.offload_stream.record_event()

    def load(self, back: torch.Tensor, kept: torch.Tensor, taken: Any) -> Any:
        """Copy `kept`, filled at event `taken`, to `back`; return the event at the end."""
        # Pinned memory has the values only after the copy to it.
        self.load_stream.wait_event(taken)
        # `back` was allocated for the current stream, whose earlier kernels may still use that
        # memory.
        self.load_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.load_stream):
            back.copy_(kept, non_blocking=True)
        back.record_stream(self.load_stream)
        return self.load_stream.record_event()

    def wait_for(self, event: Any) -> None:
        """Make computation on the device wait for the event."""
        # The stream waits and not the host, which continues to launch kernels.
        torch.cuda.current_stream(self.device).wait_event(event)


_CORE = "attention.core"  # of a block of the built-in families


def apply_modes(module: nn.Module, step: Keep, tiers: Tiers, *, is_compiled: bool = False) -> None:
    """Apply the plan's activation modes to blocks.

    Args:
        module: The model, or a pipeline stage, which has some of the blocks.
        step: The modes by block.
        tiers: The memory tiers to offload to.
        is_compiled: The blocks' forward passes are compiled afterwards.

    Raises:
        SpecError: Only attention is recomputed, and it is not a separate module.
    """
    known = dict(module.named_modules())
    offload: OffloadHooks | None = None
    for name, kept in step.blocks:
        if name not in known or next(known[name].parameters(), None) is None:
            continue  # a placeholder for another stage's block
        inner = _module_to_recompute(known, name, kept)
        if kept.tier is not Tier.DEVICE:
            offload = offload or OffloadHooks(module, tiers)
            offload.register_on(
                inner, kept.tier
            )  # before the checkpoint, so that its saved inputs are offloaded too
        if kept.policy is not None:
            draws = _may_draw(module, known[name])
            apply_recomputation(inner, kept.policy, draws=draws, is_compiled=is_compiled)


def apply_modes_for_trace(
    module: nn.Module, step: Keep | None, *, is_compiled: bool = False
) -> None:
    """Apply activation modes for a trace, which needs sizes only: on CPUs, without files.

    Args:
        module: The model or stage, changed in place.
        step: The modes by block.
        is_compiled: The blocks' forward passes are compiled afterwards.
    """
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
        raise input_error(
            "activations",
            f"policy attention needs an attention module, and {name} has none",
            "Use `recompute=full`, `recompute=selective` or `recompute.keep=[matmul, attention]`.",
        )
    return known[core]


def _may_draw(model: nn.Module, block: nn.Module) -> bool:
    """Return True if the block may draw random numbers; always True for a custom model.

    The checkpoint then saves the generator's state, 5 KB on a CPU.
    """
    return not isinstance(model, Transformer) or any(
        getattr(child, "dropout", 0) or (isinstance(child, nn.Dropout) and child.p)
        for child in block.modules()
    )
