"""The legal tuples of a data axis, and the rules that need a full spec.

Every rank of a data axis computes full layers on different samples. Parameters must therefore be
full when they are used, and activations belong to one rank. Of 625 tuples 285 are legal: 3 modes of
A x 5 of G x (4 of Θ x 5 of Ω - 1). For an optimizer that keeps state, Ω = M is meaningless: 240. An
optimizer that needs full matrices allows neither Ω nor G to be sharded: 72 = 3 x 3 of G x 4 of Θ x
2.

Whether a legal tuple is legal in a spec can depend on the number of micro-batches, on clipping, on
the layout and on the optimizer. The rules that take a full spec check this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from ptrain.axes.data.dials import DIALS
from ptrain.axes.data.form import data_factors, form_of, frozen_factors, has_distribution
from ptrain.axes.data.fsdp2 import fsdp2_behavior
from ptrain.axes.rule import AxisRules, SpecRule, TupleRule
from ptrain.cost import State
from ptrain.errors import Fault
from ptrain.installed import counted_torch
from ptrain.spec.activations import belongs_to_rank
from ptrain.spec.dials import Compiled, GradientSync, UnitKind
from ptrain.spec.job import OPTIMIZERS, OptimizerSpec
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import (
    CUT,
    DATA_AXES,
    REDUCED_AXES,
    S_STAR,
    Axis,
    Distribution,
    Factor,
    M,
    Mode,
    R,
    S,
)
from ptrain.spec.precision import Matmul
from ptrain.spec.spec import Spec
from ptrain.steps.wraps import BY_TENSOR, Form

GRADIENT_INTEGRITY = "Theorem 3, gradient integrity"
STATE_CONSISTENCY = "Theorem 4, state consistency"


def keeps_state(optimizer: OptimizerSpec) -> bool:
    """Return True if the optimizer carries values from step to step (moments, momentum)."""
    momenta = [optimizer.momentum, *(group.momentum for group in optimizer.groups)]
    return any(row.moments and not row.needs_momentum for row in optimizer.rows) or any(momenta)


# Rules for parameters, optimizer state and gradients on every axis along which gradients are
# summed.
STATE_RULES = (
    TupleRule(
        name="parameters are full when used",
        theorem=GRADIENT_INTEGRITY,
        is_broken=lambda placement, _: placement.parameters == S,
        message=(
            "parameters cannot be S on a data axis: every rank needs the full weights to "
            "compute a layer. S* all-gathers them for use"
        ),
        repair=lambda placement: replace(placement, parameters=S_STAR),
    ),
    TupleRule(
        name="parameter values are stored",
        theorem=STATE_CONSISTENCY,
        is_broken=lambda placement, _: placement.parameters == M and placement.optimizer == M,
        message=(
            "parameters M are cast from the master weights in the optimizer state, but "
            "optimizer M does not store them between steps"
        ),
        repair=lambda placement: replace(placement, optimizer=S),
    ),
    TupleRule(
        name="moments are stored between steps",
        theorem=STATE_CONSISTENCY,
        is_broken=lambda placement, optimizer: placement.optimizer == M and keeps_state(optimizer),
        message=(
            "optimizer M would drop the moments between steps; only optimizers without "
            "state (sgd without momentum) support M"
        ),
        repair=lambda placement: replace(placement, optimizer=S),
    ),
    TupleRule(
        name="tensors are updated in full",
        theorem=STATE_CONSISTENCY,
        is_broken=lambda placement, optimizer: (
            not optimizer.is_elementwise
            and Distribution.SHARDED
            in (placement.optimizer.distribution, placement.gradients.distribution)
        ),
        message=(
            "muon and adafactor update full tensors, so optimizer and gradients must be R or "
            "S* (gathered for the update)"
        ),
        repair=lambda placement: replace(
            placement,
            optimizer=_to_gathered(placement.optimizer),
            gradients=_to_gathered(placement.gradients),
        ),
    ),
)

_TUPLES = (
    *STATE_RULES,
    TupleRule(
        name="activations are local to their rank",
        theorem=GRADIENT_INTEGRITY,
        is_broken=lambda placement, _: (
            placement.activations != R and not belongs_to_rank(placement.activations)
        ),
        message=(
            "activations of local samples cannot be sharded over a data axis: use R "
            "(saved), M (recomputed) or O (offloaded). To shard tokens, use cp "
            "(`mesh.cp=2`)"
        ),
        repair=lambda placement: replace(placement, activations=R),
    ),
)


def _to_gathered(mode: Mode) -> Mode:
    """Return S as S* on the same tier, and any other mode unchanged."""
    if mode.distribution is not Distribution.SHARDED:
        return mode
    return replace(mode, distribution=Distribution.GATHERED)


def _reduced_part_counted_again(spec: Spec) -> Iterator[Fault]:
    """Reject a reduction per micro-batch of gradients that all axes replicate."""
    factors = data_factors(spec)
    whole = factors and all(
        factor.placement.gradients.distribution is Distribution.REPLICATED for factor in factors
    )
    # An all-reduce in place leaves the sum of all ranks in each rank's buffer. The next micro-batch
    # adds to it, and the next all-reduce would sum it over the ranks again.
    if whole and spec.batch.accumulate > 1 and spec.sync.gradients is GradientSync.EVERY:
        yield Fault(
            place="sync.gradients",
            finding=(
                "sync.gradients=every does not support gradients R on all data axes: the "
                "reduced sum would be reduced again with each of "
                f"{spec.batch.accumulate} micro-batches"
            ),
            remedy=f"Use `sync.gradients=last`, or `{_tuple_path(factors[-1])}.gradients=S`.",
        )


def _gradients_used_up(spec: Spec) -> Iterator[Fault]:
    """Reject consumed gradients with accumulation, clipping or loss scaling."""
    for factor in data_factors(spec):
        if factor.placement.gradients != M:
            continue
        if spec.batch.accumulate > 1:
            yield Fault(
                place=_tuple_path(factor),
                finding=(
                    "gradients M are consumed within backward, but a step accumulates "
                    f"{spec.batch.accumulate} micro-batches"
                ),
                remedy=(
                    f"Use `batch.micro={spec.batch.micro * spec.batch.accumulate}` with "
                    f"`batch.accumulate=1`, or `{_tuple_path(factor)}.gradients=S`."
                ),
            )
        if spec.optimizer.clip is not None:
            yield Fault(
                place=_tuple_path(factor),
                finding=(
                    "gradients M are consumed within backward, but clipping needs the "
                    "norm of all gradients first"
                ),
                remedy=f"Use `optimizer.clip=null`, or `{_tuple_path(factor)}.gradients=S`.",
            )
        if spec.precision.layout.scales_loss:
            yield Fault(
                place=_tuple_path(factor),
                finding=(
                    "gradients M are consumed within backward, but the layout "
                    f"{spec.precision.layout.name} scales the loss and skips a step if "
                    "any gradient overflows"
                ),
                remedy=(
                    "Use a bf16 layout, `precision.layout=zero16`, or "
                    f"`{_tuple_path(factor)}.gradients=S`."
                ),
            )


def _sum_beside_its_parts(spec: Spec) -> Iterator[Fault]:
    """Reject an unsharded accumulation into a sharded sum of another dtype."""
    cut = has_distribution(data_factors(spec), State.GRADIENTS, *CUT)
    late = spec.sync.gradients is GradientSync.LAST
    if spec.precision.layout.keeps_both and cut and late and spec.batch.accumulate > 1:
        yield Fault(
            place="sync.gradients",
            finding=(
                "sync.gradients=last does not support the layout "
                f"{spec.precision.layout.name}: it accumulates "
                f"{spec.precision.layout.reduced} gradients into a sharded "
                f"{spec.precision.layout.gradients} sum, but gradients are sharded only "
                "after the last micro-batch"
            ),
            remedy="Use `sync.gradients=every`, or gradients R on each data axis.",
        )


def _whole_matrices(spec: Spec) -> Iterator[Fault]:
    """Reject one unit for the full model with an optimizer that needs matrices."""
    if not spec.optimizer.is_elementwise and spec.unit_size.kind is UnitKind.MODEL:
        name = spec.optimizer.matrix_optimizer
        yield Fault(
            place="unit",
            finding=(
                f"unit=model does not support {name}: {name} updates full tensors of blocks, and "
                "one unit for the full model has no blocks"
            ),
            remedy="Use `unit=block`, or `optimizer.name=adamw`.",
        )


def _end_units(spec: Spec) -> Iterator[Fault]:
    """Reject `unit: ends` where its units are not tested, or not separate modules."""
    if spec.unit_size.kind is not UnitKind.ENDS or not data_factors(spec):
        return
    within = [f.axis for f in spec.factors if f.axis not in DATA_AXES and f.degree > 1]
    reasons = {
        "a model that is not built in": not isinstance(spec.model, ModelShape),
        f"mesh.{within[0]}" if within else "": bool(within),
        "a loss in chunks": spec.loss.chunk is not None,
        f"compile={spec.compile}": spec.compile is not Compiled.NONE,
        f"optimizer.name={spec.optimizer.name}": not spec.optimizer.is_elementwise,
        "a placement that fully_shard does not run": form_of(spec) not in BY_TENSOR,
    }
    for reason in (reason for reason, is_so in reasons.items() if is_so):
        yield Fault(
            place="unit",
            finding=f"not supported yet: ends with {reason}",
            remedy="Use `unit=block`.",
        )
        return


def _matrices_of_experts(spec: Spec) -> Iterator[Fault]:
    """Reject experts with an optimizer that needs matrices."""
    shape = spec.model
    has_experts = isinstance(shape, ModelShape) and shape.experts is not None
    works = " or ".join(
        f"`optimizer.name={name}`" for name, row in OPTIMIZERS.items() if row.is_elementwise
    )
    if has_experts and not spec.optimizer.is_elementwise:
        yield Fault(
            place="optimizer.name",
            finding=(
                f"not supported yet: {spec.optimizer.matrix_optimizer} for experts (their matrices "
                "are stacked in three-dimensional tensors)"
            ),
            remedy=f"Use {works}, or remove `model.experts`.",
        )


def _groups_in_flat_units(spec: Spec) -> Iterator[Fault]:
    """Reject groups whose optimizers keep different state in one flat buffer."""
    optimizer = spec.optimizer
    if optimizer.is_uniform or not optimizer.is_elementwise or form_of(spec) is not Form.FLAT:
        return
    momenta = {g.momentum for g in optimizer.groups if g.momentum is not None}
    has_sgd = any(row.needs_momentum for row in optimizer.rows)
    kinds = [row for row in optimizer.rows if row.temporaries]
    if kinds:
        name = next(name for name in optimizer.names if OPTIMIZERS[name].temporaries)
        finding = f"{name}, whose temporaries depend on each rank's part of a group"
    elif len(optimizer.names) > 1:
        finding = f"{' and '.join(optimizer.names)}, which keep different state"
    elif has_sgd and any(bool(own) != bool(optimizer.momentum) for own in momenta):
        finding = "sgd with and without momentum"
    else:
        return
    yield Fault(
        place="optimizer.groups",
        finding=f"not supported yet: groups with {finding}, in flat units (as of zero2)",
        remedy="Use one optimizer, such as adamw, or `placement=ddp` or `placement=zero3`.",
    )


def _master_copies(spec: Spec) -> Iterator[Fault]:
    """Reject modes that need master weights without them, and modes that would drop them."""
    has_master = spec.precision.layout.master is not None
    for factor in data_factors(spec):
        if factor.placement.parameters == M and not has_master:
            yield Fault(
                place=_tuple_path(factor),
                finding=(
                    "parameters M are cast from master weights in the optimizer state, "
                    f"but the layout {spec.precision.layout.name} has none"
                ),
                remedy=(
                    "Use a layout with master weights, `precision.layout=zero16`, or "
                    f"`{_tuple_path(factor)}.parameters=S*`."
                ),
            )
        if factor.placement.optimizer == M and has_master and not keeps_state(spec.optimizer):
            yield Fault(
                place=_tuple_path(factor),
                finding=(
                    "optimizer M would drop the master weights of the layout "
                    f"{spec.precision.layout.name} between steps"
                ),
                remedy=(
                    "Use a layout without master weights, `precision.layout=fp32`, or "
                    f"`{_tuple_path(factor)}.optimizer=S`."
                ),
            )


def _frozen_somewhere(spec: Spec) -> Iterator[Fault]:
    """Reject a placement of frozen parameters on an axis without ranks."""
    axes = [factor.axis for factor in data_factors(spec)]
    for axis, mode in spec.frozen.modes_by_axis().items():
        if axis not in axes and spec.world_size > 1:
            yield Fault(
                place=f"frozen.{axis}",
                finding=(
                    f"{mode} has no effect: the mesh has no {axis} axis with two or more ranks"
                ),
                remedy=f"Remove it, or use `mesh.{axis}=N`.",
            )


_ADAPTED = (*DATA_AXES, Axis.PP)  # the axes that support adapters of built-in models


def _quantized_elsewhere(spec: Spec) -> Iterator[Fault]:
    """Reject adapters of built-in models and quantized weights where they are not executed."""
    shape, dtype = spec.model, spec.frozen.dtype
    if isinstance(shape, ModelShape) and shape.lora_rank is not None:
        others = [factor.axis for factor in spec.factors if factor.axis not in _ADAPTED]
        there = {axis.value: f"mesh.{axis}=1" for axis in others if spec.degree(axis) > 1}
        there |= {"experts": "model.experts=null"} if shape.experts is not None else {}
        for where, remedy in there.items():
            yield Fault(
                place="model.lora_rank",
                finding=f"not supported yet: adapters of built-in models with {where}",
                remedy=f"Use `{remedy}`, or remove `model.lora_rank`.",
            )
    if dtype is None:
        return
    cases = (
        (spec.degree(Axis.TP) > 1, "sharded operators", "mesh.tp=1"),
        (spec.compile is not Compiled.NONE, "compiled programs", "compile=none"),
        (
            spec.precision.matmul is not Matmul.NONE,
            f"{spec.precision.matmul} products",
            "precision.matmul=none",
        ),
        (
            form_of(spec) is Form.FLAT
            and any(f.placement.parameters != R for f in frozen_factors(spec)),
            "flat units that shard or offload frozen parameters",
            "frozen=R` or, for FSDP2, `placement=zero3 precision.layout=bf16",
        ),
        (
            form_of(spec) is Form.MATERIALIZE and not fsdp2_behavior().keeps_bytes,
            f"shards that FSDP2 of torch {counted_torch()} casts",
            "precision.layout=bf16",
        ),
    )
    for is_there, where, remedy in cases:
        if is_there:
            yield Fault(
                place="frozen.dtype",
                finding=f"not supported yet: {dtype} in {where}",
                remedy=f"Use `{remedy}`.",
            )


def _one_way_for_activations(spec: Spec) -> Iterator[Fault]:
    """Reject different modes of activations on several axes."""
    own = {
        factor.placement.activations: factor
        for factor in DATA.factors(spec)
        if factor.placement.activations != R
    }
    if len(own) > 1:
        said = " and ".join(f"{mode} on {factor.axis}" for mode, factor in own.items())
        yield Fault(
            place=_tuple_path(list(own.values())[-1]),
            finding=f"activations need one mode for all axes, but are {said}",
            remedy="Set `activations` once, at the top level of the spec.",
        )


def _replicas_inside_shards(spec: Spec) -> Iterator[Fault]:
    """Reject meshes in which replicas are not outside shards."""
    for outer, inner in pairwise([factor.axis for factor in data_factors(spec)]):
        if REDUCED_AXES.index(outer) > REDUCED_AXES.index(inner):
            yield Fault(
                place=f"mesh.{inner}",
                finding=f"not supported yet: {inner} inside {outer}",
                remedy=f"Put {inner} before {outer} in `mesh` (outermost first).",
            )
            return


def _tuple_path(factor: Factor) -> str:
    """Return the place of an axis's tuple in the spec."""
    return f"placement.{factor.axis}"


