"""Check state consistency (Theorem 4) while a program runs: replicas must be bitwise equal at the
start, in each step's gradients, norm and learning rate, and after the update; on request also
the result of every collective on its group. Replicas that differ are searched by digests of
halves, so that a few tens of words find the elements, and the bit if it is one.

Dropout: copies of an activation need one mask, different samples, token slices and heads need
different ones. For each module that draws random numbers the ranks compare digests of its input and
of the generator's state. Ranks of cp draw the masks of all tokens and take their part.

Note: masks themselves are not compared. Fused attention shows none, small ones are equal by chance,
and the generator's state costs nothing to compare.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ptrain.cost import Phase
from ptrain.data.corpus import corpus
from ptrain.interpreter.program import Program
from ptrain.meters import holdings
from ptrain.meters.collectives import CollectiveLedger
from ptrain.meters.randomness import digests, generator_digest
from ptrain.meters.replicas import ReplicaMeter, coordinates
from ptrain.models.dropout import drops_out, own_dropouts
from ptrain.models.ledger import local
from ptrain.report.copies import SHARED, alike_apart, culprit, listed
from ptrain.report.finding import Culprit, Departure, Moment, Subject, Way
from ptrain.report.record import Check
from ptrain.spec.placement import TOKEN_AXES
from ptrain.train.exchange import Exchange
from ptrain.verification.capture import drive, paths
from ptrain.verification.compare import counted
from ptrain.verification.parts import INTEGERS
from ptrain.verification.places import line

DIFFERENT = "differs where it must be shared"
UNLIKE = "differs where slices of one must be taken"
EVALUATES = "evaluates while others train"
Seen = tuple[str, str, bool]  # what a module is given, where the generator stands, does it train


class Masks:
    """`with Masks(program) as masks:` around a step, then `check`, by all ranks."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._seen: dict[str, Seen] = {}
        self._now: int | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Masks:
        self._seen.clear()
        self.program.observers.append(self)
        self._stack.callback(self.program.observers.remove, self)
        for path, module in paths(self.program):
            if any(own_dropouts(module)):
                hook = module.register_forward_pre_hook(self._before(path), with_kwargs=True)
                self._stack.callback(hook.remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def phase(self, phase: Phase, micro_batch: int) -> None:
        """What runs again in backward draws again what it drew."""
        self._now = micro_batch if phase is Phase.FORWARD else None

    def _before(self, path: str) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._now is None:
                return
            given = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            what = " ".join(digests([*given]))
            state = generator_digest(self.program.world.device)
            self._seen.setdefault(f"{path} {self._now}", (what, state, module.training))

        return note

    def check(self, exchange: Exchange, step: int) -> tuple[Departure, ...]:
        """Return what departs, in the order in which the modules run."""
        everyone: list[dict[str, Seen]] = exchange.gather(self._seen)
        spec = self.program.spec
        lines = [line(spec, rank, *TOKEN_AXES) for rank in range(len(everyone))]
        departures: list[Departure] = []
        for key in dict.fromkeys(key for its in everyone for key in its):
            path, _, micro_batch = key.rpartition(" ")
            seen = {rank: its[key] for rank, its in enumerate(everyone) if key in its}
            departures += (
                replace(departure, step=step, name=path, index=int(micro_batch))
                for departure in departing(seen, lines)
            )
        return tuple(departures)

    def culprit(self, departures: Sequence[Departure]) -> Culprit | None:
        """Return whose masks they are that are wrong; None where nothing departs."""
        same = [its for its in departures if its.told == departures[0].told]
        cause = culprit(same, coordinates(self.program))
        if cause is None:
            return None
        first, ranks = same[0], cause.ranks
        if first.told != EVALUATES:  # all of them are involved
            alike = (departure for departure in same if departure.name == first.name)
            ranks = tuple(sorted({rank for departure in alike for rank in departure.between}))
        sentence = f"dropout in {first.place} on {listed(ranks)} {_REMEDIES[first.told]}"
        return replace(cause, factor=first.told, place=first.place, ranks=ranks, sentence=sentence)


_REMEDIES = {
    DIFFERENT: "draws different masks for copies of one activation: seed these ranks alike",
    UNLIKE: "draws different masks for slices of one mask: seed these ranks alike",
    SHARED: "draws the same mask for different activations: seed by the place of what each rank "
    "computes",
    EVALUATES: "is in evaluation mode: call model.train() there",
}


def departing(seen: Mapping[int, Seen], lines: Sequence[Sequence[int]]) -> Iterator[Departure]:
    """Yield what departs of one module's pass, by the ranks that run it. `lines`: of each rank
    those with slices of the same tokens, itself among them."""
    still = [rank for rank, (_, _, trains) in seen.items() if not trains]
    if 0 < len(still) < len(seen):
        yield from (_departure(rank, seen, EVALUATES) for rank in still)
        return
    groups: dict[str, list[int]] = {}
    for rank in seen:
        whole = " ".join(seen[other][0] for other in lines[rank] if other in seen)
        groups.setdefault(whole, []).append(rank)
    for group in groups.values():
        usual, _ = Counter(seen[rank][1] for rank in group).most_common(1)[0]
        for rank in group:
            given, state, _ = seen[rank]
            copies = (its for its in group if seen[its][0] == given and its not in lines[rank])
            if state != usual:
                is_copy = any(seen[its][1] != state for its in copies)
                yield _departure(rank, group, DIFFERENT if is_copy else UNLIKE)
    places = {rank: (whole, seen[rank][1]) for whole, group in groups.items() for rank in group}
    if not still:  # who evaluates draws nothing
        yield from alike_apart([places.get(rank) for rank in range(len(lines))], Moment.FORWARD, 0)


def _departure(rank: int, between: Iterable[int], fault: str) -> Departure:
    return Departure(
        step=0, moment=Moment.FORWARD, subject=Subject.RANDOM, name="", rank=rank,
        between=tuple(between), told=fault,
    )  # fmt: skip


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
