"""What ranks of ep send to each other's experts, call by call.

With a capacity every expert has as many places of every rank, and no size depends on data. Without
one a rank sends what its tokens choose: here as many rows to each expert, to the first ones one
more where they do not divide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ptrain.axes.ring import Calls, Group
from ptrain.costs import Collective, Phase, State, Traffic, TrafficKey
from ptrain.spec.activations import Kept, Operators, Scope
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec
from ptrain.steps.experts import ExpertParallel
from ptrain.steps.step import Plan

_COUNT_BYTES = 8  # int64


def sent(
    spec: Spec, plan: Plan, within: Sequence[str] | None = None, *, place: int = 0
) -> Iterator[Traffic]:
    """Yield what layers with experts send over ep in a step, those `within` some blocks alone, on a
    rank at this place along it; one that is computed again sends again, but for what arrived and is
    kept."""
    step, shape = plan.experts, spec.model
    if step is None or not isinstance(shape, ModelShape):
        return
    kept = spec.activations.of(shape.layers)
    blocks = [".".join(module.split(".")[:2]) for module in step.modules]
    modes = [
        kept[int(block.rpartition(".")[2])] for block in blocks if within is None or block in within
    ]
    times = plan.accumulate.micro_batches
    exchange = _LayerExchange(spec, step, shape, place)
    yield from exchange.forward(Phase.FORWARD, times * len(modes))
    yield from exchange.forward(Phase.BACKWARD, times * sum(map(_comes_again, modes)))
    yield from exchange.trips(Phase.BACKWARD, times * len(modes))


def own_rows(spec: Spec, step: ExpertParallel, shape: ModelShape, place: int) -> int:
    """Return how many rows each rank sends to the experts of the one at this place along ep, of a
    micro-batch: sizes of all that these compute follow from it."""
    assert shape.experts is not None, "they are on other ranks"
    number = shape.experts // spec.degree(step.axis)
    if shape.capacity_factor is not None:
        return number * spec.batch.micro * shape.capacity(spec.own_tokens)
    share, more = divmod(_chosen_rows(spec, shape), shape.experts)
    return number * share + min(max(more - place * number, 0), number)


def _chosen_rows(spec: Spec, shape: ModelShape) -> int:
    return spec.batch.micro * spec.own_tokens * shape.experts_per_token


def _comes_again(mode: Kept) -> bool:
    policy = mode.policy
    return policy is not None and (
        policy.scope is Scope.BLOCK and Operators.COLLECTIVE not in policy.keep
    )


class _LayerExchange:
    """A layer's exchange of one micro-batch: bytes of all rows that a rank sends to experts, and of
    those that each rank sends to its own."""

    def __init__(self, spec: Spec, step: ExpertParallel, shape: ModelShape, place: int) -> None:
        assert shape.experts is not None, "they are on other ranks"
        self.group = Group((step.axis,), spec.degree(step.axis))
        self.counts = 0 if shape.capacity_factor is not None else _COUNT_BYTES * shape.experts
        row = shape.hidden * spec.precision.effective.parameters.itemsize
        rows = own_rows(spec, step, shape, place)
        self.own = rows * row
        self.all = (_chosen_rows(spec, shape) if self.counts else self.group.ranks * rows) * row

    def forward(self, phase: Phase, times: int) -> Iterator[Traffic]:
        """Whose sizes depend on data say first how many rows each expert gets."""
        yield from self.trips(phase, times)
        if self.counts and times:
            calls = Calls(Collective.ALL_TO_ALL, State.ACTIVATIONS, phase, times)
            yield calls.over(self.group, self.counts)

    def trips(self, phase: Phase, times: int) -> Iterator[Traffic]:
        """All rows to their experts, and what a rank's own make of those of all ranks back."""
        if times:
            yield self._trip(phase, times, self.all)
            yield self._trip(phase, times, self.group.ranks * self.own)

    def _trip(self, phase: Phase, times: int, payload: int) -> Traffic:
        key = TrafficKey(
            axes=tuple(axis.value for axis in self.group.axes),
            collective=Collective.ALL_TO_ALL,
            state=State.ACTIVATIONS,
            phase=phase,
        )
        sent_bytes = times * (payload - self.own)  # what stays is the same both ways
        payload *= times
        return Traffic(key=key, calls=times, payload_bytes=payload, sent_bytes=sent_bytes)
