"""Wrong attention over cp: masks by other indices, keys and heads of other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

from ptrain.axes.context.attention import context_of
from ptrain.axes.context.run import apply
from ptrain.axes.context.run.apply import (
    GatheredCore,
    RingCore,
    UlyssesCore,
    _GatheredAttention,
    _key_blocks,
    _RingAttention,
)
from ptrain.interpreter.program import Program
from ptrain.models.attention import SdpaCore
from ptrain.report.finding import Subject
from tests.faults.fault import Fault
from tests.faults.of_slices import GATHERED, HYBRID, RING, RING_OF_4, ULYSSES, ZIGZAG, ZIGZAG_OF_4
from tests.faults.planting import modules

_RULE = "_is_causal_behavior"
Around = Callable[[], AbstractContextManager[Any]]
Heads = tuple[Tensor, Tensor, Tensor]

CORES = r"blocks\.\d\.attention\.core"


# masks and hops


class _Sabotaged(torch.autograd.Function):
    """A core whose passes run inside a context."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, fault: Any, *others: Any) -> Tensor:
        ctx.fault, ctx.kind = (
            fault,
            _GatheredAttention if isinstance(others[-1], GatheredCore) else _RingAttention,
        )
        with fault.forward():
            return ctx.kind.forward(ctx, q, k, v, *others)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        with ctx.fault.backward():
            queries, keys, values, *others = ctx.kind.backward(ctx, gradient)
        gradients = ctx.fault.gradients(ctx, gradient, (queries, keys, values))
        return *gradients, None, *others


class CoreFault:
    """A context for a core's passes, and a change of its gradients."""

    forward: Around = staticmethod(nullcontext)
    backward: Around = staticmethod(nullcontext)

    def gradients(self, ctx: Any, gradient: Tensor, heads: Heads) -> Heads:
        return heads


def sabotage(program: Program, fault: CoreFault, pattern: str = CORES) -> None:
    for core in modules(program, pattern):
        inner = core.inner if isinstance(core, UlyssesCore) else core
        assert isinstance(inner, (RingCore, GatheredCore))

        def forward(
            q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, of: nn.Module = inner
        ) -> Tensor:
            return _Sabotaged.apply(q, k, v, fault, mask, of)

        inner.forward = forward


class _Ruled(CoreFault):
    """A core whose blocks are masked by the function `name` of a module."""

    def __init__(self, module: Any, name: str, rule: Callable[..., Any]) -> None:
        self.forward = self.backward = lambda: patch.object(module, name, rule)


def masked_by_local_index(program: Program) -> None:
    """Mask every block of scores as if its keys began at the queries' first position."""
    sabotage(program, _Ruled(ring, _RULE, lambda **_: ring._CausalBehavior.IS_CAUSAL))


def gathered_by_local_index(program: Program) -> None:
    """Mask earlier ranks' keys like local keys."""

    def blocks(*sizes: Any) -> Iterator[tuple[slice, bool]]:
        for part, _ in _key_blocks(*sizes):
            yield part, True

    sabotage(program, _Ruled(apply, "_blocks", blocks))


def not_masked(program: Program) -> None:
    """Attend to all keys, including later ones."""
    sabotage(program, _Ruled(ring, _RULE, lambda **_: ring._CausalBehavior.NOT_IS_CAUSAL))


class _HopMissing(CoreFault):
    """A ring without its last hop. torch's backward pass takes part by the same rule, except for
    early and late chunks, which need a block in any case."""

    def __init__(self, is_balanced: bool) -> None:
        usual = ring._is_causal_behavior

        def rule(*, rank: int, world_size: int, i: int, is_causal: bool) -> Any:
            if i == world_size - 1:
                return ring._CausalBehavior.SKIP
            return usual(rank=rank, world_size=world_size, i=i, is_causal=is_causal)

        self.forward = lambda: patch.object(ring, _RULE, rule)
        self.backward = nullcontext if is_balanced else self.forward


def hop_missing(program: Program) -> None:
    """Pass keys and values around one hop less than required."""
    step = context_of(program.spec)
    assert step is not None, "cp has ranks"
    sabotage(program, _HopMissing(step.is_balanced))


def own_keys_alone(program: Program) -> None:
    """Attend to local keys only, without an exchange."""
    for core in modules(program, CORES):
        core.forward = SdpaCore().forward


def taken_for_contiguous(program: Program) -> None:
    """Treat early and late chunks as contiguous slices."""
    for core in modules(program, CORES):
        assert isinstance(core, RingCore)
        core.is_balanced = False


# heads


def heads_swapped(program: Program) -> None:
    """Join the ranks' heads in another order."""
    for core in modules(program, CORES):
        assert isinstance(core, UlyssesCore)

        def turned(x_BhSD: Tensor, of: UlyssesCore = core) -> Tensor:
            x_NBhTD = x_BhSD.unflatten(2, (of.group.size(), -1)).movedim(2, 0).contiguous()
            return of._all_to_all(x_NBhTD).flip(0).movedim(0, 1).flatten(1, 2)

        core._heads_for_tokens = turned


def keys_of_other_heads(program: Program) -> None:
    """Give a rank the keys and values of another rank's heads."""
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
        name="causal mask by local index",
        setting=RING,
        plant=masked_by_local_index,
        subjects=(Subject.ACTIVATIONS,),
        axis="cp",
        factor="mask by local index",
        place=r"blocks\.0\.attention\.core",
    ),
    Fault(
        name="causal mask by local index: all-gather",
        setting=GATHERED,
        plant=gathered_by_local_index,
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
        name="Ulysses heads swapped on their way back",
        setting=ULYSSES,
        plant=heads_swapped,
        subjects=(Subject.ACTIVATIONS,),
        axis="cp",
        factor="heads|shards in another order",
        place=r"blocks\.0\.attention\.core",
    ),
    Fault(
        name="Ulysses heads swapped on their way back: hybrid",
        setting=HYBRID,
        plant=heads_swapped,
        subjects=(Subject.ACTIVATIONS,),
        axis="cp",
        factor="heads|shards in another order",
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
