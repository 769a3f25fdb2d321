"""Why `exact` is not `paper`: one sentence for each thing that runs and that no theorem counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ptrain.axes.tensor.costs import cut_dims
from ptrain.costs import Collective, Phase, Traffic
from ptrain.derivation.ghosts.table import wrapping
from ptrain.derivation.paper import itemsizes
from ptrain.facts.model import ModelFacts
from ptrain.facts.stages import is_within
from ptrain.optimizers.update import moment_names, rule_of
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.units import format_bytes


def notes(spec: Spec, plan: Plan, facts: ModelFacts, traffic: Iterable[Traffic]) -> Iterator[str]:
    """`traffic` is the `exact` column's."""
    yield from wrapping(spec, plan, facts).notes()
    yield from _whole_beside_slices(plan, facts, sum(itemsizes(spec).values()))
    yield from _fewer_moments(spec, plan, facts)
    yield from _copies(traffic)


def _whole_beside_slices(plan: Plan, facts: ModelFacts, per_element: int) -> Iterator[str]:
    """What tp leaves whole, where Theorem 1 divides all of |Θ|, |Ω| and |G|."""
    step = plan.tensor
    if step is None:
        return
    cut = cut_dims(step, ((tensor.name, tensor.shape) for tensor in facts.tensors))
    apart = plan.experts.modules if plan.experts and plan.experts.folded else ()
    own = (tensor for tensor in facts.tensors if not is_within(tensor.name, apart))
    whole = sum(tensor.numel for tensor in own if tensor.name not in cut)
    if whole:
        yield (
            f"{whole:,} of {facts.numel:,} parameters belong to no operator that is cut, and every "
            f"rank of {step.axis} has them whole: {format_bytes(whole * per_element)} of Θ, Ω and "
            "G before the data axes divide them, of which the theorem counts a slice"
        )


def _fewer_moments(spec: Spec, plan: Plan, facts: ModelFacts) -> Iterator[str]:
    """Where an optimizer keeps less of some tensors than the theorems' |Ω| has of each element."""
    if spec.optimizer.row.is_elementwise:
        return
    layout = plan.update.layout
    usual, fewer = (
        len(moment_names(rule_of(spec.optimizer, hidden), spec.optimizer))
        for hidden in (False, True)
    )
    hidden = sum(
        tensor.numel for unit in facts.units for tensor in unit.tensors if unit.is_hidden(tensor)
    )
    if hidden:
        size = hidden * (usual - fewer) * layout.moments.itemsize
        yield (
            f"{spec.optimizer.name} keeps {fewer} moment of each matrix of the blocks, "
            f"{hidden:,} of {facts.numel:,} elements, and the theorems' |Ω| counts {usual} of "
            f"every element: {format_bytes(size)} less in all"
        )


_COPIES = {
    Collective.HOST_TO_DEVICE: "to the device",
    Collective.DEVICE_TO_HOST: "to the host",
    Collective.FILE_READ: "read from files",
    Collective.FILE_WRITE: "written to files",
}


def _copies(traffic: Iterable[Traffic]) -> Iterator[str]:
    totals: dict[str, int] = {}
    for row in traffic:
        if row.key.collective in _COPIES and row.key.phase is not Phase.SETUP:
            words = _COPIES[row.key.collective]
            totals[words] = totals.get(words, 0) + row.payload_bytes
    if totals:
        copies = ", ".join(f"{format_bytes(size)} {words}" for words, size in totals.items())
        yield f"a rank copies between its tiers, which no theorem counts: {copies} in a step"
