"""The traffic meter: every collective that ran, by axes, collective, state and phase; and every
copy of a state between memory tiers, which belongs to no group and sends nothing.

It watches the operators that reach the backend, whoever issued them: DDP's C++ reducer, FSDP2,
DTensor or this project. It knows the mesh's dimension names by process group and the registry of
storages, which shows where calls are the parts of another one: that is counted, in the bytes of the
calls. It never knows the plan, a degree or an expected count. `sent` is the ring model applied to
what was seen, in this module alone: the predictor has its own.

The ledger of collectives checks that every rank of a group called the same, in order, and received
the same. It waits for each call: the output of an all-reduce, an all-gather and a broadcast is
equal on every rank of its group, so its digest is. At the end of a step one exchange compares a
digest of the full ledger per group; only if these differ are the entries sent, and the first
difference is named. Entries hold details that torch's debug mode cannot see: the operator of a
reduction, the dtype, and the state of the tensor sent, which distinguishes two calls of one shape
in swapped order.

The always-on counter reads c10d's flight recorder: the collectives since the last look. The
recorder runs anyway and keeps the last 2000 collectives (TORCH_FR_BUFFER_SIZE enlarges it). A step
costs a microsecond; a look costs some 20 us for each collective kept, 40 ms once the ring is full.
So an optional look waits until it costs at most a hundredth of the time since the last one. A
necessary look comes before another step might overwrite unseen entries: the groups count their
collectives, which shows this for free. Limits: gloo's send and receive are absent, and there is
neither state nor phase. The recorder shows what is executed: a reduce-scatter on gloo as an
all-reduce, between two ranks as an exchange, of which every rank is taken to keep its share, an
all-gather of a large tensor as a broadcast of every part. The meters of `measure` know the intended
collective.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from ptrain.cost import Collective, Phase, State, Traffic, TrafficKey, add_traffic
from ptrain.internals import process_groups
from ptrain.internals.dispatch import without_modes
from ptrain.interpreter.program import Program
from ptrain.meters import holdings
from ptrain.meters.replicas import SupportsGather, digests, of_bytes
from ptrain.models.ledger import OperatorMode, is_tagged, storage_of, tensors_of, tier_of
from ptrain.report.calls import Call, differing, root_cause
from ptrain.report.finding import Mismatch, Moment, RootCause
from ptrain.rooms.comm import Registry
from ptrain.rooms.world import flight_recorder_size
from ptrain.spec.placement import EXPERT_AXES, TOKEN_AXES, Axis, Tier
from ptrain.units import grouped

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
    "all_reduce_coalesced": (Collective.ALL_REDUCE, "input"),
    "all_reduce_coalesced_": (Collective.ALL_REDUCE, "input"),
    "_allgather_base_": (Collective.ALL_GATHER, "first"),
    "allgather_": (Collective.ALL_GATHER, "first"),
    "allgather_coalesced_": (Collective.ALL_GATHER, "first"),
    "allgather_into_tensor_coalesced_": (Collective.ALL_GATHER, "first"),
    "all_gather_into_tensor": (Collective.ALL_GATHER, "result"),
    "all_gather_into_tensor_coalesced": (Collective.ALL_GATHER, "result"),
    "all_gather_into_tensor_out": (Collective.ALL_GATHER, "result"),
    "_reduce_scatter_base_": (Collective.REDUCE_SCATTER, "second"),
    "reduce_scatter_": (Collective.REDUCE_SCATTER, "second"),
    "reduce_scatter_tensor": (Collective.REDUCE_SCATTER, "input"),
    "reduce_scatter_tensor_out": (Collective.REDUCE_SCATTER, "input"),
    "reduce_scatter_tensor_coalesced": (Collective.REDUCE_SCATTER, "input"),
    "reduce_scatter_tensor_coalesced_": (Collective.REDUCE_SCATTER, "second"),
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

    sees_compiled = True

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

    def ran(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        if function in _COPIES:
            self._count_moves(function, args, result)
        elif function.namespace in _NAMESPACES:
            name = function._schema.name.partition("::")[2]
            if name not in SILENT:
                self._count(name, args, kwargs, result)

    def _count(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        collective, where = _COLLECTIVES[name]
        group = group_of((args, kwargs))
        whole = tensors_of(
            {"first": args[:1], "second": args[1:2], "result": result}.get(where, args)
        )
        tag = next(filter(None, map(self._registry.of, tensors_of((args, result)))), None)
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


def group_of(tree: Any) -> dist.ProcessGroup:
    """The process group of a call: boxed in c10d's operators, by name in the functional ones."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.ScriptObject):
            if process_groups.is_group(leaf):
                return dist.ProcessGroup.unbox(leaf)
        elif isinstance(leaf, str) and process_groups.is_name(leaf):
            return process_groups.named(leaf)
    raise AssertionError("the collective has no process group")


_REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
# Between two ranks, each of which calls something else.
_BETWEEN_TWO = ("send", "isend", "recv_", "irecv", "recv_any_source_", "batch_p2p_ops")
_ALIKE = ("all_reduce", "all_gather", "broadcast")  # all ranks get the same
_MOMENTS = {
    Phase.FORWARD: Moment.FORWARD,
    Phase.BACKWARD: Moment.BACKWARD,
    Phase.UPDATE: Moment.UPDATE,
}
_BESIDE = "all "  # begins the key of groups over the same axes
_Work = process_groups.Work


class CollectiveLedger(OperatorMode):
    """Enter it around a step, then `check` on all ranks. Costs what overlap saves, a pass over
    every output, and some 0.5 ms a call."""

    sees_compiled = True

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.calls: dict[str, list[Call]] = {}  # by group name
        self._groups: dict[str, tuple[int, ...]] = {}
        self._when, self._moment = "", Moment.START
        for name in program.mesh.axes_by_group():
            self._know(process_groups.named(name))

    def phase(self, phase: Phase, micro_batch: int) -> None:
        """The program enters `phase`."""
        self._moment = _MOMENTS.get(phase, Moment.START)
        of = "" if phase is Phase.UPDATE else f" of micro-batch {micro_batch}"
        self._when = f"{phase}{of}"

    def __enter__(self) -> Self:
        self.program.observers.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.program.observers.remove(self)

    def operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function.namespace not in ("c10d", "_c10d_functional"):
            return function(*args, **kwargs)
        name = function._schema.name.partition("::")[2]
        if name in SILENT or name in _BETWEEN_TWO:
            return function(*args, **kwargs)
        carries = self._carries((args, kwargs))  # before an output takes an input's place
        result = function(*args, **kwargs)
        group = group_of((args, kwargs))
        self._know(group)
        named = {a.name: value for a, value in zip(function._schema.arguments, args, strict=False)}
        self.calls[group.group_name].append(
            self._call(name, named | kwargs, result, carries or self._carries(result))
        )
        return result

    def _know(self, group: dist.ProcessGroup) -> None:
        if group.group_name not in self.calls:
            self.calls[group.group_name] = []
            self._groups[group.group_name] = tuple(dist.get_process_group_ranks(group))

    def _call(self, name: str, named: dict[str, Any], result: Any, carries: str) -> Call:
        operator = str(_COLLECTIVES[name][0]) if name in _COLLECTIVES else name.strip("_")
        is_c10d = any(isinstance(leaf, torch.ScriptObject) for leaf in tree_leaves(result))
        whole = [*tensors_of(next(iter(named.values())) if is_c10d else result)]
        digest = ""
        if operator in _ALIKE:
            _wait(result, whole)
            digest = of_bytes("".join(digests(whole)).encode())
        sent = whole if operator in _ALIKE else [*tensors_of(named)]
        meant = self.program.registry.executed
        is_sum = meant is Collective.REDUCE_SCATTER
        return Call(
            operator=operator if meant is None else str(meant),
            reduces="SUM" if is_sum else _reduction(named.get("reduce_op")),
            dtype=str(sent[0].dtype).removeprefix("torch.") if sent else "",
            numel=sum(tensor.numel() for tensor in sent),
            carries=carries,
            when=self._when,
            result=digest,
            moment=self._moment,
        )

    def _carries(self, tree: Any) -> str:
        """`gradients blocks.1`: as the registry and the program's own tensors tell."""
        tensors = [*tensors_of(tree)]
        tags = [tag for tag in map(self.program.registry.of, tensors) if tag is not None]
        state = str(tags[0].state) if tags else ""
        name = self._known(tensors) or next((tag.name for tag in tags if tag.name), "")
        return f"{state} {name}".strip()

    def _known(self, tensors: Sequence[torch.Tensor]) -> str:
        """Return the names of all whose storage one of these tensors has."""
        storages = set(map(storage_of, tensors))
        names: list[str] = []
        for name, tensor in holdings.storages_by_name(self.program):
            if storage_of(tensor) in storages and name not in names:
                names.append(name)
        return span(names)

    def check(self, exchange: SupportsGather, step: int) -> tuple[Mismatch, ...]:
        """Return where the ranks of a group first differ, of every group; else where groups over
        the same axes do. The order is that of time, and the same on all ranks, all of which call
        it. What was written is forgotten."""
        ledgers = self._ledgers()
        with without_modes():
            digests = {key: of_bytes(repr(calls).encode()) for key, (_, calls) in ledgers.items()}
            answers = exchange.gather(digests)
            said = grouped(item for answer in answers for item in answer.items())
            odd = sorted(key for key, its in said.items() if len(set(its)) > 1)
            in_groups = [key for key in odd if not key.startswith(_BESIDE)]
            mismatches = _in_full(exchange, ledgers, in_groups or odd, step) if odd else []
        self.calls = {name: [] for name in self.calls}
        return tuple(sorted(mismatches, key=lambda mismatch: mismatch.when))

    def _ledgers(self) -> dict[str, tuple[str, list[Call]]]:
        """Return axes and calls by a key that the ranks which must agree have in common. Of a group
        these are all; of groups over the same axes in one stage they lack how much is sent, and
        what comes of it."""
        mesh = self.program.mesh
        known = mesh.axes_by_group()
        stage = f" in {mesh.coordinate(Axis.PP)}" if Axis.PP in mesh.axes else ""
        ledgers: dict[str, tuple[str, list[Call]]] = {}
        for name, calls in self.calls.items():
            axes, ranks = "+".join(known.get(name, (name,))), self._groups[name]
            ledgers[f"{name} of {','.join(map(str, ranks))}"] = axes, calls
            if name in known and Axis.PP not in known[name]:
                beside = [replace(call, numel=0, result="") for call in calls]
                ledgers[f"{_BESIDE}{axes} by {len(ranks)}{stage}"] = axes, beside
        return ledgers

    def root_cause(self, mismatches: Sequence[Mismatch]) -> RootCause | None:
        """Whose fault it is, of what `check` found; None where that is nothing."""
        return root_cause(mismatches)


