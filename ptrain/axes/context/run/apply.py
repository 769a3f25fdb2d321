"""What a placement on the context axis does to a model: its layers' cores reach the tokens of other
ranks, and its positions are those of the rank's own tokens in the whole sequence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from torch import nn

from ptrain.axes.context.attention import spans_at
from ptrain.axes.context.run.cores import GatheredCore, RingCore
from ptrain.axes.context.run.documents import SlicedDocuments
from ptrain.axes.context.run.slices import sliced
from ptrain.axes.context.run.ulysses import UlyssesCore
from ptrain.axes.context.tokens import Span
from ptrain.models.attention import Core
from ptrain.models.batch import StepBatch
from ptrain.models.transformer import Transformer
from ptrain.rooms.mesh import Mesh
from ptrain.spec.dials import ReduceScatterVia
from ptrain.steps.context import ContextParallel


def own_spans(step: ContextParallel, mesh: Mesh) -> tuple[Span, ...]:
    """Return the tokens of this rank, in the order in which it has them."""
    return spans_at(step, mesh.coordinate(step.axis))


def own_tokens(step: ContextParallel, mesh: Mesh) -> Callable[[StepBatch], StepBatch]:
    """Return what takes this rank's tokens of a batch."""
    return partial(sliced, spans=own_spans(step, mesh))


class ContextGroups:
    """The ranks that exchange tokens for heads, and those that keys and values go round; made once,
    in the same order on every rank. None where there is one of them."""

    def __init__(self, step: ContextParallel, mesh: Mesh) -> None:
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
    assert isinstance(model, Transformer), "legality takes no others"
    model.place_tokens(own_spans(step, mesh))
    if model.documents is not None:
        group = mesh.group((step.axis,))
        has_all = groups.ulysses is not None
        start, registry = model.documents.start, mesh.registry
        model.documents = SlicedDocuments(start, group, registry, has_all=has_all)
    for module in list(model.modules()):
        core = getattr(module, "core", None)
        if isinstance(core, Core):
            module.core = _reaching(core, step, mesh, groups, via)


def _reaching(
    core: Core, step: ContextParallel, mesh: Mesh, groups: ContextGroups, via: ReduceScatterVia
) -> nn.Module:
    inner: nn.Module = core
    if groups.ring is not None:
        inner = _round(core, step, mesh, groups.ring, via)
    return inner if groups.ulysses is None else UlyssesCore(groups.ulysses, inner)


def _round(
    core: Core,
    step: ContextParallel,
    mesh: Mesh,
    group: dist.ProcessGroup,
    via: ReduceScatterVia,
) -> nn.Module:
    scale = core.scores.scale
    if step.gathers:
        return GatheredCore(group, scale, via, mesh.registry)
    return RingCore(group, scale, is_balanced=step.is_balanced)
