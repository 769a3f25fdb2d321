"""The meters of the X-ray: three steps of an unmodified job on one rank.

The first watched step has the memory meter, digests of the training state and hooks on modules; the
second has the traffic meter and the role finder; the third has the wait meter alone. Nothing here
communicates, so a rank never waits for another one that is not watched.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ptrain.codec import encode
from ptrain.cost import Collective, Phase, State
from ptrain.files import write_json
from ptrain.internals import process_groups
from ptrain.internals.autograd import is_in_backward
from ptrain.internals.dispatch import hook_eager_updates
from ptrain.internals.fsdp1 import flat_shard
from ptrain.internals.fsdp2 import parameter_groups, policies
from ptrain.internals.part import replace_attributes
from ptrain.meters.blocked import WaitMeter
from ptrain.meters.measure import PhaseWatch, WrappedModule, iter_groups, unwrap_optimizer
from ptrain.meters.memory import MemoryMeter, RoleFinder
from ptrain.meters.replicas import compute_digests
from ptrain.meters.traffic import TrafficMeter
from ptrain.models.ledger import local_tensor, storage_of, tensors_of, watch_modules
from ptrain.xray.observation import (
    DDP,
    FSDP1,
    FSDP2,
    CallFact,
    GroupFact,
    ModuleFact,
    Observation,
    TensorFact,
    WaitFact,
    WrapperFact,
)

# Operators that RoleFinder follows as copies, but that also compute a gradient from another one: a
# bias's gradient is a sum of its output's gradient, which is an activation.
_SUMS = ("sum", "add", "stack")
_HOST_UNKNOWN = "the device is the host"


def group_ranks(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a process group, ascending."""
    return tuple(sorted(dist.get_process_group_ranks(group)))


def find_models(optimizers: Sequence[Optimizer]) -> list[nn.Module]:
    """Return the outermost modules that the optimizers train.

    If no module has a parameter of an optimizer (flat master copies), all outermost modules with
    trainable parameters are returned. Searches the garbage collector's objects, about 0.1 s.
    """
    # `isinstance` reads `__class__`, which runs code of proxies and mocks.
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    inner = {id(child) for module in modules for child in vars(module).get("_modules", {}).values()}
    outermost = [
        module for module in modules if id(module) not in inner and "_modules" in vars(module)
    ]
    updated = {id(parameter) for optimizer in optimizers for parameter in _parameters_of(optimizer)}
    trained = [module for module in outermost if any(id(p) in updated for p in module.parameters())]
    return trained or [
        module for module in outermost if any(p.requires_grad for p in module.parameters())
    ]


def _parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _identity(parameter: torch.Tensor) -> set[int]:
    """Return keys of a parameter and of its storage, which views of a flat parameter share."""
    return {id(parameter), storage_of(parameter)._cdata}


