"""Measure one steady step: memory by state, its peak by phase, every collective, and the bytes that
the rank's sockets sent.

    with measure(program) as measurement:
        program.forward_backward(batch)
        program.step(lr)
    measurement.estimate()

`measure(module, optimizer=optimizer)` measures a module that DistributedDataParallel, FSDP2 or
another framework has wrapped. Its states are its parameters (FSDP2's shards are read off its own
groups, since a gathered module shows other parameters), their `.grad`, and the tensors of the
optimizer's state. A forward pass of the root module starts the phase FORWARD, autograd at work is
BACKWARD, what follows is UPDATE. A collective on a wrapper's own buffer counts as the state that
such a call moves in that phase: parameters if gathered, gradients if reduced in backward. A group
is named after the mesh dimensions that shard the parameters, else `world`, else by its ranks.

The wire meter: bytes that this process's own sockets sent, by axes, from the kernel's counters.

No root, no namespace, nothing of torch: getsockopt(TCP_INFO) of every TCP socket that the process
holds, before and after a step. Which socket belongs to which process group is read off the store
where gloo's ranks published the addresses that they listen on; a group's sockets have one of these
addresses at one end. Limits: Linux 4.19 or newer (the kernel's counter of bytes sent), gloo over
TCP; a scan takes 0.2 ms and asks no other rank.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from ptrain.cost import Collective, Column, Estimate, Phase, State, Traffic, TrafficKey, Wire
from ptrain.errors import PtrainError
from ptrain.internals import process_groups
from ptrain.internals.autograd import is_in_backward
from ptrain.internals.fsdp2 import parameter_groups, policies
from ptrain.interpreter import program
from ptrain.interpreter.program import Observer, Program
from ptrain.meters.memory import MemoryMeter
from ptrain.meters.traffic import TrafficMeter
from ptrain.models.ledger import OperatorMode, local
from ptrain.models.watch import listening, watching
from ptrain.rooms.comm import Registry
from ptrain.rooms.world import World

# struct tcp_info of Linux: eight bytes, 24 times u32, then u64s and u32s as they came to be added.
_NOT_SENT = struct.Struct("=I"), 144  # in the send buffer still
_SENT = struct.Struct("=QQ"), 200  # bytes sent, and of them retransmitted
_LENGTH = 216
_WORD = struct.calcsize("=Q")

Address = tuple[str, int]


class WireMeter:
    """Reads the counters when it is entered and when it is left."""

    def __init__(self, axes_by_group: Mapping[str, tuple[str, ...]], *, rank: int) -> None:
        self._rank = rank
        self.absent, self._axes_by_socket = "", {}
        try:
            self._axes_by_socket = _axes_by_socket(axes_by_group)
        except _CannotTell as error:
            self.absent = str(error)
        self._before: dict[str, int] = {}
        self._sent: dict[tuple[str, ...], int] = {}

    def rows(self) -> tuple[Wire, ...]:
        """Bytes by axes; none where `absent` says why."""
        return tuple(
            Wire(axes=axes, rank=self._rank, sent_bytes=sent) for axes, sent in self._sent.items()
        )

    def __enter__(self) -> Self:
        if not self.absent:
            self._before = self._counters()
        return self

    def __exit__(self, *_: object) -> None:
        if self.absent:
            return
        after = self._counters()
        if gone := self._axes_by_socket.keys() - (self._before.keys() & after.keys()):
            self.absent = f"{len(gone)} connections were closed during the step"
            return
        for name, axes in self._axes_by_socket.items():
            self._sent[axes] = self._sent.get(axes, 0) + after[name] - self._before[name]

    def _counters(self) -> dict[str, int]:
        return {
            name: _sent_bytes(connection)
            for name, connection in _connections()
            if name in self._axes_by_socket
        }


class _CannotTell(Exception):
    """Why there are no figures."""


def _axes_by_socket(axes_by_group: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    if not sys.platform.startswith("linux"):
        raise _CannotTell("byte counters of connections exist on Linux only")
    ends = {}
    for name, connection in _connections():
        with suppress(OSError):  # a peer that is gone
            ends[name] = (_address(connection.getsockname()), _address(connection.getpeername()))
            if len(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)) < _LENGTH:
                raise _CannotTell("this kernel does not count the bytes sent on a connection")
    axes_of: dict[str, tuple[str, ...]] = {}
    for group_name, axes in axes_by_group.items():
        axes_of |= dict.fromkeys(_sockets(process_groups.named(group_name), ends), axes)
    return axes_of


def _sockets(group: dist.ProcessGroup, ends: Mapping[str, tuple[Address, Address]]) -> list[str]:
    """Return the sockets that connect this rank with the group's others, one for each of them."""
    if group.size() == 1:
        return []
    if (backend := dist.get_backend(group)) != "gloo":
        raise _CannotTell(f"{backend} does not use sockets with byte counters")
    listening = [_published(group, rank) for rank in range(group.size())]
    own = listening.pop(group.rank())
    names = [name for name, (here, there) in ends.items() if here == own or there in listening]
    if len(names) != len(listening):
        raise _CannotTell(
            f"expected {len(listening)} connections of the group {group.group_name}, found "
            f"{len(names)}"
        )
    return names


