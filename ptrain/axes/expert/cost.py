"""Traffic of layers with experts: the exchange of rows between ranks of ep, and the counts of
router choices among ranks that have shards of the same samples.

With a capacity, every expert has a fixed number of places for each rank, and no size depends on
data. Without one, a rank sends the rows that its tokens choose. The spec gives their number as a
histogram; by default each expert gets an equal number. A remainder is spread over the ranks,
starting with the sender, so that all ranks receive the same number of rows.
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
from ptrain.spec.activations import ActivationMode, Operators, Scope
from ptrain.spec.model import ModelShape
from ptrain.spec.precision import DType
from ptrain.spec.spec import Spec, ranks_over
from ptrain.steps.experts import ByLayer, ExpertParallel, RankRows, even_rows, layers_of
from ptrain.steps.step import Plan

_TRIPS = 2  # rows to their experts, and results back
_COUNT_BYTES = 8  # int64
_NO_ROWS = RankRows(0, 0, 0)


def expert_traffic(
    spec: Spec,
    plan: Plan,
    within: Sequence[str] | None = None,
    loads: ByLayer | None = None,
) -> Iterator[Traffic]:
    """Yield the traffic of layers with experts in a step.

    A recomputed layer repeats its collectives, except if their results are kept.

    Args:
        spec: The spec.
        plan: The plan.
        within: The blocks whose layers count. None counts all.
        loads: The rows that a rank sends and receives, by layer. None is an even distribution.
    """
    shape, step = spec.model, plan.experts
    kept = dict(plan.keep.blocks) if plan.keep else {}
    times = plan.accumulate.micro_batches
    once, again = _ExchangedRows(), _ExchangedRows()
    for layer in _expert_layers(spec, plan):
        if within is not None and not is_within(layer, within):
            continue
        rows = even_rows(spec, step).scale(times) if step else _NO_ROWS
        if loads is not None:
            rows = reduce(add, loads[layer])
        once.add(times, rows)
        if any(_is_repeated(mode) for block, mode in kept.items() if is_within(layer, (block,))):
            again.add(times, rows)
    if step is not None:
        exchange = _RowExchange(spec, step)
        yield from exchange.forward(Phase.FORWARD, once)
        yield from exchange.forward(Phase.BACKWARD, again)
        # Backward exchanges gradients of rows only: the counts are known from forward.
        yield from exchange.row_traffic(Phase.BACKWARD, once)
    slices = _token_slices(spec, plan)
    if slices is not None and isinstance(shape, ModelShape) and shape.experts is not None:
        yield from _count_traffic(spec, shape, slices, Phase.FORWARD, once.times)
        # the collectives of a folded axis are counted with the blocks' repeated collectives
        if slices.group.axes != spec.folded_axes:
            yield from _count_traffic(spec, shape, slices, Phase.BACKWARD, again.times)


def rows_bytes(spec: Spec, shape: ModelShape) -> int:
    """Return the bytes of the rows that a rank sends to all experts of a layer in a micro-batch.

    Rows for its local experts are included. All experts receive the same number of rows.
    """
    assert shape.experts is not None, "nothing travels"
    rows = (
        shape.experts_per_token * spec.routed_tokens
        if shape.capacity_factor is None
        else shape.experts * own_places(spec, shape)
    )
    return (
        spec.batch.micro * rows * shape.hidden * spec.precision.effective_layout.parameters.itemsize
    )


def _expert_layers(spec: Spec, plan: Plan) -> Iterator[str]:
    """Yield the layers with experts, also if a built-in model's experts are replicated."""
    if plan.experts is not None:
        yield from layers_of(plan.experts)
    elif isinstance(spec.model, ModelShape) and spec.model.experts is not None:
        for layer in filter(spec.model.has_experts, range(spec.model.layers)):
            yield f"blocks.{layer}"


class _TokenSlices(NamedTuple):
    """Ranks that have shards of the same samples, each with this many contiguous ranges."""

    group: Group
    stretches: int


def _token_slices(spec: Spec, plan: Plan) -> _TokenSlices | None:
    """Return the ranks that count router choices together. None if a rank has all tokens of a
    sample."""
    experts, step = plan.experts, plan.context
    if experts is not None and experts.counting:
        group = Group(experts.counting, ranks_over(spec, experts.counting))
        return _TokenSlices(group, max(map(len, experts.spans)))
    if step is not None:
        return _TokenSlices(Group((step.axis,), step.ulysses * step.ring), step.chunks)
    return None


def _count_traffic(
    spec: Spec, shape: ModelShape, slices: _TokenSlices, phase: Phase, times: int
) -> Iterator[Traffic]:
    """Yield the collectives that count how often a sample's tokens choose each expert.

    The counts are all-reduced for a balancing loss. With a capacity, they are also all-gathered, by
    choice and by contiguous range of tokens.
    """
    assert shape.experts is not None, "they are counted"
    group, numbers = slices.group, spec.batch.micro * shape.experts
    if shape.aux_loss and times:
        wide = max(spec.precision.effective_layout.parameters.itemsize, DType.FP32.itemsize)
        calls = Calls(Collective.ALL_REDUCE, State.ACTIVATIONS, phase, times)
        yield calls.traffic(group, numbers * wide)
    if shape.capacity_factor is not None and times:
        numbers *= group.ranks * slices.stretches * shape.experts_per_token
        calls = Calls(Collective.ALL_GATHER, State.ACTIVATIONS, phase, times)
        yield calls.traffic(group, numbers * _COUNT_BYTES)


def _is_repeated(mode: ActivationMode) -> bool:
    """Return True if backward repeats the collectives of a block that is kept so."""
    policy = mode.policy
    return policy is not None and (
        policy.scope is Scope.BLOCK and Operators.COLLECTIVE not in policy.keep
    )


class _ExchangedRows:
    """The number of exchanges, over layers and micro-batches, and the sum of their rows."""

    def __init__(self) -> None:
        self.times, self.rows = 0, _NO_ROWS

    def add(self, times: int, rows: RankRows) -> None:
        self.times += times
        self.rows += rows


class _RowExchange:
    """Converts exchanges of rows to traffic in bytes."""

    def __init__(self, spec: Spec, step: ExpertParallel) -> None:
        self.group = Group(spec.expert_axes, ranks_over(spec, spec.expert_axes))
        self.counts = 0 if step.places is not None else _COUNT_BYTES * step.number
        self.row = step.features * spec.precision.effective_layout.parameters.itemsize

    def forward(self, phase: Phase, exchanged: _ExchangedRows) -> Iterator[Traffic]:
        """Yield the exchange of rows. If sizes depend on data, the row counts are exchanged
        first."""
        yield from self.row_traffic(phase, exchanged)
        if self.counts and exchanged.times:
            calls = Calls(Collective.ALL_TO_ALL, State.ACTIVATIONS, phase, exchanged.times)
            yield calls.traffic(self.group, self.counts)

    def row_traffic(self, phase: Phase, exchanged: _ExchangedRows) -> Iterator[Traffic]:
        """Yield the all-to-alls of rows to their experts and back. Rows for local experts are not
        sent."""
        if not exchanged.times:
            return
        key = TrafficKey(
            axes=tuple(axis.value for axis in self.group.axes),
            collective=Collective.ALL_TO_ALL,
            state=State.ACTIVATIONS,
            phase=phase,
        )
        rows = exchanged.rows
        both = rows.num_sent + rows.num_received
        yield Traffic(
            key=key,
            calls=_TRIPS * exchanged.times,
            payload_bytes=both * self.row,
            sent_bytes=(both - _TRIPS * rows.num_kept) * self.row,
        )
