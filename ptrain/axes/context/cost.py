"""Traffic of attention over cp, call by call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ptrain.axes.context.attention import kv_repeats
from ptrain.axes.ring import Calls, Group
from ptrain.cost import Collective, Phase, State, Traffic, TrafficKey
from ptrain.facts.model import AttentionFacts, AttentionHeads
from ptrain.facts.stages import is_within
from ptrain.spec.activations import PLAIN, ActivationMode, Operators, Scope
from ptrain.spec.dials import ReduceScatterVia
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import Axis
from ptrain.spec.precision import DType
from ptrain.spec.spec import Spec
from ptrain.steps.step import ContextParallel, Plan
from ptrain.units import group_by_key

_ACTIVATIONS = State.ACTIVATIONS


def attention_traffic(
    spec: Spec, plan: Plan, kept: tuple[ActivationMode, ...], own: tuple[AttentionHeads, ...] = ()
) -> Iterator[Traffic]:
    """Yield the traffic of attention over cp in a step.

    A recomputed layer repeats its collectives, except if their results are kept.

    Args:
        spec: The spec.
        plan: The plan.
        kept: How each layer keeps its activations.
        own: The heads of each layer of a model that is not built in. Empty for built-in models.
    """
    if (step := plan.context) is None:
        return
    times = plan.accumulate.micro_batches
    yield from _document_edges(spec, step, times)
    alike = group_by_key(zip(own or (_heads_of(spec),) * len(kept), kept, strict=True))
    for heads, modes in alike.items():
        yield from _layer_traffic(_Exchange(spec, plan, step, heads), times, modes)


def _document_edges(spec: Spec, step: ContextParallel, times: int) -> Iterator[Traffic]:
    """Yield the all-gather of document edges: one byte per token, set if a document begins or ends
    there."""
    shape = spec.model
    if isinstance(shape, ModelShape) and shape.has_documents:
        calls = Calls(Collective.ALL_GATHER, _ACTIVATIONS, Phase.FORWARD, times, None)
        ranks = step.ulysses * step.ring
        yield calls.traffic(Group((step.axis,), ranks), spec.batch.micro * step.sequence)


def own_kept(
    spec: Spec,
    blocks: Sequence[str],
    attending: AttentionFacts,
    within: Sequence[str] | None = None,
) -> tuple[tuple[ActivationMode, ...], tuple[AttentionHeads, ...]]:
    """Return the activation mode and the heads of each attention module of a model that is not
    built in.

    `within` restricts the modules to these layers.

    Args:
        spec: The spec.
        blocks: Names of the model's blocks.
        attending: The attention modules.
        within: Layers to which the modules are restricted, None for all.
    """
    modes = dict(zip(blocks, spec.activations.block_modes(len(blocks)), strict=True))
    kept, heads = [], []
    for module in attending.modules:
        if within is None or is_within(module.name, within):
            around = (mode for block, mode in modes.items() if is_within(module.name, (block,)))
            kept.append(next(around, PLAIN))
            heads.append(module.heads)
    return tuple(kept), tuple(heads)


def _heads_of(spec: Spec) -> AttentionHeads:
    shape = spec.model
    assert isinstance(shape, ModelShape), "of another model its modules say it"
    return AttentionHeads(heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim)


def _layer_traffic(
    exchange: _Exchange, times: int, kept: Sequence[ActivationMode]
) -> Iterator[Traffic]:
    """Yield the traffic of layers with equal heads in a step's micro-batches."""
    policies = (mode.policy for mode in kept if mode.policy is not None)
    scopes = Counter(policy.scope for policy in policies if Operators.COLLECTIVE not in policy.keep)
    attention = times * scopes[Scope.ATTENTION]
    again = times * scopes[Scope.BLOCK]
    yield from exchange.forward(Phase.FORWARD, times * len(kept))
    yield from exchange.forward(Phase.BACKWARD, again)
    # torch stops recomputing when backward has all it needs, before attention's output
    yield from exchange.forward(Phase.BACKWARD, attention, gives_back=False)
    yield from exchange.backward(times * len(kept))


