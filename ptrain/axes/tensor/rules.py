"""Legal tuples of the tensor axis, and requirements on the model.

All ranks work on the same samples, each with a shard of every operator: Θ, Ω and G are S. Between
sub-blocks, activations are full (R), a shard of the tokens (S), or such a shard with the operators'
saved inputs sharded as well (S*).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import gcd, lcm, prod

from ptrain.axes.data.form import data_factors, form_of
from ptrain.axes.rule import AxisRules, SpecRule, TupleRule
from ptrain.axes.tensor.cost import cut_sizes, ranks_per_kv_head, shard_sizes, shards_differ
from ptrain.errors import Fault
from ptrain.spec.batch import PADDED
from ptrain.spec.dials import Compiled
from ptrain.spec.keys import TensorSpec
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import S_STAR, Axis, R, Role, S
from ptrain.spec.shorthand import two_ranks
from ptrain.spec.spec import Spec
from ptrain.steps.wraps import BY_TENSOR
from ptrain.units import ceil_div, with_noun

_AXES = (Axis.TP,)


_TUPLES = (
    TupleRule(
        name="states are sharded like operators",
        theorem="Theorem 4, state consistency",
        is_broken=lambda placement, _: (placement.parameters, placement.optimizer) != (S, S),
        message=(
            "parameters and optimizer state must be S on tp: each rank computes with its "
            "shard of each operator only"
        ),
        repair=lambda placement: replace(placement, parameters=S, optimizer=S),
    ),
    TupleRule(
        name="gradients are reduced across tp groups, not within",
        theorem="Theorem 6.3, gradients are reduced across tp groups, not within",
        is_broken=lambda placement, _: placement.gradients != S,
        message=(
            "gradients must be S on tp: the gradient of an operator's shard exists on its rank only"
        ),
        repair=lambda placement: replace(placement, gradients=S),
    ),
    TupleRule(
        name="activations are full or sharded by tokens",
        theorem="Definition 2",
        is_broken=lambda placement, _: placement.activations not in (R, S, S_STAR),
        message=(
            "activations on tp must be R, S (sharded by tokens) or S* (saved as shards, "
            "all-gathered for backward); M and O are set for all axes at the top level, "
            "`activations=M`"
        ),
        repair=lambda placement: replace(placement, activations=R),
    ),
)


def _size_faults(spec: Spec) -> Iterator[Fault]:
    degree, shape = spec.degree(Axis.TP), spec.model
    if degree == 1 or not isinstance(shape, ModelShape):
        return
    fields = cut_sizes(shape, has_whole_experts=bool(spec.folded_axes))
    common = gcd(*(number for name, number in fields.items() if name != "kv_heads"))
    fits = partial(ranks_per_kv_head, shape)
    choices = [d for d in range(1, common + 1) if common % d == 0 and fits(d)]
    for name, number in fields.items():
        is_kv = name == "kv_heads"
        if number % degree and not (is_kv and fits(degree)):
            yield Fault(
                place="mesh.tp",
                finding=f"tp={degree} does not divide {name}: {number}"
                + (", and its ranks cannot share these heads equally" if is_kv else ""),
                remedy=f"Use one of {', '.join(map(str, choices))} for `mesh.tp`"
                + (_other_width(name, number, degree) if name in _FREE_WIDTHS else "")
                + ".",
            )


_FREE_WIDTHS = ("expert_ffn",)  # which no other size of a model follows from


def _other_width(name: str, width: int, degree: int) -> str:
    """Return the multiples of a degree around a width, as a remedy."""
    near = dict.fromkeys((max(degree, width - width % degree), width + degree - width % degree))
    return f", or `model.{name}={f'` or `model.{name}='.join(map(str, near))}`"


def _even_rows(shape: ModelShape, degree: int) -> str:
    """Return the setting with which every rank has as many rows of the vocabulary."""
    return f"`model.vocab_multiple={lcm(degree, shape.vocab_multiple)}`"


def _vocab_row_faults(spec: Spec) -> Iterator[Fault]:
    degree, shape = spec.degree(Axis.TP), spec.model
    if not isinstance(shape, ModelShape):
        return
    last = shard_sizes(shape.vocab_rows, degree)[-1]
    if shape.vocab_rows - last >= shape.vocab:  # it has no row, or padding alone
        even = degree * ceil_div(shape.vocab_rows, degree)
        yield Fault(
            place="mesh.tp",
            finding=f"tp={degree} leaves ranks without a row of the vocabulary of {shape.vocab}",
            remedy=f"Use a smaller `mesh.tp`, or `model.vocab={even}`.",
        )


def _shards_of_rows(spec: Spec) -> Iterator[Fault]:
    degree, shape = spec.degree(Axis.TP), spec.model
    if not isinstance(shape, ModelShape) or form_of(spec) not in BY_TENSOR:
        return
    shards = prod(f.degree for f in data_factors(spec) if f.placement.parameters != R)
    if shards_differ(shape.vocab_rows, degree, shards):
        sizes = sorted({*shard_sizes(shape.vocab_rows, degree)}, reverse=True)
        yield Fault(
            place="mesh.tp",
            finding=(
                f"not supported yet: a vocabulary of {shape.vocab_rows} in tp shards of "
                f"{' and '.join(map(str, sizes))} rows, each split into {shards} uneven shards"
            ),
            remedy=f"Use {_even_rows(shape, degree)}, or parameters R on the data axes.",
        )


def _smaller_shards(spec: Spec) -> Iterator[Fault]:
    """Reject smaller shards between forward and backward with tp.

    torch's fully_shard raises NotImplementedError for parameters that are DTensors already.
    """
    shards = spec.sync.reshard_after_forward
    is_number = isinstance(shards, int) and not isinstance(shards, bool)
    degree = prod(f.degree for f in data_factors(spec) if f.placement.parameters != R)
    if is_number and shards != degree and spec.degree(Axis.TP) > 1 and form_of(spec) in BY_TENSOR:
        yield Fault(
            place="sync.reshard_after_forward",
            finding=(
                f"not supported yet: {shards} shards between forward and backward with "
                "tp (torch's fully_shard does not support it)"
            ),
            remedy="Use true, false or non-root.",
        )


def _token_faults(spec: Spec) -> Iterator[Fault]:
    degree, sequence = spec.degree(Axis.TP), spec.batch.sequence
    if spec.is_sequence_parallel and sequence % degree:
        yield Fault(
            place="batch.sequence",
            finding=f"{with_noun(sequence, 'token')} cannot be split into {degree} equal shards",
            remedy=f"Use a multiple of {degree}, or `placement.tp.activations=R`{PADDED}.",
        )


def _logit_faults(spec: Spec) -> Iterator[Fault]:
    degree, shape = spec.degree(Axis.TP), spec.model
    if spec.tensor.loss_parallel or not isinstance(shape, ModelShape):
        return
    if (rows := shape.vocab_rows) % degree:
        yield Fault(
            place="tensor.loss_parallel",
            finding=f"false needs equal shards, but the vocabulary of {rows} is split unevenly",
            remedy=f"Use `tensor.loss_parallel=true`, or {_even_rows(shape, degree)}.",
        )


def _whole_head(spec: Spec) -> Iterator[Fault]:
    if spec.degree(Axis.TP) > 1 and spec.loss.fused:
        yield Fault(
            place="loss.fused",
            finding="torch's linear_cross_entropy needs the full output head, but tp shards it",
            remedy="Remove `loss.fused`: chunked logits are sharded over the vocabulary.",
        )


def _whole_matrices(spec: Spec) -> Iterator[Fault]:
    if spec.degree(Axis.TP) > 1 and not spec.optimizer.is_elementwise:
        yield Fault(
            place="optimizer.name",
            finding=f"{spec.optimizer.matrix_optimizer} needs full matrices, but tp shards them",
            remedy="Use `optimizer.name=adamw`, or remove `mesh.tp`.",
        )


def _own_plan(spec: Spec) -> Iterator[Fault]:
    if spec.tensor.roles and isinstance(spec.model, ModelShape):
        yield Fault(
            place="tensor.plan",
            finding="a built-in model uses the roles of its family",
            remedy="Use `tensor.plan=paired` or `tensor.plan=naive`.",
        )


def _whole_tokens(spec: Spec) -> Iterator[Fault]:
    if isinstance(spec.model, ModelShape) or spec.degree(Axis.PP) == 1:
        return
    for factor in spec.factors:
        activations = factor.placement.activations
        if factor.axis is Axis.TP and factor.degree > 1 and activations != R:
            yield Fault(
                place="placement.tp.activations",
                finding=f"not supported yet: activations {activations} with pp for custom models",
                remedy=(
                    "Use `placement.tp.activations=R`, remove `mesh.pp`, or use a built-in model."
                ),
            )


def _naive_slices(spec: Spec) -> Iterator[Fault]:
    if spec.is_sequence_parallel and spec.tensor.is_naive:
        yield Fault(
            place="tensor.plan",
            finding="not supported yet: naive with sequence parallelism",
            remedy="Use `tensor.plan=paired`, or `placement.tp.activations=R`.",
        )


def _shared_heads(spec: Spec) -> Iterator[Fault]:
    degree, shape = spec.degree(Axis.TP), spec.model
    if not isinstance(shape, ModelShape) or degree <= shape.kv_heads:
        return
    shared = f"tp={degree} ranks that share {with_noun(shape.kv_heads, 'key-value head')}"
    if spec.tensor.is_naive:
        yield Fault(
            place="tensor.plan",
            finding=f"not supported yet: naive with {shared}",
            remedy="Use `tensor.plan=paired`.",
        )
    if spec.compile is not Compiled.NONE:
        yield Fault(
            place="compile",
            finding=f"not supported yet: {spec.compile} with {shared}",
            remedy=f"Remove `compile`, or use `mesh.tp={shape.kv_heads}` or less.",
        )


def _naive_latents(spec: Spec) -> Iterator[Fault]:
    is_latent = isinstance(spec.model, ModelShape) and spec.model.is_latent
    if is_latent and spec.degree(Axis.TP) > 1 and spec.tensor.is_naive:
        yield Fault(
            place="tensor.plan",
            finding="not supported yet: naive with latent attention (model.kv_lora_rank)",
            remedy="Use `tensor.plan=paired`.",
        )


TENSOR = AxisRules(
    axes=_AXES,
    tuples=_TUPLES,
    specs=(
        SpecRule(
            name="the degree divides the operators", theorem="Definition 2", faults=_size_faults
        ),
        SpecRule(
            name="every rank has vocabulary rows", theorem="Definition 2", faults=_vocab_row_faults
        ),
        SpecRule(name="roles are those of the family", theorem="Definition 2", faults=_own_plan),
        SpecRule(name="token shards are equal", theorem="Definition 2", faults=_token_faults),
        SpecRule(
            name="the loss kernel has full weights", theorem="Definition 2", faults=_whole_head
        ),
        SpecRule(
            name="the optimizer has full matrices",
            theorem="Theorem 4, state consistency",
            faults=_whole_matrices,
        ),
    ),
    unsupported=(
        SpecRule(name="all tokens between blocks", theorem="", faults=_whole_tokens),
        SpecRule(name="the naive plan uses all tokens", theorem="", faults=_naive_slices),
        SpecRule(name="the naive plan has no latent attention", theorem="", faults=_naive_latents),
        SpecRule(name="shared heads are not compiled", theorem="", faults=_shared_heads),
        SpecRule(name="gathered shards are equal", theorem="", faults=_logit_faults),
        SpecRule(name="shards of shards are equal", theorem="", faults=_shards_of_rows),
        SpecRule(name="tp shards have one kind of data shards", theorem="", faults=_smaller_shards),
    ),
)


# Options of tp need sharded operators. On a single device all options are allowed.


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
                finding="has no effect: the mesh has no tp axis with two or more ranks",
                remedy=f"Remove `tensor.{key}`"
                + (f", or {two_ranks(Axis.TP)}" if key != "experts" else "."),
            )


DIALS = (
    SpecRule(
        name="options of tp need tp",
        theorem="every key has an effect",
        faults=_without_tp,
    ),
)