def _in_full(
    exchange: SupportsGather,
    ledgers: Mapping[str, tuple[str, Sequence[Call]]],
    odd: Sequence[str],
    step: int,
) -> list[Mismatch]:
    mine = {key: ledgers[key] for key in odd if key in ledgers}
    answers = exchange.gather(mine, dict[str, tuple[str, list[Call]]])
    mismatches: list[Mismatch] = []
    for key in odd:
        have = {rank: answer[key] for rank, answer in enumerate(answers) if key in answer}
        axes = next(iter(have.values()))[0]
        mismatches += differing(axes, {rank: calls for rank, (_, calls) in have.items()}, step)
    return mismatches


def span(names: Sequence[str]) -> str:
    """Return the first name and the last as one text."""
    return " … ".join(dict.fromkeys((*names[:1], *names[-1:])))


def _reduction(operator: Any) -> str:
    """c10d has it as a number in a box, the functional collectives in words."""
    if isinstance(operator, torch.ScriptObject):
        number = int(operator.op())
        return _REDUCTIONS[number] if number < len(_REDUCTIONS) else str(number)
    return str(operator).upper() if operator else ""


def _wait(result: Any, tensors: Sequence[torch.Tensor]) -> None:
    works = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.ScriptObject)]
    for work in works:
        _Work.unbox(work).wait()
    if not works:
        for tensor in tensors:
            torch.ops._c10d_functional.wait_tensor(tensor)