class JobState(WrappedModule):
    """The models and optimizers of a job, as the meters read them.

    Attributes:
        model: A container of the outermost trained modules.
        optimizers: The optimizers, without wrappers.
        last: The optimizer that steps last, perhaps a wrapper.
        gradient_observers: Empty; `RoleFinder` reads it.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.last = optimizers[-1]
        inner = [unwrap_optimizer(optimizer) for optimizer in optimizers]
        self.optimizers: list[Any] = list({id(one): one for one in inner}.values())
        models = find_models(self.optimizers)
        self.model: nn.Module = models[0] if len(models) == 1 else nn.ModuleList(models)
        if not models:  # tensors without modules
            self.model = nn.ParameterList(_parameters_of(self.optimizers[0]))
        self.gradient_observers: list[Any] = []
        super().__init__(self.model, None)

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        """Yield the state of the modules, then of the optimizers."""
        yield from super().storages()
        for optimizer in self.optimizers:
            # a parameter that a module has was yielded above, and its first state counts
            for parameter in _parameters_of(optimizer):
                yield State.OPTIMIZER, local_tensor(parameter.detach())
                if parameter.grad is not None:
                    yield State.GRADIENTS, local_tensor(parameter.grad)
            for values in optimizer.state.values():
                yield from ((State.OPTIMIZER, local_tensor(t)) for t in tensors_of(values))

    def named_parts(self) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...]]]:
        """Yield name, tensor and, for a flat tensor of FSDP1, the ranks that shard it."""
        flat_storages = set()
        for path, module in self.model.named_modules():
            if (shard := flat_shard(module)) is not None:
                flat_storages.add(storage_of(shard.flat)._cdata)
                ranks = group_ranks(module.process_group) if shard.is_cut else ()
                yield f"{path}._flat_param".lstrip("."), shard.flat, ranks
        for name, parameter in self.model.named_parameters():
            if storage_of(parameter)._cdata not in flat_storages:
                yield name, parameter, ()

    def tensor_facts(self) -> Iterator[TensorFact]:
        """Yield the parameters, buffers and optimizer state between two steps."""
        updated = {key for o in self.optimizers for p in _parameters_of(o) for key in _identity(p)}
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        rows: list[tuple[State, str, str, torch.Tensor, torch.Tensor, tuple[int, ...]]] = []
        for name, tensor, flat in self.named_parts():
            rows.append((State.PARAMETERS, name, "", tensor, tensor, flat))
        for name, buffer in self.model.named_buffers():
            rows.append((State.OTHER, name, "", buffer, buffer, ()))
        for index, optimizer in enumerate(self.optimizers):
            for at, parameter in enumerate(_parameters_of(optimizer)):
                name = names.get(id(parameter), f"optimizer.{index}.{at}")
                if id(parameter) not in names:
                    rows.append((State.OPTIMIZER, name, "master", parameter, parameter, ()))
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        rows.append((State.OPTIMIZER, name, key, value, parameter, ()))
        yield from _describe_tensors(rows, lambda p: not updated.isdisjoint(_identity(p)))

    def gradient_facts(self, optimizer: Any, known: Container[str]) -> Iterator[TensorFact]:
        """Yield the gradients that exist now, but not those with known names.

        Args:
            optimizer: Only the gradients of this optimizer; of the job's last one, all gradients.
            known: The known names.
        """
        held = {id(p): (name, p) for name, p in self.model.named_parameters()}
        is_last = optimizer is self.last
        chosen = set(map(id, _parameters_of(optimizer)))
        for index, optimizer in enumerate(self.optimizers):
            for at, parameter in enumerate(_parameters_of(optimizer)):
                held.setdefault(id(parameter), (f"optimizer.{index}.{at}", parameter))
        rows = [
            (State.GRADIENTS, name, "", parameter.grad, parameter.grad, ())
            for key, (name, parameter) in held.items()
            if parameter.grad is not None and name not in known and (is_last or key in chosen)
        ]
        yield from _describe_tensors(rows, lambda _: True)

    def wrap_units(self) -> Iterator[WrapperFact]:
        """Yield the wrap units of DDP, FSDP1 and FSDP2."""
        for path, module in self.model.named_modules():
            if isinstance(module, DistributedDataParallel):
                ranks, size = group_ranks(module.process_group), _count_bytes(module.parameters())
                yield WrapperFact(kind=DDP, path=path, ranks=ranks, nbytes=size)
            elif isinstance(module, FullyShardedDataParallel):
                if (shard := flat_shard(module)) is not None:
                    yield _fsdp1_fact(path, module, shard)
            elif isinstance(module, FSDPModule):
                yield from (_fsdp2_fact(path, group) for group in parameter_groups(module))


def _count_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(local_tensor(t).numel() * t.element_size() for t in tensors)


def _dtype_name(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def _fsdp1_fact(path: str, module: Any, shard: Any) -> WrapperFact:
    """Return the unit of an FSDP1 module."""
    return WrapperFact(
        kind=FSDP1,
        path=path,
        ranks=group_ranks(module.process_group),
        nbytes=_count_bytes([shard.flat]),
        # SHARD_GRAD_OP and its hybrid keep the unit between forward and backward.
        reshards=module.sharding_strategy.name in ("FULL_SHARD", "HYBRID_SHARD"),
        is_offloaded=bool(module.cpu_offload and module.cpu_offload.offload_params),
    )


def _fsdp2_fact(path: str, group: Any) -> WrapperFact:
    """Return a unit of FSDP2."""
    mesh = group.mesh_info.mesh
    shards = [part.sharded_param for part in group.fsdp_params]
    *_, offload = policies(group)
    return WrapperFact(
        kind=FSDP2,
        path=path,
        ranks=group_ranks(mesh.get_group(mesh.ndim - 1)),  # the first of two dimensions replicates
        nbytes=_count_bytes(shards),
        reshards=group.post_forward_mesh_info is not None,
        is_offloaded=type(offload).__name__ == "CPUOffloadPolicy",
    )


def _describe_tensors(rows: Sequence[Any], is_updated: Any) -> Iterator[TensorFact]:
    """Yield the facts of tensors, with their digests."""
    locals_ = [local_tensor(tensor.detach()) for _, _, _, tensor, _, _ in rows]
    digests = iter(compute_digests([held for held in locals_ if _is_telling(held)]))
    for (state, name, key, tensor, parameter, flat), held in zip(rows, locals_, strict=True):
        # Optimizer state has the layout of its parameter if it has its local shape.
        layout = tensor
        if not isinstance(tensor, DTensor) and held.shape == local_tensor(parameter).shape:
            layout = parameter
        placements, mesh = _mesh_layout(layout)
        yield TensorFact(
            state=state,
            name=name,
            key=key,
            shape=tuple(held.shape),
            dtype=_dtype_name(held.dtype),
            nbytes=held.numel() * held.element_size(),
            digest=next(digests) if _is_telling(held) else "",
            placements=placements,
            mesh=mesh,
            flat=flat,
            on_host=held.device.type == "cpu" and local_tensor(parameter).device.type != "cpu",
            is_trained=parameter.requires_grad,
            is_updated=is_updated(parameter),
        )


def _is_telling(held: torch.Tensor) -> bool:
    """Return True if equal bytes on two ranks are evidence: the elements are not all equal."""
    if held.numel() <= 1 or held.is_meta or held.layout is not torch.strided:
        return False
    return not bool((held == held.reshape(-1)[0]).all())


def _mesh_layout(tensor: torch.Tensor) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Return placements and groups by mesh dimension, () for a tensor that is no DTensor."""
    if not isinstance(tensor, DTensor):
        return (), ()
    letters = tuple(
        "P" if how.is_partial() else "R" if how.is_replicate() else "S" for how in tensor.placements
    )
    mesh = tensor.device_mesh
    return letters, tuple(group_ranks(mesh.get_group(dim)) for dim in range(mesh.ndim))


