"""Trace the stages of a model that is not built in, pass by pass, and express the allocations of a
rank with experts as a formula of its rows.

Two traces run the same operators, but each layer gets a different number of rows. A storage with
the same size in both has this size for any rows. A storage that grew with the rows of one layer has
a number of bytes per row. If a storage grew otherwise, or other operators ran, there is no formula.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from ptrain.axes.context.run.slices import MicroBatchCut
from ptrain.axes.expert.form import is_by_routing
from ptrain.axes.expert.run.apply import overloaded_routing, parallelize_experts, set_routing
from ptrain.axes.pipeline.stage_facts import chain_of
from ptrain.derivation.pipeline import message_bytes
from ptrain.facts.model import (
    LayerWork,
    ModelFacts,
    ModelWork,
    Passes,
    RowsItem,
    RowsPasses,
    RowsSize,
    RowsTimeline,
    StorageEvent,
    StorageEvents,
    WorkByKind,
    passes_of,
)
from ptrain.facts.stages import Stage, Units, is_within
from ptrain.models.facts import head_of
from ptrain.models.trace import (
    Event,
    Extent,
    GradientComplete,
    Recording,
    StorageAllocated,
    StorageFreed,
    between_boundaries,
    last_views,
    to_complete_item,
    to_timeline,
)
from ptrain.models.units import ROOT
from ptrain.plan.lower import lower
from ptrain.runtime.comm import Mesh
from ptrain.spec.spec import Spec
from ptrain.steps.experts import layers_of, num_choices
from ptrain.steps.step import Plan
from ptrain.timeline import Boundary
from ptrain.traces.rank_part import (
    ContextSlices,
    EqualLayers,
    RankPart,
    StageCuts,
    TracedLayers,
    run_only,
    running_units,
)

Sizes = Mapping[int, RowsSize]


class _NoFormula(Exception):
    """The error for allocations that are not a formula of the rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenLoads:
    """The loads of the second trace of a model.

    In the first trace all experts get `rows` rows. In the second, the experts of the first layer
    with experts get one row more, of the second such layer two rows more, and so on. Each layer's
    storages therefore grow by a different ratio.

    Attributes:
        layers: The layers with experts that run.
        rows: Rows of each expert in the first trace.
        of_model: All layers with experts, including those that do not run.
    """

    layers: tuple[str, ...]
    rows: int
    of_model: tuple[str, ...]

    def overload_experts(self, model: nn.Module) -> None:
        """Route additional rows to the experts of `model` from now on."""
        set_routing(
            model, lambda layer: partial(overloaded_routing, more=1 + self.layers.index(layer))
        )

    def formula(self, first: Recording, second: Recording) -> RowsTimeline | None:
        """Return the timeline as a formula of the rows, or None if there is none.

        Args:
            first: The recording with even loads.
            second: The recording with these loads.
        """
        try:
            return self._formula(first, second)
        except _NoFormula:
            return None

    def _formula(self, first: Recording, second: Recording) -> RowsTimeline:
        if _operators(first) != _operators(second):
            raise _NoFormula("other operators run with more rows")
        sizes = {
            number: self._size(size, second.sizes[number]) for number, size in first.sizes.items()
        }
        return RowsTimeline(
            forward=tuple(_items(first.forward, sizes, first.sizes)),
            backward=tuple(_items(first.backward, sizes, first.sizes)),
            moved=tuple((tier, sizes[number]) for number, tier in first.moved),
            repeated=first.recomputed_collectives,
        )

    def _size(self, first: int, second: int) -> RowsSize:
        """Return the size of a storage with these bytes in the two traces.

        Raises:
            _NoFormula: The size did not grow with the rows of one layer.
        """
        if first == second:
            return RowsSize(first)
        for layer in range(len(self.layers)):
            # The ratios (rows + 1 + layer) / rows differ by layer, so at most one layer explains
            # the growth.
            of_row, rest = divmod(first, self.rows)
            if not rest and of_row * (self.rows + 1 + layer) == second:
                return RowsSize(of_row, layer)
        raise _NoFormula(f"a storage of {first} bytes grew to {second} bytes")


def uneven_loads(spec: Spec, plan: Plan, layers: EqualLayers) -> UnevenLoads | None:
    """Return the loads of the second trace.

    Args:
        spec: The spec.
        plan: Its plan.
        layers: The layers of the model or stage.

    Returns:
        The loads. None if routing does not change allocations, or no layer that runs has experts.
    """
    if (step := plan.experts) is None or not is_by_routing(spec):
        return None
    of_model = layers_of(step)
    own = tuple(name for name in of_model if is_within(name, layers.run_layers))
    return UnevenLoads(layers=own, rows=num_choices(spec, step), of_model=of_model) if own else None


