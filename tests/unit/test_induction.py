"""A single device loads the state of a training and continues from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ptrain.interpreter.program import interpret
from ptrain.runtime.world import World
from ptrain.selection.recompute import resolve_auto
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.train.exchange import Exchange
from ptrain.verification import trajectory
from ptrain.verification.compare import LargestDifference
from ptrain.verification.reference import ReferenceTraining
from ptrain.verification.trajectory import ReferenceContinuation

TINY = (
    "model.layers=1", "model.hidden=16", "model.heads=2", "model.kv_heads=1", "model.ffn=24",
    "batch.global=4", "batch.micro=2", "batch.sequence=8", "mesh={dp_shard: 1}",
)  # fmt: skip


def spec(*changes: str) -> Spec:
    return resolve_auto(load("zero2", (*TINY, *changes)))


def states(device: ReferenceTraining) -> dict[str, dict[str, torch.Tensor]]:
    """As a program's `state_dict` names them."""
    updater, optimizer = device.updater, dict[str, torch.Tensor]()
    for name, updated in updater.updated.items():
        if updated is not updater.parameters[name]:
            optimizer[f"{name}.master"] = updated.detach().clone()
        kept = updater.optimizer_of(name).state.get(updated) or updater.initial_entries(name)
        known = {key: torch.as_tensor(its) for key, its in kept.items() if its is not None}
        optimizer |= {f"{name}.{key}": its.clone() for key, its in known.items()}
    model = {name: tensor.clone() for name, tensor in device.parameters.items()}
    found = {"model": model, "optimizer": optimizer}
    if updater.layout.scales_loss:
        scaling = {"scale": updater.scale, "growth_tracker": updater.steps_since_change}
        found["scaling"] = {name: torch.tensor(value) for name, value in scaling.items()}
    return found


@pytest.mark.parametrize(
    "changes",
    [
        ("precision.layout=fp32",),
        ("precision.layout=zero16",),
        ("precision.layout=fp16",),
        ("precision.layout=fp32", "optimizer={name: sgd, lr: 0.1, momentum: 0.9}"),
        ("precision.layout=fp32", "optimizer={name: muon, lr: 0.01}"),
    ],
    ids=str,
)
def test_from_a_loaded_state_the_next_steps_are_bitwise_those_of_its_owner(
    changes: tuple[str, ...],
) -> None:
    owner, other = ReferenceTraining(spec(*changes)), ReferenceTraining(spec(*changes))
    for step in range(3):
        owner.update(step, owner.accumulate(step).sums)
    trajectory.load_program_state(other, states(owner))
    for step in (3, 4):
        own, its = owner.accumulate(step), other.accumulate(step)
        assert own.loss == its.loss
        assert all(torch.equal(own.sums[name], its.sums[name]) for name in own.sums)
        assert owner.update(step, own.sums) == other.update(step, its.sums)


def look(step: int, measured: float, allowed: float) -> LargestDifference:
    return LargestDifference("loss", allowed, measured, f"step {step}")


def test_the_comparison_with_the_largest_difference_is_reported() -> None:
    onward = ReferenceContinuation(SimpleNamespace(), Told(None))  # type: ignore[arg-type]
    for step, measured in ((25, 1e-6), (50, 2e-4), (75, 1e-5)):
        onward._of = step
        onward._record("loss", measured, 1e-4)
    assert [*onward.worst.values()] == [
        LargestDifference("from its own state: loss", 1e-4, 2e-4, "step 50")
    ]


@pytest.mark.parametrize("measured", [math.nan, math.inf])
def test_a_look_that_is_no_number_takes_more_than_all(measured: float) -> None:
    assert look(99, measured, 1e-4).share == math.inf


@pytest.mark.parametrize("allowed", [math.nan, math.inf])
def test_a_nan_reference_allows_nothing(allowed: float) -> None:
    assert look(25, 1e-6, allowed).share == math.inf


def test_only_equal_values_hold_with_zero_tolerance() -> None:
    assert (look(25, 0.0, 0.0).share, look(50, 1e-300, 0.0).share) == (0.0, math.inf)


@dataclass
class Told:
    """In the place of an exchange: what this rank tells, and nothing of the others."""

    world: Any

    def gather(self, value: Any, kind: Any = Any) -> list[Any]:
        return [value]


def test_a_run_in_16_bits_is_compared_with_a_reference_that_continues_its_state() -> None:
    program = interpret(spec("precision.layout=zero16"), world=World())
    looking = ReferenceContinuation(program, Exchange(World()))
    looking.continue_from(25)
    device = ReferenceTraining(program.spec)
    trajectory.load_program_state(device, program.state_dict())
    scale = device.updater.scale
    own = device.accumulate(25)
    looking.compare_step(own.loss, {name: each / scale for name, each in own.sums.items()})
    device.update(25, own.sums)
    looking.compare_following(26, device.accumulate(26).loss)
    found = list(looking.checks())
    assert [check.measured for check in found] == [0.0, 0.0, 0.0]
    assert all(check.holds and check.tolerance > 0.0 for check in found)
    looking.compare_step(own.loss * 1.1, own.sums)
    assert looking.has_difference(26)
