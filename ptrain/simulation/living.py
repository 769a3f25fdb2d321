"""Track which storages are alive during a step, with their content and origin.

The memory meter counts live bytes by state. `AllocationMeter` also records each storage's origin
(operator, module, phase) and tags, so that the peak can be itemised. It adds the temporary memory
that a GPU's kernels allocate inside an operator, computed from the operator's arguments: an
allocator counts it, a meter of operators does not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ptrain.axes.data.run.apply import allocating_streams, stream_key
from ptrain.cost import Phase, State
from ptrain.derivation.allocator import COMPUTING
from ptrain.derivation.kernels import attention_backward, attention_of, sum_of_rows
from ptrain.internals.fsdp2 import parameter_groups
from ptrain.interpreter.program import Program
from ptrain.meters.memory import MemoryMeter
from ptrain.models.ledger import add_listeners, storage_of
from ptrain.optimizers.update import MASTER
from ptrain.runtime.comm import Tag
from ptrain.simulation.replay import Begin, Change, MemoryStream, StorageKind
from ptrain.spec.spec import Spec

LOGITS = "logits"


def named_modules(model: nn.Module, vocab: int | None) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model with their paths; the head is named `logits`.

    Args:
        model: The model.
        vocab: The size of the vocabulary: a linear layer with this many outputs is the head.
    """
    for name, module in model.named_modules():
        is_head = isinstance(module, nn.Linear) and module.out_features == vocab
        yield LOGITS if is_head else name, module


_ATTENTION, _BACKWARD = "aten::_scaled_dot_product_", "_backward"
_OF_PROCESSOR = "flash_attention_for_cpu"
_SUM = "aten::sum"
_WIDEST = 4  # bytes of an element: `derivation.kernels.sum_of_rows` is for sums in fp32

Within = Callable[[str, tuple[Any, ...]], tuple[int, ...]]


def kernel_allocations(spec: Spec) -> Within:
    """Return a function of the bytes that a kernel allocates internally.

    The function takes an operator's name and arguments, and returns the sizes of its allocations.
    It returns nothing if they are unknown, or the spec is not for GPUs. A CPU's attention operator
    is counted as the spec's kernel.
    """
    if not spec.is_for_cuda:
        return lambda name, args: ()
    attention = attention_of(spec)
    kernel = attention.kernel(spec.sm) if attention else None

    def of_operator(name: str, args: tuple[Any, ...]) -> tuple[int, ...]:
        if name.startswith(_ATTENTION) and name.endswith(_BACKWARD):
            if spec.deterministic:  # the size depends on the GPU's number of multiprocessors
                return ()
            operator = name.removeprefix(_ATTENTION).removesuffix(_BACKWARD)
            stands_in = operator == _OF_PROCESSOR
            runs = kernel if stands_in else operator.removesuffix("_attention")
            batch, heads, sequence, head_dim = args[1].shape
            return attention_backward(
                runs,
                args[1].itemsize,
                batch=batch,
                heads=heads,
                sequence=sequence,
                head_dim=head_dim,
            )
        return _sum_workspace(*args[:2]) if name == _SUM and len(args) > 1 else ()

    return of_operator


def _sum_workspace(tensor: Any, dimensions: Any) -> tuple[int, ...]:
    """Return the internal allocations of a sum over all dimensions but the last.

    Other sums allocate little.
    """
    if tensor.dim() < 2 or not tensor.numel() or tensor.itemsize > _WIDEST:
        return ()
    *rows, columns = tensor.shape
    if sorted(d % tensor.dim() for d in dimensions or ()) != [*range(len(rows))]:
        return ()
    size = sum_of_rows(math.prod(rows), columns)
    return (size,) if size else ()


_OLDER = "buffers, batch, and older tensors"


