"""The traffic meter: every collective that ran, by axes, collective, state and phase; and every
copy of a state between memory tiers, which is between no ranks and sends nothing.

It watches the operators that reach the backend, whoever issued them: DDP's C++ reducer, FSDP2,
DTensor or this project. It knows the mesh's dimension names by process group and the registry of
storages, which says where calls are the parts of another one: that is counted, in the bytes of the
calls. It never knows the plan, a degree or an expected count. `sent` is the ring model applied to
what was seen, in this module alone: the predictor has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from ptrain.cost import Collective, Phase, State, Traffic, TrafficKey, add_traffic
from ptrain.internals import process_groups
from ptrain.models.ledger import OperatorMode, storage_of
from ptrain.models.tags import is_tagged, tier_of
from ptrain.rooms.registry import Registry
from ptrain.spec.placement import EXPERT_AXES, TOKEN_AXES, Axis, Tier

_OF_TOKENS = {axis.value for axis in (*TOKEN_AXES, *EXPERT_AXES)}
_OF_ROWS = {axis.value for axis in (*EXPERT_AXES, Axis.TP)}  # where one is folded into the other
_NAMESPACES = ("c10d", "_c10d_functional")

# Operator -> collective, and which argument holds the full tensor of the call: the operators'
# schemas put the output first for gathers and scatters, c10d's and the functional ones alike.
_COLLECTIVES: dict[str, tuple[Collective, str]] = {
    "allreduce_": (Collective.ALL_REDUCE, "input"),
    "allreduce_coalesced_": (Collective.ALL_REDUCE, "input"),
    "all_reduce": (Collective.ALL_REDUCE, "input"),
    "all_reduce_": (Collective.ALL_REDUCE, "input"),
    "_allgather_base_": (Collective.ALL_GATHER, "first"),
    "allgather_": (Collective.ALL_GATHER, "first"),
    "allgather_into_tensor_coalesced_": (Collective.ALL_GATHER, "first"),
    "all_gather_into_tensor": (Collective.ALL_GATHER, "result"),
    "_reduce_scatter_base_": (Collective.REDUCE_SCATTER, "second"),
    "reduce_scatter_": (Collective.REDUCE_SCATTER, "second"),
    "reduce_scatter_tensor": (Collective.REDUCE_SCATTER, "input"),
    "alltoall_base_": (Collective.ALL_TO_ALL, "second"),
    "alltoall_": (Collective.ALL_TO_ALL, "second"),
    "all_to_all_single": (Collective.ALL_TO_ALL, "input"),
    "broadcast_": (Collective.BROADCAST, "input"),
    "broadcast": (Collective.BROADCAST, "input"),
    "reduce_": (Collective.REDUCE, "input"),
    "gather_": (Collective.GATHER, "first"),
    "scatter_": (Collective.SCATTER, "first"),
    "send": (Collective.SEND, "input"),
    "recv_": (Collective.RECV, "input"),
    "barrier": (Collective.BARRIER, "input"),
}
SILENT = ("wait_tensor", "_wrap_tensor_autograd", "monitored_barrier_")

_IN_PLACE, _OUT_OF_PLACE = torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default
_OF_LISTS = torch.ops.aten._foreach_copy_.default
_COPIES = frozenset({_IN_PLACE, _OUT_OF_PLACE, _OF_LISTS})
_MOVES = {
    (Tier.HOST, Tier.DEVICE): Collective.HOST_TO_DEVICE,
    (Tier.DEVICE, Tier.HOST): Collective.DEVICE_TO_HOST,
    (Tier.FILE, Tier.HOST): Collective.FILE_READ,
    (Tier.FILE, Tier.DEVICE): Collective.FILE_READ,
    (Tier.HOST, Tier.FILE): Collective.FILE_WRITE,
    (Tier.DEVICE, Tier.FILE): Collective.FILE_WRITE,
}


class TrafficMeter(OperatorMode):
    """Counts while it is entered; the program tells it the phase. Costs 5 us an operator."""

    def __init__(
        self,
        registry: Registry,
        axes_by_group: Mapping[str, tuple[str, ...]],
        *,
        device: str = "cpu",
        guess: Callable[[Collective, Phase], State] | None = None,
    ) -> None:
        """`guess` names the state of a call none of whose tensors has a tag. Without it, what is
        sent over tp alone, or exchanged over cp, are activations: nothing else is born there
        without one."""
        super().__init__()
        self._guess = guess
        self._device = device
        self._registry = registry
        self._axes_by_group = axes_by_group
        self._phase = Phase.SETUP
        self._rows: list[Traffic] = []

    def phase(self, phase: Phase, micro_batch: int) -> None:
        """The program enters `phase`."""
        self._phase = phase

    def calls(self) -> tuple[Traffic, ...]:
        """Return what ran, call by call, in the order in which this rank issued them."""
        return tuple(self._rows)

    def rows(self) -> tuple[Traffic, ...]:
        """Return what ran, one row per kind of call."""
        return add_traffic(self._rows)

    def operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        if function in _COPIES:
            self._count_moves(function, args, result)
        elif function.namespace in _NAMESPACES:
            name = function._schema.name.partition("::")[2]
            if name not in SILENT:
                self._count(name, args, kwargs, result)
        return result

    def _count(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        collective, where = _COLLECTIVES[name]
        group = group_of((args, kwargs))
        whole = _tensors(
            {"first": args[:1], "second": args[1:2], "result": result}.get(where, args)
        )
        tag = next(filter(None, map(self._registry.of, _tensors((args, result)))), None)
        via = None
        if tag is not None and tag.substitute is not None:
            collective, via = tag.substitute, str(collective)
        payload = sum(tensor.numel() * tensor.element_size() for tensor in whole)
        match self._registry.executed, collective:
            case Collective.REDUCE_SCATTER, Collective.ALL_REDUCE:
                collective = Collective.REDUCE_SCATTER
            case Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL:  # one half of two
                collective, payload = Collective.REDUCE_SCATTER, payload * group.size()
            case Collective.ALL_GATHER, Collective.BROADCAST:  # one for each rank's part
                if args[2] != group.rank():
                    return
                collective, payload = Collective.ALL_GATHER, payload * group.size()
        axes = self._axes_by_group.get(group.group_name, (f"group {group.group_name}",))
        key = TrafficKey(
            axes=axes,
            collective=collective,
            state=tag.state if tag is not None else self._untagged(collective, axes),
            phase=(tag and tag.phase) or self._phase,
            via=via,
        )
        sent = ring_bytes(collective, payload, group.size())
        if (splits := _splits(name, args)) and collective is Collective.ALL_TO_ALL:
            sent = payload - payload * splits[group.rank()] // max(sum(splits), 1)
        self._rows.append(Traffic(key=key, calls=1, payload_bytes=payload, sent_bytes=sent))

    def _untagged(self, collective: Collective, axes: tuple[str, ...]) -> State:
        if self._guess is not None:
            return self._guess(collective, self._phase)
        is_of_tokens = {*axes} == _OF_ROWS or (len(axes) == 1 and axes[0] in _OF_TOKENS)
        is_exchange = collective is Collective.ALL_TO_ALL and is_of_tokens
        return State.ACTIVATIONS if is_exchange or axes == (Axis.TP.value,) else State.OTHER

    def _count_moves(self, function: Any, args: tuple[Any, ...], result: Any) -> None:
        if function is _OF_LISTS:
            for target, source in zip(args[0], args[1], strict=True):
                self._count_move(target, source)
        elif function is _IN_PLACE:
            self._count_move(args[0], args[1])
        else:
            self._count_move(result, args[0])

    def _count_move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """A copy between tiers. What has no state and no tag (a batch on its way to a GPU, a loss
        that is read) is none of the training states' traffic."""
        ends = storage_of(source), storage_of(target)
        move = _MOVES.get((tier_of(ends[0], self._device), tier_of(ends[1], self._device)))
        if move is None:
            return
        tag = self._registry.of(target) or self._registry.of(source)
        if tag is None and not any(map(is_tagged, ends)):
            return
        key = TrafficKey(
            axes=(),
            collective=move,
            state=tag.state if tag is not None else State.OTHER,
            phase=self._phase,
        )
        payload = source.numel() * source.element_size()
        self._rows.append(Traffic(key=key, calls=1, payload_bytes=payload, sent_bytes=0))


def _splits(name: str, args: tuple[Any, ...]) -> list[int]:
    """Return how many rows an exchange sends to each rank, itself included; none where it sends as
    many to all."""
    place = {"all_to_all_single": 2, "alltoall_base_": 4}.get(name)  # by the operators' schemas
    return list(args[place]) if place is not None and len(args) > place else []


def ring_bytes(collective: Collective, payload: int, ranks: int) -> int:
    """Return the bytes that one rank sends of a call under the ring model, rounded up."""
    rounds = {
        Collective.ALL_REDUCE: 2 * (ranks - 1),
        Collective.SEND: ranks,
        Collective.RECV: 0,
        Collective.BARRIER: 0,
    }.get(collective, ranks - 1)
    return (rounds * payload + ranks - 1) // ranks


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def group_of(tree: Any) -> dist.ProcessGroup:
    """The process group of a call: boxed in c10d's operators, by name in the functional ones."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.ScriptObject):
            if process_groups.is_group(leaf):
                return dist.ProcessGroup.unbox(leaf)
        elif isinstance(leaf, str) and process_groups.is_name(leaf):
            return process_groups.named(leaf)
    raise AssertionError("a collective without a process group")
