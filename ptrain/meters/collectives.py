"""The ledger of collectives: what every group's ranks called, in order, and whether all got the
same.

It watches the operators that reach the backend, as the traffic meter does, and waits for each: the
output of an all-reduce, an all-gather and a broadcast is the same on every rank of its group, so
its digest is. At the end of a step one exchange compares a digest of the whole ledger per group;
only where these differ do the entries travel, and the first that differs is named. What torch's
debug mode cannot see is in the entries: the operator of a reduction, the dtype, and which state's
tensor is sent, which tells two calls of one shape apart whose order is swapped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from ptrain.cost import Collective, Phase
from ptrain.internals import process_groups
from ptrain.internals.dispatch import without_modes
from ptrain.interpreter.program import Program
from ptrain.meters import holdings
from ptrain.meters.randomness import digests, of_bytes
from ptrain.meters.replicas import SupportsGather
from ptrain.meters.traffic import SILENT, group_of
from ptrain.models.ledger import OperatorMode, storage_of
from ptrain.report.calls import Call, culprit, differing
from ptrain.report.finding import Culprit, Departure, Moment
from ptrain.spec.placement import Axis

_REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
# Between two ranks, each of which calls something else.
_BETWEEN_TWO = ("send", "isend", "recv_", "irecv", "recv_any_source_", "batch_p2p_ops")
# Operators by how c10d and the functional collectives begin their names.
_OPERATORS = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "_allgather": "all_gather",
    "all_gather": "all_gather",
    "broadcast": "broadcast",
    "_reduce_scatter": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
}
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
        begins = sorted((prefix for prefix in _OPERATORS if name.startswith(prefix)), key=len)
        operator = _OPERATORS[begins[-1]] if begins else name.strip("_")
        is_c10d = any(isinstance(leaf, torch.ScriptObject) for leaf in tree_leaves(result))
        whole = _tensors(next(iter(named.values())) if is_c10d else result)
        digest = ""
        if operator in _ALIKE:
            _wait(result, whole)
            digest = of_bytes("".join(digests(whole)).encode())
        sent = whole if operator in _ALIKE else _tensors(named)
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
        tensors = _tensors(tree)
        tags = [tag for tag in map(self.program.registry.of, tensors) if tag is not None]
        state = str(tags[0].state) if tags else ""
        name = self._known(tensors) or next((tag.name for tag in tags if tag.name), "")
        return f"{state} {name}".strip()

    def _known(self, tensors: Sequence[torch.Tensor]) -> str:
        """Return the names of all whose storage one of these tensors has."""
        storages = {storage_of(tensor)._cdata for tensor in tensors}
        names: list[str] = []
        for name, tensor in holdings.storages_by_name(self.program):
            if storage_of(tensor)._cdata in storages and name not in names:
                names.append(name)
        return span(names)

    def check(self, exchange: SupportsGather, step: int) -> tuple[Departure, ...]:
        """Return where the ranks of a group first differ, of every group; else where groups over
        the same axes do. The order is that of time, and the same on all ranks, all of which call
        it. What was written is forgotten."""
        ledgers = self._ledgers()
        with without_modes():
            digests = {key: _digest(calls) for key, (_, calls) in ledgers.items()}
            answers = exchange.gather(digests)
            odd = sorted({key for key in set().union(*answers) if len(_values(answers, key)) > 1})
            in_groups = [key for key in odd if not key.startswith(_BESIDE)]
            departures: list[Departure] = []
            if odd:
                departures = _in_full(exchange, ledgers, in_groups or odd, step)
        self.calls = {name: [] for name in self.calls}
        return tuple(sorted(departures, key=lambda departure: departure.when))

    def _ledgers(self) -> dict[str, tuple[str, list[Call]]]:
        """Return axes and calls by a key that the ranks which must agree have in common. Of a group
        these are all; of groups over the same axes in one stage they lack how much is sent, and
        what comes of it."""
        known = self.program.mesh.axes_by_group()
        ledgers: dict[str, tuple[str, list[Call]]] = {}
        for name, calls in self.calls.items():
            axes, ranks = "+".join(known.get(name, (name,))), self._groups[name]
            ledgers[f"{name} of {','.join(map(str, ranks))}"] = axes, calls
            if name in known and Axis.PP not in known[name]:
                beside = [replace(call, numel=0, result="") for call in calls]
                ledgers[f"{_BESIDE}{axes} by {len(ranks)}{self._stage()}"] = axes, beside
        return ledgers

    def _stage(self) -> str:
        mesh = self.program.mesh
        return f" in {mesh.coordinate(Axis.PP)}" if Axis.PP in mesh.axes else ""

    def culprit(self, departures: Sequence[Departure]) -> Culprit | None:
        """Whose fault it is, of what `check` found; None where that is nothing."""
        return culprit(departures)


def _in_full(
    exchange: SupportsGather,
    ledgers: Mapping[str, tuple[str, Sequence[Call]]],
    odd: Sequence[str],
    step: int,
) -> list[Departure]:
    mine = {key: ledgers[key] for key in odd if key in ledgers}
    answers = exchange.gather(mine, dict[str, tuple[str, list[Call]]])
    departures: list[Departure] = []
    for key in odd:
        have = {rank: answer[key] for rank, answer in enumerate(answers) if key in answer}
        axes = next(iter(have.values()))[0]
        departures += differing(axes, {rank: calls for rank, (_, calls) in have.items()}, step)
    return departures


def span(names: Sequence[str]) -> str:
    """Return the first name and the last as one text."""
    return " … ".join(dict.fromkeys((*names[:1], *names[-1:])))


def _digest(calls: Sequence[Call]) -> str:
    return of_bytes(repr(calls).encode())


def _values(answers: Sequence[dict[str, str]], key: str) -> set[str]:
    return {answer[key] for answer in answers if key in answer}


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


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