def _operators(recording: Recording) -> object:
    """Return the events of a recording without their sizes."""
    passes = {
        name: [
            replace(event, size=0) if isinstance(event, StorageAllocated) else event
            for event in events
        ]
        for name, events in recording.passes.items()
    }
    return passes, recording.sizes.keys(), recording.moved, recording.recomputed_collectives


def _items(events: Sequence[Event], sizes: Sizes, known: Mapping[int, int]) -> Iterator[RowsItem]:
    """Yield the items of a pass with sizes as formulas.

    Args:
        events: The events of the pass.
        sizes: The formula of each storage's size.
        known: The bytes of each storage with even loads.
    """
    last = last_views(events)
    for part in between_boundaries(events):
        match part:
            case Boundary():
                yield part
            case GradientComplete():
                # A gradient is kept over the step, and its row in the memory estimate has no
                # formula.
                own = (part.id, *part.freed)
                if any(sizes[number] != RowsSize(known[number]) for number in own):
                    raise _NoFormula(f"the gradient of {part.parameter} depends on routed rows")
                yield to_complete_item(part, last, known)
            case lives:
                happened = (StorageEvent(sizes[e.id], isinstance(e, StorageFreed)) for e in lives)
                yield StorageEvents(tuple(happened))


class StageTrace(NamedTuple):
    """The trace of one rank's part of a stage, or of a model without stages.

    Attributes:
        passes: The passes with even loads.
        work: The operators. None if unknown.
        is_by_rows: True if the rows of its experts change sizes.
        formula: The passes for any rows. None if there is no formula, or sizes do not depend on
            rows.
    """

    passes: Passes
    work: WorkByKind | None
    is_by_rows: bool = False
    formula: RowsPasses | None = None


def rank_part(
    module: nn.Module,
    spec: Spec,
    facts: ModelFacts,
    mesh: Mesh | None = None,
    *,
    extent: Extent = Extent.GIVEN,
) -> RankPart:
    """Return the changes of the plan to a module on one rank.

    Args:
        module: The full module.
        spec: The spec.
        facts: Its model.
        mesh: The mesh of the sharding axes. None if no axis shards layers.
        extent: The share of elements that data-dependent operators select.
    """
    plan = lower(spec, facts)
    cut = MicroBatchCut(samples=spec.batch.micro, slices=plan.boundary_slices)
    return RankPart(
        batch=spec.batch.micro,
        sequence=spec.batch.sequence,
        tensor=plan.tensor,
        mesh=mesh.submesh((plan.tensor.axis,)) if mesh and plan.tensor else None,
        kv_group=mesh.consecutive_group(plan.tensor.axis, plan.tensor.kv_ranks)
        if mesh and plan.tensor
        else None,
        context=ContextSlices(plan.context, mesh, spec.reduce_scatter, cut, facts.attending)
        if mesh and plan.context
        else None,
        experts=partial(parallelize_experts, step=plan.experts, mesh=mesh)
        if mesh and plan.experts
        else None,
        slices=plan.boundary_slices,
        keep=plan.keep,
        compiled=plan.compiled,
        quantize=plan.quantize,
        loss=plan.loss,
        head=head_of(module, spec) if plan.loss else ROOT,
        spec=spec,
        extent=extent,
    )


def stage_traces(
    module: nn.Module,
    spec: Spec,
    facts: ModelFacts,
    mesh: Mesh | None = None,
    *,
    extent: Extent = Extent.GIVEN,
) -> list[StageTrace]:
    """Trace every stage on one rank. Equal stages are traced once.

    The state of the random generator is restored.

    Args:
        module: The full module.
        spec: The spec.
        facts: Its model.
        mesh: The mesh of the sharding axes. None if no axis shards layers.
        extent: The share of elements that data-dependent operators select.

    Returns:
        One trace for each stage, first to last.
    """
    part, plan = rank_part(module, spec, facts, mesh, extent=extent), lower(spec, facts)
    stages, chain = plan.stages, chain_of(spec, facts)
    cuts, hidden = StageCuts(stages=stages, chain=chain), message_bytes(spec, plan, chain)

    def trace(stage: Stage, units: Units) -> PartTraces:
        layers = EqualLayers.from_spec(spec, stage.layers, in_halves=spec.pipeline.is_in_halves)
        ran = running_units(units, stage.layers, layers.run_layers)
        in_halves = spec.pipeline.is_in_halves and stage.index > 0
        uneven = uneven_loads(spec, plan, layers)
        with run_only(module, stage.layers, layers.run_layers):
            recordings = part.trace_stage(
                module,
                ran,
                cuts,
                stage.index,
                layers,
                *([uneven.overload_experts] if uneven else []),
                in_halves=in_halves,
            )
        whole, *halves = recordings[: 1 + in_halves]
        own = TracedLayers(whole, layers, ran, *halves)
        is_first = stage.index == 0
        return PartTraces(own, uneven, recordings[1 + in_halves :], is_first, hidden)

    traced: dict[Hashable, PartTraces] = {}
    traces: list[StageTrace] = []
    with torch.random.fork_rng(devices=[]):
        for stage in stages:
            units = stage.stage_units(facts.unit_modules)
            layers = EqualLayers.from_spec(spec, stage.layers, in_halves=spec.pipeline.is_in_halves)
            # Only the ends of the model have other modules than layers, so that stages with equal
            # rows of layers between them run the same operators.
            kind = stage.index == 0, stage.index == len(stages) - 1, layers.rows
            if kind not in traced:
                traced[kind] = trace(stage, units)
            traces.append(traced[kind].stage_trace(layers, units))
    return traces


