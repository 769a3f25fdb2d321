"""A flag on the device disables an update of any optimizer without a host read."""

from __future__ import annotations

import pytest
import torch

from ptrain.algebra.legality import require_runnable
from ptrain.interpreter.program import Program, interpret
from ptrain.runtime.queue import DeviceQueue
from ptrain.runtime.world import World
from ptrain.spec.load import load
from ptrain.train.exchange import DeviceSums, StepFigures
from ptrain.train.rank_start import Interrupts
from ptrain.units import leaves

SMALL = (
    "model.layers=1", "model.hidden=32", "model.heads=2", "model.kv_heads=1", "model.ffn=64",
    "batch.sequence=16", "batch.global=2", "batch.micro=1",
)  # fmt: skip
EXPERTS = ("model.experts=4", "model.experts_per_token=2", "model.bias_update_rate=0.1")


def program_of(name: str, *more: str) -> Program:
    alone = f"mesh.{'dp_replicate' if name == 'ddp' else 'dp_shard'}=1"
    return interpret(require_runnable(load(name, [*SMALL, alone, *more])), world=World())


def launch(program: Program, step: int, halted: torch.Tensor | None) -> None:
    lr = 1e-2
    program.forward_backward(program.samples(step), lr)
    program.reduce()
    program.apply(lr, halted)


def state(program: Program) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in leaves(program.state_dict())}


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("ddp", ()),
        ("zero3", ("optimizer.name=sgd", "optimizer.momentum=0.9")),
        ("zero1", ("precision.layout=fp16",)),
        ("zero2", ("precision.layout=zero16",)),
        ("zero3", EXPERTS),
    ],
)
def test_checkpointed_state_is_unchanged_if_the_flag_is_set(
    name: str, more: tuple[str, ...]
) -> None:
    plain, flagged = program_of(name, *more), program_of(name, *more)
    launch(plain, 0, None)
    launch(flagged, 0, torch.zeros(()))
    once = state(plain)
    assert once.keys() == state(flagged).keys()
    assert all(torch.equal(value, once[key]) for key, value in state(flagged).items())
    launch(flagged, 1, torch.ones(()))
    assert all(torch.equal(value, once[key]) for key, value in state(flagged).items())
    for program, flag in ((plain, None), (flagged, torch.zeros(()))):
        launch(program, 1, flag)
    twice = state(plain)
    assert any(not torch.equal(value, once[key]) for key, value in twice.items())
    assert all(torch.equal(value, twice[key]) for key, value in state(flagged).items())


def figures(sums: DeviceSums, share: float, norm: float | None) -> StepFigures:
    look = sums.start_check(torch.tensor(share), None if norm is None else torch.tensor(norm))
    look.start_copy()
    return look.wait_for_figures()


def test_from_the_first_step_that_is_not_sound_on_none_is() -> None:
    program = program_of("ddp")
    sums = DeviceSums(program, DeviceQueue(torch.device("cpu")), Interrupts())
    known = figures(sums, 2.5, 0.5)
    assert (known.loss, known.gradient_norm, known.is_sound) == (2.5, 0.5, True)
    assert not figures(sums, 2.5, float("inf")).is_sound
    assert not figures(sums, 2.5, 0.5).is_sound


@pytest.mark.parametrize("share", [float("nan"), float("-inf")])
def test_a_loss_that_is_not_finite_is_not_sound(share: float) -> None:
    sums = DeviceSums(program_of("ddp"), DeviceQueue(torch.device("cpu")), Interrupts())
    assert not figures(sums, share, 0.5).is_sound


@pytest.mark.parametrize("layout", ["fp32", "bf16"])
@pytest.mark.parametrize("value", [1.0, float("nan"), float("inf"), float("-inf")])
def test_without_a_norm_all_gradients_are_checked_and_unchanged(value: float, layout: str) -> None:
    program = program_of("ddp", "optimizer.clip=null", f"precision.layout={layout}")
    program.forward_backward(program.samples(0))
    norm = program.reduce()
    gradients = program.gradients()
    gradients[-1].view(-1)[-1] = value
    before = [gradient.clone() for gradient in gradients]
    sums = DeviceSums(program, DeviceQueue(torch.device("cpu")), Interrupts())
    look = sums.start_check(program.loss.share, norm)
    look.start_copy()
    assert look.wait_for_figures().is_sound is (value == 1.0)
    pairs = zip(before, gradients, strict=True)
    assert all(torch.equal(old.nan_to_num(7), new.nan_to_num(7)) for old, new in pairs)
