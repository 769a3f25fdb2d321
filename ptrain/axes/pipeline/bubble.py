"""How long a rank waits in a step, by the formulas of the literature; the simulator gives the same,
or the formula is a bound and says on which side.

F, B and W are one micro-batch's forward, whole backward and weight half on one of p*v equal stages,
I = B - W, and communication is free.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from ptrain.axes.pipeline.schedule import PipelineShape
from ptrain.axes.pipeline.simulate import StageCost
from ptrain.spec.pipeline import ScheduleName


class Relation(StrEnum):
    """Of the wait to the formula."""

    EQUAL = "="
    AT_LEAST = ">="
    AT_MOST = "<="


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedForm:
    """`idle`: what the rank that waits most waits in a step. `ideal`: what each rank computes,
    m*v*(F+B), nothing of it hidden by pairs."""

    idle: float
    ideal: float
    relation: Relation = Relation.EQUAL

    @property
    def ratio(self) -> float:
        """To the ideal time."""
        return self.idle / self.ideal


def closed_form(
    name: ScheduleName, pipeline: PipelineShape, cost: StageCost, *, hidden: float = 0
) -> ClosedForm | None:
    """None where the literature has no formula, or its formula's premises do not hold. `hidden` is
    what a pair takes less than its halves (`Costs.hidden`)."""
    ranks, microbatches = pipeline.ranks, pipeline.microbatches
    weight = cost.weight
    both = cost.forward + cost.input + weight
    ideal = microbatches * pipeline.stages_per_rank * both
    match name:
        case ScheduleName.NAIVE:
            return ClosedForm(idle=(ranks - 1) * microbatches * both, ideal=ideal)
        case ScheduleName.GPIPE | ScheduleName.ONE_F_ONE_B:
            return ClosedForm(idle=(ranks - 1) * both, ideal=ideal)
        case ScheduleName.BFS | ScheduleName.INTERLEAVED:
            # fewer micro-batches than ranks: the first is not back when the last has gone
            gap = max(0, ranks - microbatches) * (pipeline.stages_per_rank - 1)
            return ClosedForm(idle=(ranks - 1 + gap) * both, ideal=ideal)
        case ScheduleName.ZERO_BUBBLE:
            # ZB-H1 of Qi et al. 2024, (p-1)(F + I - W); with a longer W the drain is not filled
            fits = weight <= min(cost.forward, cost.input) and microbatches >= ranks
            relation = Relation.EQUAL if fits else Relation.AT_LEAST
            return ClosedForm(
                idle=(ranks - 1) * (both - 2 * weight), ideal=ideal, relation=relation
            )
        case ScheduleName.DUALPIPEV:
            if max(cost.forward, weight) > cost.input:
                return None
            # DeepSeek's (PP/2 - 1)(F&B + B - 3W): their PP counts stages, and p ranks have 2p
            pair, backward = both - hidden, cost.input + weight
            idle = (ranks - 1) * (pair + backward - 3 * weight)
            return ClosedForm(idle=idle, ideal=ideal, relation=Relation.AT_MOST)
        case ScheduleName.ZBV:
            return None
        case _:
            assert_never(name)