def _published(group: dist.ProcessGroup, rank: int) -> Address:
    """Where a rank of a gloo group listens. The store has its host's name and a socket address,
    the length before each, as the host writes them."""
    store = process_groups.store_of(group)
    key = f"cpu//0/{rank}"
    if not store.check([key]):
        raise _CannotTell("the store has no gloo addresses under the key of torch 2.13")
    raw = bytes(store.get(key))
    raw = raw[_WORD + int.from_bytes(raw[:_WORD], sys.byteorder) + _WORD :]
    family = int.from_bytes(raw[:2], sys.byteorder)
    port = int.from_bytes(raw[2:4], "big")
    if family == socket.AF_INET:
        return socket.inet_ntop(family, raw[4:8]), port
    if family == socket.AF_INET6:
        return _address((socket.inet_ntop(family, raw[8:24]), port))
    raise _CannotTell(f"gloo uses an unknown address family ({family})")


def _address(name: tuple[str | int, ...]) -> Address:
    """IPv4 in IPv6 is IPv4."""
    return str(name[0]).removeprefix("::ffff:"), int(name[1])


def _connections() -> Iterator[tuple[str, socket.socket]]:
    """Every TCP connection of this process, as a copy that is closed after its turn."""
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if not name.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as copy:
                is_tcp = copy.type == socket.SOCK_STREAM and copy.family in (
                    socket.AF_INET,
                    socket.AF_INET6,
                )
                if is_tcp:
                    yield name, copy


