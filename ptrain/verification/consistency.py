"""State consistency (Theorem 4) while a program runs: what ranks hold alike is bitwise the same, at
the start, in each step's gradients, norm and learning rate, and after its update; on request
also what every collective left on its group. Copies that differ are looked at closer: in how many
elements, and if it is one, in which bit, by digests of halves, so that of a tensor of any size some
tens of words travel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from ptrain.data.corpus import corpus
from ptrain.interpreter.program import Program
from ptrain.meters import holdings
from ptrain.meters.collectives import CollectiveLedger
from ptrain.meters.digest import digests
from ptrain.meters.replicas import ReplicaMeter
from ptrain.models.dropout import drops_out
from ptrain.models.ledger import local
from ptrain.report.finding import Culprit, Departure, Moment, Way
from ptrain.report.record import Check
from ptrain.train.exchange import Exchange
from ptrain.verification.capture import drive
from ptrain.verification.compare import counted
from ptrain.verification.masks import Masks
from ptrain.verification.roundings import INTEGERS

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
        self.draws = any(exchange.gather(drops_out(program.model)))
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


def closer(
    program: Program, exchange: Exchange, departures: Sequence[Departure], culprit: Culprit
) -> Culprit:
    """Return `culprit` of these departures, with the bit where it is one bit of one element.
    Collective; what departs has to be there still."""
    first = min(departures, key=lambda departure: departure.when)
    if first.way is not Way.VALUE or len(first.between) < 2:
        return culprit
    own = _held(program, first) if program.world.rank in first.between else None
    sizes = exchange.gather(None if own is None else own.numel())
    ranks = [rank for rank in first.between if sizes[rank] is not None]
    if len(ranks) < 2 or len({sizes[rank] for rank in ranks}) > 1:
        return culprit
    element = _one_element(own, sizes[ranks[0]], ranks, exchange)
    if element is None:
        return culprit
    place, bits = element
    factor = f"flipped bit {bits[0]}" if len(bits) == 1 else "one element"
    sentence = f"element {place} of {first.name} is another ({factor}), and no other. "
    return replace(culprit, factor=factor, sentence=sentence + culprit.sentence)


def _held(program: Program, first: Departure) -> torch.Tensor | None:
    """Return what this rank has under the name, as a row of integers."""
    known = (holdings.parameters, holdings.optimizer, holdings.buffers)
    for held in chain.from_iterable(holding(program) for holding in known):
        name = f"{held.name}.{held.key}" if held.key else held.name
        if (held.subject, name, held.part) == (first.subject, first.name, first.told):
            tensor = local(held.tensor.detach()).contiguous()
            return tensor.view(INTEGERS[tensor.element_size()]).reshape(-1)
    return None


def _one_element(
    own: torch.Tensor | None, size: int, ranks: Sequence[int], exchange: Exchange
) -> tuple[int, list[int]] | None:
    """Return its place, and the bits in which the ranks' differ; None where other elements do
    too."""

    def differs(start: int, end: int) -> bool:
        checksums = exchange.gather(None if own is None else digests([own[start:end]])[0])
        return len({checksums[rank] for rank in ranks}) > 1

    start, end = 0, size
    while end - start > 1:
        middle = (start + end) // 2
        start, end = (start, middle) if differs(start, middle) else (middle, end)
    if not differs(start, end) or (end < size and differs(end, size)):
        return None
    values: list[Any] = exchange.gather(None if own is None else int(own[start]))
    width = 8 * (own.element_size() if own is not None else 8)
    widths = exchange.gather(width)
    mask = 2 ** widths[ranks[0]] - 1
    both = 0
    for rank in ranks[1:]:
        both |= (values[rank] ^ values[ranks[0]]) & mask
    return start, [bit for bit in range(both.bit_length()) if both >> bit & 1]
