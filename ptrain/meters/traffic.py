"""The traffic meter, the ledger of collectives, and the always-on traffic counter.

The traffic meter records every collective that ran by axes, collective, state and phase, and every
copy of a state between memory tiers (a copy has no group and sends nothing). It watches the
operators that reach the backend, from any issuer: DDP's C++ reducer, FSDP2, DTensor or this
project. Its inputs are the mesh's dimension names by process group, and the registry of storages,
which also marks calls that implement another collective: the intended one is counted, with the
bytes of the actual calls. It never reads the plan, a degree or an expected count. `sent` is the
ring model applied to the observed calls; the predictor has a separate implementation.

The ledger of collectives checks that all ranks of a group call the same collectives in order, and
receive the same. It waits for each call: the output of an all-reduce, an all-gather and a broadcast
is equal on all ranks of the group, so its digest must be. At the end of a step, one exchange
compares a digest of the full ledger per group. Only if these differ are the entries exchanged, and
the first difference is reported. Entries hold details that torch's debug mode does not check: the
reduction operator, the dtype, and the state of the tensor sent, which distinguishes swapped calls
of equal shape.

The always-on counter reads c10d's flight recorder: the collectives since the last read. The
recorder keeps the last 2000 collectives in any case (TORCH_FR_BUFFER_SIZE changes the number). A
step costs a microsecond. A read costs about 20 us per recorded collective, 40 ms once the ring is
full. An optional read therefore waits until it costs at most a hundredth of the time since the last
one. A required read happens before the next step could overwrite unread entries; the groups'
collective counts show this at no cost. Limits: gloo's send and receive are missing, and there is
neither state nor phase. The recorder shows the executed collective: on gloo, a reduce-scatter
appears as an all-reduce, or between two ranks as an all-to-all, of which every rank is assumed to
keep its share, and an all-gather of a large tensor as a broadcast of every part. The meters of
`measure` count the intended collective.
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
from ptrain.internals.dispatch import disable_modes
from ptrain.interpreter.program import Program
from ptrain.meters import holdings
from ptrain.meters.replicas import SupportsGather, compute_digests, digest_bytes
from ptrain.models.ledger import OperatorMode, has_tier, storage_of, tensors_of, tier_of
from ptrain.report.copies import Call, explain_call_mismatches, find_differing_calls
from ptrain.report.finding import Mismatch, Moment, RootCause
from ptrain.runtime.comm import TagRegistry
from ptrain.runtime.world import flight_recorder_size
from ptrain.spec.placement import EXPERT_AXES, TOKEN_AXES, Axis, Tier
from ptrain.units import group_by_key

_OF_TOKENS = {axis.value for axis in (*TOKEN_AXES, *EXPERT_AXES)}
# axes of an exchange if ep is folded into tp
_OF_ROWS = {axis.value for axis in (*EXPERT_AXES, Axis.TP)}
_NAMESPACES = ("c10d", "_c10d_functional")

# Operator -> collective, and the argument that holds the full tensor of the call. The schemas of
# c10d and of the functional collectives put the output first for gathers and scatters.
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
    """The meter that records collectives and copies between tiers while it is entered.

    The program reports the phase. The cost is 5 us per operator.
    """

    sees_compiled = True

    def __init__(
        self,
        registry: TagRegistry,
        axes_by_group: Mapping[str, tuple[str, ...]],
        *,
        device: str = "cpu",
        guess: Callable[[Collective, Phase], State] | None = None,
    ) -> None:
        """Prepare a measurement.

        Args:
            registry: The tags of storages.
            axes_by_group: Axes of each process group, by group name.
            device: Device type, which decides the tiers of storages.
            guess: Returns the state of a call without tagged tensors. By default, traffic over tp
                alone and token exchanges (all-to-all over cp or expert axes) are ACTIVATIONS, since
                no other untagged tensor is sent there, and all else is OTHER.
        """
        super().__init__()
        self._guess = guess
        self._device = device
        self._registry = registry
        self._axes_by_group = axes_by_group
        self._phase = Phase.SETUP
        self._rows: list[Traffic] = []

    def phase(self, phase: Phase, micro_batch: int) -> None:
        """Note that the program enters `phase`."""
        self._phase = phase

    def calls(self) -> tuple[Traffic, ...]:
        """Return one row per call, in the order in which this rank issued them."""
        return tuple(self._rows)

    def rows(self) -> tuple[Traffic, ...]:
        """Return one row per kind of call, with calls and bytes added up."""
        return add_traffic(self._rows)

    def on_operator(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        if function in _COPIES:
            self._count_moves(function, args, result)
        elif function.namespace in _NAMESPACES:
            name = function._schema.name.partition("::")[2]
            if name not in SILENT:
                self._record_collective(name, args, kwargs, result)

    def _record_collective(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Record one collective, as the one that it implements."""
        collective, where = _COLLECTIVES[name]
        group = group_of((args, kwargs))
        whole = tensors_of(
            {"first": args[:1], "second": args[1:2], "result": result}.get(where, args)
        )
        tag = next(filter(None, map(self._registry.tag_of, tensors_of((args, result)))), None)
        via = None
        if tag is not None and tag.substitute is not None:
            collective, via = tag.substitute, str(collective)
        payload = sum(tensor.numel() * tensor.element_size() for tensor in whole)
        match self._registry.executed, collective:
            case Collective.REDUCE_SCATTER, Collective.ALL_REDUCE:
                collective = Collective.REDUCE_SCATTER
            # an all-to-all of equal shares that implements a reduce-scatter: its payload is one
            # rank's
            case Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL:
                collective, payload = Collective.REDUCE_SCATTER, payload * group.size()
            # broadcasts that implement an all-gather, one per rank: count this rank's only
            case Collective.ALL_GATHER, Collective.BROADCAST:
                if args[2] != group.rank():
                    return
                collective, payload = Collective.ALL_GATHER, payload * group.size()
        axes = self._axes_by_group.get(group.group_name, (f"group {group.group_name}",))
        key = TrafficKey(
            axes=axes,
            collective=collective,
            state=tag.state if tag is not None else self._untagged_state(collective, axes),
            phase=(tag and tag.phase) or self._phase,
            via=via,
        )
        sent = ring_bytes(collective, payload, group.size())
        if (splits := _split_sizes(name, args)) and collective is Collective.ALL_TO_ALL:
            sent = payload - payload * splits[group.rank()] // max(sum(splits), 1)
        self._rows.append(Traffic(key=key, calls=1, payload_bytes=payload, sent_bytes=sent))

    def _untagged_state(self, collective: Collective, axes: tuple[str, ...]) -> State:
        """Return the state of a call without tagged tensors."""
        if self._guess is not None:
            return self._guess(collective, self._phase)
        is_of_tokens = {*axes} == _OF_ROWS or (len(axes) == 1 and axes[0] in _OF_TOKENS)
        is_exchange = collective is Collective.ALL_TO_ALL and is_of_tokens
        return State.ACTIVATIONS if is_exchange or axes == (Axis.TP.value,) else State.OTHER

    def _count_moves(self, function: Any, args: tuple[Any, ...], result: Any) -> None:
        """Record the copies of one copy operator."""
        if function is _OF_LISTS:
            for target, source in zip(args[0], args[1], strict=True):
                self._count_move(target, source)
        elif function is _IN_PLACE:
            self._count_move(args[0], args[1])
        else:
            self._count_move(result, args[0])

    def _count_move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Record a copy between tiers.

        Tensors without tag and tier mark (a batch that moves to the GPU, a loss that is read) are
        not training state, so their copies are not counted.
        """
        ends = storage_of(source), storage_of(target)
        move = _MOVES.get((tier_of(ends[0], self._device), tier_of(ends[1], self._device)))
        if move is None:
            return
        tag = self._registry.tag_of(target) or self._registry.tag_of(source)
        if tag is None and not any(map(has_tier, ends)):
            return
        key = TrafficKey(
            axes=(),
            collective=move,
            state=tag.state if tag is not None else State.OTHER,
            phase=self._phase,
        )
        payload = source.numel() * source.element_size()
        self._rows.append(Traffic(key=key, calls=1, payload_bytes=payload, sent_bytes=0))


def _split_sizes(name: str, args: tuple[Any, ...]) -> list[int]:
    """Return the number of rows that an all-to-all sends to each rank, itself included.

    The list is empty if all ranks get equal shares.
    """
    # position of the split sizes in the operators' schemas
    place = {"all_to_all_single": 2, "alltoall_base_": 4}.get(name)
    return list(args[place]) if place is not None and len(args) > place else []


def ring_bytes(collective: Collective, payload: int, ranks: int) -> int:
    """Return the bytes that one rank sends for a call under the ring model, rounded up.

    Args:
        collective: The kind of call.
        payload: Bytes of the full tensor of the call.
        ranks: Number of ranks of the group.
    """
    rounds = {
        Collective.ALL_REDUCE: 2 * (ranks - 1),
        Collective.SEND: ranks,
        Collective.RECV: 0,
        Collective.BARRIER: 0,
    }.get(collective, ranks - 1)
    return (rounds * payload + ranks - 1) // ranks


def group_of(tree: Any) -> dist.ProcessGroup:
    """Return the process group of a call: c10d operators have it boxed, functional ones by name."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.ScriptObject):
            if process_groups.is_group(leaf):
                return dist.ProcessGroup.unbox(leaf)
        elif isinstance(leaf, str) and process_groups.is_group_name(leaf):
            return process_groups.resolve_group(leaf)
    raise AssertionError("the collective has no process group")


