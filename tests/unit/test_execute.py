"""The steps of a plan are executed in their order: a step in an impossible position is rejected,
and no step is reordered."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from itertools import combinations
from typing import get_args

import pytest

from ptrain.algebra.legality import require_runnable
from ptrain.data.corpus import open_corpus
from ptrain.data.sampler import read_batch
from ptrain.errors import BrokenPlan
from ptrain.interpreter.execute import OF_PIECES, OF_RANK, execute
from ptrain.interpreter.program import Program, prepare_construction
from ptrain.runtime.world import World
from ptrain.spec.load import load
from ptrain.steps.step import Clip, Keep, Plan, Step

SPEC = require_runnable(
    load(
        {
            "model": {"layers": 2, "hidden": 32, "heads": 2, "ffn": 48, "vocab": 259},
            "batch": {"global": 4, "micro": 2, "sequence": 8},
            "mesh": {},
            "activations": "M",
            "loss": {"chunk": 4},
            "optimizer": {"name": "adamw", "clip": 1.0},
            "data": {"corpus": "python-docs", "tokenizer": "bytes"},
        }
    )
)
NAMES = ("CreateMesh", "Keep", "LocalGradients", "ChunkedLoss", "Accumulate", "Clip", "Update")


def execute_plan(plan: Plan) -> Program:
    rank = prepare_construction(SPEC, world=World())
    rank.plan = plan
    execute(rank)
    return Program(rank)


def lower_spec() -> Plan:
    return prepare_construction(SPEC, world=World()).plan


def losses(program: Program, steps: int = 3) -> list[float]:
    source, seen = open_corpus(SPEC.data), []
    for step in range(steps):
        local = read_batch(source, spec=SPEC, step=step, data_index=0, data_degree=1)
        seen.append(float(program.forward_backward(local)))
        program.step(1e-2)
    return seen


def test_every_kind_of_step_has_one_executor():
    kinds = set(get_args(Step))
    assert set(OF_RANK) | set(OF_PIECES) == kinds
    assert not set(OF_RANK) & set(OF_PIECES)


def test_the_executed_steps_equal_the_plan():
    plan = lower_spec()
    assert tuple(type(step).__name__ for step in plan.steps) == NAMES
    program = execute_plan(plan)
    assert tuple(each.step for each in program.ran) == plan.steps
    assert [each.piece for each in program.ran] == [None, 0, 0, 0, None, None, None]


@pytest.mark.parametrize("pair", list(combinations(range(len(NAMES)), 2)), ids=str)
def test_two_steps_that_change_places_are_rejected_or_change_nothing(pair: tuple[int, int]):
    first, second = pair
    plan = lower_spec()
    steps = list(plan.steps)
    steps[first], steps[second] = steps[second], steps[first]
    try:
        program = execute_plan(replace(plan, steps=tuple(steps)))
    except BrokenPlan as error:
        assert "cannot run at this position" in str(error)
        return
    assert {NAMES[first], NAMES[second]} == {"ChunkedLoss", "Accumulate"}
    assert tuple(each.step for each in program.ran) == tuple(steps)
    assert losses(program) == losses(execute_plan(plan))


@pytest.mark.parametrize("place", range(len(NAMES)))
def test_optional_steps_may_be_missing_and_others_not(place: int):
    plan = lower_spec()
    others = (*plan.steps[:place], *plan.steps[place + 1 :])
    if NAMES[place] in ("Keep", "ChunkedLoss", "Clip"):
        assert tuple(each.step for each in execute_plan(replace(plan, steps=others)).ran) == others
        return
    with pytest.raises(AssertionError, match=r"no (mesh|wrap|accumulate|update)"):
        replace(plan, steps=others)


def test_a_repeated_step_is_rejected():
    plan = lower_spec()
    with pytest.raises(AssertionError, match="two steps of a kind"):
        replace(plan, steps=(*plan.steps, plan.update))


def test_a_step_is_replaced_in_its_position():
    plan = lower_spec()
    assert plan.clip is not None and plan.keep is not None
    other = plan.replace_steps(Clip(max_norm=0.5, axes=()), Keep(blocks=plan.keep.blocks[:1]))
    assert [type(step) for step in other.steps] == [type(step) for step in plan.steps]
    assert other.clip is not None and other.clip.max_norm == 0.5
    with pytest.raises(AssertionError, match="no step of the kind of clip"):
        replace(plan, steps=tuple(s for s in plan.steps if s is not plan.clip)).replace_steps(
            plan.clip
        )


def test_a_program_goes_with_its_last_name():
    """No cycle holds a model until somebody collects garbage."""
    program = execute_plan(lower_spec())
    losses(program, 1)
    gc.collect()
    gc.disable()
    try:
        model = weakref.ref(program.model)
        del program
        assert model() is None
    finally:
        gc.enable()
