"""Legality of the expert axis: which placements and specs it accepts.

Experts are sharded: parameters, optimizer state, gradients and expert activations are S. For all
other tensors ep is a data axis whose ranks have different samples. It accepts any legal placement
of parameters, optimizer state and gradients there, with A = R. That is 1 x 95 placements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ptrain.axes.data.dials import REASON
from ptrain.axes.data.rules import GRADIENT_INTEGRITY, STATE_RULES
from ptrain.axes.expert.form import factor_of, histogram_fault, is_by_routing
from ptrain.axes.rule import AxisRules, SpecRule, TupleRule
from ptrain.errors import Fault
from ptrain.facts.parameters import expert_layers
from ptrain.spec.batch import PADDED
from ptrain.spec.model import HuggingFaceModel, ModelShape
from ptrain.spec.placement import Axis, R
from ptrain.spec.shorthand import two_ranks
from ptrain.spec.spec import Spec, ranks_over
from ptrain.units import ceil_div, with_noun

_IMPLEMENTATION, _GROUPED = "experts_implementation", "grouped_mm"  # of Transformers
_FOLDS = "tensor.experts"
_CUT = "tensor.experts=cut"
_OVERLAP = "overlap_shared_experts"
_TUPLES = (
    *STATE_RULES,
    TupleRule(
        name="activations are those of the local samples",
        theorem=GRADIENT_INTEGRITY,
        is_broken=lambda placement, _: placement.activations != R,
        message=(
            "activations on ep must be R outside of experts: each rank holds those of "
            "its local samples; M and O are set for all axes at the top level, "
            "`activations=M`"
        ),
        repair=lambda placement: replace(placement, activations=R),
    ),
)


def _experts_divide(spec: Spec) -> Iterator[Fault]:
    factor, shape = factor_of(spec), spec.model
    if factor is None or not isinstance(shape, ModelShape):
        return
    if shape.experts is None:
        yield Fault(
            place="mesh.ep",
            finding="ep needs experts, and the model has none",
            remedy="Set `model.experts`, or use dp_shard instead of ep.",
        )
        return
    # Folded ranks of tp have different experts too.
    beside = ranks_over(spec, spec.folded_axes)
    if shape.experts % (factor.degree * beside):
        ranks = f"{factor.degree} × {beside}" if beside > 1 else f"{factor.degree}"
        yield Fault(
            place="mesh.ep",
            finding=f"{ranks} ranks do not divide {shape.experts} experts",
            remedy=f"Use {', or '.join(_division_remedies(shape.experts, factor.degree, beside))}.",
        )


def _division_remedies(experts: int, degree: int, beside: int) -> Iterator[str]:
    """Yield remedies that give each rank the same number of experts.

    Args:
        experts: Experts of a layer.
        degree: Ranks of ep.
        beside: Ranks of tp for each rank of ep.
    """
    fewest = 1 if beside == 1 else 2  # tp does not fold into a single rank
    choices = [d for d in range(fewest, experts + 1) if experts % (d * beside) == 0]
    if choices:
        yield f"one of {', '.join(map(str, choices))} for `mesh.ep`"
    if beside > 1 and experts % degree == 0:
        yield f"`{_CUT}`"
    elif not choices:
        yield f"`model.experts={ceil_div(experts, degree * beside) * degree * beside}`"


def _routing_fits(spec: Spec) -> Iterator[Fault]:
    """Yield the faults of `routing`. For models that are not built in, `form.experts_of` checks
    counts when the layers are known."""
    if spec.routing is None:
        return
    if not is_by_routing(spec):
        finding = "has no effect: the mesh has no ep axis with two or more ranks, or "
        finding += "capacity_factor gives every expert the same number of tokens"
        yield Fault(place="routing", finding=finding, remedy="Remove it.")
    elif (known := expert_layers(spec)) is not None and (wrong := histogram_fault(spec, known)):
        yield wrong


def _nothing_folds(spec: Spec) -> Iterator[Fault]:
    if not spec.tensor.is_folded or spec.degree(Axis.TP) == 1 or spec.folded_axes:
        return
    has_experts = isinstance(spec.model, ModelShape) and spec.model.experts is not None
    yield Fault(
        place=_FOLDS,
        finding="folded has no effect: the mesh has no ep axis with two or more ranks"
        if has_experts
        else "folded has no effect: the model has no experts",
        remedy="Remove it" + (f", or {two_ranks(Axis.EP)}" if has_experts else "."),
    )


def _folded_slices(spec: Spec) -> Iterator[Fault]:
    ranks, tokens = ranks_over(spec, spec.folded_axes), spec.own_tokens
    if tokens % ranks:
        yield Fault(
            place="batch.sequence",
            finding=(
                f"{with_noun(tokens, 'token')} per rank cannot be split evenly over the "
                f"{ranks} tp ranks that route them"
            ),
            remedy=f"Use a multiple of {ranks}, or `{_CUT}`{PADDED}.",
        )


def _naive_with_folded(spec: Spec) -> Iterator[Fault]:
    if spec.folded_axes and spec.tensor.is_naive:
        yield Fault(
            place="tensor.plan",
            finding="not supported yet: naive with folded experts",
            remedy=f"Use `tensor.plan=paired`, or `{_CUT}`.",
        )


def _shared_experts_overlap(spec: Spec) -> Iterator[Fault]:
    shape = spec.model
    if not spec.overlap_shared_experts:
        return
    if not isinstance(shape, ModelShape):
        yield Fault(
            place=_OVERLAP,
            finding="has no effect: custom models decide the order of their computation",
            remedy="Remove it.",
        )
    elif factor_of(spec) is None:
        yield Fault(
            place=_OVERLAP,
            finding="has no effect: the mesh has no ep axis with two or more ranks",
            remedy="Remove it, or set `mesh.ep`.",
        )
    elif not shape.shared_experts:
        yield Fault(
            place=_OVERLAP,
            finding="has no effect: the model has no shared experts",
            remedy="Remove it.",
        )


def _grouped_implementation(spec: Spec) -> Iterator[Fault]:
    model = spec.model
    if (
        factor_of(spec) is not None
        and isinstance(model, HuggingFaceModel)
        and (written := model.config.get(_IMPLEMENTATION)) not in (None, _GROUPED)
    ):
        yield Fault(
            place=f"model.config.{_IMPLEMENTATION}",
            finding=f"ep needs the grouped_mm implementation of experts; got {written}",
            remedy="Remove it, or use dp_shard instead of ep.",
        )


def _ep_with_tp(spec: Spec) -> Iterator[Fault]:
    is_on_both = factor_of(spec) is not None and spec.degree(Axis.TP) > 1
    if is_on_both and not isinstance(spec.model, ModelShape):
        yield Fault(
            place="mesh.ep",
            finding="not supported yet: ep with tp for custom models",
            remedy="Use dp_shard instead of ep, remove `mesh.tp`, or use a built-in model.",
        )


EXPERT = AxisRules(
    axes=(Axis.EP,),
    tuples=_TUPLES,
    specs=(
        SpecRule(
            name="ranks have equal numbers of experts",
            theorem="Definition 2",
            faults=_experts_divide,
        ),
        SpecRule(name="tp joins ep", theorem="Definition 2", faults=_nothing_folds),
        SpecRule(name="routed shards are equal", theorem="Definition 2", faults=_folded_slices),
        SpecRule(name="counts match the layers", theorem="Definition 2", faults=_routing_fits),
        SpecRule(
            name="experts use grouped products",
            theorem="Definition 2",
            faults=_grouped_implementation,
        ),
        SpecRule(
            name="shared experts overlap communication",
            theorem=REASON,
            faults=_shared_experts_overlap,
        ),
    ),
    unsupported=(
        SpecRule(name="experts are sharded over tp too", theorem="", faults=_ep_with_tp),
        SpecRule(name="the naive plan shards experts", theorem="", faults=_naive_with_folded),
    ),
)
