"""Theorem 6, checked on the traffic meter's records: the ranks of the groups, and the order of
calls in a backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from ptrain.axes.data.run.target import cutting_axes
from ptrain.axes.tensor.run.apply import micro_batch, parallelize
from ptrain.cost import Phase, State, Traffic
from ptrain.data.corpus import open_corpus
from ptrain.errors import BrokenPlan
from ptrain.interpreter.execute import execute
from ptrain.interpreter.program import Program, interpret, prepare_construction
from ptrain.meters.measure import measure
from ptrain.models.ledger import local_tensor
from ptrain.plan.composition import are_consecutive, have_one_of_each, theorem_6
from ptrain.runtime.world import World
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.steps.wraps import ExecutedStep
from ptrain.train.loop import local_batch
from tests.gloo.tensor_cases import SIZES, tensor_spec
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

LAYERS = SIZES["layers"]
TP = ("tp",)
SCALAR = 8  # bytes
STEPS = 3  # DDP and FSDP2 are steady in the third


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One rank's record of a steady step: the ranks of its groups, and its calls in order."""

    ranks_by_axes: Mapping[tuple[str, ...], tuple[int, ...]]
    calls: tuple[Traffic, ...]

    @property
    def backward(self) -> tuple[Traffic, ...]:
        """Return the calls of backward and after it, where replicated gradients are reduced before
        the update."""
        return tuple(c for c in self.calls if c.key.phase in (Phase.BACKWARD, Phase.UPDATE))

    def group_of(self, call: Traffic) -> tuple[int, ...]:
        return self.ranks_by_axes[call.key.axes]


def record_step(spec: Spec) -> StepRecord:
    """Train some steps on this rank with the meters on the last of them."""
    program = interpret(spec, world=World.join(spec.timeout))
    assert theorem_6(spec, program.plan, program.ran)[1].holds
    return records_of(program, STEPS)


def wrap_before_sharding(plan: Plan) -> Plan:
    """Wrap units first, then shard their operators."""
    others = [step for step in plan.steps if step not in (plan.tensor, plan.wrap)]
    assert plan.tensor is not None
    return replace(plan, steps=(others[0], plan.wrap, plan.tensor, *others[1:]))


def refusal_message(spec: Spec) -> str:
    """Return the executor's message."""
    rank = prepare_construction(spec, world=World.join(spec.timeout))
    rank.plan = wrap_before_sharding(rank.plan)
    try:
        execute(rank)
    except BrokenPlan as error:
        return str(error)
    return ""


def moves_sharded_tensors(spec: Spec, *, is_wrapped_first: bool) -> set[bool]:
    """Return for each tensor sharded over tp whether a step changes it, for the plan or for the
    rejected order, in which the operators of wrapped units are sharded."""
    rank = prepare_construction(spec, world=World.join(spec.timeout))
    plan, step = rank.plan, rank.plan.tensor
    assert step is not None
    if is_wrapped_first:
        rank.plan = replace(plan, steps=tuple(each for each in plan.steps if each is not step))
    execute(rank)
    if is_wrapped_first:
        parallelize(rank.model, step, rank.mesh.submesh((step.axis,)), rank.mesh.registry)
        rank.operators = micro_batch(step)
        rank.ran.append(ExecutedStep(step, 0))
    program = Program(rank)
    holding = [each.holds for each in theorem_6(spec, plan, program.ran)]
    assert holding == [True, not is_wrapped_first, True]
    cut = [each for each in program.model.parameters() if cutting_axes(each)]
    before = [local_tensor(each).detach().clone() for each in cut]
    samples = local_batch(program, open_corpus(spec.data), 0)
    program.forward_backward(samples)
    program.step(1e-3)
    after = [local_tensor(each) for each in cut]
    return {not torch.equal(old, new) for old, new in zip(before, after, strict=True)}


def records_of(program: Program, steps: int) -> StepRecord:
    source = open_corpus(program.spec.data)
    for step in range(steps):
        local = local_batch(program, source, step)
        with measure(program) if step == steps - 1 else nullcontext() as measurement:
            program.forward_backward(local)
            program.step(1e-3)
    return StepRecord(ranks_by_axes=measurement.ranks_by_axes, calls=measurement.traffic.calls())


def tp_groups(seen: Sequence[StepRecord]) -> list[tuple[int, ...]]:
    """Return the groups of the calls over tp."""
    return sorted({s.group_of(call) for s in seen for call in s.calls if call.key.axes == TP})


