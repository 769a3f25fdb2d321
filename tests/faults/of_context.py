"""Wrong context parallelism: tokens, positions, masks and heads of other ranks, gradients of keys
and values that stay away, sums over cp that are missing or twice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

from ptrain.axes.context.attention import context_of, spans_at
from ptrain.axes.context.run.cores import GatheredCore, RingCore, _Ring
from ptrain.axes.context.run.slices import SlicedTokens, sliced, token_slices
from ptrain.axes.context.run.ulysses import UlyssesCore
from ptrain.axes.context.tokens import Span
from ptrain.axes.data.run.fully_sharded import FullyShardedWrap
from ptrain.data.corpus import corpus
from ptrain.data.sampler import LocalBatch, batch
from ptrain.interpreter.program import Program
from ptrain.report.finding import Subject
from ptrain.spec.axis import Axis
from tests.faults.fault import Fault, Setting
from tests.faults.planting import after_reduction, exchanged, given, modules

Around = Callable[[], AbstractContextManager[Any]]
Heads = tuple[Tensor, Tensor, Tensor]

CORES = r"blocks\.\d\.attention\.core"


def _setting(attention: Any, degree: int = 2, **others: Any) -> Setting:
    return Setting(mesh={"cp": degree}, sections={"context": {"attention": attention}}, **others)


RING, ZIGZAG, ULYSSES = map(_setting, ("ring", "zigzag", "ulysses"))
GATHERED = _setting("all-gather", placement={"cp": "R,R,R,S*"})
HYBRID = _setting({"ulysses": 2, "ring": 2}, 4)
RING_OF_4, ZIGZAG_OF_4 = _setting("ring", 4), _setting("zigzag", 4)
GPT = _setting("zigzag", model="gpt")
SHARDED = _setting("zigzag", placement={"cp": "S*,S,S,S"})
WITH_DATA = Setting(
    mesh={"dp_replicate": 2, "cp": 2}, sections={"context": {"attention": "zigzag"}}
)


def _group(program: Program) -> dist.ProcessGroup:
    return program.mesh.group((Axis.CP,))


def _spans(program: Program, attention: str | None = None) -> tuple[Span, ...]:
    """A rank's own tokens, or those that another attention gives it."""
    step = context_of(program.spec)
    assert step is not None, "cp has ranks"
    if attention is not None:
        step = replace(
            step, is_balanced=attention == "zigzag", ulysses=1, ring=_group(program).size()
        )
    return spans_at(step, program.mesh.coordinate(Axis.CP))


# losses and gradients


def divided_locally(program: Program) -> None:
    """Each rank divides by the number of its own tokens, and gradients are summed over cp."""
    given(program, lambda _, own: replace(own, global_tokens=own.targets.numel()))


SPACE = ord(" ")


def divided_by_own_count(program: Program) -> None:
    """Each rank divides by a count of its own tokens, which differ, and gradients are averaged over
    cp: as with targets that do not count, of which a rank has more than another."""

    def change(_: int, own: SlicedTokens) -> SlicedTokens:
        counted = int((own.targets != SPACE).sum())
        return replace(own, global_tokens=counted * _group(program).size())

    given(program, change)


def summed_twice(program: Program) -> None:
    """Gradients that are sums over cp are summed over it again."""

    def again(_: int) -> None:
        for gradient in program.gradients():
            dist.all_reduce(gradient, group=_group(program))

    after_reduction(program, again)


def averaged(program: Program) -> None:
    """Losses are divided by the tokens of all ranks, and fully_shard averages over cp."""
    assert isinstance(program.wrapped, FullyShardedWrap)
    for module in program.wrapped.sharded:
        module.set_gradient_divide_factor(float(_group(program).size()))


def never_summed(program: Program) -> None:
    """Each rank keeps the gradients of its own tokens: cp is taken for an axis like tp."""
    micro_batch = program.wrapped.micro_batch
    program.wrapped.micro_batch = lambda is_last: micro_batch(False)


# tokens


