"""The tensor axis in the exact column: each rank's own part of the model, and what tp sends.

The part is a model like any other, smaller: the data axes derive its costs as they do a whole
model's. What the operators send is counted here, call by call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ptrain.axes.ring import Calls, Group
from ptrain.axes.tensor.costs import Cut
from ptrain.costs import Collective, Phase, State, Traffic
from ptrain.derivation import activations
from ptrain.derivation.facts import ModelFacts, TensorFacts
from ptrain.plan.step import Parallelize, Plan
from ptrain.spec.model import ModelShape
from ptrain.spec.precision import DType
from ptrain.spec.role import Role
from ptrain.spec.spec import Spec
from ptrain.units import ceil_div

_LOSS_SUMS = 3  # of a loss on cut logits: their maximum, their sum, the targets' logits


def parts(spec: Spec, plan: Plan, facts: ModelFacts) -> dict[ModelFacts, tuple[int, ...]]:
    """What the ranks of tp have of the model, and which of them have it."""
    step = plan.tensor
    if step is None:
        return {facts: (0,)}
    found: dict[ModelFacts, tuple[int, ...]] = {}
    degree = spec.degree(step.axis)
    for index in range(degree):
        cut = Cut(step=step, degree=degree, index=index)
        part = local_facts(spec, facts, cut)
        found[part] = (*found.get(part, ()), index)
    return found


def local_facts(spec: Spec, facts: ModelFacts, cut: Cut) -> ModelFacts:
    """One rank's part: local shapes, and the timeline of its micro-batch."""
    assert isinstance(spec.model, ModelShape), "other models' parts are read off themselves"
    units = tuple(
        replace(unit, tensors=tuple(_local(tensor, cut) for tensor in unit.tensors))
        for unit in facts.units
    )
    return replace(
        facts,
        units=units,
        timeline=activations.timeline(
            spec.model,
            facts.unit_modules,
            batch=spec.batch.micro,
            sequence=spec.batch.sequence,
            compute=spec.precision.effective.parameters,
            cut=cut,
        ),
    )


def _local(tensor: TensorFacts, cut: Cut) -> TensorFacts:
    return replace(
        tensor,
        shape=cut.shape(tensor.name, tensor.shape),
        is_cut=cut.is_cut(tensor.name, tensor.shape),
    )


def sent(spec: Spec, plan: Plan, facts: ModelFacts) -> Iterator[Traffic]:
    """What the operators of `facts`, the whole model, send in a step: activations, their gradients
    and the sums of what the ranks computed of their own tokens."""
    step = plan.tensor
    if step is None:
        return
    group = Group((step.axis,), spec.degree(step.axis))
    times = plan.accumulate.micro_batches
    for collective, state, phase, number, payload in _calls(spec, step, facts, group.ranks):
        yield Calls(collective, state, phase, number * times).over(group, payload)


_Row = tuple[Collective, State, Phase, int, int]


def _calls(spec: Spec, step: Parallelize, facts: ModelFacts, ranks: int) -> Iterator[_Row]:
    """(collective, state, phase, calls in a micro-batch, payload of each)."""
    shape, layout = spec.model, spec.precision.effective
    assert isinstance(shape, ModelShape)
    itemsize = layout.parameters.itemsize
    tokens = spec.batch.micro * spec.batch.sequence
    hidden = tokens * shape.hidden * itemsize
    counts = {role: _count(step, facts, role) for role in Role}
    joins = counts[Role.ROW] + counts[Role.VOCABULARY]  # sums of parts: into the residual stream
    opens = counts[Role.COLUMN] if step.is_naive else counts[Role.WHOLE_INPUT]
    opens += counts[Role.LAST_NORM]
    for phase, sums, copies in (
        (Phase.FORWARD, joins, opens),
        (Phase.BACKWARD, opens, joins),
    ):
        if step.is_sequence:
            yield Collective.REDUCE_SCATTER, State.ACTIVATIONS, phase, sums, hidden
            yield Collective.ALL_GATHER, State.ACTIVATIONS, phase, copies, hidden
        else:
            yield Collective.ALL_REDUCE, State.ACTIVATIONS, phase, sums, hidden
    if step.is_saved_cut:
        again = counts[Role.WHOLE_INPUT]
        yield Collective.ALL_GATHER, State.ACTIVATIONS, Phase.BACKWARD, again, hidden
    if step.is_sequence:
        yield from _summed_gradients(step, facts, itemsize)
        if counts[Role.POSITIONS]:
            rows = spec.batch.sequence * shape.hidden * itemsize
            yield Collective.ALL_GATHER, State.ACTIVATIONS, Phase.BACKWARD, 1, rows
    if step.loss_parallel:
        wide = max(itemsize, DType.FP32.itemsize)
        yield Collective.ALL_REDUCE, State.ACTIVATIONS, Phase.FORWARD, _LOSS_SUMS, tokens * wide
    else:
        vocabulary = ranks * ceil_div(shape.vocab, ranks)
        size = tokens * vocabulary * itemsize
        yield Collective.ALL_GATHER, State.ACTIVATIONS, Phase.FORWARD, 1, size


def _summed_gradients(step: Parallelize, facts: ModelFacts, itemsize: int) -> Iterator[_Row]:
    """Of the tensors that every rank has whole and uses on its tokens: one sum each."""
    cut = Cut(step=step, degree=1, index=0)
    for tensor in facts.tensors:
        if cut.role(tensor.name) in (Role.NORM, Role.LAST_NORM):
            size = tensor.numel * itemsize
            yield Collective.ALL_REDUCE, State.GRADIENTS, Phase.BACKWARD, 1, size


def _count(step: Parallelize, facts: ModelFacts, role: Role) -> int:
    """Modules with a role: its patterns, once per block where they name one."""
    layers = len({t.name.split(".")[1] for t in facts.tensors if t.name.startswith("blocks.")})
    return sum(layers if "*" in pattern else 1 for pattern, has in step.roles if has is role)
