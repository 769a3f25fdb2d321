"""What attention over cp sends, call by call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ptrain.axes.ring import Calls, Group
from ptrain.costs import Collective, Phase, State, Traffic, TrafficKey
from ptrain.spec.activations import Kept, Scope
from ptrain.spec.axis import Axis
from ptrain.spec.dials import ReduceScatterVia
from ptrain.spec.model import ModelShape
from ptrain.spec.precision import DType
from ptrain.spec.spec import Spec
from ptrain.steps.context import ContextParallel
from ptrain.steps.step import Plan

_ACTIVATIONS = State.ACTIVATIONS


def sent(spec: Spec, plan: Plan, kept: tuple[Kept, ...]) -> Iterator[Traffic]:
    """Yield what layers whose activations are `kept` so send over cp in a step; one that is
    computed again sends again."""
    step = plan.context
    if step is None:
        return
    exchange, times = _Exchange(spec, plan, step), plan.accumulate.micro_batches
    yield from exchange.documents(times)
    scopes = Counter(mode.policy.scope for mode in kept if mode.policy is not None)
    attention = times * scopes[Scope.ATTENTION]
    again = times * scopes[Scope.BLOCK]
    yield from exchange.forward(Phase.FORWARD, times * len(kept))
    yield from exchange.forward(Phase.BACKWARD, again)
    # torch computes no more again than backward needs: nothing within attention needs its output
    yield from exchange.forward(Phase.BACKWARD, attention, gives_back=False)
    yield from exchange.backward(times * len(kept))


class _Exchange:
    """A layer's attention, of so many `times`: `head` are bytes of one head of a rank's tokens,
    `keys` those of its keys and values, `queries` those of its queries, `marks` those that say of a
    rank's tokens which of them begin documents."""

    def __init__(self, spec: Spec, plan: Plan, step: ContextParallel) -> None:
        shape, compute = spec.model, spec.precision.effective.parameters
        assert isinstance(shape, ModelShape), "legality takes no others"
        self.step, self.via = step, spec.reduce_scatter
        has_documents = shape.document_start is not None
        self.marks = spec.batch.micro * spec.batch.sequence // spec.degree(Axis.CP) * has_documents
        cut = spec.degree(Axis.TP)
        head = spec.batch.micro * plan.tokens * shape.head_dim * compute.itemsize
        self.queries, self.keys = head * shape.heads // cut, 2 * head * shape.kv_heads // cut
        wide = max(compute.itemsize, DType.FP32.itemsize)
        self.gradients = self.keys // compute.itemsize * wide  # of keys and values, as they travel

    def forward(self, phase: Phase, times: int, *, gives_back: bool = True) -> Iterator[Traffic]:
        """`gives_back`: what was attended to is exchanged back."""
        ring = self.step.ring
        yield from self._ulysses(phase, times, gives_back=gives_back)
        if self.step.gathers:
            yield from self._over(Collective.ALL_GATHER, phase, times, ring, ring * self.keys)
        else:
            yield from self._hops(phase, times * (ring - 1), self.keys)

    def documents(self, times: int) -> Iterator[Traffic]:
        """A byte a token says whether a document begins with it."""
        if self.marks:
            ranks = self.step.ulysses * self.step.ring
            gather, phase = Collective.ALL_GATHER, Phase.FORWARD
            yield from self._over(gather, phase, times, ranks, ranks * self.marks)

    def backward(self, times: int) -> Iterator[Traffic]:
        ring, phase = self.step.ring, Phase.BACKWARD
        yield from self._ulysses(phase, times)
        if self.step.gathers:
            yield from self._over(Collective.REDUCE_SCATTER, phase, times, ring, ring * self.keys)
        else:
            yield from self._hops(phase, times * (ring - 1), self.keys)
            yield from self._hops(phase, times * ring if ring > 1 else 0, self.gradients)

    def _ulysses(self, phase: Phase, times: int, *, gives_back: bool = True) -> Iterator[Traffic]:
        """Queries, keys, values; then what was attended to."""
        back = (self.queries,) if gives_back else ()
        for size in (self.queries, self.keys // 2, self.keys // 2, *back):
            yield from self._over(Collective.ALL_TO_ALL, phase, times, self.step.ulysses, size)

    def _over(
        self, collective: Collective, phase: Phase, times: int, ranks: int, payload: int
    ) -> Iterator[Traffic]:
        if not times or ranks == 1:
            return
        is_exchanged = self.via is not ReduceScatterVia.NATIVE
        via = None
        if collective is Collective.REDUCE_SCATTER and is_exchanged:
            via = Collective.ALL_TO_ALL.value
        calls = Calls(collective, _ACTIVATIONS, phase, times, via)
        yield calls.over(Group((self.step.axis,), ranks), payload)

    def _hops(self, phase: Phase, times: int, size: int) -> Iterator[Traffic]:
        """Exchanges of which all goes to the next rank."""
        if not times:
            return
        key = TrafficKey(
            axes=(self.step.axis.value,),
            collective=Collective.ALL_TO_ALL,
            state=_ACTIVATIONS,
            phase=phase,
        )
        yield Traffic(key=key, calls=times, payload_bytes=times * size, sent_bytes=times * size)