def _batch(program: Program, step: int, data_index: int | None = None) -> LocalBatch:
    spec, index = program.spec, program.data_index if data_index is None else data_index
    source, degree = corpus(spec.data), max(spec.data_degree, index + 1)
    return batch(source, spec=spec, step=step, data_index=index, data_degree=degree)


def other_samples(program: Program) -> None:
    """The ranks of a cp group read other samples: one is steps ahead."""

    def change(step: int, own: SlicedTokens) -> SlicedTokens:
        if not program.mesh.coordinate(Axis.CP):
            return own
        return sliced(_batch(program, step + 7), _spans(program))

    given(program, change)


def samples_swapped(program: Program) -> None:
    """The ranks of a cp group have the micro-batches in different orders."""

    def change(_: int, own: SlicedTokens) -> SlicedTokens:
        if not program.mesh.coordinate(Axis.CP):
            return own
        order = [1, 0, *range(2, len(own.inputs))]
        return replace(own, inputs=own.inputs[order], targets=own.targets[order])

    given(program, change)


def contiguous_tokens(program: Program) -> None:
    """The loader cuts contiguous slices, and attention expects early and late chunks."""
    given(program, lambda step, _: sliced(_batch(program, step), _spans(program, "ring")))


def contiguous_targets(program: Program) -> None:
    """Inputs are permuted to early and late chunks, and targets are not."""

    def change(step: int, own: SlicedTokens) -> SlicedTokens:
        (tokens,) = _batch(program, step).tensors
        whole = token_slices(tokens, _spans(program, "ring")).data
        return replace(own, targets=whole.targets)

    given(program, change)


# positions


def positions_from_0(program: Program) -> None:
    """Each rank's tables of angles are those of the first positions."""
    count = program.spec.batch.sequence // _group(program).size()
    program.model.place_tokens(((0, count),))


def learned_from_0(program: Program) -> None:
    """Each rank adds the vectors of the first positions."""
    for module in modules(program, "positions"):
        module.spans = ()


def contiguous_positions(program: Program) -> None:
    """The ranks' angles are those of contiguous slices, and their tokens are not."""
    program.model.place_tokens(_spans(program, "ring"))


