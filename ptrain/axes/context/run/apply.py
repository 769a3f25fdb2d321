"""Apply a placement on the context axis to a model: attention reaches the tokens of other ranks,
and positions are those of the rank's tokens in the whole sequence.

Ulysses (Jacobs et al. 2023): ranks exchange their tokens of all heads for all tokens of their
heads, attend, and exchange back. Key-value heads that the degree does not divide are repeated
first: up to the degree, where it is a multiple of their number.

Legend of shape suffixes: B samples, H heads of all ranks, T tokens of a rank, D elements per head,
N ranks, h heads of a rank, S tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn

from ptrain.axes.context.attention import Span, all_spans, repeats, spans_at
from ptrain.axes.context.run.cores import GatheredCore, RingCore
from ptrain.axes.context.run.rehearsal import give_positions, reach
from ptrain.axes.context.run.slices import (
    MicroBatchCut,
    SampleSlices,
    SlicedDocuments,
    masks_at,
    route_slices,
    sliced,
)
from ptrain.facts.model import Attending
from ptrain.internals.functional_collectives import all_to_all_single_autograd, awaited
from ptrain.models.attention import Core, repeated
from ptrain.models.modes import dropouts
from ptrain.models.objective import StepBatch
from ptrain.models.transformer import Transformer
from ptrain.rooms.comm import Mesh
from ptrain.spec.dials import ReduceScatterVia
from ptrain.steps.step import ContextParallel

# Ulysses (Jacobs et al. 2023): ranks exchange their tokens of all heads for all tokens of their
# heads, attend, and exchange back. Where they do not divide the heads of keys and values these are
# repeated first, as often as each rank then has as many: to the degree, where it is a multiple.
#
# Legend of shape suffixes: B samples, H heads of all ranks, T tokens of a rank, D elements per
# head, N ranks, h heads of a rank, S tokens of all of them.


class UlyssesCore(nn.Module):
    """`inner` attends, to all tokens that the group has."""

    def __init__(self, group: dist.ProcessGroup, inner: nn.Module) -> None:
        super().__init__()
        self.group, self.inner = group, inner

    def forward(
        self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask_SS: Tensor | None = None
    ) -> Tensor:
        times = repeats(self.group.size(), k_BGTD.shape[1])
        k_BGTD, v_BGTD = repeated(k_BGTD, times), repeated(v_BGTD, times)
        heads = [self._tokens_for_heads(x_BHTD) for x_BHTD in (q_BHTD, k_BGTD, v_BGTD)]
        del k_BGTD, v_BGTD
        y_BhSD = self.inner(*heads, mask_SS)
        del heads
        return self._heads_for_tokens(y_BhSD)

    def _tokens_for_heads(self, x_BHTD: Tensor) -> Tensor:
        x_NBhTD = x_BHTD.unflatten(1, (self.group.size(), -1)).movedim(1, 0).contiguous()
        return self._exchanged(x_NBhTD).movedim(0, 2).flatten(2, 3)

    def _heads_for_tokens(self, x_BhSD: Tensor) -> Tensor:
        x_NBhTD = x_BhSD.unflatten(2, (self.group.size(), -1)).movedim(2, 0).contiguous()
        return self._exchanged(x_NBhTD).movedim(0, 1).flatten(1, 2)

    def _exchanged(self, x_NBhTD: Tensor) -> Tensor:
        ones = [1] * self.group.size()
        return awaited(all_to_all_single_autograd(x_NBhTD, ones, ones, self.group))


def own_spans(step: ContextParallel, mesh: Mesh) -> tuple[Span, ...]:
    """Return the tokens of this rank, in the order in which it has them."""
    return spans_at(step, mesh.coordinate(step.axis))


def own_tokens(step: ContextParallel, mesh: Mesh) -> Callable[[StepBatch], StepBatch]:
    """Return what takes this rank's tokens of a batch."""
    return partial(sliced, spans=own_spans(step, mesh))


class ContextGroups:
    """The ranks that exchange tokens for heads, and those that keys and values go round; made once,
    in the same order on every rank. None where there is one of them. `attending`: the modules of a
    model that is not built in whose attention goes over them. `masks` are those of dropout."""

    def __init__(
        self,
        step: ContextParallel,
        mesh: Mesh,
        cut: MicroBatchCut,
        attending: Attending | None = None,
    ) -> None:
        self.attending = attending
        self.masks = masks_at(step, mesh.coordinate(step.axis), cut)
        self.ulysses = self.ring = None
        degree, lines = step.ulysses * step.ring, range(step.ulysses * step.ring)
        if step.ulysses == degree:
            self.ulysses = mesh.group((step.axis,))
        elif step.ring == degree:
            self.ring = mesh.group((step.axis,))
        else:
            for first in range(0, degree, step.ulysses):
                line = lines[first : first + step.ulysses]
                self.ulysses = mesh.group_at(step.axis, line) or self.ulysses
            for first in range(step.ulysses):
                line = lines[first :: step.ulysses]
                self.ring = mesh.group_at(step.axis, line) or self.ring


def parallelize_context(
    model: nn.Module,
    step: ContextParallel,
    mesh: Mesh,
    groups: ContextGroups,
    via: ReduceScatterVia,
) -> None:
    """Let the layers of `model`, or of a stage of it, attend over `step.axis`. Its tensors may be
    on meta."""
    core_over = partial(_reaching, step=step, mesh=mesh, groups=groups, via=via)
    spans = groups.masks.spans
    groups.masks.around(_dropping(model, groups.attending))
    if isinstance(model, Transformer):
        model.place_tokens(spans)
        group, registry = mesh.group((step.axis,)), mesh.registry
        tokens = SampleSlices(group, registry, [*all_spans(step)])
        route_slices(model, tokens, tokens.slices)
        if model.documents is not None:
            model.documents = SlicedDocuments(model.documents, step, group, registry)
        for module in list(model.modules()):
            core = getattr(module, "core", None)
            if isinstance(core, Core):
                module.core = core_over(core, core.scores.scale)
        return
    attending, known = groups.attending, dict(model.named_modules())
    assert attending is not None, "the facts of another model have what attends"
    give_positions(model, attending.positions, spans)
    for own in attending.modules:
        if own.name in known:  # else it is another stage's
            reach(known[own.name], core_over)


def _dropping(model: nn.Module, attending: Attending | None) -> Iterator[nn.Module]:
    """Yield the modules whose own code drops out something: of a model that is not built in those
    that were seen to, which may be another stage's."""
    known = dict(model.named_modules())
    if attending is None:
        names = [name.rpartition(".")[0] for name, _ in dropouts(model)]
    else:
        names = [name for name in attending.dropping if name in known]
    yield from (known[name] for name in dict.fromkeys(names))


def _reaching(
    core: nn.Module,
    scale: float | None,
    *,
    step: ContextParallel,
    mesh: Mesh,
    groups: ContextGroups,
    via: ReduceScatterVia,
) -> nn.Module:
    """Return what attends over cp; `core` attends to all tokens."""
    inner = core
    if groups.ring is not None:
        if step.gathers:
            inner = GatheredCore(groups.ring, scale, via, mesh.registry)
        else:
            inner = RingCore(groups.ring, scale, is_balanced=step.is_balanced)
    return inner if groups.ulysses is None else UlyssesCore(groups.ulysses, inner)
