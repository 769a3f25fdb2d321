"""Which tuples the tensor axis takes, and what a model must be to be cut over it.

Every rank of it works on the same samples with a slice of each operator: Theta, Omega and G are S.
Activations are whole between the sub-blocks (R), a slice of the tokens there (S), or that with what
the operators save cut too (S*).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd, prod

from ptrain.axes.data.form import data_factors, form_of
from ptrain.axes.rule import AxisRules, SpecRule, TupleRule
from ptrain.axes.tensor.cost import cut_sizes, shards_differ, slices
from ptrain.errors import Fault
from ptrain.spec.batch import PADDED
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import S_STAR, Axis, Placement, R, S
from ptrain.spec.role import Role
from ptrain.spec.spec import Spec
from ptrain.spec.tensor import TensorSpec
from ptrain.spec.tuples import two_ranks
from ptrain.steps.wraps import BY_TENSOR
from ptrain.units import ceil_div, counted

_AXES = (Axis.TP,)


def _states(placement: Placement, optimizer: OptimizerSpec) -> bool:
    return (placement.parameters, placement.optimizer) != (S, S)


def _gradients(placement: Placement, optimizer: OptimizerSpec) -> bool:
    return placement.gradients != S


def _activations(placement: Placement, optimizer: OptimizerSpec) -> bool:
    return placement.activations not in (R, S, S_STAR)


_TUPLES = (
    TupleRule(
        name="an operator's slice has its own states",
        theorem="Theorem 4 (state consistency)",
        broken=_states,
        message="a rank of tp computes with its slice of each operator and nothing else, so "
        "parameters and optimizer state are S",
        nearest=lambda placement: replace(placement, parameters=S, optimizer=S),
    ),
    TupleRule(
        name="gradients are summed across tp groups, not within",
        theorem="Theorem 6.3 (gradients are summed across tp groups, not within)",
        broken=_gradients,
        message="the gradient of an operator's slice is its rank's alone, so gradients are S",
        nearest=lambda placement: replace(placement, gradients=S),
    ),
    TupleRule(
        name="activations are whole or slices of the tokens",
        theorem="Definition 2",
        broken=_activations,
        message="activations on tp are R, S (a slice of the tokens) or S* (saved so, and gathered "
        "for backward); M and O belong to a rank, not to an axis: "
        "activations: M at the top of the spec",
        nearest=lambda placement: replace(placement, activations=R),
    ),
)


def _divides(spec: Spec) -> Iterator[Fault]:
    degree, shape = spec.degree(Axis.TP), spec.model
    if degree == 1 or not isinstance(shape, ModelShape):
        return
    fields = cut_sizes(shape, has_whole_experts=bool(spec.folded_axes))
    common = gcd(*fields.values())
    choices = [d for d in range(1, common + 1) if common % d == 0]
    for name, number in fields.items():
        if number % degree:
            yield Fault(
                place="mesh.tp",
                finding=f"tp={degree} does not divide {name}: {number}",
                remedy=f"choose tp from {', '.join(map(str, choices))}"
                + (_other_width(name, number, degree) if name in _FREE_WIDTHS else ""),
            )


_FREE_WIDTHS = ("expert_ffn",)  # which no other size of a model follows from


def _other_width(name: str, width: int, degree: int) -> str:
    """Return the multiples of a degree around a width, as a remedy."""
    near = dict.fromkeys((max(degree, width - width % degree), width + degree - width % degree))
    return f", or write model.{name}={' or '.join(map(str, near))}"


def _rows(spec: Spec) -> Iterator[Fault]:
    degree, shape = spec.degree(Axis.TP), spec.model
    if isinstance(shape, ModelShape) and not min(slices(shape.vocab, degree)):
        even = degree * ceil_div(shape.vocab, degree)
        yield Fault(
            place="mesh.tp",
            finding=f"tp={degree} leaves ranks without a row of a vocabulary of {shape.vocab}",
            remedy=f"choose a lower degree, or write model.vocab={even}",
        )


def _shards_of_rows(spec: Spec) -> Iterator[Fault]:
    degree, shape = spec.degree(Axis.TP), spec.model
    if not isinstance(shape, ModelShape) or form_of(spec) not in BY_TENSOR:
        return
    shards = prod(f.degree for f in data_factors(spec) if f.placement.parameters != R)
    if shards_differ(shape.vocab, degree, shards):
        even = degree * ceil_div(shape.vocab, degree)
        yield Fault(
            place="mesh.tp",
            finding=f"not yet: a vocabulary of {shape.vocab} in slices of "
            f"{' and '.join(map(str, sorted(set(slices(shape.vocab, degree)), reverse=True)))} "
            f"rows, each in {shards} shards of unlike heights",
            remedy=f"what works today: model.vocab={even}, or parameters R on the data axes",
        )


def _smaller_shards(spec: Spec) -> Iterator[Fault]:
    """torch's fully_shard raises NotImplementedError of tensors that are DTensors already."""
    shards = spec.sync.reshard_after_forward
    is_number = isinstance(shards, int) and not isinstance(shards, bool)
    degree = prod(f.degree for f in data_factors(spec) if f.placement.parameters != R)
    if is_number and shards != degree and spec.degree(Axis.TP) > 1 and form_of(spec) in BY_TENSOR:
        yield Fault(
            place="sync.reshard_after_forward",
            finding=f"not yet: {shards} shards from forward to backward of what tp cuts, which "
            "torch's fully_shard does not make",
            remedy="write true, false or non-root",
        )


