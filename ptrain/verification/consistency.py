"""State consistency (Theorem 4) while a program runs: what ranks hold alike is bitwise the same, at
the start, in each step's gradients, norm and learning rate, and after its update; on request
also what every collective left on its group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ptrain.data.corpus import corpus
from ptrain.interpreter.program import Program
from ptrain.meters.collectives import CollectiveLedger
from ptrain.meters.randomness import draws
from ptrain.meters.replicas import ReplicaMeter
from ptrain.report.finding import Culprit, Departure, Moment
from ptrain.report.record import Check
from ptrain.train.exchange import Exchange
from ptrain.verification.compare import counted
from ptrain.verification.differing_bits import closer
from ptrain.verification.drive import drive
from ptrain.verification.masks import Masks

STEPS = 3
EVERY = 10  # steps of a trajectory


class Watch:
    """Looks at steps of a program, and keeps what departs first. All ranks look at the same."""

    def __init__(self, program: Program, exchange: Exchange, *, every_collective: bool) -> None:
        self.program, self.exchange = program, exchange
        self.replicas = ReplicaMeter(program, exchange)
        self.every_collective = every_collective
        self.departures: tuple[Departure, ...] = ()
        self.culprit: Culprit | None = None
        self.draws = any(exchange.gather(draws(program.model)))
        self.looks = {"state that ranks share": 0, "masks of dropout": 0, "collectives": 0}
        self.failed = ""

    def start(self) -> None:
        """Before any step."""
        self._take("state that ranks share", self.replicas, self.replicas.check(0, Moment.START))

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around one step."""
        with ExitStack() as stack:
            stack.enter_context(self.replicas.noted())
            masks = stack.enter_context(Masks(self.program)) if self.draws else None
            ledger = (
                stack.enter_context(CollectiveLedger(self.program))
                if self.every_collective
                else None
            )
            yield
        if masks is not None:
            self._take("masks of dropout", masks, masks.check(self.exchange, step))
        if ledger is not None:
            self._take("collectives", ledger, ledger.check(self.exchange, step))
        self._take("state that ranks share", self.replicas, self.replicas.check(step))

    def _take(
        self,
        name: str,
        by: ReplicaMeter | CollectiveLedger | Masks,
        departures: tuple[Departure, ...],
    ) -> None:
        self.looks[name] += self.exchange.world.size > 1  # one rank shares nothing
        if departures and not self.departures:
            self.departures, self.culprit, self.failed = departures, by.culprit(departures), name
            if isinstance(by, ReplicaMeter) and self.culprit is not None:
                self.culprit = closer(self.program, self.exchange, self.departures, self.culprit)

    def checks(self) -> tuple[Check, ...]:
        """Return a check for each kind of look: how many there were, how many showed nothing."""
        return tuple(self._check(name, looks) for name, looks in self.looks.items() if looks)

    def _check(self, name: str, looks: int) -> Check:
        failed = name == self.failed
        why = ""
        if failed:
            first = self.departures[0]
            ranks = ", ".join(map(str, first.between or (first.rank,)))
            why = f"step {first.step}: {first.subject} {first.name} differs between ranks {ranks}"
        return counted(name, looks, int(failed), why)


def consistency(program: Program, exchange: Exchange, *, every_collective: bool) -> Watch:
    """STEPS steps, each looked at, or fewer where one departs. All ranks call it."""
    source = corpus(program.spec.data)
    watch = Watch(program, exchange, every_collective=every_collective)
    watch.start()
    for step in range(STEPS):
        if watch.departures:
            break
        with watch.step(step):
            drive(program, source, step)
    return watch