class _Exchange:
    """The communication of a layer's attention.

    `queries` and `keys` are the bytes of a rank's queries, and of its keys and values together as
    they are sent. `gradients` are the bytes of the gradients of keys and values in a ring.
    """

    def __init__(
        self, spec: Spec, plan: Plan, step: ContextParallel, heads: AttentionHeads
    ) -> None:
        compute = spec.precision.effective_layout.parameters
        self.step, self.via = step, spec.reduce_scatter
        cut = spec.degree(Axis.TP)
        head = spec.batch.micro * plan.tokens * heads.head_dim * compute.itemsize
        kv_heads = max(1, heads.kv_heads // cut)  # several ranks of tp may share a head
        kv_heads *= kv_repeats(step.ulysses, kv_heads)
        self.queries, self.keys = head * heads.heads // cut, 2 * head * kv_heads
        wide = max(compute.itemsize, DType.FP32.itemsize)
        self.gradients = self.keys // compute.itemsize * wide  # at least fp32

    def forward(self, phase: Phase, times: int, *, gives_back: bool = True) -> Iterator[Traffic]:
        """Yield the traffic of `times` forward passes. Without `gives_back`, Ulysses does not
        exchange the output back."""
        ring = self.step.ring
        yield from self._ulysses_traffic(phase, times, gives_back=gives_back)
        if self.step.gathers:
            yield from self._collective_traffic(
                Collective.ALL_GATHER, phase, times, ring, ring * self.keys
            )
        else:
            yield from self._hop_traffic(phase, times * (ring - 1), self.keys)

    def backward(self, times: int) -> Iterator[Traffic]:
        """Yield the traffic of `times` backward passes."""
        ring, phase = self.step.ring, Phase.BACKWARD
        yield from self._ulysses_traffic(phase, times)
        if self.step.gathers:
            yield from self._collective_traffic(
                Collective.REDUCE_SCATTER, phase, times, ring, ring * self.keys
            )
        else:
            yield from self._hop_traffic(phase, times * (ring - 1), self.keys)
            # Gradients make one hop more than keys and values, because they must return to the rank
            # of their keys.
            yield from self._hop_traffic(phase, times * ring if ring > 1 else 0, self.gradients)

    def _ulysses_traffic(
        self, phase: Phase, times: int, *, gives_back: bool = True
    ) -> Iterator[Traffic]:
        """Yield the exchange of queries, keys and values, and that of the output."""
        back = (self.queries,) if gives_back else ()
        for size in (self.queries, self.keys // 2, self.keys // 2, *back):
            yield from self._collective_traffic(
                Collective.ALL_TO_ALL, phase, times, self.step.ulysses, size
            )

    def _collective_traffic(
        self, collective: Collective, phase: Phase, times: int, ranks: int, payload: int
    ) -> Iterator[Traffic]:
        if not times or ranks == 1:
            return
        is_reduced = collective is Collective.REDUCE_SCATTER
        is_exchanged = is_reduced and self.via is not ReduceScatterVia.NATIVE
        via = Collective.ALL_TO_ALL.value if is_exchanged else None
        calls = Calls(collective, _ACTIVATIONS, phase, times, via)
        yield calls.traffic(Group((self.step.axis,), ranks), payload)

    def _hop_traffic(self, phase: Phase, times: int, size: int) -> Iterator[Traffic]:
        """Yield exchanges in which all bytes go to the next rank."""
        if not times:
            return
        key = TrafficKey(
            axes=(self.step.axis.value,),
            collective=Collective.ALL_TO_ALL,
            state=_ACTIVATIONS,
            phase=phase,
        )
        yield Traffic(key=key, calls=times, payload_bytes=times * size, sent_bytes=times * size)
