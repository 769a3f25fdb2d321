"""Specs as benchmarks run them: predicted, accounted for, on the clock in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ptrain.costs import Estimate, State
from ptrain.derivation.estimate import derive
from ptrain.facts.model import ModelFacts
from ptrain.report.record import compare
from ptrain.spec.spec import Spec

if TYPE_CHECKING:  # torch is imported by those that run
    from ptrain.data.sampler import LocalBatch
    from ptrain.interpreter.program import Program


@dataclass(frozen=True)
class Figures:
    """Of one step: activations on the device and off it, and the peak over all phases, in bytes;
    floating-point operations of forward and of all of backward."""

    activations: int
    off: int
    peak: int
    forward: int
    backward: int

    @property
    def operations(self) -> int:
        return self.forward + self.backward


@dataclass(kw_only=True)
class Account:
    """`again`: operations of `predicted.backward` that are forward's once more. `measured` is None
    of what did not run; `wrong` names checks that do not hold, with their figures."""

    predicted: Figures
    again: int
    measured: Figures | None = None
    wrong: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def told(self) -> str:
        if self.measured is None:
            return "not run"
        return "fails" if self.wrong else "holds"


def figures(estimate: Estimate, forward: int, backward: int) -> Figures:
    rows = [row for row in estimate.memory if row.state is State.ACTIVATIONS]
    return Figures(
        activations=estimate.bytes_of(State.ACTIVATIONS),
        off=sum(row.host_bytes + row.file_bytes for row in rows),
        peak=max(row.device_bytes for row in estimate.peak),
        forward=forward,
        backward=backward,
    )


class Contender:
    """A spec with its account; its program once it runs, with its own data, always the same
    samples. `facts` are those of a model of which no table tells. It runs on one device; of several
    it is predicted, with the operations of rank 0."""

    def __init__(self, name: str, spec: Spec, facts: ModelFacts | None = None) -> None:
        self.name, self.spec = name, spec
        self.exact = derive(spec, facts).exact
        work = self.exact.operations[0]
        own = figures(self.exact, work.forward, work.backward + work.again)
        self.account = Account(predicted=own, again=work.again)

    def start(self) -> None:
        """The first step is counted, the second metered."""
        from ptrain.costs import Phase
        from ptrain.data.corpus import corpus
        from ptrain.interpreter.program import interpret
        from ptrain.meters.measure import measure
        from ptrain.rooms.world import World
        from tests.flops import counted

        self.program: Program = interpret(self.spec, world=World())
        self.source, self.number = corpus(self.spec.data), 0
        work = counted(self.program, self._batch())
        with measure(self.program) as measurement:
            self.step()
        found = measurement.estimate()
        self.account.measured = figures(found, work[Phase.FORWARD], work[Phase.BACKWARD])
        self.account.wrong = self._wrong(found, self.account.measured)

    def step(self) -> None:
        loss = self.program.forward_backward(self._batch())
        self.program.step(1e-3)
        self.account.losses.append(float(loss))

    def timed(self) -> None:
        began = time.perf_counter()
        self.step()
        self.account.seconds.append(time.perf_counter() - began)

    def _batch(self) -> LocalBatch:
        from ptrain.data.sampler import batch

        self.number += 1
        return batch(self.source, spec=self.spec, step=self.number, data_index=0, data_degree=1)

    def _wrong(self, measured: Estimate, found: Figures) -> list[str]:
        """Checks that do not hold, and operations that are not the predicted ones."""
        wrong = unequal(self.name, self.exact, measured)
        own = self.account.predicted
        for when, said, ran in (
            ("forward", own.forward, found.forward),
            ("backward", own.backward, found.backward),
        ):
            if said != ran:
                wrong.append(f"{self.name}: {when}: predicted {said:,} operations, ran {ran:,}")
        return wrong


def unequal(name: str, exact: Estimate, measured: Estimate) -> list[str]:
    """Checks of the verdict that do not hold."""
    return [
        f"{name}: {check.name}: predicted {check.predicted}, measured {check.measured}"
        for check in compare(exact, measured)
        if not check.holds
    ]


def spread(values: Sequence[float], digits: int = 4) -> tuple[str, str]:
    """Median; smallest and largest."""
    if not values:
        return "–", "–"
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f}", f"{low:.{digits}f} – {high:.{digits}f}"


def in_turns(contenders: Mapping[str, Contender], rounds: int) -> None:
    """Each is started, then takes a step a round, in an order that rotates."""
    every = list(contenders.values())
    for contender in every:
        contender.start()
    for turn in range(rounds):
        shift = turn % len(every)
        for contender in (*every[shift:], *every[:shift]):
            contender.timed()