def _sent_bytes(connection: socket.socket) -> int:
    """Payload given to the kernel so far, once each."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    sent, again = _SENT[0].unpack_from(info, _SENT[1])
    (waiting,) = _NOT_SENT[0].unpack_from(info, _NOT_SENT[1])
    return int(sent) - int(again) + int(waiting)


_GATHERS = (Collective.ALL_GATHER, Collective.BROADCAST, Collective.GATHER, Collective.SCATTER)


class Foreign:
    """A wrapped module and its optimizer, seen from outside."""

    def __init__(self, module: nn.Module, optimizer: object | None) -> None:
        self.module = module
        self.registry = Registry()
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self._optimizer = _innermost(optimizer)
        self._parameters = list(module.parameters())
        self.device = self._parameters[0].device.type

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        """Parameters and gradients as this rank stores them, optimizer state, buffers."""
        shards, gathered = self._sharded()
        away = {id(parameter) for parameter in gathered}
        kept = [parameter for parameter in self._parameters if id(parameter) not in away]
        for parameter in (*shards, *kept):
            yield State.PARAMETERS, local(parameter.detach())
        yield from (
            (State.GRADIENTS, local(parameter.grad))
            for parameter in (*shards, *kept, *gathered)
            if parameter.grad is not None
        )
        for values in getattr(self._optimizer, "state", {}).values():
            yield from (
                (State.OPTIMIZER, local(value))
                for value in values.values()
                if isinstance(value, torch.Tensor)
            )
        yield from ((State.OTHER, local(buffer)) for buffer in self.module.buffers())

    def _sharded(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """FSDP2's shards, and the gathered parameters that stand in for them while in use."""
        parts = [
            part
            for module in self.module.modules()
            if isinstance(module, FSDPModule)
            for group in parameter_groups(module)
            for part in group.fsdp_params
        ]
        gathered = [getattr(part, "_unsharded_param", None) for part in parts]
        return [part.sharded_param for part in parts], [
            parameter for parameter in gathered if parameter is not None
        ]

    def policies(self) -> tuple[str, ...]:
        """Return what FSDP2 was given that changes what a spec means, a line for each."""
        meanings = (
            _meaning(policy)
            for module in self.module.modules()
            if isinstance(module, FSDPModule)
            for group in parameter_groups(module)
            for policy in policies(group)
        )
        return tuple(dict.fromkeys(filter(None, meanings)))

    def axes_by_group(self) -> dict[str, tuple[str, ...]]:
        """Return the axes of each group by its name. Groups that no parameter is sharded on are
        found by their ranks."""
        axes_of: dict[str, tuple[str, ...]] = {}
        for parameter in (*self._sharded()[0], *self._parameters):
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                names = mesh.mesh_dim_names or tuple(f"dim{dim}" for dim in range(mesh.ndim))
                for dim in range(mesh.ndim):
                    axes_of[mesh.get_group(dim).group_name] = (names[dim],)
        for group in _groups():
            axes_of.setdefault(group.group_name, (_by_ranks(group),))
        return axes_of


def _meaning(policy: object) -> str:
    """What a policy does, in a spec's words; nothing of one that does nothing."""
    match policy:
        case MixedPrecisionPolicy(param_dtype=None, reduce_dtype=None):
            return ""
        case MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=reduced):
            dtypes = f"param_dtype={gathered}, reduce_dtype={reduced}"
            return (
                f"MixedPrecisionPolicy({dtypes}): the dtypes in which units are all-gathered "
                "and gradients reduced. The shards have the dtype of the model; a spec with "
                "parameters M counts them as master copies in the optimizer state. A spec "
                "reduces in bf16 with the layout fsdp-mixed and in fp32 with megatron18"
            )
        case CPUOffloadPolicy():
            return (
                "CPUOffloadPolicy: all shards are on the host, as in the spec fsdp-offload "
                "(S*@host,O,O,R)"
            )
        case _:
            return ""


def state_of(collective: Collective, phase: Phase) -> State:
    """Return the state that a call on an untagged buffer moves. DDP broadcasts a module's buffers
    in forward."""
    if phase is Phase.FORWARD and collective is Collective.BROADCAST:
        return State.OTHER
    if collective in _GATHERS:
        return State.PARAMETERS
    return State.ACTIVATIONS if phase is Phase.FORWARD else State.GRADIENTS


class PhaseWatch(OperatorMode):
    """Tells observers the phase of a model that does not tell it itself."""

    sees_compiled = True

    def __init__(self, module: nn.Module, observers: Sequence[Observer]) -> None:
        super().__init__()
        self._module, self._observers = module, observers
        self._phase: Phase | None = None
        self._micro_batch = -1

    def __enter__(self) -> Self:
        self._watch = watching([("", self._module)], before=self._begins, is_first=True)
        self._watch.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._watch.__exit__(None, None, None)

    def _begins(self, *_: object) -> None:
        if not is_in_backward():
            self._micro_batch += 1
            self._enter(Phase.FORWARD)

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        for observer in self._observers:
            observer.phase(phase, 0 if phase is Phase.UPDATE else self._micro_batch)

    def operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_in_backward():
            if self._phase is Phase.FORWARD:
                self._enter(Phase.BACKWARD)
        elif self._phase is Phase.BACKWARD:
            self._enter(Phase.UPDATE)
        return function(*args, **kwargs)


