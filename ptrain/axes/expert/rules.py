"""Which tuples the expert axis takes, and which specs.

Of the experts a rank has some, whole: Theta, Omega, G and what it makes of tokens are S. Of all
else ep is a data axis whose ranks hold different samples: any triple of Theta, Omega and G that is
legal there, with A = R. That is 1 x 95 tuples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ptrain.axes.data.rules import GRADIENT_INTEGRITY, STATE_RULES
from ptrain.axes.expert.form import factor_of
from ptrain.axes.rule import AxisRules, SpecRule, TupleRule
from ptrain.errors import Fault
from ptrain.spec.axis import Axis
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import R
from ptrain.spec.spec import Spec

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
        divide = [d for d in range(1, shape.experts + 1) if shape.experts % d == 0]
        yield Fault(
            place="mesh.ep",
            finding=f"{factor.degree} ranks do not divide {shape.experts} experts",
            remedy=f"choose ep from {', '.join(map(str, divide))}",
        )


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
    ),
    not_yet=(SpecRule(name="experts are known", theorem="", faults=_unknown_experts),),
)
