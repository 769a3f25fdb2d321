"""What a rank does in the tests of the protocol: verify a spec, of which some programs are made
otherwise. Runs inside the pool of ranks."""

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


class Otherwise(StrEnum):
    """How programs differ from what the interpreter makes."""

    EVERY_TIME_ANEW = "each program computes with other bits than the last"
    LATE_RATE = "the learning rate is another one from step LATE on"
    LATE_NAN = "the loss is no number from step LATE on"


@dataclass
class Made:
    """Makes programs, and does something to them."""

    otherwise: Otherwise | None = None
    number: int = 0

    def __call__(self, spec: Spec, world: World) -> Program:
        program = interpret_spec(spec, world)
        self.number += 1
        if self.otherwise is not None:
            _spoil(program, self.otherwise, self.number)
        return program


def _spoil(program: Program, otherwise: Otherwise, number: int) -> None:
    state = program.state_dict()
    with torch.no_grad():
        match otherwise:
            case Otherwise.EVERY_TIME_ANEW if number % 2 == 0:
                for each in state["model"].values():
                    _local(each).mul_(1 + 1e-4)  # a loss of fp32 differs too
            case Otherwise.LATE_RATE | Otherwise.LATE_NAN:
                _go_wrong_late(program, otherwise)
            case _:
                pass


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _go_wrong_late(program: Program, otherwise: Otherwise) -> None:
    steps, forward_backward, step = [0], program.forward_backward, program.step

    def run(batch, lr=None):  # type: ignore[no-untyped-def]
        loss = forward_backward(batch, lr)
        steps[0] += 1
        if otherwise is Otherwise.LATE_NAN and steps[0] > LATE:
            loss.fill_(float("nan"))
        return loss

    def update(lr):  # type: ignore[no-untyped-def]
        late = otherwise is Otherwise.LATE_RATE and steps[0] > LATE
        return step(lr * 1.01 if late else lr)

    program.forward_backward = run  # type: ignore[method-assign]
    program.step = update  # type: ignore[method-assign]


def presupposed(spec: Spec, otherwise: Otherwise | None) -> tuple[Check, ...]:
    world = World.join(spec.timeout)
    exchange = Exchange(world)
    try:
        return check_preconditions(spec, world, exchange, Made(otherwise)).checks
    finally:
        exchange.close()


def verified(spec: Spec, asked: VerifyOptions, otherwise: Otherwise | None = None) -> Verification:
    world = World.join(spec.timeout)
    exchange = Exchange(world)
    try:
        return verify_on_ranks(spec, world, exchange, asked, make=Made(otherwise))
    finally:
        exchange.close()