@contextmanager
def one_step(optimizer: object | None) -> Iterator[None]:
    """Refuses a second step of the optimizer: of two steps the sums of calls and the peaks would
    be taken for those of one. Without an optimizer no step is seen."""
    own = optimizer if hasattr(optimizer, "_optimizer_step_pre_hooks") else _innermost(optimizer)
    if not isinstance(own, torch.optim.Optimizer):
        yield
        return
    num_steps = 0

    def count(*_: object) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps > 1:
            raise PtrainError(
                "measure: the optimizer starts a second step, but measure() covers one "
                "step\n  remedy: Run one step inside each `measure()`."
            )

    hook = own.register_step_pre_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _innermost(optimizer: object | None) -> object | None:
    """The optimizer inside of wrappers: accelerate keeps it as `optimizer`, ZeRO's as `optim`."""
    for name in ("optimizer", "optim"):
        if isinstance(inner := getattr(optimizer, name, None), torch.optim.Optimizer):
            return _innermost(inner)
    return optimizer


def _groups() -> Iterator[dist.ProcessGroup]:
    if dist.is_initialized():
        yield from (
            group
            for group in list(process_groups.names())
            if group is not None and group.rank() >= 0
        )


def ranks_by_axes(
    axes_by_group: Mapping[str, tuple[str, ...]],
) -> dict[tuple[str, ...], tuple[int, ...]]:
    """The ranks of each group, ascending, under the name of its axes."""
    return {
        axes: tuple(sorted(dist.get_process_group_ranks(process_groups.named(name))))
        for name, axes in axes_by_group.items()
    }


def _by_ranks(group: dist.ProcessGroup) -> str:
    ranks = sorted(dist.get_process_group_ranks(group))
    if ranks == list(range(dist.get_world_size())):
        return "world"
    return "ranks " + ",".join(map(str, ranks))


class Measurement:
    """What the meters of one rank saw of one step, on a `device` of this type. `ranks_by_axes` are
    the ranks of its groups; `spec` is a program's, None of a model that somebody else wrapped.
    It prints as its figures."""

    def __init__(self, measured: Program | Foreign) -> None:
        guess: dict[str, Any] = {}
        waits = True
        self.policies: tuple[str, ...] = ()  # of a wrapper: what it was told besides
        if isinstance(measured, Program):
            self.rank, self.size = measured.world.rank, measured.world.size
            device, axes_by_group = measured.world.device.type, measured.mesh.axes_by_group()
            waits = measured.world.backend != "fake"
        else:
            self.rank, self.size, device = measured.rank, measured.size, measured.device
            axes_by_group, guess = measured.axes_by_group(), {"guess": state_of}
            self.policies = measured.policies()
        self.device = device
        self.spec = measured.spec if isinstance(measured, Program) else None
        self.ranks_by_axes = ranks_by_axes(axes_by_group)
        self.memory = MemoryMeter(measured, rank=self.rank, device=device, waits=waits)
        self.traffic = TrafficMeter(measured.registry, axes_by_group, device=device, **guess)
        self.wire = WireMeter(axes_by_group, rank=self.rank)

    def __repr__(self) -> str:
        return f"Measurement(rank {self.rank} of {self.size} on {self.device})"

    def __str__(self) -> str:
        return str(self.estimate())

    def estimate(self) -> Estimate:
        """This rank's measured figures."""
        return Estimate(
            column=Column.MEASURED,
            world_size=self.size,
            memory=self.memory.footprints(),
            peak=self.memory.peaks(),
            traffic=self.traffic.rows(),
            wire=self.wire.rows(),
            undefined={"wire": self.wire.absent} if self.wire.absent else {},
        )