# c10d::ReduceOp::RedOpType in its numeric order (torch/csrc/distributed/c10d/Types.hpp, 2.13).
_REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
# Point-to-point calls: the two ranks issue different ones.
_BETWEEN_TWO = ("send", "isend", "recv_", "irecv", "recv_any_source_", "batch_p2p_ops")
_EQUAL_OUTPUTS = ("all_reduce", "all_gather", "broadcast")  # all ranks receive equal outputs
_MOMENTS = {
    Phase.FORWARD: Moment.FORWARD,
    Phase.BACKWARD: Moment.BACKWARD,
    Phase.UPDATE: Moment.UPDATE,
}
_OVER_AXES = "all "  # key prefix for groups over the same axes
_Work = process_groups.Work


class CollectiveLedger(OperatorMode):
    """The ledger of the collectives that a rank issues in a step, compared between ranks.

    Enter it around a step, then call `check` on all ranks. It removes all overlap, reads every
    output once, and costs about 0.5 ms per call.
    """

    sees_compiled = True

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.calls: dict[str, list[Call]] = {}  # by group name
        self._groups: dict[str, tuple[int, ...]] = {}
        self._moment_label, self._moment = "", Moment.START
        for name in program.mesh.axes_by_group():
            self._register_group(process_groups.resolve_group(name))

    def phase(self, phase: Phase, micro_batch: int) -> None:
        """Note that the program enters `phase`."""
        self._moment = _MOMENTS.get(phase, Moment.START)
        of = "" if phase is Phase.UPDATE else f" of micro-batch {micro_batch}"
        self._moment_label = f"{phase}{of}"

    def __enter__(self) -> Self:
        self.program.observers.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.program.observers.remove(self)

    def run_operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and record it if it is a collective within a group."""
        if function.namespace not in ("c10d", "_c10d_functional"):
            return function(*args, **kwargs)
        name = function._schema.name.partition("::")[2]
        if name in SILENT or name in _BETWEEN_TWO:
            return function(*args, **kwargs)
        # before the call: an output may replace an input in the storage
        carries = self._describe_payload((args, kwargs))
        result = function(*args, **kwargs)
        group = group_of((args, kwargs))
        self._register_group(group)
        named = {a.name: value for a, value in zip(function._schema.arguments, args, strict=False)}
        self.calls[group.group_name].append(
            self._ledger_entry(
                name, named | kwargs, result, carries or self._describe_payload(result)
            )
        )
        return result

    def _register_group(self, group: dist.ProcessGroup) -> None:
        """Start a list of calls for a group on its first use."""
        if group.group_name not in self.calls:
            self.calls[group.group_name] = []
            self._groups[group.group_name] = tuple(dist.get_process_group_ranks(group))

    def _ledger_entry(self, name: str, named: dict[str, Any], result: Any, carries: str) -> Call:
        """Return the ledger entry of a call, with a digest of a result that all ranks receive."""
        operator = str(_COLLECTIVES[name][0]) if name in _COLLECTIVES else name.strip("_")
        is_c10d = any(isinstance(leaf, torch.ScriptObject) for leaf in tree_leaves(result))
        whole = [*tensors_of(next(iter(named.values())) if is_c10d else result)]
        digest = ""
        if operator in _EQUAL_OUTPUTS:
            _wait_for(result, whole)
            digest = digest_bytes("".join(compute_digests(whole)).encode())
        sent = whole if operator in _EQUAL_OUTPUTS else [*tensors_of(named)]
        meant = self.program.registry.executed
        is_sum = meant is Collective.REDUCE_SCATTER
        return Call(
            operator=operator if meant is None else str(meant),
            reduces="SUM" if is_sum else _reduction_name(named.get("reduce_op")),
            dtype=str(sent[0].dtype).removeprefix("torch.") if sent else "",
            numel=sum(tensor.numel() for tensor in sent),
            carries=carries,
            when=self._moment_label,
            result=digest,
            moment=self._moment,
        )

    def _describe_payload(self, tree: Any) -> str:
        """Return state and names of the tensors in a call, such as `gradients blocks.1`.

        State comes from the registry's tags, names from the program's storages, else from the tags.
        """
        tensors = [*tensors_of(tree)]
        tags = [tag for tag in map(self.program.registry.tag_of, tensors) if tag is not None]
        state = str(tags[0].state) if tags else ""
        name = self._names_of(tensors) or next((tag.name for tag in tags if tag.name), "")
        return f"{state} {name}".strip()

    def _names_of(self, tensors: Sequence[torch.Tensor]) -> str:
        """Return the names of the program's tensors that share a storage with one of these."""
        storages = set(map(storage_of, tensors))
        names: list[str] = []
        for name, tensor in holdings.storages_by_name(self.program):
            if storage_of(tensor) in storages and name not in names:
                names.append(name)
        return " … ".join(dict.fromkeys((*names[:1], *names[-1:])))

    def check(self, exchange: SupportsGather, step: int) -> tuple[Mismatch, ...]:
        """Return the first difference between the ranks of each group, in order of time.

        If no group has a difference, groups over the same axes are compared with each other. All
        ranks must call it and get the same result. The recorded calls are cleared.

        Args:
            exchange: The exchange between all ranks.
            step: The step number to report.
        """
        ledgers = self._calls_by_key()
        with disable_modes():
            digests = {
                key: digest_bytes(repr(calls).encode()) for key, (_, calls) in ledgers.items()
            }
            answers = exchange.gather(digests)
            said = group_by_key(item for answer in answers for item in answer.items())
            odd = sorted(key for key, its in said.items() if len(set(its)) > 1)
            in_groups = [key for key in odd if not key.startswith(_OVER_AXES)]
            mismatches = _compare_in_full(exchange, ledgers, in_groups or odd, step) if odd else []
        self.calls = {name: [] for name in self.calls}
        return tuple(sorted(mismatches, key=lambda mismatch: mismatch.order_key))

    def _calls_by_key(self) -> dict[str, tuple[str, list[Call]]]:
        """Return axes and calls under a key that is equal on all ranks whose calls must agree.

        Within a group, all of a call must agree. Between groups over the same axes in one stage,
        sizes and results may differ and are left out.
        """
        mesh = self.program.mesh
        known = mesh.axes_by_group()
        stage = f" in {mesh.coordinate(Axis.PP)}" if Axis.PP in mesh.axes else ""
        ledgers: dict[str, tuple[str, list[Call]]] = {}
        for name, calls in self.calls.items():
            axes, ranks = "+".join(known.get(name, (name,))), self._groups[name]
            ledgers[f"{name} of {','.join(map(str, ranks))}"] = axes, calls
            if name in known and Axis.PP not in known[name]:
                beside = [replace(call, numel=0, result="") for call in calls]
                ledgers[f"{_OVER_AXES}{axes} by {len(ranks)}{stage}"] = axes, beside
        return ledgers

    def root_cause(self, mismatches: Sequence[Mismatch]) -> RootCause | None:
        """Return the root cause of the mismatches that `check` found, None if there are none."""
        return explain_call_mismatches(mismatches)


