"""Theorem 6, read off what the traffic meter saw: which ranks the groups have, and in what order
the calls of a backward pass came."""

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
class Seen:
    """One rank's account of a steady step: the ranks of its groups, and its calls in order."""

    ranks_by_axes: Mapping[tuple[str, ...], tuple[int, ...]]
    calls: tuple[Traffic, ...]

    @property
    def backward(self) -> tuple[Traffic, ...]:
        """And what comes after it: gradients that are whole are summed before the update."""
        return tuple(c for c in self.calls if c.key.phase in (Phase.BACKWARD, Phase.UPDATE))

    def group_of(self, call: Traffic) -> tuple[int, ...]:
        return self.ranks_by_axes[call.key.axes]


def watch(spec: Spec) -> Seen:
    """Some steps on this rank, with the meters on the last of them. What ran obeys the theorem."""
    program = interpret(spec, world=World.join(spec.timeout))
    assert theorem_6(spec, program.plan, program.ran)[1].holds
    return seen_of(program, STEPS)


def wrapped_first(plan: Plan) -> Plan:
    """Units are wrapped, and then their operators are cut."""
    others = [step for step in plan.steps if step not in (plan.tensor, plan.wrap)]
    assert plan.tensor is not None
    return replace(plan, steps=(others[0], plan.wrap, plan.tensor, *others[1:]))


def refused(spec: Spec) -> str:
    """What the executor says of that."""
    rank = prepare_construction(spec, world=World.join(spec.timeout))
    rank.plan = wrapped_first(rank.plan)
    try:
        execute(rank)
    except BrokenPlan as error:
        return str(error)
    return ""


def moved(spec: Spec, *, is_wrapped_first: bool) -> set[bool]:
    """Whether a step of the plan moves each of the tensors that are cut over tp; or a step of what
    the executor refuses: the operators of wrapped units are cut behind its back."""
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


def seen_of(program: Program, steps: int) -> Seen:
    source = open_corpus(program.spec.data)
    for step in range(steps):
        local = local_batch(program, source, step)
        with measure(program) if step == steps - 1 else nullcontext() as measurement:
            program.forward_backward(local)
            program.step(1e-3)
    return Seen(ranks_by_axes=measurement.ranks_by_axes, calls=measurement.traffic.calls())


def tp_groups(seen: Sequence[Seen]) -> list[tuple[int, ...]]:
    """Of the calls over tp that the ranks made."""
    return sorted({s.group_of(call) for s in seen for call in s.calls if call.key.axes == TP})


def reductions(calls: Sequence[Traffic]) -> list[Traffic]:
    """What summed gradients over data axes; of clipping there are scalars besides."""
    of_gradients = (call for call in calls if call.key.state is State.GRADIENTS)
    return [c for c in of_gradients if "tp" not in c.key.axes and c.payload_bytes > SCALAR]


def breaks_6_1(seen: Sequence[Seen]) -> bool:
    return not are_consecutive(tp_groups(seen))


def breaks_6_2(calls: Sequence[Traffic], activations: str) -> bool:
    """Blocks are reduced last to first, then the root. Before that of a block come tp's calls of
    the head and of every block down to it: of each its two sub-blocks; where activations are slices
    a gather and a scatter for each, and the sum of a norm's gradient."""
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


def breaks_6_3(seen: Sequence[Seen]) -> bool:
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
def test_the_conditions_hold_of_the_calls_that_ran_and_of_no_others(
    ranks: Ranks, axis: str, placement: str, activations: str
) -> None:
    spec = tensor_spec(data={axis: placement}, activations=activations, accumulate=1)
    seen: list[Seen] = ranks.run(4, watch, spec)
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
def test_units_that_would_be_wrapped_before_their_operators_are_cut_are_refused(
    ranks: Ranks, placement: str
) -> None:
    axis = "dp_replicate" if placement == "ddp" else "dp_shard"
    for message in ranks.run(4, refused, tensor_spec(data={axis: placement})):
        assert "Parallelize cannot run at this position" in message and "Theorem 6.2" in message


def test_what_is_refused_would_learn_nothing_in_cut_operators(ranks: Ranks) -> None:
    """Units that were made of whole operators never see the gradients of the cut ones."""
    spec = tensor_spec(data={"dp_shard": "zero2"}, accumulate=1)
    assert ranks.run(4, partial(moved, is_wrapped_first=False), spec) == [{True}] * 4
    assert ranks.run(4, partial(moved, is_wrapped_first=True), spec) == [{False}] * 4


def test_a_mesh_in_the_wrong_order_is_seen(ranks: Ranks) -> None:
    """Which no loaded spec gets past the rules with: tp outermost, its groups every other rank."""
    spec = tensor_spec(data={"dp_replicate": "ddp"}, accumulate=1)
    seen: list[Seen] = ranks.run(4, watch, replace(spec, factors=tuple(reversed(spec.factors))))
    assert tp_groups(seen) == [(0, 2), (1, 3)]
    assert breaks_6_1(seen) and not breaks_6_3(seen)
