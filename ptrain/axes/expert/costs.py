"""What ranks of ep send to each other's experts, call by call.

With a capacity every expert has as many places of every rank, and no size depends on data. Without
one a rank sends what its tokens choose: as a histogram says, else as many rows to each expert, and
of what they do not divide as many to the experts of each rank, its own first, so that all ranks get
as many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import add

from ptrain.axes.expert.loads import ByLayer, RankRows, even
from ptrain.axes.ring import Calls, Group
from ptrain.costs import Collective, Phase, State, Traffic, TrafficKey
from ptrain.spec.activations import Kept, Operators, Scope
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec
from ptrain.steps.experts import ExpertParallel
from ptrain.steps.step import Plan

_TRIPS = 2  # of rows to their experts, and of what these make of them back
_COUNT_BYTES = 8  # int64


def sent(
    spec: Spec,
    plan: Plan,
    within: Sequence[str] | None = None,
    loads: ByLayer | None = None,
) -> Iterator[Traffic]:
    """Yield what layers with experts send over ep in a step, those `within` some blocks alone; one
    that is computed again sends again, but for what arrived and is kept. `loads` are the rows of a
    rank; None: even ones."""
    step, shape = plan.experts, spec.model
    if step is None or not isinstance(shape, ModelShape):
        return
    kept = spec.activations.of(shape.layers)
    times = plan.accumulate.micro_batches
    once, again = _Exchanged(), _Exchanged()
    for module in step.modules:
        block = ".".join(module.split(".")[:2])
        if within is not None and block not in within:
            continue
        layer = module.rpartition(".")[0]
        rows = even(spec, shape).times(times) if loads is None else reduce(add, loads[layer])
        once.add(times, rows)
        if _comes_again(kept[int(block.rpartition(".")[2])]):
            again.add(times, rows)
    exchange = _RowExchange(spec, step, shape)
    yield from exchange.forward(Phase.FORWARD, once)
    yield from exchange.forward(Phase.BACKWARD, again)
    yield from exchange.trips(Phase.BACKWARD, once)


def _comes_again(mode: Kept) -> bool:
    policy = mode.policy
    return policy is not None and (
        policy.scope is Scope.BLOCK and Operators.COLLECTIVE not in policy.keep
    )


class _Exchanged:
    """What is exchanged: of how many layers and micro-batches, and all rows of these."""

    def __init__(self) -> None:
        self.times, self.rows = 0, RankRows(0, 0, 0)

    def add(self, times: int, rows: RankRows) -> None:
        self.times += times
        self.rows += rows


class _RowExchange:
    """In bytes, which a row has so many of."""

    def __init__(self, spec: Spec, step: ExpertParallel, shape: ModelShape) -> None:
        assert shape.experts is not None, "they are on other ranks"
        self.group = Group((step.axis,), spec.degree(step.axis))
        self.counts = 0 if shape.capacity_factor is not None else _COUNT_BYTES * shape.experts
        self.row = shape.hidden * spec.precision.effective.parameters.itemsize

    def forward(self, phase: Phase, exchanged: _Exchanged) -> Iterator[Traffic]:
        """Whose sizes depend on data say first how many rows each expert gets."""
        yield from self.trips(phase, exchanged)
        if self.counts and exchanged.times:
            calls = Calls(Collective.ALL_TO_ALL, State.ACTIVATIONS, phase, exchanged.times)
            yield calls.over(self.group, self.counts)

    def trips(self, phase: Phase, exchanged: _Exchanged) -> Iterator[Traffic]:
        """There go the rows that a rank sends, back those that it got; those that it keeps leave
        it neither way."""
        if not exchanged.times:
            return
        key = TrafficKey(
            axes=tuple(axis.value for axis in self.group.axes),
            collective=Collective.ALL_TO_ALL,
            state=State.ACTIVATIONS,
            phase=phase,
        )
        rows = exchanged.rows
        both = rows.sent + rows.received
        yield Traffic(
            key=key,
            calls=_TRIPS * exchanged.times,
            payload_bytes=both * self.row,
            sent_bytes=(both - _TRIPS * rows.kept) * self.row,
        )