def _tokens(spec: Spec) -> Iterator[Fault]:
    degree, sequence = spec.degree(Axis.TP), spec.batch.sequence
    cut = any(f.axis is Axis.TP and f.placement.activations != R for f in spec.factors)
    if cut and sequence % degree:
        yield Fault(
            place="batch.sequence",
            finding=f"{counted(sequence, 'token')} cannot be cut into {degree} equal slices",
            remedy=f"write a multiple of {degree}, or placement.tp.activations=R{PADDED}",
        )


def _logits(spec: Spec) -> Iterator[Fault]:
    degree, shape = spec.degree(Axis.TP), spec.model
    if spec.tensor.loss_parallel or not isinstance(shape, ModelShape):
        return
    if shape.vocab % degree:
        yield Fault(
            place="tensor.loss_parallel",
            finding=f"false: a vocabulary of {shape.vocab} is cut into unequal slices, and only "
            "equal ones are gathered",
            remedy=f"write true, or a vocab that is a multiple of {degree}",
        )


def _whole_head(spec: Spec) -> Iterator[Fault]:
    if spec.degree(Axis.TP) > 1 and spec.loss.fused:
        yield Fault(
            place="loss.fused",
            finding="torch's linear_cross_entropy takes a whole head, and tp cuts it",
            remedy="remove fused: chunks of logits are cut over the vocabulary too",
        )


def _whole_matrices(spec: Spec) -> Iterator[Fault]:
    if spec.degree(Axis.TP) > 1 and not spec.optimizer.row.is_elementwise:
        yield Fault(
            place="optimizer.name",
            finding=f"{spec.optimizer.name} takes whole matrices, and tp cuts them",
            remedy="write adamw, or no tp",
        )


def _own_plan(spec: Spec) -> Iterator[Fault]:
    if spec.tensor.roles and isinstance(spec.model, ModelShape):
        yield Fault(
            place="tensor.plan",
            finding="a built-in model has the roles of its family",
            remedy="write paired or naive",
        )


def _whole_tokens(spec: Spec) -> Iterator[Fault]:
    if isinstance(spec.model, ModelShape) or spec.degree(Axis.PP) == 1:
        return
    for factor in spec.factors:
        activations = factor.placement.activations
        if factor.axis is Axis.TP and factor.degree > 1 and activations != R:
            yield Fault(
                place="placement.tp.activations",
                finding=f"not yet: {activations}, of a model that is not built in, in stages",
                remedy="what works today: activations: R, no pp, or a preset or a shape",
            )


def _naive_slices(spec: Spec) -> Iterator[Fault]:
    cut = any(f.axis is Axis.TP and f.placement.activations != R for f in spec.factors)
    if cut and spec.tensor.is_naive:
        yield Fault(
            place="tensor.plan",
            finding="not yet: naive, with slices of the tokens between the sub-blocks",
            remedy="write paired, or placement.tp.activations=R",
        )


def _naive_latents(spec: Spec) -> Iterator[Fault]:
    is_latent = isinstance(spec.model, ModelShape) and spec.model.is_latent
    if is_latent and spec.degree(Axis.TP) > 1 and spec.tensor.is_naive:
        yield Fault(
            place="tensor.plan",
            finding="not yet: naive, of latent attention (model.kv_lora_rank), whose ranks sum "
            "the gradients of what all heads share once",
            remedy="write paired",
        )


TENSOR = AxisRules(
    axes=_AXES,
    tuples=_TUPLES,
    specs=(
        SpecRule(name="the degree divides the operators", theorem="Definition 2", faults=_divides),
        SpecRule(name="every rank has rows", theorem="Definition 2", faults=_rows),
        SpecRule(name="roles are the family's own", theorem="Definition 2", faults=_own_plan),
        SpecRule(name="slices of the tokens are equal", theorem="Definition 2", faults=_tokens),
        SpecRule(name="an operator has whole weights", theorem="Definition 2", faults=_whole_head),
        SpecRule(
            name="an update sees what it needs",
            theorem="Theorem 4 (state consistency)",
            faults=_whole_matrices,
        ),
    ),
    not_yet=(
        SpecRule(name="all tokens between the blocks", theorem="", faults=_whole_tokens),
        SpecRule(name="the naive plan has all tokens", theorem="", faults=_naive_slices),
        SpecRule(name="the naive plan has no latents", theorem="", faults=_naive_latents),
        SpecRule(name="equal slices are gathered", theorem="", faults=_logits),
        SpecRule(name="shards of slices are alike", theorem="", faults=_shards_of_rows),
        SpecRule(name="slices have one kind of shards", theorem="", faults=_smaller_shards),
    ),
)


# Which spec obeys the dials of tp: one whose operators are cut. On one device they are free, as
# all dials are.


def _without_tp(spec: Spec) -> Iterator[Fault]:
    if spec.degree(Axis.TP) > 1 or spec.world_size == 1:
        return
    tensor, default = spec.tensor, TensorSpec()
    is_of_ep = spec.degree(Axis.EP) > 1 and {role for _, role in tensor.roles} == {Role.EXPERTS}
    has_roles = bool(tensor.roles) and not isinstance(spec.model, ModelShape)
    written = {
        "plan": (has_roles and not is_of_ep) or tensor.is_naive is not default.is_naive,
        "loss_parallel": tensor.loss_parallel is not default.loss_parallel,
        "experts": tensor.is_folded,
    }
    for key, is_written in written.items():
        if is_written:
            yield Fault(
                place=f"tensor.{key}",
                finding="nothing obeys it: no operator is cut, since tp has no two ranks",
                remedy=f"remove tensor.{key}"
                + (f", or write {two_ranks(Axis.TP)}" if key != "experts" else ""),
            )


DIALS = (
    SpecRule(
        name="the dials of tp need it",
        theorem="every key of a spec has an effect",
        faults=_without_tp,
    ),
)
