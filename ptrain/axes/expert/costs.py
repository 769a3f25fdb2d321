"""What layers with experts send, call by call: ranks of ep to each other's experts, and ranks that
have slices of the same samples to count what routers choose of all of their tokens.

With a capacity every expert has as many places of every rank, and no size depends on data. Without
one a rank sends what its tokens choose: here as many rows to each expert, and of what they do not
divide as many to the experts of each rank, its own first, so that all ranks get as many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ptrain.axes.expert.form import own_places
from ptrain.axes.ring import Calls, Group
from ptrain.costs import Collective, Phase, State, Traffic, TrafficKey
from ptrain.spec.activations import Kept, Operators, Scope
from ptrain.spec.model import ModelShape
from ptrain.spec.precision import DType
from ptrain.spec.spec import Spec
from ptrain.steps.context import ContextParallel
from ptrain.steps.experts import ExpertParallel
from ptrain.steps.step import Plan
from ptrain.units import ceil_div

_TRIPS = 2  # of rows to their experts, and of what these make of them back
_COUNT_BYTES = 8  # int64


def sent(spec: Spec, plan: Plan, within: Sequence[str] | None = None) -> Iterator[Traffic]:
    """Yield what layers with experts send in a step, those `within` some blocks alone; one that is
    computed again sends again, but for what arrived and is kept."""
    shape = spec.model
    if not isinstance(shape, ModelShape) or shape.experts is None:
        return
    blocks = enumerate(spec.activations.of(shape.layers))
    modes = [
        mode
        for layer, mode in blocks
        if shape.has_experts(layer) and (within is None or f"blocks.{layer}" in within)
    ]
    times = plan.accumulate.micro_batches
    again = times * sum(map(_comes_again, modes))
    if plan.experts is not None:
        exchange = _LayerExchange(spec, plan.experts, shape)
        yield from exchange.forward(Phase.FORWARD, times * len(modes))
        yield from exchange.forward(Phase.BACKWARD, again)
        yield from exchange.trips(Phase.BACKWARD, times * len(modes))
    if plan.context is not None:
        yield from _counted(spec, shape, plan.context, Phase.FORWARD, times * len(modes))
        yield from _counted(spec, shape, plan.context, Phase.BACKWARD, again)


def _counted(
    spec: Spec, shape: ModelShape, step: ContextParallel, phase: Phase, times: int
) -> Iterator[Traffic]:
    """How often a sample's tokens choose each expert is summed where a loss balances them; where an
    expert has places it is gathered too, by choice and by stretch of tokens."""
    assert shape.experts is not None, "they are counted"
    ranks, numbers = step.ulysses * step.ring, spec.batch.micro * shape.experts
    group = Group((step.axis,), ranks)
    if shape.aux_loss and times:
        wide = max(spec.precision.effective.parameters.itemsize, DType.FP32.itemsize)
        calls = Calls(Collective.ALL_REDUCE, State.ACTIVATIONS, phase, times)
        yield calls.over(group, numbers * wide)
    if shape.capacity_factor is not None and times:
        numbers *= ranks * step.chunks * shape.experts_per_token
        calls = Calls(Collective.ALL_GATHER, State.ACTIVATIONS, phase, times)
        yield calls.over(group, numbers * _COUNT_BYTES)


def _comes_again(mode: Kept) -> bool:
    policy = mode.policy
    return policy is not None and (
        policy.scope is Scope.BLOCK and Operators.COLLECTIVE not in policy.keep
    )


class _LayerExchange:
    """A layer's exchange of one micro-batch: bytes of all rows that a rank sends to experts, as
    many as it gets, and of those that stay."""

    def __init__(self, spec: Spec, step: ExpertParallel, shape: ModelShape) -> None:
        assert shape.experts is not None, "they are on other ranks"
        ranks = spec.degree(step.axis)
        self.group = Group((step.axis,), ranks)
        self.counts = 0 if shape.capacity_factor is not None else _COUNT_BYTES * shape.experts
        tokens = spec.own_tokens
        if shape.capacity_factor is None:
            number = spec.batch.micro * tokens * shape.experts_per_token
        else:
            number = spec.batch.micro * shape.experts * own_places(spec, shape)
        share, more = divmod(number, shape.experts)
        stay = shape.experts // ranks * share + ceil_div(more, ranks)
        row = shape.hidden * spec.precision.effective.parameters.itemsize
        self.all, self.own = number * row, stay * row

    def forward(self, phase: Phase, times: int) -> Iterator[Traffic]:
        """Whose sizes depend on data say first how many rows each expert gets."""
        yield from self.trips(phase, times)
        if self.counts and times:
            calls = Calls(Collective.ALL_TO_ALL, State.ACTIVATIONS, phase, times)
            yield calls.over(self.group, self.counts)

    def trips(self, phase: Phase, times: int) -> Iterator[Traffic]:
        """There and back."""
        calls = times * _TRIPS
        if not calls:
            return
        key = TrafficKey(
            axes=tuple(axis.value for axis in self.group.axes),
            collective=Collective.ALL_TO_ALL,
            state=State.ACTIVATIONS,
            phase=phase,
        )
        leaving = calls * (self.all - self.own)
        yield Traffic(key=key, calls=calls, payload_bytes=calls * self.all, sent_bytes=leaving)