def measure(
    model: Program | nn.Module, *, optimizer: object | None = None
) -> AbstractContextManager[Measurement]:
    """Measure memory and traffic of exactly one training step.

    Measure the third step or a later one: earlier steps allocate optimizer state.

    Args:
        model: A program (`ptrain.interpret`), or any module, wrapped by DDP, FSDP2 or other code.
        optimizer: The optimizer of a wrapped module. Without it, optimizer state counts as
            `other`.

    Returns:
        A context manager that yields the measurement. The measurement is complete when it exits.

    Raises:
        TypeError: `model` is neither a program nor a module.
        PtrainError: The optimizer starts a second step inside.

    Example:
        >>> import ptrain
        >>> spec = ptrain.load("zero3", ["mesh.dp_shard=1", "batch.global=8"]).spec
        >>> program = ptrain.interpret(spec)
        >>> for step in range(3):
        ...     with ptrain.measure(program) as measurement:
        ...         loss = program.forward_backward(program.samples(step))
        ...         norm = program.step(lr=1e-3)
        >>> print(ptrain.compare(spec, measurement).verdict)
        verdict: holds (9 of 9)
        >>> program.world.close()
    """
    if not isinstance(model, Program | nn.Module):
        raise TypeError(f"measure takes a Program or an nn.Module; got {model!r:.60}")
    return _measure(model, optimizer)


@contextmanager
def _measure(model: Program | nn.Module, optimizer: object | None) -> Iterator[Measurement]:
    measured = model if isinstance(model, Program) else Foreign(model, optimizer)
    measurement = Measurement(measured)
    observers = (measurement.memory, measurement.traffic)
    watch: AbstractContextManager[object]
    if isinstance(model, Program):
        watch = listening(model.observers, *observers)
    else:
        watch = PhaseWatch(model, observers)
    with one_step(optimizer), measurement.wire, measurement.memory, measurement.traffic, watch:
        yield measurement


def gather_estimates(world: World, estimate: Estimate) -> list[Estimate]:
    """Return every rank's estimate on every rank, in order of rank."""
    if world.size == 1:
        return [estimate]
    return program.gather(estimate, world.size, world.device, kind=Estimate)


def join_estimates(estimates: list[Estimate]) -> Estimate:
    """Join the estimates of all ranks: rows of memory and peak are per rank; traffic has one row
    per kind of call, and where ranks differ (one may have no such call at all) a row for each
    account."""
    keys = dict.fromkeys(row.key for estimate in estimates for row in estimate.traffic)
    accounts = _apart(estimates)
    return Estimate(
        column=estimates[0].column,
        world_size=estimates[0].world_size,
        memory=tuple(row for estimate in estimates for row in estimate.memory),
        peak=tuple(row for estimate in estimates for row in estimate.peak),
        traffic=tuple(
            dict.fromkeys(row for key in keys for row in _accounts(key, estimates)),
        ),
        wire=tuple(row for estimate in estimates for row in estimate.wire),
        blocked=tuple(row for estimate in estimates for row in estimate.blocked),
        operations=tuple(row for estimate in estimates for row in estimate.operations),
        accounts=accounts,
        account_of=tuple(range(len(accounts))),
        undefined={name: why for estimate in estimates for name, why in estimate.undefined.items()},
    )


def _apart(estimates: list[Estimate]) -> tuple[tuple[Traffic, ...], ...]:
    """Each rank's traffic, where they differ."""
    accounts = tuple(estimate.traffic for estimate in estimates)
    return accounts if len(set(accounts)) > 1 else ()


def _accounts(key: TrafficKey, estimates: list[Estimate]) -> Iterator[Traffic]:
    """What each rank says of one kind of call."""
    none = Traffic(key=key, calls=0, payload_bytes=0, sent_bytes=0)
    for estimate in estimates:
        yield next((row for row in estimate.traffic if row.key == key), none)
