"""Faults of the update: clipping, the loss scale, learning rates, skipped shards, counters, weight
decay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import torch

from ptrain.interpreter.program import Program
from ptrain.optimizers.update import COUNTER, TargetsUpdate
from ptrain.report.finding import Subject
from ptrain.train.loop_inputs import learning_rate
from tests.faults.fault import Fault, Setting
from tests.faults.models import FROZEN
from tests.faults.of_batches import BLOCKWISE, DDP, TP, ZERO2, ZERO3
from tests.faults.planting import (
    after_reduction,
    after_update_once,
    before_forward,
    data_group,
    is_faulty,
    next_ranks_value,
    tensor_target,
)

EVEN = replace(ZERO3, shape={"vocab": 260})  # shards of one size
FP16 = Setting(mesh={"dp_shard": 2}, layout="fp16")
DECAYED = {
    "optimizer": {
        "name": "adamw",
        "lr": 3e-3,
        "schedule": {"warmup": 4},
        "clip": 1.0,
        "weight_decay": 0.1,
    }
}
DDP_DECAY = Setting(mesh={"dp_replicate": 2}, sections=DECAYED)
FREEZING = Setting(mesh={"dp_replicate": 2}, model="frozen", sections=DECAYED)
PART_CLIPPED = {"optimizer": {"name": "adamw", "lr": 3e-3, "schedule": {"warmup": 4}, "clip": 0.01}}
ZERO2_CLIPPED = replace(ZERO2, sections=PART_CLIPPED)
LEFT_BEHIND = "blocks.1.mlp.up.weight"


def _update(program: Program) -> TargetsUpdate:
    assert isinstance(program.update, TargetsUpdate)
    return program.update


def shard_skipped(program: Program) -> None:
    """Skip the update of one rank's shard of one unit."""
    if is_faulty(program):
        _skip(_update(program).groups[0])


def _skip(group: Any) -> None:
    for optimizer in (rule.optimizer for rule in group.optimizers.values()):
        optimizer.step = lambda: None


def tensor_not_updated(program: Program) -> None:
    """Leave one tensor out of all parameter groups."""
    target = tensor_target(program, LEFT_BEHIND)
    for group in _update(program).groups:
        left_out = [id(member.leaf.tensor) for member in group.members if member.target is target]
        for optimizer in (rule.optimizer for rule in group.optimizers.values()):
            for options in optimizer.param_groups:
                options["params"] = [p for p in options["params"] if id(p) not in left_out]


def neighbours_state(program: Program) -> None:
    """Load the optimizer state of the next rank once: shards in another order."""

    def act() -> None:
        for _, tensors in program.update.tensors():
            for name, tensor in tensors.items():
                if name != COUNTER:
                    tensor.copy_(next_ranks_value(tensor, data_group(program)))

    after_update_once(program, act, step=0)


def clipped_by_local_norm(program: Program) -> None:
    """Clip by the norm of the local shards on every rank."""
    clipping = program.clipping
    assert clipping is not None
    clipping.step = replace(clipping.step, axes=(), operator_axes=())


def clipped_twice(program: Program) -> None:
    """Apply the clipping factor twice."""
    assert program.clipping is not None
    scale_down = program.clipping.scale_down

    def twice(gradients: list[torch.Tensor], norm: torch.Tensor) -> None:
        scale_down(gradients, norm)
        scale_down(gradients, norm)

    program.clipping.scale_down = twice


def not_clipped(program: Program) -> None:
    """Compute and report the norm without scaling."""
    assert program.clipping is not None
    program.clipping.scale_down = lambda gradients, norm: None


def scale_not_undone(program: Program) -> None:
    """Pass the gradients of the scaled loss to the optimizer."""
    assert program.scaling is not None
    step = program.update.step
    program.update.step = lambda lr, scaling=None: step(lr)


def clipped_with_scale(program: Program) -> None:
    """Clip before the loss scale is undone: by a norm 65536 times as large."""
    assert program.scaling is not None
    assert program.clipping is not None
    norm = program.clipping.norm
    program.clipping.norm = lambda gradients, wrapped, scaling: norm(gradients, wrapped, None)


def _at_rate(program: Program, rate: Callable[[int], float]) -> None:
    step, steps = program.step, count()
    program.step = lambda lr: step(rate(next(steps)))


def rate_of_another_step(program: Program) -> None:
    """Advance the schedule before the update: warm-up begins a step late."""
    _at_rate(program, lambda step: learning_rate(program.spec.optimizer, step + 1))


def rate_on_one_rank(program: Program) -> None:
    """Delay one rank's schedule by a step."""
    if is_faulty(program):
        _at_rate(program, lambda step: learning_rate(program.spec.optimizer, max(0, step - 1)))


def decay_on_one_rank(program: Program) -> None:
    """Disable weight decay on one rank."""
    if not is_faulty(program):
        return
    for group in _update(program).groups:
        for optimizer in (rule.optimizer for rule in group.optimizers.values()):
            for options in optimizer.param_groups:
                options["weight_decay"] = 0.0


def counter_begins_again(program: Program) -> None:
    """Reset Adam's step counters but not its moments."""

    def act() -> None:
        for _, tensors in program.update.tensors():
            tensors[COUNTER].zero_()

    after_update_once(program, act, step=0)


