"""Which tuples the expert axis takes, and which specs.

Of the experts a rank has some, whole: Theta, Omega, G and what it makes of tokens are S. Of all
else ep is a data axis whose ranks hold different samples: any triple of Theta, Omega and G that is
legal there, with A = R. That is 1 x 95 tuples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ptrain.axes.data.rules import GRADIENT_INTEGRITY, STATE_RULES
from ptrain.axes.expert.form import factor_of, is_by_routing, undivided, unfit
from ptrain.axes.rule import AxisRules, SpecRule, TupleRule
from ptrain.errors import Fault
from ptrain.facts.parameters import expert_layers
from ptrain.spec.axis import Axis
from ptrain.spec.model import HuggingFaceModel, ModelShape
from ptrain.spec.placement import R
from ptrain.spec.spec import Spec

_IMPLEMENTATION, _GROUPED = "experts_implementation", "grouped_mm"  # of transformers
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
    elif shape.experts % factor.degree:
        yield undivided(factor.degree, shape.experts)


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


def _by_groups(spec: Spec) -> Iterator[Fault]:
    model = spec.model
    if factor_of(spec) is None or not isinstance(model, HuggingFaceModel):
        return
    written = model.config.get(_IMPLEMENTATION)
    if written not in (None, _GROUPED):
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
        SpecRule(name="counts are of the layers", theorem="Definition 2", faults=_routing_fits),
        SpecRule(name="rows are multiplied by group", theorem="Definition 2", faults=_by_groups),
    ),
    not_yet=(SpecRule(name="experts are cut over tp too", theorem="", faults=_whole_on_tp),),
)
