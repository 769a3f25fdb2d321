"""The legal tuple of the pipeline axis, and the stages and schedules that a spec may use.

All ranks of the axis work on the same micro-batches with different layers. Parameters, optimizer
state and gradients are S, by layer and therefore in unequal parts; activations are local (R). Any
tuple of the data axes can be combined with it, within each stage. If a rank shards gradients or
gathers parameters, every micro-batch of the step may move them: `sync` decides, and `derivation`
counts it.

The mesh order is the spec's. With pp outermost, a stage's replicas are consecutive ranks (Theorem
7.1); inside the data axes they are not (Remark 4), but the computation is identical.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from ptrain.axes.data.form import data_factors, form_of
from ptrain.axes.pipeline.catalogue import (
    faults_of_rows,
    pipeline_of,
    schedule_faults,
    takes_any_stages,
)
from ptrain.axes.rule import AxisRules, SpecRule, TupleRule
from ptrain.errors import Fault
from ptrain.facts.stages import layer_count_faults
from ptrain.spec.dials import UnitKind
from ptrain.spec.model import ModelShape
from ptrain.spec.pipeline import ListedSchedule, PipelineSpec
from ptrain.spec.placement import S_STAR, Axis, M, R, S, Tier
from ptrain.spec.shorthand import two_ranks
from ptrain.spec.spec import Spec
from ptrain.steps.wraps import Form
from ptrain.units import with_noun

_DISJOINT = "Theorem 4, state consistency"
_PER_STAGE = "Theorem 7.2, gradients are reduced among replicas of a stage"
_BETWEEN_STAGES = "Theorem 7.3, activations are sent from stage to stage of one pipeline"
_EVERY_MICROBATCH = "Theorem 3, gradient integrity"


_TUPLES = (
    TupleRule(
        name="states are sharded by stage",
        theorem=_DISJOINT,
        is_broken=lambda placement, _: (placement.parameters, placement.optimizer) != (S, S),
        message=(
            "parameters and optimizer state must be S on pp: each rank holds the layers "
            "of its stages only"
        ),
        repair=lambda placement: replace(placement, parameters=S, optimizer=S),
    ),
    TupleRule(
        name="gradients are reduced per stage",
        theorem=_PER_STAGE,
        is_broken=lambda placement, _: placement.gradients != S,
        message=(
            "gradients must be S on pp: the gradients of a stage exist on its rank only "
            "and are not reduced over pp"
        ),
        repair=lambda placement: replace(placement, gradients=S),
    ),
    TupleRule(
        name="activations are those of the local layers",
        theorem="Definition 2",
        is_broken=lambda placement, _: placement.activations != R,
        message=(
            "activations on pp must be R: each rank holds the full activations of its "
            "layers; M and O are set for all axes at the top level, `activations=M`"
        ),
        repair=lambda placement: replace(placement, activations=R),
    ),
)


def _rounds_of_stages(spec: Spec) -> Iterator[Fault]:
    """Require equal numbers of stages on all ranks, and as many as are listed."""
    ranks, said = spec.degree(Axis.PP), spec.pipeline
    if ranks == 1:
        return
    if isinstance(said.schedule, ListedSchedule) and pipeline_of(spec) is None:
        yield from faults_of_rows(said.schedule, ranks)
        return
    stages, split = said.stages_over(ranks), said.split
    listed = len(split) if isinstance(split, tuple) else stages
    if listed != stages:
        yield Fault(
            place="pipeline.split",
            finding=f"{_split_text(spec)} has {with_noun(listed, 'stage')}, but "
            + (f"{said.schedule} has" if said.stages is None else "pipeline.stages is")
            + f" {stages}",
            remedy=(
                f"{'L' if said.stages is None else 'Remove `pipeline.stages`, or l'}ist "
                f"{stages} numbers."
            ),
        )
    elif stages < ranks or stages % ranks:
        is_listed = said.stages is None
        near = sorted({max(1, stages // ranks) * ranks, -(-stages // ranks) * ranks} - {0})
        yield Fault(
            place="pipeline.split" if is_listed else "pipeline.stages",
            finding=(
                f"{_split_text(spec) + ' has ' if is_listed else ''}{with_noun(stages, 'stage')}, "
                f"not a multiple of pp={ranks} ranks"
            ),
            remedy=(
                f"List {' or '.join(map(str, near))} numbers."
                if is_listed
                else f"Use {' or '.join(f'`pipeline.stages={number}`' for number in near)}."
            ),
        )


def _schedule_faults(spec: Spec) -> Iterator[Fault]:
    """Require a schedule that fits the pipeline."""
    if (pipeline := pipeline_of(spec)) is not None:
        yield from schedule_faults(spec.pipeline.schedule, pipeline)


def _layer_faults(spec: Spec) -> Iterator[Fault]:
    """Require at least one layer per stage, and a split that fits the layers."""
    pipeline, shape = pipeline_of(spec), spec.model
    if pipeline is None or not isinstance(shape, ModelShape):
        return
    stages, layers, ranks = pipeline.stages, shape.layers, pipeline.ranks
    split = spec.pipeline.split
    if stages <= layers:
        is_list = isinstance(split, tuple) and len(split) == stages
        yield from layer_count_faults(split, layers) if isinstance(split, tuple) and is_list else ()
        return
    ways = []
    if takes_any_stages(spec.pipeline.schedule) and layers >= ranks:
        ways.append(f"use `pipeline.stages={layers // ranks * ranks}`")
    fewer = layers // pipeline.stages_per_rank
    ways.append(
        f"use `mesh.pp={fewer}`{' or less' if fewer > 2 else ''}"
        if fewer > 1
        else "remove `mesh.pp`"
    )
    written = "pipeline.split" if isinstance(split, tuple) else "mesh.pp"
    yield Fault(
        place="pipeline.stages" if spec.pipeline.stages is not None else written,
        finding=(
            f"{stages} stages ({pipeline.stages_per_rank} on each of {ranks} ranks) need "
            f"at least one layer each; the model has {layers}"
        ),
        remedy=f"{', or '.join((*ways, 'use a model with more layers')).capitalize()}.",
    )


def _split_text(spec: Spec) -> str:
    """Return the split as it is written in a spec."""
    split = spec.pipeline.split
    return f"[{', '.join(map(str, split))}]" if isinstance(split, tuple) else str(split)


def _unit_faults(spec: Spec) -> Iterator[Fault]:
    """Reject units that could span two stages."""
    if spec.degree(Axis.PP) > 1 and spec.unit_size.kind in (UnitKind.BLOCKS, UnitKind.MODEL):
        yield Fault(
            place="unit",
            finding=(
                f"not supported yet: unit={spec.unit_size} with pp (a unit could span two stages)"
            ),
            remedy="Use `unit=block` or `unit=sub-block`.",
        )


def _kept_for_a_while(spec: Spec) -> Iterator[Fault]:
    """Reject flat units that are freed after one pass only, and their prefetch."""
    sync = spec.sync
    keeps = not sync.reshard_after_forward
    if spec.degree(Axis.PP) == 1 or form_of(spec) is not Form.FLAT:
        return
    if keeps is sync.reshard_after_backward:
        yield Fault(
            place=f"sync.reshard_after_{'backward' if keeps else 'forward'}",
            finding=(
                "not supported yet: with pp, units of this placement that are freed "
                "after one pass and kept after the other"
            ),
            remedy=(
                "Set `sync.reshard_after_forward` and `sync.reshard_after_backward` to "
                "the same value."
            ),
        )
    if spec.prefetch:
        yield Fault(
            place="prefetch",
            finding="not supported yet: prefetch with pp for units of this placement",
            remedy="Remove `prefetch`.",
        )


def _half_faults(spec: Spec) -> Iterator[Fault]:
    """Reject freeing of units with schedules that split backward passes."""
    sync = spec.sync
    if spec.degree(Axis.PP) == 1 or not spec.pipeline.is_in_halves:
        return
    for key in ("reshard_after_forward", "reshard_after_backward"):
        gathers = any(
            f.placement.parameters.distribution is not R.distribution for f in data_factors(spec)
        )
        if gathers and getattr(sync, key):
            yield Fault(
                place=f"sync.{key}",
                finding=(
                    f"not supported yet: freeing units with {spec.pipeline.schedule}, "
                    "which computes weight gradients later than input gradients"
                ),
                remedy=(
                    f"Use `sync.{key}=false`, or a schedule with full backward passes, "
                    "`pipeline.schedule=1f1b`."
                ),
            )


def _regather_faults(spec: Spec) -> Iterator[Fault]:
    """Reject sharded saved activations with schedules that split backward passes."""
    cut = (f for f in spec.factors if f.axis is Axis.TP and f.placement.activations == S_STAR)
    if spec.degree(Axis.PP) != 1 and spec.pipeline.is_in_halves and any(cut):
        yield Fault(
            place="placement.tp.activations",
            finding=(
                "not supported yet: sharded saved activations with "
                f"{spec.pipeline.schedule}, whose two backward halves would both gather them"
            ),
            remedy="Use S or R, or a schedule with full backward passes, `pipeline.schedule=1f1b`.",
        )


def _whole_matrices(spec: Spec) -> Iterator[Fault]:
    """Reject optimizers that need full matrices."""
    if spec.degree(Axis.PP) > 1 and not spec.optimizer.is_elementwise:
        yield Fault(
            place="optimizer.name",
            finding=f"not supported yet: {spec.optimizer.matrix_optimizer} with pp",
            remedy="Use `optimizer.name=adamw`, or remove `mesh.pp`.",
        )


def _tied_head_faults(spec: Spec) -> Iterator[Fault]:
    """Reject gradients of a tied head that the first and last stage cannot sum on the device."""
    factors, shape = data_factors(spec), spec.model
    is_tied = isinstance(shape, ModelShape) and shape.tied
    if spec.degree(Axis.PP) == 1 or not is_tied:
        return
    for factor in factors:
        gradients = factor.placement.gradients
        if gradients.tier is not Tier.DEVICE or gradients == M:
            yield Fault(
                place=f"placement.{factor.axis}.gradients",
                finding=(
                    f"not supported yet: gradients {gradients} with a tied head, which "
                    "the first and the last stage reduce on the device before the update"
                ),
                remedy="Use `model.tied=false`, or place gradients on the device.",
            )
            return


PIPELINE = AxisRules(
    axes=(Axis.PP,),
    tuples=_TUPLES,
    specs=(
        SpecRule(
            name="ranks have equal numbers of stages",
            theorem=_BETWEEN_STAGES,
            faults=_rounds_of_stages,
        ),
        SpecRule(name="every stage has layers", theorem=_BETWEEN_STAGES, faults=_layer_faults),
        SpecRule(
            name="the schedule has enough micro-batches",
            theorem=_EVERY_MICROBATCH,
            faults=_schedule_faults,
        ),
    ),
    unsupported=(
        SpecRule(name="units are within a stage", theorem="", faults=_unit_faults),
        SpecRule(name="one policy for both passes", theorem="", faults=_kept_for_a_while),
        SpecRule(name="units exist until their weight gradients", theorem="", faults=_half_faults),
        SpecRule(name="saved shards are gathered once", theorem="", faults=_regather_faults),
        SpecRule(
            name="shared gradients are reduced before the update",
            theorem="",
            faults=_tied_head_faults,
        ),
        SpecRule(name="full updates exclude stages", theorem="", faults=_whole_matrices),
    ),
)


# The options of pp have an effect only with several stages. On a single device all options are
# allowed.


def _without_pp(spec: Spec) -> Iterator[Fault]:
    """Reject options of pp without a pp axis of two or more ranks."""
    if spec.degree(Axis.PP) > 1 or spec.world_size == 1:
        return
    default = PipelineSpec()
    for field in fields(PipelineSpec):
        if getattr(spec.pipeline, field.name) != getattr(default, field.name):
            yield Fault(
                place=f"pipeline.{field.name}",
                finding="has no effect: the mesh has no pp axis with two or more ranks",
                remedy=f"Remove `pipeline.{field.name}`, or {two_ranks(Axis.PP)}",
            )


DIALS = (
    SpecRule(
        name="options of pp need pp",
        theorem="every key has an effect",
        faults=_without_pp,
    ),
)
