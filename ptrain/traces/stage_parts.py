"""Trace what the stages of a model that is not built in allocate, pass by pass, as plain data,
since other processes may be asked for it; and the allocation of a rank with experts as a formula
of their rows.

Two traces of the same operators are compared, between which each layer gets another number of rows.
A storage of the same size in both has that size; one that grew with the rows of a layer has so many
bytes per row. If another one grew, or operators differ, there is no formula.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ptrain.axes.context.run.slices import MicroBatchCut
from ptrain.axes.expert.form import is_by_routing
from ptrain.axes.expert.run.apply import assume, parallelize_experts
from ptrain.axes.expert.run.exchange import heavier
from ptrain.axes.pipeline.stage_facts import chain_of
from ptrain.codec import decode, encode
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
    Born,
    Completion,
    Died,
    Event,
    Extent,
    Recording,
    between_boundaries,
    completion,
    last_views,
    to_timeline,
)
from ptrain.models.units import ROOT
from ptrain.plan.lower import lower
from ptrain.rooms.comm import Mesh
from ptrain.spec.spec import Spec
from ptrain.steps.experts import choices, layers_of
from ptrain.steps.step import Plan
from ptrain.timeline import Boundary, Timeline
from ptrain.traces.rank_part import (
    ContextSlices,
    EqualLayers,
    RankPart,
    StageCuts,
    TracedLayers,
    only,
    running_units,
)

Sizes = Mapping[int, RowsSize]


class _NoFormula(Exception):
    """What is allocated is no formula of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenLoads:
    """The second trace of a model: the experts of its first layer with some get a row more than in
    the first trace, where all get as many `rows`, those of the next one two, and so on. So no two
    layers' storages grow in the same ratio. `of_model`: all layers with experts, run or not."""

    layers: tuple[str, ...]
    rows: int
    of_model: tuple[str, ...]

    def assume(self, model: nn.Module) -> None:
        """From now on the experts of `model` get so many."""
        assume(model, lambda layer: partial(heavier, more=1 + self.layers.index(layer)))

    def formula(self, first: Recording, second: Recording) -> RowsTimeline | None:
        """Return the formula of the rows that both traces are of; None where there is none."""
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
            repeated=first.repeated,
        )

    def _size(self, first: int, second: int) -> RowsSize:
        """Return the size of a storage that was so large in the two traces."""
        if first == second:
            return RowsSize(first)
        for layer in range(len(self.layers)):
            of_row, rest = divmod(first, self.rows)
            if not rest and of_row * (self.rows + 1 + layer) == second:
                return RowsSize(of_row, layer)
        raise _NoFormula(f"a storage of {first} bytes grew to {second} bytes")


def uneven_loads(spec: Spec, plan: Plan, layers: EqualLayers) -> UnevenLoads | None:
    """Return how to trace what the plan has made of these layers of a model once more; None where
    they allocate the same wherever tokens go."""
    if (step := plan.experts) is None or not is_by_routing(spec):
        return None
    of_model = layers_of(step)
    own = tuple(name for name in of_model if is_within(name, layers.ran))
    return UnevenLoads(layers=own, rows=choices(spec, step), of_model=of_model) if own else None


def _operators(recording: Recording) -> object:
    """What happened, whatever the sizes."""
    passes = {
        name: [replace(event, size=0) if isinstance(event, Born) else event for event in events]
        for name, events in recording.passes.items()
    }
    return passes, recording.sizes.keys(), recording.moved, recording.repeated


def _items(events: Sequence[Event], sizes: Sizes, known: Mapping[int, int]) -> Iterator[RowsItem]:
    last = last_views(events)
    for part in between_boundaries(events):
        match part:
            case Boundary():
                yield part
            case Completion():
                own = (part.id, *part.freed)
                if any(sizes[number] != RowsSize(known[number]) for number in own):
                    raise _NoFormula(f"the gradient of {part.parameter} depends on routed rows")
                yield completion(part, last, known)
            case lives:
                happened = (StorageEvent(sizes[e.id], isinstance(e, Died)) for e in lives)
                yield StorageEvents(tuple(happened))