@dataclass(frozen=True, slots=True)
class PartTraces:
    """The recordings of a stage, or of a model without stages.

    Attributes:
        layers: The layers that ran.
        uneven: The loads of the second trace. None if routing changes no size.
        unevenly: The recordings with these loads: of the full backward, then of its halves.
        is_first: True for the first stage.
        hidden: Bytes of a micro-batch that cross a stage boundary.
    """

    layers: TracedLayers
    uneven: UnevenLoads | None
    unevenly: Sequence[Recording]
    is_first: bool = True
    hidden: int = 0

    def stage_trace(self, layers: EqualLayers, units: Units) -> StageTrace:
        """Return the trace of layers with these kinds, in a model or stage with these units."""
        own, halves = self.layers, self.layers.halves
        passes = passes_of(
            own.timeline(layers, units),
            own.of_all(to_timeline(_of_halves(halves)), layers, units) if halves else None,
            is_first=self.is_first,
            output=self._output,
            hidden=self.hidden,
        )
        is_by_rows = self.uneven is not None
        return StageTrace(passes, own.work(layers), is_by_rows, self._formula(layers, units))

    @property
    def _output(self) -> int:
        """The bytes that a stage sends to the next one."""
        recording = self.layers.recording
        return 0 if recording.output is None else recording.sizes[recording.output]

    def _formula(self, layers: EqualLayers, units: Units) -> RowsPasses | None:
        """Return the passes as a formula of rows, or None."""
        if self.uneven is None:
            return None
        evenly = [self.layers.recording, *([self.layers.halves] if self.layers.halves else [])]
        formulas = [
            self.uneven.formula(first, second)
            for first, second in zip(
                (evenly[0], *map(_of_halves, evenly[1:])),
                (self.unevenly[0], *map(_of_halves, self.unevenly[1:])),
                strict=True,
            )
        ]
        whole, *halves = (of and self.layers.of_all(of, layers, units) for of in formulas)
        if whole is None or None in halves:
            return None
        return RowsPasses(
            layers=tuple(name for name in self.uneven.of_model if is_within(name, layers.layers)),
            whole=whole,
            halves=halves[0] if halves else None,
            is_first=self.is_first,
            output=self._output,
            hidden=self.hidden,
        )


def _of_halves(recording: Recording) -> Recording:
    """Return a recording whose forward and backward are the two halves of the backward pass."""
    passes = {"forward": recording.passes["input"], "backward": recording.passes["weight"]}
    return replace(recording, passes=passes, moved=(), works={})


def stage_formulas(stages: Sequence[Sequence[StageTrace]]) -> tuple[tuple[RowsPasses, ...], ...]:
    """Return the formulas by stage and place along the cutting axes.

    A stage without experts has none. The result is empty if the formula of any stage is missing.
    """
    if any(trace.is_by_rows and trace.formula is None for places in stages for trace in places):
        return ()
    return tuple(tuple(trace.formula for trace in places if trace.formula) for places in stages)


def joined_works(by_place: Sequence[Sequence[StageTrace]]) -> tuple[WorkByKind, ...]:
    """Return the work of all stages together, by place along the cutting axes.

    Args:
        by_place: The traces of all stages, by place.

    Returns:
        The work. Empty if the work of any stage is unknown.
    """
    works = [[trace.work for trace in traces if trace.work] for traces in by_place]
    is_known = all(len(own) == len(traces) for own, traces in zip(works, by_place, strict=True))
    return tuple(map(_join_stages, works)) if is_known else ()


def _join_stages(stages: Sequence[WorkByKind]) -> WorkByKind:
    """Join the work of stages. Work of a later stage before its layers, or of an earlier stage
    after them, is added to its first or last layer."""
    first, last = stages[0].to_model, stages[-1].to_model
    layers: list[LayerWork] = []
    for place, stage in enumerate(stages):
        model = stage.to_model
        of_stage = [*model.layers]
        if place > 0:
            of_stage[0] = model.front.followed_by(of_stage[0])
        if place < len(stages) - 1:
            of_stage[-1] = of_stage[-1].followed_by(model.behind)
        layers += of_stage
    return WorkByKind.from_model(
        ModelWork(front=first.front, layers=tuple(layers), behind=last.behind)
    )