DATA = AxisRules(
    axes=DATA_AXES,
    tuples=_TUPLES,
    specs=(
        SpecRule(
            name="reduced gradients are not reduced again",
            theorem=GRADIENT_INTEGRITY,
            faults=_reduced_part_counted_again,
        ),
        SpecRule(
            name="consumed gradients are not accumulated, clipped or skipped",
            theorem=GRADIENT_INTEGRITY,
            faults=_gradients_used_up,
        ),
        SpecRule(
            name="master weights are stored between steps",
            theorem=STATE_CONSISTENCY,
            faults=_master_copies,
        ),
        SpecRule(
            name="sums are stored like their terms",
            theorem=GRADIENT_INTEGRITY,
            faults=_sum_beside_its_parts,
        ),
        SpecRule(
            name="full updates have units of blocks",
            theorem="Definition 1",
            faults=_whole_matrices,
        ),
        SpecRule(
            name="frozen parameters are placed on existing axes",
            theorem="Definition 1",
            faults=_frozen_somewhere,
        ),
        SpecRule(
            name="activations have one mode",
            theorem="Definition 2",
            faults=_one_way_for_activations,
        ),
        *DIALS,
    ),
    unsupported=(
        SpecRule(name="replicas are outside shards", theorem="", faults=_replicas_inside_shards),
        SpecRule(name="quantized weights are executed", theorem="", faults=_quantized_elsewhere),
        SpecRule(name="ends are units of fully_shard", theorem="", faults=_end_units),
        SpecRule(name="full updates exclude experts", theorem="", faults=_matrices_of_experts),
        SpecRule(
            name="groups have equal state in flat units", theorem="", faults=_groups_in_flat_units
        ),
    ),
)
