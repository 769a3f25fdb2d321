"""A fault before the court: the whole protocol on a program in which it is planted, and whether the
verdict says what is wrong."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from ptrain.interpreter.program import Program, interpret
from ptrain.report.finding import POSSIBLE, Certainty, RootCause
from ptrain.report.record import Check
from ptrain.runtime.world import World
from ptrain.spec.spec import Spec
from ptrain.train.exchange import Exchange
from ptrain.verification.options import VerifyOptions
from ptrain.verification.protocol import Verification, verify_on_ranks
from tests.faults.catalogue import FAULTS
from tests.faults.fault import Fault
from tests.ranks import Ranks

SECONDS = 600.0  # where all stages run, on a machine that does much else
STEPS = 10  # of trajectories: a fault that nothing before them finds


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The verdict of rank 0 on one fault."""

    fault: str
    root_cause: RootCause | None
    failing: tuple[Check, ...]
    seconds: float

    @property
    def of(self) -> Fault:
        return FAULTS[self.fault]

    @property
    def caught(self) -> bool:
        return bool(self.failing)

    @property
    def certainty(self) -> Certainty | None:
        """How sure the root cause is."""
        return None if self.root_cause is None else self.root_cause.certainty

    @property
    def localised(self) -> bool:
        """The first module or tensor that is named is the one that was tampered with; where the
        fault is in no one tensor, the state is the right one."""
        if self.root_cause is None or self.root_cause.state not in self.of.subjects:
            return False
        return bool(re.search(self.of.place, self.root_cause.place))

    @property
    def named(self) -> bool:
        """State, axis and factor."""
        root_cause = self.root_cause
        if root_cause is None or root_cause.state not in self.of.subjects:
            return False
        on_axis = not self.of.axis or bool(re.fullmatch(self.of.axis, root_cause.axis))
        return on_axis and bool(re.search(self.of.factor, root_cause.factor))

    @property
    def names_one_cause(self) -> bool:
        """Return True if a reason is stated instead of possible causes."""
        cause = self.root_cause
        return self.certainty not in (Certainty.UNEXPLAINED, Certainty.LOCATED) and (
            cause is None or POSSIBLE not in cause.sentence
        )

    @property
    def line(self) -> str:
        """The root cause in one line, or the check that fails."""
        if self.root_cause is not None:
            return str(self.root_cause).partition("\n")[0].removeprefix("root cause: ")
        return f"{self.failing[0].name}: {self.failing[0].why}" if self.failing else "holds"


def verified(name: str) -> Verification:
    """On this rank of a pool."""
    fault = FAULTS[name]
    spec = fault.setting.spec()
    world = World.join(spec.timeout)

    def make(each: Spec, world: World) -> Program:
        program = interpret(each, world=world, allow_import=True)
        fault.plant(program)
        return program

    exchange = Exchange(world)
    return verify_on_ranks(spec, world, exchange, VerifyOptions(steps=STEPS), make=make)


def tried(ranks: Ranks, name: str) -> Trial:
    """On a pool of as many ranks as the fault's mesh has."""
    began = time.perf_counter()
    told: Verification = ranks.run(FAULTS[name].setting.world, verified, name, timeout=SECONDS)[0]
    return Trial(
        fault=name,
        root_cause=told.root_cause,
        failing=tuple(check for check in told.checks if not check.holds),
        seconds=time.perf_counter() - began,
    )