_NAMES = {
    "all_reduce": Collective.ALL_REDUCE,
    "all_gather": Collective.ALL_GATHER,
    "_all_gather_base": Collective.ALL_GATHER,
    "all_gather_into_tensor_coalesced": Collective.ALL_GATHER,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "_reduce_scatter_base": Collective.REDUCE_SCATTER,
    "all_to_all": Collective.ALL_TO_ALL,
    "broadcast": Collective.BROADCAST,
    "reduce": Collective.REDUCE,
    "gather": Collective.GATHER,
    "scatter": Collective.SCATTER,
    "send": Collective.SEND,
    "recv": Collective.RECV,
}
_ITEMSIZES = {
    "Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2,
    "Byte": 1, "Char": 1, "Bool": 1,
}  # fmt: skip

SHARE = 0.01  # of the time between two looks that the second may cost


@dataclass(frozen=True, slots=True)
class Counted:
    """Collectives of one rank since the last look. `missed` were overwritten before it."""

    calls: int
    sent_bytes: int
    missed: int


class Counter:
    """Looks at the flight recorder from time to time; None where this torch build has none."""

    def __init__(self) -> None:
        self._dump = getattr(process_groups.RECORDER, "_dump_fr_trace_json", None)
        self._ring = flight_recorder_size()
        self._next = 0
        self._issued = self._seen = _issued()
        self._most = 0  # collectives between two questions, of those that the ring can hold
        self._began = self._ended = 0.0  # of the last look
        self.read()

    def look(self, *, wanted: bool) -> Counted | None:
        """`read` where it is wanted and cheap, or due; asked once a step."""
        issued = _issued()
        since, unseen = issued - self._issued, issued - self._seen
        self._issued = issued
        if since <= self._ring:
            self._most = max(self._most, since)
        cost, passed = self._ended - self._began, time.perf_counter() - self._ended
        is_due = unseen <= self._ring < unseen + self._most
        return self.read() if is_due or (wanted and cost <= SHARE * passed) else None

    def read(self) -> Counted | None:
        """Return what was issued since the last call of `read`; None where this torch build has no
        recorder."""
        if self._dump is None:
            return None
        self._began, issued = time.perf_counter(), _issued()
        dump = json.loads(self._dump(True, False))
        fresh = [entry for entry in dump.get("entries", ()) if entry["record_id"] >= self._next]
        sizes = _group_sizes()
        missed = fresh[0]["record_id"] - self._next if fresh else issued - self._seen
        sent = sum(_sent(entry, sizes) for entry in fresh)
        if fresh:
            self._next = fresh[-1]["record_id"] + 1
        self._seen, self._ended = issued, time.perf_counter()
        return Counted(calls=len(fresh), sent_bytes=sent, missed=missed)


def _issued() -> int:
    """Collectives that this rank has issued, by the groups' own count; whether they were kept or
    not."""
    return process_groups.collectives(group for group in process_groups.names() if group)


def _sent(entry: dict[str, Any], group_sizes: dict[str, int]) -> int:
    collective = _NAMES.get(entry["profiling_name"].partition(":")[2])
    ranks = group_sizes.get(entry["process_group"][0])
    if collective is None or ranks is None:
        return 0
    side = "output" if collective in (Collective.ALL_GATHER, Collective.GATHER) else "input"
    payload = sum(_nbytes(entry[f"{side}_sizes"], entry[f"{side}_dtypes"]))
    return ring_bytes(collective, payload, ranks)


def _nbytes(sizes: list[list[int]], dtypes: list[str]) -> Iterator[int]:
    for position, size in enumerate(sizes):
        dtype = dtypes[min(position, len(dtypes) - 1)]
        yield math.prod(size) * _ITEMSIZES.get(dtype, 4)


def _group_sizes() -> dict[str, int]:
    """Ranks by name of process group; the recorder's own list leaves sub-groups empty."""
    names = process_groups.names()
    return {name: group.size() for group, name in names.items() if group is not None}
