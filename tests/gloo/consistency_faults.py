"""Differences planted on one rank of a running program before a check of the replicated state."""

from __future__ import annotations

import torch

from ptrain.axes.data.run.target import ParameterTarget
from ptrain.interpreter.program import Program
from ptrain.meters import holdings
from ptrain.optimizers.update import COUNTER, MASTER, TargetsUpdate

STEP, RANK = 2, 1


def _is_faulty_step(program: Program, step: int) -> bool:
    return step == STEP and program.world.rank == RANK


def change_learning_rate(program: Program, step: int) -> None:
    """Double the learning rate of one rank's optimizer."""
    if _is_faulty_step(program, step):
        assert isinstance(program.update, TargetsUpdate)
        for group in program.update.groups:
            for optimizer in (rule.optimizer for rule in group.optimizers.values()):
                optimizer.param_groups[0]["lr"] *= 2


def decrement_step_counter(program: Program, step: int) -> None:
    """Make one rank's optimizer count one update less for one tensor."""
    if _is_faulty_step(program, step):
        _, tensors = next(iter(program.update.tensors()))
        tensors[COUNTER].sub_(1)


def cast_parameter(program: Program, step: int) -> None:
    """Cast one parameter to bf16 on one rank."""
    if _is_faulty_step(program, step):
        target = next(iter(holdings.targets(program)))
        assert isinstance(target, ParameterTarget)
        target.parameter.data = target.parameter.data.bfloat16()


@torch.no_grad()
def change_buffer(program: Program, step: int) -> None:
    """Change one element of a buffer on one rank."""
    if _is_faulty_step(program, step):
        next(program.model.buffers()).view(-1)[0] += 1


@torch.no_grad()
def leave_stale_copy(program: Program, step: int) -> None:
    """Change a master copy identically on all ranks without refreshing its 16-bit copy."""
    if step == STEP:
        for target, tensors in program.update.tensors():
            if MASTER in tensors:
                target.value().add_(1)
                return


def reset_seed(program: Program, step: int) -> None:
    """Make every rank draw the same random numbers."""
    if step == STEP:
        torch.manual_seed(0)


@torch.no_grad()
def scale_summed_gradients(program: Program, step: int) -> None:
    """Halve one rank's gradients after the reduction."""
    if step != STEP - 1 or program.world.rank != RANK:
        return
    reduce_gradients = program.wrapped.reduce_gradients

    def reduce_and_scale() -> None:
        reduce_gradients()
        program.gradients()[0].mul_(0.5)

    program.wrapped.reduce_gradients = reduce_and_scale  # type: ignore[method-assign]
