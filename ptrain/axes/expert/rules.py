"""Which tuples the expert axis takes, and which specs.

Of the experts a rank has some, whole: Theta, Omega, G and what it makes of tokens are S. Of all
else ep is a data axis whose ranks hold different samples: any triple of Theta, Omega and G that is
legal there, with A = R. That is 1 x 95 tuples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ptrain.axes.data.dials import REASON
from ptrain.axes.data.rules import GRADIENT_INTEGRITY, STATE_RULES
from ptrain.axes.expert.form import factor_of, is_by_routing
from ptrain.axes.rule import AxisRules, SpecRule, TupleRule
from ptrain.errors import Fault
from ptrain.facts.parameters import expert_modules
from ptrain.spec.axis import Axis
from ptrain.spec.batch import PADDED
from ptrain.spec.layout import ranks_over
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import R
from ptrain.spec.routing import FORM, Choices, Histogram
from ptrain.spec.spec import Spec
from ptrain.units import ceil_div, counted

_FOLDS = "tensor.experts"
_CUT = "tensor.experts: cut"
_OVERLAP = "overlap_shared_experts"
_TUPLES = (
    *STATE_RULES,
    TupleRule(
        name="activations are those of a rank's samples",
        theorem=GRADIENT_INTEGRITY,
        broken=lambda placement, _: placement.activations != R,
        message="activations on ep are those of a rank's own samples (R), but within its experts; "
        "M and O belong to a rank, not to an axis: activations: M at the top of the spec",
        nearest=lambda placement: replace(placement, activations=R),
    ),
)


def _experts_divide(spec: Spec) -> Iterator[Fault]:
    factor, shape = factor_of(spec), spec.model
    if factor is None or not isinstance(shape, ModelShape):
        return
    if shape.experts is None:
        yield Fault(
            place="mesh.ep",
            finding="the model has no experts that ranks of ep could have",
            remedy="write model.experts, or dp_shard in place of ep",
        )
        return
    beside = ranks_over(spec, spec.folded_axes)
    if shape.experts % (factor.degree * beside):
        ranks = f"{factor.degree} × {beside}" if beside > 1 else f"{factor.degree}"
        yield Fault(
            place="mesh.ep",
            finding=f"{ranks} ranks do not divide {shape.experts} experts",
            remedy=", or ".join(_divisible(shape.experts, factor.degree, beside)),
        )


def _divisible(experts: int, degree: int, beside: int) -> Iterator[str]:
    """Yield what makes as many experts a rank, of so many ranks of tp beside one of ep."""
    fewest = 1 if beside == 1 else 2  # nothing folds into one
    choices = [d for d in range(fewest, experts + 1) if experts % (d * beside) == 0]
    if choices:
        yield f"choose ep from {', '.join(map(str, choices))}"
    if beside > 1 and experts % degree == 0:
        yield f"write {_CUT}"
    elif not choices:
        yield f"write model.experts={ceil_div(experts, degree * beside) * degree * beside}"


def _routing_fits(spec: Spec) -> Iterator[Fault]:
    """One fault: what is wrong with counts in one place mostly is in all of them."""
    shape = spec.model
    if spec.routing is None or not isinstance(shape, ModelShape):
        return
    if not is_by_routing(spec):
        finding = "no size depends on where tokens go: there are no two ranks of ep, or a "
        finding += "capacity_factor gives every expert as many places"
        yield Fault(place="routing", finding=finding, remedy="leave it out")
    elif isinstance(spec.routing, Histogram) and (wrong := _misfit(spec, shape, spec.routing)):
        yield Fault(place="routing", finding=wrong, remedy=f"write {FORM}")


def _misfit(spec: Spec, shape: ModelShape, histogram: Histogram) -> str:
    """Return what does not fit the spec, with its place; empty where all does."""
    layers = [module.rpartition(".")[0] for module in expert_modules(spec)]
    if missing := [layer for layer in layers if layer not in histogram.layers]:
        return f"no counts of {', '.join(missing)}"
    if others := [layer for layer in histogram.layers if layer not in layers]:
        return f"{', '.join(others)}: the model has no such layer with experts"
    ranks = ranks_over(spec, spec.routing_axes)
    for layer, of_layer in zip(histogram.layers, histogram.counts, strict=True):
        if len(of_layer) != ranks:
            return f"{layer}: {len(of_layer)} ranks; {ranks} have tokens of their own"
        for rank, of_rank in enumerate(of_layer):
            place = f"{layer}, rank {rank}"
            if len(of_rank) != spec.batch.accumulate:
                return f"{place}: {len(of_rank)} micro-batches; a step has {spec.batch.accumulate}"
            for number, of_experts in enumerate(of_rank):
                if wrong := _misfit_of(spec, shape, of_experts):
                    return f"{place}, micro-batch {number}: {wrong}"
    return ""


def _misfit_of(spec: Spec, shape: ModelShape, of_experts: Choices) -> str:
    """Return what does not fit in the counts of one micro-batch."""
    if len(of_experts) != shape.experts:
        return f"{len(of_experts)} experts; the layer has {shape.experts}"
    tokens, often = spec.batch.micro * spec.routed_tokens, shape.experts_per_token
    if (number := sum(of_experts)) != tokens * often:
        return f"{number} choices; {tokens} tokens make {often} each, which are {tokens * often}"
    if (most := max(of_experts)) > tokens:
        return f"{most} choices of expert {of_experts.index(most)}; there are {tokens} tokens"
    return ""


def _nothing_folds(spec: Spec) -> Iterator[Fault]:
    if not spec.tensor.is_folded or spec.degree(Axis.TP) == 1 or spec.folded_axes:
        return
    has_experts = isinstance(spec.model, ModelShape) and spec.model.experts is not None
    yield Fault(
        place=_FOLDS,
        finding="folded: ranks of tp join those of ep, which has no two"
        if has_experts
        else "folded: the model has no experts that ranks of ep and tp could have",
        remedy="leave it out" + (", or write ep: mesh: {…, ep: 2, tp: 2}" if has_experts else ""),
    )


def _folded_slices(spec: Spec) -> Iterator[Fault]:
    ranks, tokens = ranks_over(spec, spec.folded_axes), spec.own_tokens
    if tokens % ranks:
        yield Fault(
            place="batch.sequence",
            finding=f"{counted(tokens, 'token')} of a rank cannot be cut into {ranks} equal "
            "slices, of which ranks of tp route one each",
            remedy=f"write a multiple of {ranks}, or {_CUT}{PADDED}",
        )


def _folded_naively(spec: Spec) -> Iterator[Fault]:
    if spec.folded_axes and spec.tensor.is_naive:
        yield Fault(
            place="tensor.plan",
            finding="not yet: naive, with experts that are folded",
            remedy=f"write paired, or {_CUT}",
        )


def _shared_experts_overlap(spec: Spec) -> Iterator[Fault]:
    shape = spec.model
    if not spec.overlap_shared_experts or not isinstance(shape, ModelShape):
        return
    if factor_of(spec) is None:
        finding = "no rows travel, beside which they could compute: there are no two ranks of ep"
        yield Fault(place=_OVERLAP, finding=finding, remedy="leave it out, or write mesh.ep")
    elif not shape.shared_experts:
        finding = "the model has no experts that all tokens go to"
        yield Fault(place=_OVERLAP, finding=finding, remedy="leave it out")


def _unknown_experts(spec: Spec) -> Iterator[Fault]:
    if factor_of(spec) is not None and not isinstance(spec.model, ModelShape):
        yield Fault(
            place="mesh.ep",
            finding="not yet: ranks with experts of their own, of a model that is not built in",
            remedy="what works today: dp_shard in place of ep",
        )


EXPERT = AxisRules(
    axes=(Axis.EP,),
    tuples=_TUPLES,
    specs=(
        SpecRule(name="ranks have as many experts", theorem="Definition 2", faults=_experts_divide),
        SpecRule(name="tp joins ep", theorem="Definition 2", faults=_nothing_folds),
        SpecRule(name="routed slices are equal", theorem="Definition 2", faults=_folded_slices),
        SpecRule(name="counts are of the layers", theorem="Definition 2", faults=_routing_fits),
        SpecRule(
            name="shared experts overlap rows that travel",
            theorem=REASON,
            faults=_shared_experts_overlap,
        ),
    ),
    not_yet=(
        SpecRule(name="experts are known", theorem="", faults=_unknown_experts),
        SpecRule(name="the naive plan cuts experts", theorem="", faults=_folded_naively),
    ),
)