@dataclass(slots=True)
class StorageLife:
    """The history of one storage.

    Attributes:
        module: The module that ran when it was allocated; None outside of modules, and before the
            step.
        phase: The phase of its allocation; None before the step.
        state: The last known state.
        is_declared: True if the program has declared its state.
        unit: The unit of which it is an all-gathered part; empty for other storages.
        is_moment: True for optimizer state.
        is_within: True for an internal allocation of a kernel.
    """

    module: str | None
    phase: Phase | None
    tag: Tag | None = None
    state: State = State.ACTIVATIONS
    is_declared: bool = False
    unit: str = ""  # that it is an unsharded part of
    micro_batch: int = 0
    stream: str = COMPUTING
    is_moment: bool = False  # of the optimizer
    is_within: bool = False  # a kernel

    @property
    def is_passing(self) -> bool:
        """True for a buffer of a collective or a temporary of an update, which no module keeps."""
        states = (State.PARAMETERS, State.GRADIENTS)
        return self.phase is Phase.UPDATE or (self.tag is not None and self.tag.state in states)


class AllocationMeter(MemoryMeter):
    """A memory meter that also records all allocations and frees of the step.

    Args:
        program: The program whose step is measured.
        running: The paths of the running modules, outermost first. The list changes during the
            step.
        rank: The rank that this process plays.
        device: The type of the device.
    """

    def __init__(self, program: Program, running: Sequence[str], *, rank: int, device: str) -> None:
        super().__init__(program, rank=rank, device=device, waits=False)
        self._within = kernel_allocations(program.spec)
        self._registry = program.registry
        self._running = running
        self._units = dict(gathered_units(program))
        self._lives: dict[int, StorageLife] = {}
        self._before: list[tuple[StorageLife, int]] = []
        self._events: list[tuple[StorageLife, int] | Begin] = []
        self._micro_batch = 0
        self._streams = allocating_streams(program.model)
        self._moments_of = {
            # The master copy exists before the first update. Only moments are allocated by it.
            storage_of(tensor)._cdata
            for _, kept in program.update.tensors()
            for name, tensor in kept.items()
            if name != MASTER
        }

    def record_tags(self) -> AbstractContextManager[None]:
        """Temporarily record the tags of storages.

        A storage gets its tag after its allocation, and loses it when it is freed.
        """
        return add_listeners(self._registry.listeners, self._store_tag)

    def _store_tag(self, storage: torch.UntypedStorage, tag: Tag) -> None:
        """Store the tag of a live storage."""
        if life := self._lives.get(storage._cdata):
            life.tag = tag

    def on_existing(self, key: int, storage: torch.UntypedStorage) -> None:
        """Record a storage that was allocated before the step."""
        self._lives[key] = StorageLife(None, None, self._registry.tag_of_storage(storage))
        super().on_existing(key, storage)

    def on_allocation(self, key: int, storage: torch.UntypedStorage, operator: str) -> None:
        """Record an allocation, with the running module and the stream.

        Args:
            key: The key of the storage.
            storage: The storage.
            operator: The name of the operator that allocated it.
        """
        current = torch.cuda if self._device == "cuda" else torch.cpu
        stream = self._streams.get(stream_key(current.current_stream()), COMPUTING)
        module = self._running[-1] if self._running else None
        self._lives[key] = StorageLife(
            module, self._phase, micro_batch=self._micro_batch, stream=stream
        )
        super().on_allocation(key, storage, operator)

    def run_operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator and record its internal allocations."""
        result = super().run_operator(function, args, kwargs)
        self._record_kernel_allocations(self._within(function._schema.name, args))
        return result

    def _record_kernel_allocations(self, sizes: tuple[int, ...]) -> None:
        """Record allocations of a kernel, which are freed when its results exist."""
        if not sizes:
            return
        self._count_pending()  # the operator's own allocations and frees come first
        allocations = [
            (StorageLife(None, self._phase, state=State.TRANSIENT, is_within=True), size)
            for size in sizes
        ]
        self._events += [*allocations, *((life, -size) for life, size in allocations)]

    def on_resize(self, key: int, storage: torch.UntypedStorage, before: int) -> None:
        """Record that FSDP2 filled or freed a unit's buffer by resizing its storage."""
        self._lives[key].unit = self._units.get(key, "a unit")
        super().on_resize(key, storage, before)

    def _count_free(self, key: int, size: int) -> None:
        self._remember(key)
        super()._count_free(key, size)
        del self._lives[key]

    def _remember(self, key: int) -> None:
        """Store the current state of a storage in its history."""
        life = self._lives[key]
        life.is_declared = key in self._states
        life.state = self._state_of(key)
        # The meter counts undeclared storages as activations; buffers are temporary instead.
        if life.state is State.ACTIVATIONS and not life.is_declared and life.is_passing:
            life.state = State.TRANSIENT

    def _add_live_bytes(self, key: int, size: int) -> None:
        before = self.live
        super()._add_live_bytes(key, size)
        if self.live != before:
            self._events.append((self._lives[key], self.live - before))

    def _add_to_all(self, key: int, size: int) -> None:
        before = self.live
        super()._add_to_all(key, size)
        if self.live != before:
            life = self._lives[key]
            life.is_moment = key in self._moments_of
            self._before.append((life, self.live - before))

    def phase(self, phase: Phase, micro_batch: int) -> None:
        """Record the beginning of a phase."""
        super().phase(phase, micro_batch)
        self._micro_batch = micro_batch
        self._events.append(Begin(phase, micro_batch))

    def stream(self) -> MemoryStream:
        """Return all allocations and frees of the step. Call it after the step."""
        for key in self._lives:
            self._remember(key)
        # By id(): a freed storage's key may be reused; the events keep its StorageLife alive.
        kinds: dict[int, StorageKind] = {}
        keys: dict[int, int] = {}

        def change(life: StorageLife, size: int) -> Change:
            if id(life) not in keys:
                keys[id(life)] = len(keys)
                kinds[id(life)] = StorageKind(
                    describe_storage(life),
                    life.state,
                    life.micro_batch,
                    life.stream,
                    life.is_moment,
                    life.is_within,
                )
            return Change(kinds[id(life)], size, keys[id(life)])

        return MemoryStream(
            resident=tuple(change(*resident) for resident in self._before),
            events=tuple(
                event if isinstance(event, Begin) else change(*event) for event in self._events
            ),
        )