def counter_on_one_rank(program: Program) -> None:
    """Decrement Adam's counter on one rank."""

    def act() -> None:
        if is_faulty(program):
            for _, tensors in program.update.tensors():
                tensors[COUNTER].sub_(1)

    after_update_once(program, act)


def frozen_updated(program: Program) -> None:
    """Decay a frozen parameter with the others."""
    target = tensor_target(program, FROZEN)

    def act(step: int) -> None:
        with torch.no_grad():
            target.parameter.mul_(1 - 3e-3)

    after_reduction(program, act)


def other_betas(program: Program) -> None:
    """Use torch's default betas on one rank."""

    def act(step: int) -> None:
        for group in _update(program).groups:
            for optimizer in (rule.optimizer for rule in group.optimizers.values()):
                for options in optimizer.param_groups:
                    options["betas"] = (0.5, 0.9)

    if is_faulty(program):
        before_forward(program, act)


def moment_in_bf16(program: Program) -> None:
    """Round one rank's first moments to 16 bits once."""

    def act() -> None:
        if is_faulty(program):
            for _, tensors in program.update.tensors():
                tensors["exp_avg"].copy_(tensors["exp_avg"].bfloat16())

    after_update_once(program, act)


FAULTS = (
    Fault(
        name="optimizer shard skipped",
        setting=BLOCKWISE,
        plant=shard_skipped,
        subjects=(Subject.OPTIMIZER, Subject.PARAMETERS),
        axis="dp_shard",
        factor="skipped|not updated|missing|stale",
    ),
    Fault(
        name="missing update of one tensor",
        setting=DDP,
        plant=tensor_not_updated,
        subjects=(Subject.OPTIMIZER, Subject.PARAMETERS),
        factor="skipped|not updated|missing|stale",
        place=LEFT_BEHIND,
    ),
    Fault(
        name="optimizer state of a neighbour",
        setting=EVEN,
        plant=neighbours_state,
        subjects=(Subject.OPTIMIZER,),
        factor="rank|neighbour|differs after",
    ),
    Fault(
        name="clip by the local norm",
        setting=ZERO2,
        plant=clipped_by_local_norm,
        subjects=(Subject.NORM,),
        axis="dp_shard",
        factor="local|missing",
    ),
    Fault(
        name="clip by the local norm (tp)",
        setting=TP,
        plant=clipped_by_local_norm,
        subjects=(Subject.NORM,),
        axis="tp",
        factor="local|missing",
    ),
    Fault(
        name="clip applied twice",
        setting=ZERO2_CLIPPED,
        plant=clipped_twice,
        subjects=(Subject.NORM, Subject.GRADIENTS),
        factor="twice|clip",
    ),
    Fault(
        name="the norm reported, nothing clipped",
        setting=ZERO2_CLIPPED,
        plant=not_clipped,
        subjects=(Subject.NORM, Subject.GRADIENTS),
        factor="clip",
    ),
    Fault(
        name="loss scale not undone",
        setting=FP16,
        plant=scale_not_undone,
        subjects=(Subject.GRADIENTS, Subject.LOSS),
        factor="65536|scale",
    ),
    Fault(
        name="clipped before the loss scale is undone",
        setting=FP16,
        plant=clipped_with_scale,
        subjects=(Subject.NORM,),
        factor="65536|scale",
    ),
    Fault(
        name="learning rate of another step",
        setting=ZERO3,
        plant=rate_of_another_step,
        subjects=(Subject.LEARNING_RATE,),
        factor="step|× 2",
    ),
    Fault(
        name="learning rate of another step on one rank",
        setting=DDP,
        plant=rate_on_one_rank,
        subjects=(Subject.LEARNING_RATE,),
        factor="step|÷ 2",
    ),
    Fault(
        name="weight decay missing on one rank",
        setting=DDP_DECAY,
        plant=decay_on_one_rank,
        subjects=(Subject.PARAMETERS, Subject.OPTIMIZER),
        factor="decay",
    ),
    Fault(
        name="step counter begins again",
        setting=ZERO3,
        plant=counter_begins_again,
        subjects=(Subject.COUNTER, Subject.OPTIMIZER),
        factor="step|counter|0|differs after",
    ),
    Fault(
        name="step counter of one rank a step behind",
        setting=DDP,
        plant=counter_on_one_rank,
        subjects=(Subject.COUNTER, Subject.OPTIMIZER),
        axis="dp_replicate",
        factor="step|counter|1|differs after",
    ),
    Fault(
        name="a frozen parameter updated",
        setting=FREEZING,
        plant=frozen_updated,
        subjects=(Subject.PARAMETERS, Subject.GRADIENTS, Subject.OPTIMIZER),
        factor="frozen",
        place=FROZEN,
    ),
    Fault(
        name="other betas on one rank",
        setting=ZERO2,
        plant=other_betas,
        subjects=(Subject.OPTIMIZER,),
        factor="beta|moment|exp_avg",
    ),
    Fault(
        name="dtype mismatch on one rank: its moments in bf16",
        setting=ZERO3,
        plant=moment_in_bf16,
        subjects=(Subject.OPTIMIZER,),
        factor="bfloat16|differs after",
        place="exp_avg|attention",
    ),
)
