"""The same run twice: what is the same, and what is not."""

from __future__ import annotations

import math

import pytest

from ptrain.interpreter.program import Program, interpret
from ptrain.rooms.world import World
from ptrain.selection.recompute import resolve_auto
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.train.exchange import Exchange
from ptrain.verification.preconditions import (
    _same_bits,
    _same_tensors,
    preconditions,
)

TINY = (
    "model.layers=1", "model.hidden=16", "model.heads=2", "model.kv_heads=2", "model.ffn=32",
    "batch.global=8", "batch.micro=2", "batch.sequence=8", "mesh={dp_shard: 1}",
)  # fmt: skip


def test_a_loss_that_is_no_number_twice_is_the_same_twice() -> None:
    assert _same_bits([1.0, math.nan], [1.0, math.nan]).holds
    found = _same_bits([1.0, math.nan], [1.0, 2.0])
    assert found.why == "step 1: nan the first time, 2.0 the second"


def test_a_tensor_that_only_one_of_two_runs_has_is_another() -> None:
    alone = Exchange(World())
    for first, second in (({}, {"a": "x"}), ({"a": "x"}, {})):
        found = _same_tensors(first, second, alone)
        assert not found.holds
        assert (found.predicted, found.measured) == (1, 0)
        assert found.why.startswith("a has other bits on rank 0")
    assert _same_tensors({"a": "x"}, {"a": "x"}, alone).holds


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
    checks = preconditions(spec, World(), Exchange(World()), make)
    (broken,) = [check for check in checks if not check.holds]
    assert (broken.predicted, broken.measured) == (3, 1)
    assert broken.why.startswith(f"step 1 stops: {error.__name__}: not again;")