class StepWatch(PhaseWatch):
    """The mode that infers phases, and counts backward and forward passes.

    Attributes:
        backwards: Outermost calls of `backward` so far.
        forwards: Calls of each outermost module with gradients, by path.
        inputs: Digests of the first tensors that an outermost module receives.
        recomputed: Forward passes within backward, by path.
    """

    def __init__(self, state: JobState, observers: Sequence[Any], *, takes_inputs: bool) -> None:
        super().__init__(state.model, observers)
        self.backwards, self.forwards, self.inputs = 0, Counter[str](), list[str]()
        self.recomputed = Counter[str]()
        self._takes_inputs = takes_inputs
        self._memory = next((one for one in observers if isinstance(one, ModuleMemory)), None)
        self._stack = ExitStack()
        self._began: list[int] = []

    def __enter__(self) -> Self:
        modules = [*self._module.named_modules()]
        watched = watch_modules(
            modules, before=self._begin_forward, after=self._end_forward, is_first=True
        )
        self._running = self._stack.enter_context(watched)
        backward = torch.autograd.backward

        def counting_backward(*args: Any, **kwargs: Any) -> Any:
            is_outermost = not is_in_backward()
            try:
                return backward(*args, **kwargs)
            finally:
                self.backwards += is_outermost

        self._stack.enter_context(replace_attributes(torch.autograd, backward=counting_backward))
        super(PhaseWatch, self).__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super(PhaseWatch, self).__exit__(*error)
        self._stack.close()

    def _begin_forward(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note a module's forward pass; it begins the forward phase outside backward."""
        if self._memory is not None:
            self._memory.begin_module()
        if is_in_backward():
            self.recomputed[path] += 1
            return
        if len(self._running) == 1 and torch.is_grad_enabled():
            self.forwards[path] += 1
            if self._takes_inputs and not self.inputs:
                tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
                self.inputs = compute_digests(tensors)
        if self._phase is not Phase.FORWARD:
            self._micro_batch += 1
            self._enter_phase(Phase.FORWARD)

    def _end_forward(self, path: str, *_: object) -> None:
        if self._memory is not None:
            self._memory.end_module(path, is_recomputed=is_in_backward())


class ModuleMemory(MemoryMeter):
    """The memory meter with live bytes by module."""

    def __init__(self, state: JobState) -> None:
        super().__init__(state, rank=state.rank, device=state.device, waits=False)
        self.by_module: dict[str, ModuleFact] = {}
        self._open: list[list[int]] = []  # live bytes at the begin, and the most since

    def begin_module(self) -> None:
        """Note that a module begins."""
        self._count_pending()
        self._open.append([self.live, self.live])

    def end_module(self, path: str, *, is_recomputed: bool) -> None:
        """Record the memory of a module's first forward pass."""
        self._count_pending()
        if not self._open:
            return
        before, most = self._open.pop()
        if self._open:
            self._open[-1][1] = max(self._open[-1][1], most)
        known = self.by_module.get(path)
        if known is None and not is_recomputed:
            self.by_module[path] = ModuleFact(
                path=path, peak_bytes=most, kept_bytes=self.live - before
            )

    def _add_live_bytes(self, key: int, size: int) -> None:
        super()._add_live_bytes(key, size)
        if self._open:
            self._open[-1][1] = max(self._open[-1][1], self.live)


class CallMeter(TrafficMeter):
    """The traffic meter with the dtype, storages and micro-batch of each call."""

    def __init__(
        self, state: JobState, ranks: dict[str, tuple[str, ...]], roles: CopyFinder
    ) -> None:
        super().__init__(state.registry, ranks, device=state.device)
        self.watch: StepWatch | None = None
        self._roles = roles
        self._details: list[tuple[list[int], str, int, int]] = []
        self._buffers = {storage_of(buffer)._cdata for buffer in state.model.buffers()}

    def _record_collective(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        before = len(self._rows)
        super()._record_collective(name, args, kwargs, result)
        if len(self._rows) == before or self.watch is None:
            return
        tensors = [*tensors_of((args, kwargs, result))]
        is_buffer = any(storage_of(tensor)._cdata in self._buffers for tensor in tensors)
        numbers = [] if is_buffer else [self._roles.storage_number(tensor) for tensor in tensors]
        largest = max(tensors, key=torch.Tensor.numel, default=None)
        dtype = _dtype_name(largest.dtype) if largest is not None else ""
        size = 0 if is_buffer or largest is None else largest.numel()
        self._details.append((numbers, dtype, size, self.watch.backwards))

    def call_facts(self) -> tuple[CallFact, ...]:
        """Return the calls, with equal ones added up."""
        roles = self._roles.find_roles()
        total: dict[CallFact, CallFact] = {}
        rows = (row for row in self._rows if not row.key.collective.is_copy)
        for row, (numbers, dtype, size, micro_batch) in zip(rows, self._details, strict=True):
            if not all(map(str.isdecimal, row.key.axes)):
                continue  # a group that was created within the step
            moved = {roles.get(number) for number in numbers}
            kind, phase = row.key.collective, row.key.phase
            key = CallFact(
                ranks=tuple(map(int, row.key.axes)),
                collective=kind,
                state=_moved_state(kind, phase, moved, dtype, size),
                phase=phase,
                dtype=dtype,
                calls=0,
                micro_batch=micro_batch,
            )
            known = total.get(key, key)
            total[key] = replace(
                key,
                calls=known.calls + row.calls,
                payload_bytes=known.payload_bytes + row.payload_bytes,
                sent_bytes=known.sent_bytes + row.sent_bytes,
            )
        return tuple(total.values())


def _moved_state(
    collective: Collective, phase: Phase, roles: set[State | None], dtype: str, size: int
) -> State:
    """Return the state that a call moves, from the roles of its storages."""
    if State.GRADIENTS in roles and phase is not Phase.FORWARD:
        return State.GRADIENTS
    if {State.PARAMETERS, State.OPTIMIZER} & roles:
        return State.PARAMETERS
    # Single numbers (a loss, a norm) and integers (counts) are no activations. DDP broadcasts
    # copies of the buffers. A stage may receive between its passes, when no module runs.
    is_real = ("float" in dtype or dtype == "complex64") and size > 1
    in_pass = phase in (Phase.FORWARD, Phase.BACKWARD) and collective is not Collective.BROADCAST
    is_passing = is_real and (in_pass or collective in (Collective.SEND, Collective.RECV))
    return State.ACTIVATIONS if is_passing else State.OTHER


class CopyFinder(RoleFinder):
    """The role finder that follows copies only, to attribute collectives.

    It is entered inside a hook after an optimizer's step, where no such hook can be added.
    """

    def _hook_updates(self) -> None:
        self._stack.callback(hook_eager_updates(self._before_update))

    def storage_number(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's storage."""
        return self._storage_number(tensor)

    def find_roles(self) -> dict[int, State]:
        """Return the role of each storage."""
        return self._find_roles()

    def on_operator(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        if function._schema.name.partition("::")[2] not in _SUMS:
            super().on_operator(function, args, kwargs, result)


class JobWatch:
    """The watch of one rank: a set of meters for each of its steps, and the observation.

    Args:
        folder: The folder that the observation is written to.
        optimizers: The optimizers of the job.
    """

    def __init__(self, folder: str, optimizers: Sequence[Any]) -> None:
        self._folder, self._optimizers = folder, optimizers
        self._stack = ExitStack()
        self._facts: dict[str, Any] = {}
        self._steps: list[int] = []
        self._seconds: list[float] = []  # of steps without meters
        self._watched: list[float] = []
        self._finish: Any = None

    def begin_step(self, number: int, step: int) -> None:
        """Attach the meters of the next step.

        Args:
            number: 0 memory, 1 traffic, 2 waits.
            step: The number of the step, from 1.
        """
        self._steps.append(step)
        if number == 0:
            self._state = JobState(self._optimizers)
        begin = (self._watch_memory, self._watch_traffic, self._watch_waits)[number]
        self._finish = begin()
        self._began = time.perf_counter()

    def end_step(self, seconds: float) -> None:
        """Detach the meters of the step that has ended, and keep their facts."""
        if self._finish is None:
            self._seconds.append(seconds)
            return
        self._watched.append(time.perf_counter() - self._began)
        keep_facts, self._finish = self._finish, None
        self._stack.close()
        keep_facts()

    def detach_meters(self) -> None:
        """Detach all meters."""
        self._stack.close()

    def _watch_memory(self) -> Any:
        state, memory = self._state, ModuleMemory(self._state)
        watch = StepWatch(state, [memory], takes_inputs=True)
        gradients: dict[str, TensorFact] = {}

        def before_update(optimizer: Any, *_: object) -> None:
            facts = [*state.gradient_facts(optimizer, gradients)]
            gradients.update({fact.name: fact for fact in facts})

        for context in (memory, watch):
            self._stack.enter_context(context)
        self._stack.callback(hook_eager_updates(before_update))

        def keep_facts() -> None:
            first = next(iter(watch.forwards), "")
            self._facts |= {
                "tensors": (*state.tensor_facts(), *gradients.values()),
                "wrappers": tuple(state.wrap_units()),
                "memory": memory.footprints(),
                "peaks": memory.peaks(),
                "modules": tuple(
                    replace(fact, recomputations=watch.recomputed[path])
                    for path, fact in memory.by_module.items()
                ),
                "forwards": watch.forwards[first],
                "backwards": watch.backwards,
                "inputs": tuple(watch.inputs),
            }

        return keep_facts

    def _ranks_by_group(self) -> dict[str, tuple[str, ...]]:
        """Return the ranks of this rank's groups by name, as the axes of a meter's rows."""
        return {group.group_name: tuple(map(str, group_ranks(group))) for group in iter_groups()}

    def _watch_traffic(self) -> Any:
        roles = CopyFinder(self._state)
        calls = CallMeter(self._state, self._ranks_by_group(), roles)
        calls.watch = StepWatch(self._state, [calls], takes_inputs=False)
        for context in (roles, calls, calls.watch):
            self._stack.enter_context(context)

        def keep_facts() -> None:
            groups = [group for group in iter_groups() if group.size() > 1]
            self._facts |= {
                "calls": calls.call_facts(),
                "backend": str(dist.get_backend()) if dist.is_initialized() else "",
                "groups": tuple(
                    GroupFact(ranks=group_ranks(g), axis=process_groups.mesh_dimension(g))
                    for g in groups
                ),
            }

        return keep_facts

    def _watch_waits(self) -> Any:
        waits = WaitMeter(self._ranks_by_group(), rank=self._state.rank)
        self._stack.enter_context(waits)

        def keep_facts() -> None:
            self._facts["waits"] = tuple(
                WaitFact(ranks=tuple(map(int, row.axes)), seconds=row.seconds)
                for row in waits.rows()
            )
            host = _HOST_UNKNOWN if self._state.device == "cpu" else "not measured"
            self._facts["unknown"] = {"host_share": host} | (
                {"blocked": waits.absent} if waits.absent else {}
            )

        return keep_facts

    def write_observation(self) -> None:
        """Write the observation of this rank."""
        state = self._state
        observation = Observation(
            rank=state.rank,
            world_size=state.size,
            device=state.device,
            steps=(self._steps[0], self._steps[-1]),
            seconds=min(self._seconds, default=None),
            watched_seconds=tuple(self._watched),
            **self._facts,
        )
        path = Path(self._folder) / f"rank-{state.rank}.json"
        write_json(path, encode(observation))