def describe_storage(life: StorageLife) -> str:
    """Return a description of a storage, without the numbers in the names of modules."""
    if life.is_within:
        return "within a kernel"
    tag = life.tag
    if life.unit or (tag and tag.state is State.PARAMETERS and not life.is_declared):
        return f"unsharded {_without_numbers(life.unit or (tag.name if tag else '') or 'unit')}"
    if life.is_declared or life.phase is None:
        in_bucket = tag is not None and tag.state is State.GRADIENTS and not tag.name
        if life.state is State.GRADIENTS and in_bucket:
            return "gradient buckets"
        return _OLDER if life.state is State.OTHER else str(life.state)
    if tag and tag.state is State.GRADIENTS:
        return f"gradients to reduce: {_without_numbers(tag.name or 'all')}"
    if life.phase is Phase.UPDATE:
        return "temporaries of the optimizer"
    if life.module is None:
        return "loss" if life.phase is Phase.FORWARD else "temporaries of backward"
    where = _without_numbers(life.module) or "the model itself"
    return where if life.phase is Phase.FORWARD else f"{where}, recomputed"


def _without_numbers(path: str) -> str:
    """Return a path with `*` for numbers: `blocks.*.mlp` for blocks.3.mlp."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def gathered_units(program: Program) -> Iterator[tuple[int, str]]:
    """Yield the key and the unit of each storage that FSDP2 fills and frees by resizing."""
    for name, module in program.model.named_modules():
        if isinstance(module, FSDPModule):
            for group in parameter_groups(module):
                for part in group.fsdp_params:
                    for output in part.all_gather_outputs:
                        yield storage_of(output)._cdata, name or "root"