def reductions(calls: Sequence[Traffic]) -> list[Traffic]:
    """Return the calls that reduced gradients over data axes, without the scalars of clipping."""
    of_gradients = (call for call in calls if call.key.state is State.GRADIENTS)
    return [c for c in of_gradients if "tp" not in c.key.axes and c.payload_bytes > SCALAR]


def breaks_6_1(seen: Sequence[StepRecord]) -> bool:
    return not are_consecutive(tp_groups(seen))


def breaks_6_2(calls: Sequence[Traffic], activations: str) -> bool:
    """Return violations of condition 2.

    Blocks are reduced from last to first, then the root. The calls of tp for the head and for every
    block down to it come before a block's reduction: two per block for its sub-blocks, or a gather
    and a scatter each for sequence shards, and the sum of a norm's gradient."""
    of_head, of_block = (1, 2) if activations == "R" else (2, 6)
    of_all = sum(call.key.axes == TP and call.key.phase is Phase.BACKWARD for call in calls)
    needed = [of_head + of_block * (block + 1) for block in range(LAYERS)] + [of_all]
    found, done = [], 0
    for call in calls:
        done += call.key.axes == TP
        found += [done] * len(reductions([call]))
    return len(found) != len(needed) or any(
        had < least for had, least in zip(found, needed, strict=True)
    )


def breaks_6_3(seen: Sequence[StepRecord]) -> bool:
    groups = {s.group_of(call) for s in seen for call in reductions(s.backward)}
    return not groups or not have_one_of_each(sorted(groups), tp_groups(seen))


@pytest.mark.parametrize(
    ("axis", "placement", "activations"),
    [
        ("dp_shard", "zero3", "S"),
        pytest.param("dp_replicate", "ddp", "S", marks=pytest.mark.nightly),
        pytest.param("dp_shard", "zero2", "R", marks=pytest.mark.nightly),
    ],
)
def test_the_conditions_hold_for_the_recorded_calls_and_for_no_others(
    ranks: Ranks, axis: str, placement: str, activations: str
) -> None:
    spec = tensor_spec(data={axis: placement}, activations=activations, accumulate=1)
    seen: list[StepRecord] = ranks.run(4, record_step, spec)
    assert tp_groups(seen) == [(0, 1), (2, 3)]
    assert not breaks_6_1(seen) and not breaks_6_3(seen)
    for each in seen:
        assert not breaks_6_2(each.backward, activations)
        data_first = sorted(each.backward, key=lambda call: call.key.axes == TP)
        assert breaks_6_2(data_first, activations)
    within = [
        replace(each, ranks_by_axes=dict.fromkeys(each.ranks_by_axes, each.ranks_by_axes[TP]))
        for each in seen
    ]
    assert breaks_6_3(within)


@pytest.mark.parametrize("placement", ["ddp", "zero3"])
def test_wrapping_units_before_sharding_their_operators_is_rejected(
    ranks: Ranks, placement: str
) -> None:
    axis = "dp_replicate" if placement == "ddp" else "dp_shard"
    for message in ranks.run(4, refusal_message, tensor_spec(data={axis: placement})):
        assert "Parallelize cannot run at this position" in message and "Theorem 6.2" in message


def test_the_rejected_order_would_not_train_sharded_operators(ranks: Ranks) -> None:
    """Units of full operators never receive the gradients of the sharded ones."""
    spec = tensor_spec(data={"dp_shard": "zero2"}, accumulate=1)
    assert (
        ranks.run(4, partial(moves_sharded_tensors, is_wrapped_first=False), spec) == [{True}] * 4
    )
    assert (
        ranks.run(4, partial(moves_sharded_tensors, is_wrapped_first=True), spec) == [{False}] * 4
    )


def test_a_mesh_in_the_wrong_order_is_detected(ranks: Ranks) -> None:
    """No loaded spec passes the rules with this mesh: tp is outermost, with every other rank in a
    group."""
    spec = tensor_spec(data={"dp_replicate": "ddp"}, accumulate=1)
    seen: list[StepRecord] = ranks.run(
        4, record_step, replace(spec, factors=tuple(reversed(spec.factors)))
    )
    assert tp_groups(seen) == [(0, 2), (1, 3)]
    assert breaks_6_1(seen) and not breaks_6_3(seen)
