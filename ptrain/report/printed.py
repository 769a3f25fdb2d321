"""What the values of the API print: the tables of the command line.

A spec prints as `ptrain specs show`, a derivation as `ptrain predict`, a plan as `ptrain plan`, an
estimate as the column that it is.
"""

from __future__ import annotations

from ptrain.algebra.obeyed import shown
from ptrain.cost import Estimate
from ptrain.derivation.estimate import Derivation
from ptrain.plan.show import show
from ptrain.report.predict import account, one, prediction_of
from ptrain.report.selection import selection_text
from ptrain.selection.ranking import PlacementRanking
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.wording import worded

worded.register(Estimate, account)


@worded.register(Spec)
def _(spec: Spec) -> str:
    return shown(spec).as_yaml().rstrip()


@worded.register(Derivation)
def _(derivation: Derivation) -> str:
    return one(prediction_of(derivation))


@worded.register(Plan)
def _(plan: Plan) -> str:
    return show(plan.spec, plan)


@worded.register(PlacementRanking)
def _(selection: PlacementRanking) -> str:
    return selection_text(selection)
