"""Two identical runs: equal values, and differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count

import pytest
from torch import Tensor

from ptrain.interpreter.program import Program, interpret
from ptrain.models.objective import StepBatch
from ptrain.report.record import Check
from ptrain.runtime.world import World
from ptrain.selection.recompute import resolve_auto
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.train.exchange import Exchange
from ptrain.verification.preconditions import check_preconditions

TINY = (
    "model.layers=1", "model.hidden=16", "model.heads=2", "model.kv_heads=2", "model.ffn=32",
    "batch.global=8", "batch.micro=2", "batch.sequence=8", "mesh={dp_shard: 1}",
)  # fmt: skip


def check_programs(*changes: Callable[[Program], None]) -> Check:
    """Return the check of as many programs as there are changes of them."""
    left = iter(changes)

    def make(spec: Spec, world: World) -> Program:
        program = interpret(spec, world=world)
        next(left)(program)
        return program

    spec = resolve_auto(load("zero2", TINY))
    (check,) = check_preconditions(spec, World(), Exchange(World()), make).checks
    return check


def lose_loss(program: Program) -> None:
    """From the second step on the loss is no number."""
    run, steps = program.forward_backward, count()

    def forward_backward(batch: StepBatch, lr: float | None = None) -> Tensor:
        loss = run(batch, lr)
        return loss.fill_(math.nan) if next(steps) else loss

    program.forward_backward = forward_backward  # type: ignore[method-assign]


def left_alone(program: Program) -> None:
    """Do nothing."""


def change_moment(program: Program) -> None:
    """Change a moment by less than a loss of these steps shows."""
    step = program.step

    def once(lr: float) -> Tensor | None:
        norm = step(lr)
        next(iter(program.state_dict()["optimizer"].values())).mul_(1 + 1e-6)
        return norm

    program.step = once  # type: ignore[method-assign]


def test_a_loss_that_is_no_number_twice_is_the_same_twice() -> None:
    assert check_programs(lose_loss, lose_loss).holds
    its = check_programs(left_alone, lose_loss)
    assert (its.holds, its.predicted, its.measured) == (False, 3, 1)
    assert its.why.startswith("step 1: loss has other bits on rank 0: something is not a function")


def test_a_moment_with_another_bit_is_not_the_same_twice() -> None:
    assert check_programs(left_alone, left_alone).holds
    its = check_programs(left_alone, change_moment)
    assert not its.holds
    assert "exp_avg has other bits on rank 0" in its.why


@pytest.mark.parametrize("error", [RuntimeError, TypeError])
def test_a_step_that_breaks_off_is_a_check_that_fails(error: type[Exception]) -> None:
    """What broke it may have differed in the step before, which is then looked at."""

    def make(spec: Spec, world: World) -> Program:
        program = interpret(spec, world=world)
        step, rates = program.step, iter(range(2))

        def once(lr: float) -> object:
            if next(rates):
                raise error("not again\nand more")
            return step(lr)

        program.step = once
        return program

    spec = resolve_auto(load("zero2", TINY))
    (broken,) = check_preconditions(spec, World(), Exchange(World()), make).checks
    assert (broken.predicted, broken.measured) == (3, 1)
    assert broken.why.startswith(f"step 1 stops: {error.__name__}: not again")
