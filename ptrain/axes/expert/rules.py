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
from ptrain.axes.expert.form import factor_of, is_by_routing, unfit
from ptrain.axes.rule import AxisRules, SpecRule, TupleRule
from ptrain.errors import Fault
from ptrain.facts.parameters import expert_layers
from ptrain.spec.batch import PADDED
from ptrain.spec.model import HuggingFaceModel, ModelShape
from ptrain.spec.placement import Axis, R
from ptrain.spec.spec import Spec, ranks_over
from ptrain.spec.tuples import two_ranks
from ptrain.units import ceil_div, counted

_IMPLEMENTATION, _GROUPED = "experts_implementation", "grouped_mm"  # of transformers
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
    """Counts of a model that is not built in are looked at where its layers are known
    (`form.experts_of`)."""
    if spec.routing is None:
        return
    if not is_by_routing(spec):
        finding = "no size depends on where tokens go: there are no two ranks of ep, or a "
        finding += "capacity_factor gives every expert as many places"
        yield Fault(place="routing", finding=finding, remedy="leave it out")
    elif (known := expert_layers(spec)) is not None and (wrong := unfit(spec, known)):
        yield wrong


def _nothing_folds(spec: Spec) -> Iterator[Fault]:
    if not spec.tensor.is_folded or spec.degree(Axis.TP) == 1 or spec.folded_axes:
        return
    has_experts = isinstance(spec.model, ModelShape) and spec.model.experts is not None
    yield Fault(
        place=_FOLDS,
        finding="folded: ranks of tp join those of ep, which has no two"
        if has_experts
        else "folded: the model has no experts that ranks of ep and tp could have",
        remedy="leave it out" + (f", or write {two_ranks(Axis.EP)}" if has_experts else ""),
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
    if not spec.overlap_shared_experts:
        return
    if not isinstance(shape, ModelShape):
        finding = "a model that is not built in says itself what computes when"
        yield Fault(place=_OVERLAP, finding=finding, remedy="leave it out")
    elif factor_of(spec) is None:
        finding = "no rows travel, beside which they could compute: there are no two ranks of ep"
        yield Fault(place=_OVERLAP, finding=finding, remedy="leave it out, or write mesh.ep")
    elif not shape.shared_experts:
        finding = "the model has no experts that all tokens go to"
        yield Fault(place=_OVERLAP, finding=finding, remedy="leave it out")


def _by_groups(spec: Spec) -> Iterator[Fault]:
    model = spec.model
    if factor_of(spec) is None or not isinstance(model, HuggingFaceModel):
        return
    if (written := model.config.get(_IMPLEMENTATION)) not in (None, _GROUPED):
        yield Fault(
            place=f"model.config.{_IMPLEMENTATION}",
            finding=f"{written}: on ep the rows that a rank's experts get are multiplied group by "
            "group",
            remedy="leave it out, or write dp_shard in place of ep",
        )


def _whole_on_tp(spec: Spec) -> Iterator[Fault]:
    is_on_both = factor_of(spec) is not None and spec.degree(Axis.TP) > 1
    if is_on_both and not isinstance(spec.model, ModelShape):
        yield Fault(
            place="mesh.ep",
            finding="not yet: beside tp, of a model that is not built in, whose experts are whole "
            "on every rank of tp",
            remedy="what works today: dp_shard in place of ep, no tp, or a built-in model",
        )


EXPERT = AxisRules(
    axes=(Axis.EP,),
    tuples=_TUPLES,
    specs=(
        SpecRule(name="ranks have as many experts", theorem="Definition 2", faults=_experts_divide),
        SpecRule(name="tp joins ep", theorem="Definition 2", faults=_nothing_folds),
        SpecRule(name="routed slices are equal", theorem="Definition 2", faults=_folded_slices),
        SpecRule(name="counts are of the layers", theorem="Definition 2", faults=_routing_fits),
        SpecRule(name="rows are multiplied by group", theorem="Definition 2", faults=_by_groups),
        SpecRule(
            name="shared experts overlap rows that travel",
            theorem=REASON,
            faults=_shared_experts_overlap,
        ),
    ),
    not_yet=(
        SpecRule(name="experts are cut over tp too", theorem="", faults=_whole_on_tp),
        SpecRule(name="the naive plan cuts experts", theorem="", faults=_folded_naively),
    ),
)
