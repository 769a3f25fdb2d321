"""What the stages of a model that is not built in allocate: one micro-batch is traced through each,
pass by pass, and told as plain data, since other processes may be asked for it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ptrain.axes.context.run.randomness import MicroBatchCut
from ptrain.axes.expert.run.apply import parallelize_experts
from ptrain.axes.pipeline.stage_facts import chain_of
from ptrain.codec import decode, encode
from ptrain.facts.model import ModelFacts
from ptrain.facts.operators import LayerWork, ModelWork, WorkByKind
from ptrain.facts.passes import Passes, RowsPasses, passes_of
from ptrain.facts.rows_timeline import RowsTimeline
from ptrain.facts.stages import Stage, Units
from ptrain.models.heads import head_of
from ptrain.models.selection import Extent
from ptrain.models.trace import Recording, to_timeline
from ptrain.models.units import ROOT
from ptrain.plan.lower import lower
from ptrain.rooms.mesh import Mesh
from ptrain.spec.spec import Spec
from ptrain.timeline import Timeline
from ptrain.traces.layer_rows import (
    TracedLayers,
    alike_of,
    kind_of_row,
    only,
    running,
    running_units,
)
from ptrain.traces.rank_part import ContextSlices, RankPart, StageCuts
from ptrain.traces.rows import UnevenLoads, uneven_loads

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

    def trace(stage: Stage, units: Units) -> _StageTraces:
        names = running(spec, stage.layers)
        ran = running_units(units, stage.layers, names)
        in_halves = spec.pipeline.is_in_halves and stage.index > 0
        uneven = uneven_loads(spec, plan, stage.layers)
        with only(module, stage.layers, names):
            recordings = part.trace_stage(
                module,
                ran,
                cuts,
                stage.index,
                alike_of(spec, stage.layers),
                *([uneven.assume] if uneven else []),
                in_halves=in_halves,
            )
        whole, *halves = recordings[: 1 + in_halves]
        layers = TracedLayers(whole, names, ran, *halves)
        return _StageTraces(layers, uneven, recordings[1 + in_halves :])

    traced: dict[Hashable, _StageTraces] = {}
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


@dataclass(frozen=True, slots=True)
class _StageTraces:
    """What a stage did, and where sizes depend on where tokens go what it did with `uneven`
    loads."""

    layers: TracedLayers
    uneven: UnevenLoads | None
    unevenly: Sequence[Recording]

    def formulas(self) -> dict[str, Any]:
        """Return its passes and their halves as formulas, null where there is none, and of which
        layers; nothing where where tokens go changes nothing."""
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
        plain = [encode(formula, RowsTimeline | None) for formula in formulas]
        return {"uneven": list(self.uneven.layers), "formulas": plain}


def _of_halves(recording: Recording) -> Recording:
    """Return what the halves of a backward pass did, as if they were the two passes."""
    passes = {"forward": recording.passes["input"], "backward": recording.passes["weight"]}
    return replace(recording, passes=passes, moved=(), works={})


def _rows(traced: _StageTraces, stage: Stage, units: Units) -> dict[str, Any]:
    layers = traced.layers
    whole, halves = layers.recording, layers.halves
    assert whole.output is not None, "a stage hands something on"
    rows = {
        "passes": encode(layers.timeline(stage.layers, units), Timeline),
        "output": whole.sizes[whole.output],
        "work": encode(layers.work(stage.layers), WorkByKind | None),
    }
    if halves is not None:
        timeline = to_timeline(_of_halves(halves))
        rows["halves"] = encode(replace(timeline, saved=()), Timeline)
    return rows | traced.formulas()


def stage_passes(
    spec: Spec, facts: ModelFacts, by_place: Sequence[Rows]
) -> tuple[tuple[Passes, ...], ...]:
    """Return the passes by stage, then by place along tp; `by_place` are the rows of each place."""
    hidden = _hidden_bytes(spec, facts)
    return tuple(
        tuple(_passes(rows, index, hidden) for rows in of_places)
        for index, of_places in enumerate(zip(*by_place, strict=True))
    )


def stage_formulas(
    spec: Spec, facts: ModelFacts, by_place: Sequence[Rows]
) -> tuple[tuple[RowsPasses, ...], ...]:
    """Return the passes as formulas of where tokens go, as `stage_passes`, of a stage where that
    changes none nothing; nothing at all where there is no formula of one."""
    hidden = _hidden_bytes(spec, facts)
    if any(None in row.get("formulas", ()) for rows in by_place for row in rows):
        return ()
    return tuple(
        tuple(_formula(rows, index, hidden) for rows in of_places if "formulas" in rows)
        for index, of_places in enumerate(zip(*by_place, strict=True))
    )


def _hidden_bytes(spec: Spec, facts: ModelFacts) -> int:
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
    joined = ModelWork(front=first.front, layers=tuple(layers), behind=last.behind)
    return WorkByKind.of(joined)


def _passes(rows: Mapping[str, Any], index: int, hidden: int) -> Passes:
    return passes_of(
        decode(rows["passes"], Timeline),
        decode(rows.get("halves"), Timeline | None),
        is_first=index == 0,
        output=rows["output"],
        hidden=hidden,
    )
