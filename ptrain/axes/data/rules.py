"""Which tuples a data axis takes.

Every rank of a data axis computes whole layers on its own samples, so Theta must be whole when it
is used, and activations are nobody else's. Of 625 tuples 285 are legal: 3 modes of A x 5 of G x
(4 of Theta x 5 of Omega - 1); an optimizer that keeps state has no meaning for Omega = M: 240; one
that needs whole matrices takes neither Omega nor G in slices: 72 = 3 x 3 of G x 4 of Theta x 2.

Whether a legal tuple is legal in a spec may depend on the number of micro-batches, on clipping, on
the layout and on the optimizer: the rules below that take a whole spec.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from ptrain.axes.data.dials import DIALS
from ptrain.axes.data.form import data_factors, has
from ptrain.axes.rule import AxisRules, SpecRule, TupleRule
from ptrain.cost import State
from ptrain.errors import Fault
from ptrain.optimizers.update import moment_names
from ptrain.spec.activations import belongs_to_rank
from ptrain.spec.dials import GradientSync, UnitKind
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.model import ModelShape
from ptrain.spec.optimizers import OPTIMIZERS
from ptrain.spec.placement import (
    CUT,
    DATA_AXES,
    REDUCED_AXES,
    S_STAR,
    Distribution,
    Factor,
    M,
    Mode,
    Placement,
    R,
    S,
)
from ptrain.spec.spec import Spec

GRADIENT_INTEGRITY = "Theorem 3 (gradient integrity)"
STATE_CONSISTENCY = "Theorem 4 (state consistency)"


def keeps_state(optimizer: OptimizerSpec) -> bool:
    """Return whether the optimizer carries values from step to step (moments, momentum)."""
    return bool(moment_names(optimizer.name, optimizer))


def _foreign_activations(placement: Placement, optimizer: OptimizerSpec) -> bool:
    mode = placement.activations
    return mode != R and not belongs_to_rank(mode)


# What of Theta, Omega and G holds on every axis along which gradients are summed.
STATE_RULES = (
    TupleRule(
        name="parameters are whole when used",
        theorem=GRADIENT_INTEGRITY,
        broken=lambda placement, _: placement.parameters == S,
        message="parameters: S leaves each rank a slice of every tensor, but it computes whole "
        "layers on what is its own; nothing defines the computation",
        nearest=lambda placement: replace(placement, parameters=S_STAR),
    ),
    TupleRule(
        name="the parameters' values live somewhere",
        theorem=STATE_CONSISTENCY,
        broken=lambda placement, _: placement.parameters == M and placement.optimizer == M,
        message="parameters: M are rebuilt from the master copy in the optimizer state, but "
        "optimizer: M keeps none between steps; the values live nowhere",
        nearest=lambda placement: replace(placement, optimizer=S),
    ),
    TupleRule(
        name="moments outlive a step",
        theorem=STATE_CONSISTENCY,
        broken=lambda placement, optimizer: placement.optimizer == M and keeps_state(optimizer),
        message="optimizer: M would drop the optimizer's moments between steps; only an optimizer "
        "without state (sgd without momentum) can be materialized",
        nearest=lambda placement: replace(placement, optimizer=S),
    ),
    TupleRule(
        name="a matrix is orthogonalized whole",
        theorem=STATE_CONSISTENCY,
        broken=lambda placement, optimizer: (
            not optimizer.row.is_elementwise
            and Distribution.SHARDED
            in (placement.optimizer.distribution, placement.gradients.distribution)
        ),
        message="muon orthogonalizes the momentum of a whole matrix, and a slice of that is not "
        "what a slice alone gives; optimizer and gradients are gathered for the update (S*)",
        nearest=lambda placement: replace(
            placement,
            optimizer=_gathered(placement.optimizer),
            gradients=_gathered(placement.gradients),
        ),
    ),
)

_TUPLES = (
    *STATE_RULES,
    TupleRule(
        name="activations belong to their rank",
        theorem=GRADIENT_INTEGRITY,
        broken=_foreign_activations,
        message="activations are those of a rank's own samples and cannot be spread over a data "
        "axis; they are kept (R), recomputed (M) or offloaded (O), and slices of the tokens are "
        "those of cp (mesh: {cp: 2})",
        nearest=lambda placement: replace(placement, activations=R),
    ),
)


def _gathered(mode: Mode) -> Mode:
    """Slices that are gathered, on the same tier; any other mode as it is."""
    if mode.distribution is not Distribution.SHARDED:
        return mode
    return replace(mode, distribution=Distribution.GATHERED)


def _reduced_part_counted_again(spec: Spec) -> Iterator[Fault]:
    factors = data_factors(spec)
    whole = factors and all(
        factor.placement.gradients.distribution is Distribution.REPLICATED for factor in factors
    )
    if whole and spec.batch.accumulate > 1 and spec.sync.gradients is GradientSync.EVERY:
        yield Fault(
            place="sync.gradients",
            finding="every: gradients are R on every data axis, so a micro-batch would be added to "
            f"a sum already reduced and be reduced again with it: of {spec.batch.accumulate} "
            "micro-batches the first would count once per rank",
            remedy=f"write sync.gradients=last, or {_place(factors[-1])}.gradients=S",
        )


def _gradients_used_up(spec: Spec) -> Iterator[Fault]:
    for factor in data_factors(spec):
        if factor.placement.gradients != M:
            continue
        if spec.batch.accumulate > 1:
            yield Fault(
                place=_place(factor),
                finding=f"gradients: M are used as soon as they exist, but a step accumulates "
                f"{spec.batch.accumulate} micro-batches",
                remedy=f"write batch.micro={spec.batch.micro * spec.batch.accumulate} with "
                f"batch.accumulate=1, or {_place(factor)}.gradients=S",
            )
        if spec.optimizer.clip is not None:
            yield Fault(
                place=_place(factor),
                finding="gradients: M are used as soon as they exist, but clipping needs the norm "
                "of all of them first",
                remedy=f"write optimizer.clip=null, or {_place(factor)}.gradients=S",
            )
        if spec.precision.layout.scales_loss:
            yield Fault(
                place=_place(factor),
                finding=f"gradients: M are used as soon as they exist, but the layout "
                f"{spec.precision.layout.name} scales the loss, and a step is skipped if any "
                "gradient of it overflowed",
                remedy="use a layout in bf16 (precision.layout=zero16), or "
                f"{_place(factor)}.gradients=S",
            )


def _sum_beside_its_parts(spec: Spec) -> Iterator[Fault]:
    cut = has(data_factors(spec), State.GRADIENTS, *CUT)
    late = spec.sync.gradients is GradientSync.LAST
    if spec.precision.layout.keeps_both and cut and late and spec.batch.accumulate > 1:
        yield Fault(
            place="sync.gradients",
            finding=f"last: the layout {spec.precision.layout.name} adds each micro-batch's "
            f"{spec.precision.layout.reduced} gradients to their {spec.precision.layout.gradients} "
            "sum, which is kept in slices, but before the last micro-batch nothing is in slices",
            remedy="write sync.gradients=every, or gradients R on each data axis",
        )


def _whole_matrices(spec: Spec) -> Iterator[Fault]:
    if not spec.optimizer.row.is_elementwise and spec.unit_size.kind is UnitKind.MODEL:
        yield Fault(
            place="unit",
            finding="model: muon is for the matrices of the blocks, and with one unit for all "
            "there are none (the root's tensors, embedding and head, are adamw's)",
            remedy="write unit=block, or optimizer.name=adamw",
        )


def _matrices_of_experts(spec: Spec) -> Iterator[Fault]:
    shape = spec.model
    has_experts = isinstance(shape, ModelShape) and shape.experts is not None
    works = " or ".join(name for name, row in OPTIMIZERS.items() if row.is_elementwise)
    if has_experts and not spec.optimizer.row.is_elementwise:
        yield Fault(
            place="optimizer.name",
            finding=f"not yet: {spec.optimizer.name} for experts, whose matrices are one tensor of "
            "three dimensions for each projection",
            remedy=f"what works today: {works}, or remove experts",
        )


def _master_copies(spec: Spec) -> Iterator[Fault]:
    has_master = spec.precision.layout.master is not None
    for factor in data_factors(spec):
        if factor.placement.parameters == M and not has_master:
            yield Fault(
                place=_place(factor),
                finding="parameters: M are made of the master copies in the optimizer state, "
                "wherever these lie, and the layout "
                f"{spec.precision.layout.name} has none",
                remedy="use a layout with master copies (precision.layout=zero16), or "
                f"{_place(factor)}.parameters=S*",
            )
        if factor.placement.optimizer == M and has_master and not keeps_state(spec.optimizer):
            yield Fault(
                place=_place(factor),
                finding=f"optimizer: M would drop the master copies of the layout "
                f"{spec.precision.layout.name} between steps",
                remedy="use a layout without master copies (precision.layout=fp32), or "
                f"{_place(factor)}.optimizer=S",
            )


def _frozen_somewhere(spec: Spec) -> Iterator[Fault]:
    axes = [factor.axis for factor in data_factors(spec)]
    for axis, mode in spec.frozen.written().items():
        if axis not in axes and spec.world_size > 1:
            yield Fault(
                place=f"frozen.{axis}",
                finding=f"{mode}: no two ranks of {axis} are in the mesh, on which it would be a "
                "place",
                remedy=f"remove it, or give the mesh two ranks of {axis}",
            )


def _one_way_for_activations(spec: Spec) -> Iterator[Fault]:
    own = {
        factor.placement.activations: factor
        for factor in DATA.factors(spec)
        if factor.placement.activations != R
    }
    if len(own) > 1:
        said = " and ".join(f"{mode} on {factor.axis}" for mode, factor in own.items())
        yield Fault(
            place=_place(list(own.values())[-1]),
            finding=f"activations belong to the rank, not to an axis, but are {said}",
            remedy="give activations once, at the top of the spec",
        )


def _replicas_inside_shards(spec: Spec) -> Iterator[Fault]:
    for outer, inner in pairwise([factor.axis for factor in data_factors(spec)]):
        if REDUCED_AXES.index(outer) > REDUCED_AXES.index(inner):
            yield Fault(
                place=f"mesh.{inner}",
                finding=f"{inner} inside {outer} is not executed yet",
                remedy=f"write {inner} before {outer}: the mesh is outermost first",
            )
            return


def _place(factor: Factor) -> str:
    return f"placement.{factor.axis}"


DATA = AxisRules(
    axes=DATA_AXES,
    tuples=_TUPLES,
    specs=(
        SpecRule(
            name="a reduced gradient is not reduced again",
            theorem=GRADIENT_INTEGRITY,
            faults=_reduced_part_counted_again,
        ),
        SpecRule(
            name="a gradient that is used up is neither accumulated, clipped nor skipped",
            theorem=GRADIENT_INTEGRITY,
            faults=_gradients_used_up,
        ),
        SpecRule(
            name="master copies outlive a step",
            theorem=STATE_CONSISTENCY,
            faults=_master_copies,
        ),
        SpecRule(
            name="a sum is kept as its parts are",
            theorem=GRADIENT_INTEGRITY,
            faults=_sum_beside_its_parts,
        ),
        SpecRule(
            name="there is a matrix to orthogonalize",
            theorem="Definition 1",
            faults=_whole_matrices,
        ),
        SpecRule(
            name="what is frozen is on an axis",
            theorem="Definition 1",
            faults=_frozen_somewhere,
        ),
        SpecRule(
            name="activations are kept in one way",
            theorem="Definition 2",
            faults=_one_way_for_activations,
        ),
        *DIALS,
    ),
    not_yet=(
        SpecRule(name="replicas outside shards", theorem="", faults=_replicas_inside_shards),
        SpecRule(name="experts are no matrices", theorem="", faults=_matrices_of_experts),
    ),
)