Rows = list[dict[str, Any]]  # JSON, a mapping for each stage


def rank_part(
    module: nn.Module,
    spec: Spec,
    facts: ModelFacts,
    mesh: Mesh | None = None,
    *,
    extent: Extent = Extent.GIVEN,
) -> RankPart:
    """Return what the plan does to a module before it runs on one rank, over the `mesh` of the
    cutting axes where there are some. `extent`: how much operators select by data."""
    plan = lower(spec, facts)
    cut = MicroBatchCut(samples=spec.batch.micro, slices=plan.boundary_slices)
    return RankPart(
        batch=spec.batch.micro,
        sequence=spec.batch.sequence,
        tensor=plan.tensor,
        mesh=mesh.submesh((plan.tensor.axis,)) if mesh and plan.tensor else None,
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


def stage_rows(
    module: nn.Module,
    spec: Spec,
    facts: ModelFacts,
    mesh: Mesh | None = None,
    *,
    extent: Extent = Extent.GIVEN,
) -> Rows:
    """Return the rows of every stage, of which those that do alike are traced once; `mesh` and
    `extent` as of `rank_part`. The generator's state is left as it was."""
    part, plan = rank_part(module, spec, facts, mesh, extent=extent), lower(spec, facts)
    stages = plan.stages
    cuts = StageCuts(stages=stages, chain=chain_of(spec, facts))

    def trace(stage: Stage, units: Units) -> PartTraces:
        layers = EqualLayers.of(spec, stage.layers)
        ran = running_units(units, stage.layers, layers.ran)
        in_halves = spec.pipeline.is_in_halves and stage.index > 0
        uneven = uneven_loads(spec, plan, layers)
        with only(module, stage.layers, layers.ran):
            recordings = part.trace_stage(
                module,
                ran,
                cuts,
                stage.index,
                layers,
                *([uneven.assume] if uneven else []),
                in_halves=in_halves,
            )
        whole, *halves = recordings[: 1 + in_halves]
        own = TracedLayers(whole, layers, ran, *halves)
        return PartTraces(own, uneven, recordings[1 + in_halves :])

    traced: dict[Hashable, PartTraces] = {}
    rows: Rows = []
    with torch.random.fork_rng(devices=[]):
        for stage in stages:
            units = stage.units(facts.unit_modules)
            if (kind := _kind_of_stage(spec, stage, len(stages))) not in traced:
                traced[kind] = trace(stage, units)
            rows.append(traced[kind].row(EqualLayers.of(spec, stage.layers), units))
    return rows


def _kind_of_stage(spec: Spec, stage: Stage, stages: int) -> Hashable:
    """Return what stages have in common that do alike: none but its own layers where nobody says
    that these do."""
    rows = EqualLayers.of(spec, stage.layers).rows
    return stage.index == 0, stage.index == stages - 1, rows


@dataclass(frozen=True, slots=True)
class PartTraces:
    """What a stage did, or a model without stages, and where sizes depend on where tokens go what
    it did with `uneven` loads."""

    layers: TracedLayers
    uneven: UnevenLoads | None
    unevenly: Sequence[Recording]

    def row(self, layers: EqualLayers, units: Units) -> dict[str, Any]:
        """Return what such layers do as JSON: passes, the bytes that a stage hands on, and work."""
        own, halves = self.layers, self.layers.halves
        output = own.recording.output
        row = {
            "passes": encode(own.timeline(layers, units), Timeline),
            "output": 0 if output is None else own.recording.sizes[output],
            "work": encode(own.work(layers), WorkByKind | None),
        }
        if halves is not None:
            row["halves"] = encode(to_timeline(_of_halves(halves)), Timeline)
        return row | self._formulas(layers, units)

    def _formulas(self, layers: EqualLayers, units: Units) -> dict[str, Any]:
        """Return passes of such layers and their halves as formulas, null where there is none, and
        of which layers; nothing where where tokens go changes nothing."""
        if self.uneven is None:
            return {}
        evenly = [self.layers.recording, *([self.layers.halves] if self.layers.halves else [])]
        formulas = [
            self.uneven.formula(first, second)
            for first, second in zip(
                (evenly[0], *map(_of_halves, evenly[1:])),
                (self.unevenly[0], *map(_of_halves, self.unevenly[1:])),
                strict=True,
            )
        ]
        of_all = [of and self.layers.of_all(of, layers, units) for of in formulas]
        plain = [encode(formula, RowsTimeline | None) for formula in of_all]
        own = [name for name in self.uneven.of_model if is_within(name, layers.layers)]
        return {"uneven": own, "formulas": plain}


def _of_halves(recording: Recording) -> Recording:
    """Return what the halves of a backward pass did, as if they were the two passes."""
    passes = {"forward": recording.passes["input"], "backward": recording.passes["weight"]}
    return replace(recording, passes=passes, moved=(), works={})


def stage_passes(by_place: Sequence[Rows], hidden: int) -> tuple[tuple[Passes, ...], ...]:
    """Return the passes by stage, then by place along the cutting axes; `by_place` are the rows of
    each place, and so many bytes go over a boundary."""
    return tuple(
        tuple(_passes(rows, index, hidden) for rows in of_places)
        for index, of_places in enumerate(zip(*by_place, strict=True))
    )


def stage_formulas(by_place: Sequence[Rows], hidden: int) -> tuple[tuple[RowsPasses, ...], ...]:
    """Return the passes as formulas of where tokens go, as `stage_passes`, of a stage where that
    changes none nothing; nothing at all where there is no formula of one."""
    if any(None in row.get("formulas", ()) for rows in by_place for row in rows):
        return ()
    return tuple(
        tuple(_formula(rows, index, hidden) for rows in of_places if "formulas" in rows)
        for index, of_places in enumerate(zip(*by_place, strict=True))
    )


def hidden_bytes(spec: Spec, facts: ModelFacts) -> int:
    """Return the bytes of what goes over a boundary, of a micro-batch."""
    itemsize = spec.precision.effective.parameters.itemsize
    slices = lower(spec, facts).boundary_slices
    shape = chain_of(spec, facts).sample_shape(spec.batch.sequence, slices)
    return spec.batch.micro * math.prod(shape) * itemsize


def _formula(rows: Mapping[str, Any], index: int, hidden: int) -> RowsPasses:
    whole, *halves = (decode(plain, RowsTimeline) for plain in rows["formulas"])
    return RowsPasses(
        layers=tuple(rows["uneven"]),
        whole=whole,
        halves=halves[0] if halves else None,
        is_first=index == 0,
        output=rows["output"],
        hidden=hidden,
    )


def stage_works(by_place: Sequence[Rows]) -> tuple[WorkByKind, ...]:
    """Return by place along tp what all stages compute together, layer by layer; nothing where that
    of one is not known."""
    if any(row["work"] is None for rows in by_place for row in rows):
        return ()
    return tuple(_joined([decode(row["work"], WorkByKind) for row in rows]) for rows in by_place)


def _joined(stages: Sequence[WorkByKind]) -> WorkByKind:
    """What a later stage does before its layers, or an earlier one behind them, is its first or its
    last layer's."""
    first, last = stages[0].model, stages[-1].model
    layers: list[LayerWork] = []
    for place, stage in enumerate(stages):
        model = stage.model
        of_stage = [*model.layers]
        if place > 0:
            of_stage[0] = model.front.then(of_stage[0])
        if place < len(stages) - 1:
            of_stage[-1] = of_stage[-1].then(model.behind)
        layers += of_stage
    return WorkByKind.of(ModelWork(front=first.front, layers=tuple(layers), behind=last.behind))


def _passes(rows: Mapping[str, Any], index: int, hidden: int) -> Passes:
    return passes_of(
        decode(rows["passes"], Timeline),
        decode(rows.get("halves"), Timeline | None),
        is_first=index == 0,
        output=rows["output"],
        hidden=hidden,
    )
