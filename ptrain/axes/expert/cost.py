"""What layers with experts send, call by call: ranks of ep to each other's experts, and ranks that
have slices of the same samples to count what routers choose of all of their tokens.

With a capacity every expert has as many places of every rank, and no size depends on data. Without
one a rank sends what its tokens choose: as a histogram says, else as many rows to each expert, and
of what they do not divide as many to the experts of each rank, its own first, so that all ranks get
as many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import add
from typing import NamedTuple

from ptrain.axes.expert.form import own_places
from ptrain.axes.ring import Calls, Group
from ptrain.cost import Collective, Phase, State, Traffic, TrafficKey
from ptrain.facts.stages import is_within
from ptrain.spec.activations import Kept, Operators, Scope
from ptrain.spec.model import ModelShape
from ptrain.spec.precision import DType
from ptrain.spec.spec import Spec, ranks_over
from ptrain.steps.experts import ByLayer, ExpertParallel, RankRows, even, layers_of
from ptrain.steps.step import Plan

_TRIPS = 2  # of rows to their experts, and of what these make of them back
_COUNT_BYTES = 8  # int64
_NO_ROWS = RankRows(0, 0, 0)


def sent(
    spec: Spec,
    plan: Plan,
    within: Sequence[str] | None = None,
    loads: ByLayer | None = None,
) -> Iterator[Traffic]:
    """Yield what layers with experts send in a step, those `within` some blocks alone; one that is
    computed again sends again, but for what arrived and is kept. `loads` are the rows of a rank;
    None: even ones."""
    shape, step = spec.model, plan.experts
    kept = dict(plan.keep.blocks) if plan.keep else {}
    times = plan.accumulate.micro_batches
    once, again = _Exchanged(), _Exchanged()
    for layer in _layers(spec, plan):
        if within is not None and not is_within(layer, within):
            continue
        rows = even(spec, step).times(times) if step else _NO_ROWS
        if loads is not None:
            rows = reduce(add, loads[layer])
        once.add(times, rows)
        if any(_comes_again(mode) for block, mode in kept.items() if is_within(layer, (block,))):
            again.add(times, rows)
    if step is not None:
        exchange = _RowExchange(spec, step)
        yield from exchange.forward(Phase.FORWARD, once)
        yield from exchange.forward(Phase.BACKWARD, again)
        yield from exchange.trips(Phase.BACKWARD, once)
    slices = _token_slices(spec, plan)
    if slices is not None and isinstance(shape, ModelShape) and shape.experts is not None:
        yield from _counted(spec, shape, slices, Phase.FORWARD, once.times)
        if slices.group.axes != spec.folded_axes:  # else it is among what operators send again
            yield from _counted(spec, shape, slices, Phase.BACKWARD, again.times)


def rows_bytes(spec: Spec, shape: ModelShape) -> int:
    """Return the bytes of the rows that a rank sends to all experts of a layer in a micro-batch,
    its own among them, where every expert gets as many."""
    assert shape.experts is not None, "nothing travels"
    rows = (
        shape.experts_per_token * spec.routed_tokens
        if shape.capacity_factor is None
        else shape.experts * own_places(spec, shape)
    )
    return spec.batch.micro * rows * shape.hidden * spec.precision.effective.parameters.itemsize


def _layers(spec: Spec, plan: Plan) -> Iterator[str]:
    """Yield the layers with experts; of a built-in model those, too, of which every rank has
    all."""
    if plan.experts is not None:
        yield from layers_of(plan.experts)
    elif isinstance(spec.model, ModelShape) and spec.model.experts is not None:
        for layer in filter(spec.model.has_experts, range(spec.model.layers)):
            yield f"blocks.{layer}"


class _TokenSlices(NamedTuple):
    """Ranks that have slices of the same samples, in so many stretches each."""

    group: Group
    stretches: int


def _token_slices(spec: Spec, plan: Plan) -> _TokenSlices | None:
    """Return which ranks count over their slices what routers choose; None where a rank has all of
    a sample's tokens."""
    experts, step = plan.experts, plan.context
    if experts is not None and experts.counting:
        group = Group(experts.counting, ranks_over(spec, experts.counting))
        return _TokenSlices(group, max(map(len, experts.spans)))
    if step is not None:
        return _TokenSlices(Group((step.axis,), step.ulysses * step.ring), step.chunks)
    return None


def _counted(
    spec: Spec, shape: ModelShape, slices: _TokenSlices, phase: Phase, times: int
) -> Iterator[Traffic]:
    """How often a sample's tokens choose each expert is summed where a loss balances them; where an
    expert has places it is gathered too, by choice and by stretch of tokens."""
    assert shape.experts is not None, "they are counted"
    group, numbers = slices.group, spec.batch.micro * shape.experts
    if shape.aux_loss and times:
        wide = max(spec.precision.effective.parameters.itemsize, DType.FP32.itemsize)
        calls = Calls(Collective.ALL_REDUCE, State.ACTIVATIONS, phase, times)
        yield calls.over(group, numbers * wide)
    if shape.capacity_factor is not None and times:
        numbers *= group.ranks * slices.stretches * shape.experts_per_token
        calls = Calls(Collective.ALL_GATHER, State.ACTIVATIONS, phase, times)
        yield calls.over(group, numbers * _COUNT_BYTES)


def _comes_again(mode: Kept) -> bool:
    policy = mode.policy
    return policy is not None and (
        policy.scope is Scope.BLOCK and Operators.COLLECTIVE not in policy.keep
    )


class _Exchanged:
    """What is exchanged: of how many layers and micro-batches, and all rows of these."""

    def __init__(self) -> None:
        self.times, self.rows = 0, _NO_ROWS

    def add(self, times: int, rows: RankRows) -> None:
        self.times += times
        self.rows += rows


class _RowExchange:
    """In bytes, which a row has so many of."""

    def __init__(self, spec: Spec, step: ExpertParallel) -> None:
        self.group = Group(spec.expert_axes, ranks_over(spec, spec.expert_axes))
        self.counts = 0 if step.places is not None else _COUNT_BYTES * step.number
        self.row = step.features * spec.precision.effective.parameters.itemsize

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
