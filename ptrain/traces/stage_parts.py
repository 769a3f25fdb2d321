"""What the stages of a model that is not built in allocate: one micro-batch is traced through each,
pass by pass, and told as plain data, since other processes may be asked for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ptrain.axes.pipeline.run.cut import part_of
from ptrain.axes.pipeline.stage_facts import chain_of, stages_of
from ptrain.axes.tensor.run.apply import loss_inside
from ptrain.facts.model import ModelFacts
from ptrain.facts.passes import Passes, of_first_stage, of_later_stage
from ptrain.facts.plain import from_plain, to_plain
from ptrain.facts.stages import Ends, Stage
from ptrain.interpreter.loss import Loss
from ptrain.models.heads import head_of
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.models.trace import Recording, to_timeline
from ptrain.models.units import ROOT
from ptrain.plan.lower import lower
from ptrain.spec.spec import Spec
from ptrain.timeline import Kind, Timeline
from ptrain.traces.stage_trace import PassEvents, TracedStage, record_passes

Rows = list[dict[str, Any]]  # JSON, a mapping for each stage
Around = Callable[[], AbstractContextManager[None]]
Prepare = Callable[[nn.Module, Stage, Ends], None]


def stage_rows(
    module: nn.Module,
    spec: Spec,
    facts: ModelFacts,
    prepare: Prepare | None = None,
    around: Around = nullcontext,
) -> Rows:
    """Return the rows of every stage. `prepare` cuts a stage's operators, in place, and `around` is
    what its passes run in. The generator's state is left as it was."""
    stages, ends = stages_of(spec, facts), chain_of(spec, facts).ends
    plan = lower(spec, facts.unit_modules, facts.roles, stages, facts.blocks)
    loss = Loss(loss_inside(plan.loss, plan.tensor) if plan.loss else None)
    head = head_of(module, spec) if plan.loss else ROOT
    rows: Rows = []
    with torch.random.fork_rng(devices=[]):
        for stage in stages:
            part = part_of(module, stages, stage.index, ends)
            traced = _traced(part, spec, facts, stage, loss if stage is stages[-1] else None)
            with around():
                if prepare is not None:
                    prepare(part, stage, ends)
                if stage is stages[-1]:
                    loss.attach(part, head)
                if prepare is not None:
                    record_passes(traced)  # torch learns what each operator is cut to
                rows.append(_rows(traced, in_halves=spec.pipeline.is_in_halves and stage.index > 0))
    return rows


def _traced(
    part: nn.Module, spec: Spec, facts: ModelFacts, stage: Stage, loss: Loss | None
) -> TracedStage:
    """`loss`: of the last stage."""
    micro, sequence = spec.batch.micro, spec.batch.sequence
    own = sequence // _slices(spec, facts)
    dtype = TORCH_DTYPES[spec.precision.effective.parameters]
    tokens = torch.zeros(micro, sequence + 1, dtype=torch.int64)
    targets = tokens[:, 1:]
    return TracedStage(
        module=part,
        units=stage.units(facts.unit_modules),
        hidden=torch.zeros(micro, own, chain_of(spec, facts).hidden, dtype=dtype),
        given=None if stage.index else tokens[:, :-1],
        loss=(lambda output: loss.of(output, targets) / spec.batch.tokens) if loss else None,
        around=partial(loss.given, targets) if loss else nullcontext,
    )


def _slices(spec: Spec, facts: ModelFacts) -> int:
    """Into how many tp cuts the tokens between the blocks."""
    stages = stages_of(spec, facts)
    step = lower(spec, facts.unit_modules, facts.roles, stages, facts.blocks).tensor
    return spec.degree(step.axis) if step is not None and step.is_sequence else 1


def _rows(traced: TracedStage, *, in_halves: bool) -> dict[str, Any]:
    whole = record_passes(traced)
    rows = {
        "passes": to_plain(
            replace(to_timeline(whole.recording()), repeated=whole.repeated), Timeline
        ),
        "output": whole.sizes[whole.output],
    }
    if in_halves:
        rows["halves"] = to_plain(
            to_timeline(_halves(record_passes(traced, in_halves=True))), Timeline
        )
    return rows


def _halves(passes: PassEvents) -> Recording:
    """Return the half of the inputs, then that of the weights, as one recording."""
    return Recording(passes.events["input"], passes.events["weight"], passes.sizes)


def stage_passes(
    spec: Spec, facts: ModelFacts, by_place: Sequence[Rows]
) -> tuple[tuple[Passes, ...], ...]:
    """Return the passes by stage, then by place along tp; `by_place` are the rows of each place."""
    itemsize = spec.precision.effective.parameters.itemsize
    tokens = spec.batch.micro * spec.batch.sequence // _slices(spec, facts)
    hidden = tokens * chain_of(spec, facts).hidden * itemsize
    return tuple(
        tuple(_passes(rows, index, hidden) for rows in of_places)
        for index, of_places in enumerate(zip(*by_place, strict=True))
    )


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