def turned_from_0(program: Program) -> None:
    """Sub-blocks turn queries and keys by the index of a token on its rank."""
    whole = type(program.model)(program.spec.model, sequence=program.spec.batch.sequence)
    tables = dict(whole.named_buffers())

    def turned(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, cos, _, *more = args
        count = x.shape[1]
        return (x, *(tables[name][:count].to(cos) for name in ("cos_TK", "sin_TK")), *more)

    for attention in modules(program, r"blocks\.\d\.attention"):
        attention.register_forward_pre_hook(turned)


# masks and hops


class _Sabotaged(torch.autograd.Function):
    """A ring whose passes run inside of something."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, core: RingCore, fault: Any) -> Tensor:
        ctx.fault = fault
        with fault.forward():
            return _Ring.forward(ctx, q, k, v, core)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        with ctx.fault.backward():
            queries, keys, values, _ = _Ring.backward(ctx, gradient)
        return queries, *ctx.fault.gradients(ctx, gradient, (queries, keys, values)), None, None


class _RingFault:
    """What is around a ring's passes, and what becomes of its gradients of keys and values."""

    forward: Around = staticmethod(nullcontext)
    backward: Around = staticmethod(nullcontext)

    def gradients(self, ctx: Any, gradient: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
        return heads[1], heads[2]


def _sabotage_ring(program: Program, fault: _RingFault, pattern: str = CORES) -> None:
    for core in modules(program, pattern):
        ring_core = core.inner if isinstance(core, UlyssesCore) else core
        assert isinstance(ring_core, RingCore)

        def forward(
            q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, of: RingCore = ring_core
        ) -> Tensor:
            return _Sabotaged.apply(q, k, v, of, fault)

        ring_core.forward = forward


class _Behaving(_RingFault):
    """Hops are masked by another rule."""

    def __init__(self, rule: Callable[..., Any]) -> None:
        self.forward = self.backward = lambda: patch.object(ring, "_is_causal_behavior", rule)


def masked_by_local_index(program: Program) -> None:
    """Every block of scores is masked as if its keys began where its queries do."""
    _sabotage_ring(program, _Behaving(lambda **_: ring._CausalBehavior.IS_CAUSAL))


def not_masked(program: Program) -> None:
    """Queries attend to all keys, also those that are still to come."""
    _sabotage_ring(program, _Behaving(lambda **_: ring._CausalBehavior.NOT_IS_CAUSAL))


class _HopMissing(_RingFault):
    """The last hop's block is in no output; torch's backward pass takes part in it or not by the
    same rule, but for early and late chunks, of which it wants a block in any case."""

    def __init__(self, is_balanced: bool) -> None:
        usual = ring._is_causal_behavior

        def rule(*, rank: int, world_size: int, i: int, is_causal: bool) -> Any:
            if i == world_size - 1:
                return ring._CausalBehavior.SKIP
            return usual(rank=rank, world_size=world_size, i=i, is_causal=is_causal)

        self.forward = lambda: patch.object(ring, "_is_causal_behavior", rule)
        self.backward = nullcontext if is_balanced else self.forward


def hop_missing(program: Program) -> None:
    """Keys and values go round one hop less than they should."""
    step = context_of(program.spec)
    assert step is not None, "cp has ranks"
    _sabotage_ring(program, _HopMissing(step.is_balanced))


def own_keys_alone(program: Program) -> None:
    """Nothing is exchanged: a rank attends to the keys that it has."""

    class Alone(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
            more = q.shape[1] // k.shape[1]
            keys, values = (x.repeat_interleave(more, 1) for x in (k, v))
            return nn.functional.scaled_dot_product_attention(q, keys, values, is_causal=True)

    for core in modules(program, CORES):
        core.forward = Alone().forward


def taken_for_contiguous(program: Program) -> None:
    """The ring takes early and late chunks for contiguous slices."""
    for core in modules(program, CORES):
        assert isinstance(core, RingCore)
        core.is_balanced = False


class _NotHome(_RingFault):
    """The last hop of the gradients of keys and values is missing: a rank keeps its neighbour's."""

    def gradients(self, ctx: Any, gradient: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
        keys, values = (exchanged(tensor, ctx.core.group) for tensor in heads[1:])
        return keys, values


class _OwnAlone(_RingFault):
    """No gradients of keys and values travel: a rank keeps those that its own queries gave."""

    def __init__(self, alone: dist.ProcessGroup) -> None:
        self.alone = alone

    def gradients(self, ctx: Any, gradient: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
        with patch.object(ctx.core, "group", self.alone):
            _, keys, values, _ = _Ring.backward(ctx, gradient)
        return keys, values


def not_sent_home(program: Program) -> None:
    _sabotage_ring(program, _NotHome(), r"blocks\.1\.attention\.core")


def not_sent_at_all(program: Program) -> None:
    alone = [dist.new_group([rank]) for rank in range(program.world.size)]
    _sabotage_ring(program, _OwnAlone(alone[program.world.rank]), r"blocks\.1\.attention\.core")


def not_reduced(program: Program) -> None:
    """Gradients of gathered keys and values are cut, and not summed before."""
    for core in modules(program, r"blocks\.1\.attention\.core"):
        assert isinstance(core, GatheredCore)

        def cut(keys: Tensor, values: Tensor, of: GatheredCore = core) -> tuple[Tensor, ...]:
            return tuple(x.chunk(of.size, 2)[of.rank].contiguous() for x in (keys, values))

        core.summed = cut


# heads


def heads_swapped(program: Program) -> None:
    """What comes back of the ranks' heads is put together in another order."""
    for core in modules(program, CORES):
        assert isinstance(core, UlyssesCore)

        def turned(x_BhSD: Tensor, of: UlyssesCore = core) -> Tensor:
            x_NBhTD = x_BhSD.unflatten(2, (of.group.size(), -1)).movedim(2, 0).contiguous()
            return of._exchanged(x_NBhTD).flip(0).movedim(0, 1).flatten(1, 2)

        core._heads_for_tokens = turned


def keys_of_other_heads(program: Program) -> None:
    """A rank is given the keys and values of another rank's heads."""
    count = program.spec.model.heads
    for core in modules(program, CORES):
        assert isinstance(core, UlyssesCore)
        usual = core._tokens_for_heads

        def turned(
            x_BHTD: Tensor, of: UlyssesCore = core, usual: Callable[[Tensor], Tensor] = usual
        ) -> Tensor:
            if x_BHTD.shape[1] == count:
                return usual(x_BHTD)
            return usual(x_BHTD.unflatten(1, (of.group.size(), -1)).flip(1).flatten(1, 2))

        core._tokens_for_heads = turned


FAULTS = (
    Fault(
        name="loss divided by a rank's own tokens (cp)",
        setting=RING,
        plant=divided_locally,
        subjects=(Subject.LOSS, Subject.GRADIENTS),
        axis="cp",
        factor="× 2",
    ),
    Fault(
        name="loss divided by a rank's own count, unequal over cp",
        setting=ZIGZAG,
        plant=divided_by_own_count,
        subjects=(Subject.LOSS, Subject.GRADIENTS),
        axis="cp",
        factor="normalised per rank of cp",
    ),
    Fault(
        name="gradient times cp: summed twice",
        setting=ZIGZAG,
        plant=summed_twice,
        subjects=(Subject.GRADIENTS,),
        axis="cp",
        factor="× 2",
    ),
    Fault(
        name="gradient divided by cp: averaged sums",
        setting=SHARDED,
        plant=averaged,
        subjects=(Subject.GRADIENTS,),
        axis="cp",
        factor="÷ 2",
    ),
    Fault(
        name="gradients not summed over cp",
        setting=ULYSSES,
        plant=never_summed,
        subjects=(Subject.GRADIENTS,),
        axis="cp",
        factor="missing all-reduce over cp",
    ),
    Fault(
        name="gradients summed over neither cp nor data ranks",
        setting=WITH_DATA,
        plant=never_summed,
        subjects=(Subject.GRADIENTS,),
        axis="cp|dp_replicate",
        factor="missing all-reduce over (dp_replicate and cp|cp and dp_replicate)",
    ),
    Fault(
        name="ranks of cp read different samples",
        setting=RING,
        plant=other_samples,
        subjects=(Subject.BATCH,),
        axis="cp",
        factor="no sample",
    ),
    Fault(
        name="ranks of cp have samples in different orders",
        setting=GATHERED,
        plant=samples_swapped,
        subjects=(Subject.BATCH,),
        axis="cp",
        factor="order",
    ),
    Fault(
        name="contiguous tokens for a zigzag ring",
        setting=ZIGZAG,
        plant=contiguous_tokens,
        subjects=(Subject.BATCH,),
        axis="cp",
        factor="tokens 0-7 of its samples for 0-3, 12-15",
    ),
    Fault(
        name="contiguous targets for zigzag tokens",
        setting=ZIGZAG,
        plant=contiguous_targets,
        subjects=(Subject.BATCH,),
        axis="cp",
        factor="targets 0-7 of its samples for inputs 0-3, 12-15",
    ),
    Fault(
        name="angles of positions from 0 on each rank",
        setting=RING,
        plant=positions_from_0,
        subjects=(Subject.BUFFERS,),
        axis="cp",
        factor="positions 0-7 for 8-15",
        place="_TK",
    ),
    Fault(
        name="angles of contiguous positions for zigzag tokens",
        setting=ZIGZAG,
        plant=contiguous_positions,
        subjects=(Subject.BUFFERS,),
        axis="cp",
        factor="positions 0-7 for 0-3, 12-15",
        place="_TK",
    ),
    Fault(
        name="learned positions from 0 on each rank",
        setting=GPT,
        plant=learned_from_0,
        subjects=(Subject.ACTIVATIONS,),
        axis="cp",
        factor="positions 0-7",
        place="positions",
    ),
    Fault(
        name="queries and keys turned by local positions",
        setting=ZIGZAG,
        plant=turned_from_0,
        subjects=(Subject.ACTIVATIONS,),
        axis="cp",
        factor="positions 0-7",
        place=r"blocks\.0\.attention\.core",
    ),
    Fault(
        name="causal mask by local index",
        setting=RING,
        plant=masked_by_local_index,
        subjects=(Subject.ACTIVATIONS,),
        axis="cp",
        factor="mask by local index",
        place=r"blocks\.0\.attention\.core",
    ),
    Fault(
        name="no causal mask between blocks",
        setting=RING_OF_4,
        plant=not_masked,
        subjects=(Subject.ACTIVATIONS,),
        axis="cp",
        factor="no causal mask",
        place=r"blocks\.0\.attention\.core",
    ),
    Fault(
        name="a hop missing: ring",
        setting=RING_OF_4,
        plant=hop_missing,
        subjects=(Subject.ACTIVATIONS,),
        axis="cp",
        factor="missing keys",
        place=r"blocks\.0\.attention\.core",
    ),
    Fault(
        name="a hop missing: zigzag",
        setting=ZIGZAG_OF_4,
        plant=hop_missing,
        subjects=(Subject.ACTIVATIONS,),
        axis="cp",
        factor="missing keys",
        place=r"blocks\.0\.attention\.core",
    ),
    Fault(
        name="a hop missing: hybrid",
        setting=HYBRID,
        plant=hop_missing,
        subjects=(Subject.ACTIVATIONS,),
        axis="cp",
        factor="missing keys",
        place=r"blocks\.0\.attention\.core",
    ),
    Fault(
        name="keys and values are not gathered",
        setting=GATHERED,
        plant=own_keys_alone,
        subjects=(Subject.ACTIVATIONS,),
        axis="cp",
        factor="missing keys",
        place=r"blocks\.0\.attention\.core",
    ),
    Fault(
        name="zigzag tokens in a ring that takes them for contiguous",
        setting=ZIGZAG,
        plant=taken_for_contiguous,
        subjects=(Subject.ACTIVATIONS,),
        axis="cp",
        factor="mask of contiguous slices",
        place=r"blocks\.0\.attention\.core",
    ),
    Fault(
        name="dK and dV a hop from home",
        setting=RING_OF_4,
        plant=not_sent_home,
        subjects=(Subject.ACTIVATIONS, Subject.GRADIENTS),
        axis="cp",
        factor="dK and dV of cp rank 1",
        place=r"blocks\.1\.attention",
    ),
    Fault(
        name="dK and dV of own queries alone: zigzag",
        setting=ZIGZAG,
        plant=not_sent_at_all,
        subjects=(Subject.ACTIVATIONS, Subject.GRADIENTS),
        axis="cp",
        factor="missing dK and dV",
        place=r"blocks\.1\.attention",
    ),
    Fault(
        name="dK and dV of own queries alone: hybrid",
        setting=HYBRID,
        plant=not_sent_at_all,
        subjects=(Subject.ACTIVATIONS, Subject.GRADIENTS),
        axis="cp",
        factor="missing dK and dV",
        place=r"blocks\.1\.attention",
    ),
    Fault(
        name="dK and dV of gathered keys not summed",
        setting=GATHERED,
        plant=not_reduced,
        subjects=(Subject.ACTIVATIONS, Subject.GRADIENTS),
        axis="cp",
        factor="missing dK and dV",
        place=r"blocks\.1\.attention",
    ),
    Fault(
        name="Ulysses heads swapped on their way back",
        setting=ULYSSES,
        plant=heads_swapped,
        subjects=(Subject.ACTIVATIONS,),
        axis="cp",
        factor="heads|slices in another order",
        place=r"blocks\.0\.attention\.core",
    ),
    Fault(
        name="Ulysses heads swapped on their way back: hybrid",
        setting=HYBRID,
        plant=heads_swapped,
        subjects=(Subject.ACTIVATIONS,),
        axis="cp",
        factor="heads|slices in another order",
        place=r"blocks\.0\.attention\.core",
    ),
    Fault(
        name="Ulysses keys of other heads",
        setting=ULYSSES,
        plant=keys_of_other_heads,
        subjects=(Subject.ACTIVATIONS,),
        axis="cp",
        factor="keys of other heads",
        place=r"blocks\.0\.attention\.core",
    ),
)