def _compare_in_full(
    exchange: SupportsGather,
    ledgers: Mapping[str, tuple[str, Sequence[Call]]],
    odd: Sequence[str],
    step: int,
) -> list[Mismatch]:
    """Exchange the calls of the ledgers that differ, and return the first difference of each."""
    mine = {key: ledgers[key] for key in odd if key in ledgers}
    answers = exchange.gather(mine, dict[str, tuple[str, list[Call]]])
    mismatches: list[Mismatch] = []
    for key in odd:
        have = {rank: answer[key] for rank, answer in enumerate(answers) if key in answer}
        axes = next(iter(have.values()))[0]
        mismatches += find_differing_calls(axes, {r: its for r, (_, its) in have.items()}, step)
    return mismatches


def _reduction_name(operator: Any) -> str:
    """Return the name of a reduction operator, which c10d passes as a boxed number."""
    if isinstance(operator, torch.ScriptObject):
        number = int(operator.op())
        return _REDUCTIONS[number] if number < len(_REDUCTIONS) else str(number)
    return str(operator).upper() if operator else ""


def _wait_for(result: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Wait for a call by its works, or by `wait_tensor` for functional collectives."""
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

SHARE = 0.002  # highest cost of an optional read, as a share of the time since the last read


@dataclass(frozen=True, slots=True)
class CollectiveCount:
    """Collectives of one rank since the last read.

    Attributes:
        calls: Collectives in the recorder's ring.
        sent_bytes: Bytes sent by these calls under the ring model.
        missed: Collectives that were overwritten before this read.
    """

    calls: int
    sent_bytes: int
    missed: int


class CollectiveCounter:
    """The counter that reads c10d's flight recorder when that is cheap or necessary."""

    def __init__(self) -> None:
        self._dump = getattr(process_groups.RECORDER, "_dump_fr_trace_json", None)
        self._ring = flight_recorder_size()
        self._next = 0
        self._num_issued = self._seen = _num_issued()
        # most collectives between two calls of `read_if_wanted` that the ring could hold
        self._most_per_step = 0
        self._began = self._ended = 0.0  # start and end of the last read
        self.read()

    def read_if_wanted(self, *, wanted: bool) -> CollectiveCount | None:
        """Return the collectives since the last read. Call it once per step.

        It reads if the next step might overwrite unread entries, or if a read is wanted and costs
        at most `SHARE` of the time since the last one.

        Args:
            wanted: True to read if the cost allows it.

        Returns:
            The collectives; None if this call does not read.
        """
        issued = _num_issued()
        since, unseen = issued - self._num_issued, issued - self._seen
        self._num_issued = issued
        if since <= self._ring:
            self._most_per_step = max(self._most_per_step, since)
        cost, passed = self._ended - self._began, time.perf_counter() - self._ended
        is_due = unseen <= self._ring < unseen + self._most_per_step
        return self.read() if is_due or (wanted and cost <= SHARE * passed) else None

    def read(self) -> CollectiveCount | None:
        """Return the collectives since the last read; None if this torch build has no recorder."""
        if self._dump is None:
            return None
        self._began, issued = time.perf_counter(), _num_issued()
        dump = json.loads(self._dump(True, False))
        fresh = [entry for entry in dump.get("entries", ()) if entry["record_id"] >= self._next]
        sizes = _group_sizes()
        missed = fresh[0]["record_id"] - self._next if fresh else issued - self._seen
        sent = sum(_sent_bytes(entry, sizes) for entry in fresh)
        if fresh:
            self._next = fresh[-1]["record_id"] + 1
        self._seen, self._ended = issued, time.perf_counter()
        return CollectiveCount(calls=len(fresh), sent_bytes=sent, missed=missed)


def _num_issued() -> int:
    """Return the number of collectives that this rank has issued, recorded or not."""
    return process_groups.count_collectives(
        group for group in process_groups.group_names() if group
    )


def _sent_bytes(entry: dict[str, Any], group_sizes: dict[str, int]) -> int:
    """Return the bytes sent for a recorded call; 0 if its kind or group is unknown."""
    collective = _NAMES.get(entry["profiling_name"].partition(":")[2])
    ranks = group_sizes.get(entry["process_group"][0])
    if collective is None or ranks is None:
        return 0
    side = "output" if collective in (Collective.ALL_GATHER, Collective.GATHER) else "input"
    payload = sum(_tensor_bytes(entry[f"{side}_sizes"], entry[f"{side}_dtypes"]))
    return ring_bytes(collective, payload, ranks)


def _tensor_bytes(sizes: list[list[int]], dtypes: list[str]) -> Iterator[int]:
    """Yield the bytes of each recorded tensor; the last dtype applies to all further ones."""
    for position, size in enumerate(sizes):
        dtype = dtypes[min(position, len(dtypes) - 1)]
        yield math.prod(size) * _ITEMSIZES.get(dtype, 4)


def _group_sizes() -> dict[str, int]:
    """Return the size of each process group, which the recorder lacks for sub-groups."""
    names = process_groups.group_names()
    return {name: group.size() for group, name in names.items() if group is not None}
