"""What can differ on one rank of a running program, planted before a check of what ranks share."""

from __future__ import annotations

import torch

from ptrain.axes.data.run.target import ParameterTarget
from ptrain.interpreter.program import Program
from ptrain.meters import holdings
from ptrain.optimizers.update import COUNTER, MASTER, TargetsUpdate

STEP, RANK = 2, 1


def _is_here(program: Program, step: int) -> bool:
    return step == STEP and program.world.rank == RANK


def another_rate(program: Program, step: int) -> None:
    """Its optimizer was told the learning rate of another step."""
    if _is_here(program, step):
        assert isinstance(program.update, TargetsUpdate)
        for group in program.update.groups:
            for optimizer in (rule.optimizer for rule in group.optimizers.values()):
                optimizer.param_groups[0]["lr"] *= 2


def a_step_behind(program: Program, step: int) -> None:
    """Its optimizer has made one update less of one tensor."""
    if _is_here(program, step):
        _, tensors = next(iter(program.update.tensors()))
        tensors[COUNTER].sub_(1)


def another_dtype(program: Program, step: int) -> None:
    """It holds one parameter in 16 bits."""
    if _is_here(program, step):
        target = next(iter(holdings.targets(program)))
        assert isinstance(target, ParameterTarget)
        target.parameter.data = target.parameter.data.bfloat16()


@torch.no_grad()
def an_own_buffer(program: Program, step: int) -> None:
    """It has something of its own in a buffer."""
    if _is_here(program, step):
        next(program.model.buffers()).view(-1)[0] += 1


@torch.no_grad()
def a_stale_copy(program: Program, step: int) -> None:
    """All ranks have the same master copies, and of one of them no fresh 16-bit copy."""
    if step == STEP:
        for target, tensors in program.update.tensors():
            if MASTER in tensors:
                target.value().add_(1)
                return


def one_seed(program: Program, step: int) -> None:
    """Every rank draws the same, whatever it works on."""
    if step == STEP:
        torch.manual_seed(0)


@torch.no_grad()
def own_gradients(program: Program, step: int) -> None:
    """It does something to its gradients after they were summed."""
    if step != STEP - 1 or program.world.rank != RANK:
        return
    reduce_gradients = program.wrapped.reduce_gradients

    def changed() -> None:
        reduce_gradients()
        program.gradients()[0].mul_(0.5)

    program.wrapped.reduce_gradients = changed  # type: ignore[method-assign]
