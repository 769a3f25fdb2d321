"""One device takes the state that a training has come to, and goes on as if it were its own."""

from __future__ import annotations

import pytest
import torch

from ptrain.selection.recompute import settled
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.verification import onward
from ptrain.verification.onward import Worst
from ptrain.verification.reference import OneDevice
from ptrain.verification.states import of_reference

TINY = (
    "model.layers=1", "model.hidden=16", "model.heads=2", "model.kv_heads=1", "model.ffn=24",
    "batch.global=4", "batch.micro=2", "batch.sequence=8", "mesh={dp_shard: 1}",
)  # fmt: skip


def spec(*changes: str) -> Spec:
    return settled(load("zero2", (*TINY, *changes)))


def states(device: OneDevice) -> dict[str, dict[str, torch.Tensor]]:
    """As a program's `state_dict` names them."""
    found: dict[str, dict[str, torch.Tensor]] = {"model": {}, "optimizer": {}}
    for (subject, name), tensor in of_reference(device).items():
        kind = {"parameters": "model", "optimizer": "optimizer", "step counter": "optimizer"}
        if subject in kind:
            found[kind[subject]][name] = tensor.clone()
    if device.updater.layout.scales_loss:
        updater = device.updater
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
    owner, other = OneDevice(spec(*changes)), OneDevice(spec(*changes))
    for step in range(3):
        owner.update(step, owner.accumulate(step).sums)
    onward.load(other, states(owner))
    for step in (3, 4):
        own, its = owner.accumulate(step), other.accumulate(step)
        assert own.loss == its.loss
        assert all(torch.equal(own.sums[name], its.sums[name]) for name in own.sums)
        assert owner.update(step, own.sums) == other.update(step, its.sums)


def test_the_look_that_is_farthest_off_is_the_one_that_is_told() -> None:
    worst = Worst()
    worst.add(25, 1e-6, 1e-4)
    worst.add(50, 2e-4, 1e-4)
    worst.add(75, 1e-5, 1e-4)
    assert (worst.step, worst.measured, worst.share) == (50, 2e-4, 2.0)
    worst.add(99, float("nan"), 1e-4)
    assert worst.step == 99 and worst.share > 1.0
