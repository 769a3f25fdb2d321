"""What the stages of a model that is not built in allocate: one micro-batch is traced through each,
pass by pass, and told as plain data, since other processes may be asked for it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ptrain.axes.context.run.randomness import MicroBatchCut
from ptrain.axes.expert.run.apply import parallelize_experts
from ptrain.axes.pipeline.stage_facts import chain_of, stages_of
from ptrain.facts.model import ModelFacts
from ptrain.facts.operators import LayerWork, ModelWork, WorkByKind
from ptrain.facts.passes import Passes, of_first_stage, of_later_stage
from ptrain.facts.plain import from_plain, to_plain
from ptrain.facts.stages import Stage, Units
from ptrain.models.heads import head_of
from ptrain.models.selection import Extent
from ptrain.models.trace import to_timeline
from ptrain.models.units import ROOT
from ptrain.plan.lower import lower
from ptrain.rooms.mesh import Mesh
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.timeline import Kind, Timeline
from ptrain.traces.layer_rows import (
    TracedLayers,
    alike_of,
    kind_of_row,
    only,
    running,
    running_units,
)
from ptrain.traces.rank_part import ContextSlices, RankPart, StageCuts

Rows = list[dict[str, Any]]  # JSON, a mapping for each stage


def plan_of(spec: Spec, facts: ModelFacts) -> Plan:
    """Return the plan of a spec whose model has these facts."""
    stages = stages_of(spec, facts)
    return lower(spec, facts.unit_modules, facts.roles, stages, facts.blocks, facts.fusions)


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
    plan = plan_of(spec, facts)
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
    chain, stages = chain_of(spec, facts), stages_of(spec, facts)
    cuts = StageCuts(stages=stages, chain=chain)
    part = rank_part(module, spec, facts, mesh, extent=extent)

    def trace(stage: Stage, units: Units) -> TracedLayers:
        names = running(spec, stage.layers)
        ran = running_units(units, stage.layers, names)
        in_halves = spec.pipeline.is_in_halves and stage.index > 0
        with only(module, stage.layers, names):
            recordings = part.trace_stage(
                module, ran, cuts, stage.index, alike_of(spec, stage.layers), in_halves=in_halves
            )
        return TracedLayers(recordings[0], names, ran, *recordings[1:])

    traced: dict[Hashable, TracedLayers] = {}
    rows: Rows = []
    with torch.random.fork_rng(devices=[]):
        for stage in stages:
            units = stage.units(facts.unit_modules)
            kind = _kind_of_stage(spec, stage, len(stages))
            if kind not in traced:
                traced[kind] = trace(stage, units)
            rows.append(_rows(traced[kind], stage, units))
    return rows


def _kind_of_stage(spec: Spec, stage: Stage, stages: int) -> Hashable:
    """Return what stages have in common that do alike: none but its own index where nobody says
    that their layers do."""
    kind = kind_of_row(spec, stage.layers)
    if kind is None:
        return stage.index
    ends = stage.index == 0, stage.index == stages - 1
    return *ends, kind, len(running(spec, stage.layers))


def _rows(layers: TracedLayers, stage: Stage, units: Units) -> dict[str, Any]:
    whole, halves = layers.recording, layers.halves
    assert whole.output is not None, "a stage hands something on"
    rows = {
        "passes": to_plain(layers.timeline(stage.layers, units), Timeline),
        "output": whole.sizes[whole.output],
        "work": to_plain(layers.work(stage.layers), WorkByKind),
    }
    if halves is not None:
        of_backward = {"forward": halves.passes["input"], "backward": halves.passes["weight"]}
        timeline = to_timeline(replace(halves, passes=of_backward, moved=(), works={}))
        rows["halves"] = to_plain(replace(timeline, saved=()), Timeline)
    return rows


def stage_passes(
    spec: Spec, facts: ModelFacts, by_place: Sequence[Rows]
) -> tuple[tuple[Passes, ...], ...]:
    """Return the passes by stage, then by place along tp; `by_place` are the rows of each place."""
    itemsize = spec.precision.effective.parameters.itemsize
    slices = plan_of(spec, facts).boundary_slices
    shape = chain_of(spec, facts).sample_shape(spec.batch.sequence, slices)
    hidden = spec.batch.micro * math.prod(shape) * itemsize
    return tuple(
        tuple(_passes(rows, index, hidden) for rows in of_places)
        for index, of_places in enumerate(zip(*by_place, strict=True))
    )


def stage_works(by_place: Sequence[Rows]) -> tuple[WorkByKind, ...]:
    """Return by place along tp what all stages compute together, layer by layer; nothing where that
    of one is not known."""
    if any(row["work"] is None for rows in by_place for row in rows):
        return ()
    return tuple(
        _joined([from_plain(row["work"], WorkByKind) for row in rows]) for rows in by_place
    )


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
    joined = ModelWork(front=first.front, layers=tuple(layers), behind=last.behind)
    return WorkByKind.of(joined)


def _passes(rows: Mapping[str, Any], index: int, hidden: int) -> Passes:
    whole = from_plain(rows["passes"], Timeline)
    items = {Kind.FORWARD: whole.forward, Kind.BACKWARD: whole.backward}
    if index == 0:
        passes = of_first_stage(items, output=rows["output"])
        return replace(passes, moved=whole.moved, repeated=whole.repeated)
    if "halves" in rows:
        halves = from_plain(rows["halves"], Timeline)
        items |= {Kind.INPUT: halves.forward, Kind.WEIGHT: halves.backward}
    passes = of_later_stage(items, output=rows["output"], hidden=hidden)
    return replace(passes, moved=whole.moved, repeated=whole.repeated)
