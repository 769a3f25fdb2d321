"""The step that moves the biases of routers."""

from __future__ import annotations

from dataclasses import dataclass

from ptrain.spec.axis import Axis
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec
from ptrain.steps.kind import PlanStep


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceExperts(PlanStep):
    """The bias of every expert rises by `rate` where the tokens of a step chose it less often than
    the mean of its layer's experts, and falls by it where more often (DeepSeek-V3,
    arXiv:2412.19437, section 2.1.2; Wang et al. 2024, arXiv:2408.15664, algorithm 1).

    Choices are those of the global batch's tokens, `choices` in every layer, dropped ones too: each
    rank's are summed over `axes`, whose ranks have tokens of their own. All ranks keep the same
    biases.
    """

    rate: float
    choices: int
    axes: tuple[Axis, ...]


def balance_of(spec: Spec, axes: tuple[Axis, ...]) -> BalanceExperts | None:
    """Return the step of a spec whose gradients are summed over `axes`; None where no router has a
    bias."""
    shape = spec.model
    if not isinstance(shape, ModelShape) or shape.bias_update_rate is None:
        return None
    tokens = spec.batch.global_samples * spec.batch.sequence
    return BalanceExperts(
        rate=shape.bias_update_rate, choices=tokens * shape.experts_per_token, axes=axes
    )
