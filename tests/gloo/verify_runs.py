"""Functions that run on ranks for the tests of the verification protocol: they verify a spec, some
of whose programs are changed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from ptrain.interpreter.program import Program
from ptrain.report.record import Check
from ptrain.runtime.world import World
from ptrain.spec.spec import Spec
from ptrain.train.exchange import Exchange
from ptrain.verification.options import VerifyOptions
from ptrain.verification.preconditions import check_preconditions
from ptrain.verification.protocol import (
    Verification,
    interpret_spec,
    verify_on_ranks,
)

LATE = 4  # the step in which a program goes wrong that did well until then


class ProgramChanges(StrEnum):
    """The changes to the programs that the interpreter builds."""

    EVERY_TIME_ANEW = "each program computes with other bits than the last"
    LATE_RATE = "the learning rate is another one from step LATE on"
    LATE_NAN = "the loss is no number from step LATE on"


@dataclass
class ChangedInterpreter:
    """A program factory that changes the programs it builds."""

    otherwise: ProgramChanges | None = None
    number: int = 0

    def __call__(self, spec: Spec, world: World) -> Program:
        program = interpret_spec(spec, world)
        self.number += 1
        if self.otherwise is not None:
            _corrupt_program(program, self.otherwise, self.number)
        return program


def _corrupt_program(program: Program, otherwise: ProgramChanges, number: int) -> None:
    state = program.state_dict()
    with torch.no_grad():
        match otherwise:
            case ProgramChanges.EVERY_TIME_ANEW if number % 2 == 0:
                for each in state["model"].values():
                    _local(each).mul_(1 + 1e-4)  # a loss of fp32 differs too
            case ProgramChanges.LATE_RATE | ProgramChanges.LATE_NAN:
                _corrupt_late(program, otherwise)
            case _:
                pass


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _corrupt_late(program: Program, otherwise: ProgramChanges) -> None:
    steps, forward_backward, step = [0], program.forward_backward, program.step

    def run(batch, lr=None):  # type: ignore[no-untyped-def]
        loss = forward_backward(batch, lr)
        steps[0] += 1
        if otherwise is ProgramChanges.LATE_NAN and steps[0] > LATE:
            loss.fill_(float("nan"))
        return loss

    def update(lr):  # type: ignore[no-untyped-def]
        late = otherwise is ProgramChanges.LATE_RATE and steps[0] > LATE
        return step(lr * 1.01 if late else lr)

    program.forward_backward = run  # type: ignore[method-assign]
    program.step = update  # type: ignore[method-assign]


def check_assumptions(spec: Spec, otherwise: ProgramChanges | None) -> tuple[Check, ...]:
    world = World.join(spec.timeout)
    exchange = Exchange(world)
    try:
        return check_preconditions(spec, world, exchange, ChangedInterpreter(otherwise)).checks
    finally:
        exchange.close()


def verify_spec(
    spec: Spec, asked: VerifyOptions, otherwise: ProgramChanges | None = None
) -> Verification:
    world = World.join(spec.timeout)
    exchange = Exchange(world)
    try:
        return verify_on_ranks(spec, world, exchange, asked, make=ChangedInterpreter(otherwise))
    finally:
        exchange.close()
