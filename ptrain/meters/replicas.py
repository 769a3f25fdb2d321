"""State consistency (Theorem 4) in a running program: whatever several ranks hold is bitwise the
same on all of them, dtype included, and what is a copy of a master is that.

Every rank digests its local storages in place and names each part by what it is of the whole
(`meters.holdings`), so that nobody has to say what is replicated over which ranks: equal keys are
copies. The ranks tell each other one digest per set of ranks that share something; only where these
differ, or at the first check, all keys travel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Protocol

import torch

from ptrain.internals.dispatch import without_modes
from ptrain.interpreter.program import Program
from ptrain.meters import holdings
from ptrain.meters.holdings import Holding
from ptrain.meters.randomness import digests, drawn, kind, of_bytes
from ptrain.report.copies import Copy, alike_apart, culprit, differing, holders
from ptrain.report.finding import Culprit, Departure, Moment, Subject, Way

Identity = tuple[int, str, str, str]


class SupportsGather(Protocol):
    """How ranks tell each other small values."""

    def gather(self, value: Any, kind: Any = Any) -> list[Any]:
        """Return every rank's value of this type, in the order of the ranks."""
        ...


class ReplicaMeter:
    """Compares what the ranks hold. `noted()` around a step notes its gradients; `check` afterwards
    compares these and all else. Every rank calls both alike, and gets the same answer.

    Costs a pass over what a rank stores, at some 10 GB/s and core, and one exchange of some hundred
    bytes. Nothing is gathered or moved.
    """

    def __init__(self, program: Program, exchange: SupportsGather) -> None:
        self.program = program
        self.exchange = exchange
        self.last_good: int | None = None  # the last step that all agreed after
        self._noted: list[Copy] = []
        self._holders: dict[Identity, tuple[int, ...]] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """A step's gradients are digested when they are reduced, and their norm is kept."""
        self._noted = []
        self.program.gradient_observers.append(self)
        try:
            yield
        finally:
            self.program.gradient_observers.remove(self)

    def reduced(self) -> None:
        """The program has the gradients' sums."""
        self._noted += _copies(Moment.GRADIENTS, holdings.gradients(self.program))

    def clipped(self, norm: torch.Tensor | None) -> None:
        """The program has clipped them."""
        if norm is not None:
            self._noted.append(_number(Moment.CLIP, Subject.NORM, "norm", repr(float(norm))))

    def check(self, step: int, moment: Moment = Moment.UPDATE) -> tuple[Departure, ...]:
        """Return what differs between ranks now, in the order of time. `step` is this rank's."""
        if self.program.world.size == 1 or self.program.world.backend == "fake":
            return ()
        table = [*self._noted, *self._now(step, moment)]
        self._noted = []
        with without_modes():
            is_known = all(copy.identity in self._holders for copy in table)
            answers = self.exchange.gather(
                {
                    "known": is_known and _agrees_with_itself(table),
                    "classes": self._classes(table) if is_known else {},
                    "random": self._drawn(moment),
                    "stale": [list(copy) for copy in holdings.stale_copies(self.program)],
                }
            )
            departures = [*_stale(answers, moment, step)]
            if not _all_agree(answers):
                departures += self._in_full(table, step)
        departures += alike_apart([answer["random"] for answer in answers], moment, step)
        departures.sort(key=lambda departure: departure.when)
        if not departures:
            self.last_good = step
        return tuple(departures)

    def culprit(self, departures: Sequence[Departure]) -> Culprit | None:
        """Whose fault it is, of what `check` found; None where that is nothing."""
        return culprit(departures, coordinates(self.program), self.last_good)

    def _now(self, step: int, moment: Moment) -> Iterator[Copy]:
        """Yield a `Copy` of all that this rank holds between steps."""
        program = self.program
        held = (holdings.parameters, holdings.optimizer, holdings.buffers)
        yield from _copies(moment, chain.from_iterable(read(program) for read in held))
        counts = holdings.counters(program)
        updates = {f"{name}.step": count for name, count in counts.items()}
        if counts:
            updates["updates"] = max(counts.values())
        for name, count in {"training step": step, **updates}.items():
            yield _number(moment, Subject.COUNTER, name, str(count))
        for name, values in holdings.hyperparameters(program).items():
            yield _number(moment, Subject.LEARNING_RATE, name, " ".join(map(repr, values)))
        if (random := self._drawn(moment)) is not None:
            place, digest = random
            yield Copy(moment, Subject.RANDOM, "generator", place, "state", digest)

    def _drawn(self, moment: Moment) -> tuple[str, str] | None:
        """Generators are seeded when a step begins, and nothing is to be said of them before."""
        return None if moment is Moment.START else drawn(self.program)

    def _classes(self, table: Iterable[Copy]) -> dict[str, str]:
        """For every set of ranks that share something, one digest of all of it."""
        of_ranks: dict[tuple[int, ...], list[Copy]] = {}
        for copy in table:
            ranks = tuple(dict.fromkeys(self._holders[copy.identity]))
            if len(ranks) > 1:
                of_ranks.setdefault(ranks, []).append(copy)
        return {
            ",".join(map(str, ranks)): of_bytes(repr(sorted(map(repr, copies))).encode())
            for ranks, copies in of_ranks.items()
        }

    def _in_full(self, table: Sequence[Copy], step: int) -> Iterator[Departure]:
        tables = self.exchange.gather(table, list[Copy])
        before, now = self._holders, holders(tables)
        self._holders = before | now
        yield from _missing(before, now, step)
        yield from differing(tables, step)


def coordinates(program: Program) -> dict[int, dict[str, int]]:
    """Return every rank's place along every axis."""
    mesh = program.mesh.device_mesh
    if mesh is None:
        return {0: {}}
    places = torch.cartesian_prod(*(torch.arange(size) for size in mesh.mesh.shape))
    rows = places.view(-1, mesh.mesh.dim()).tolist()
    names = [str(axis) for axis in program.mesh.axes]
    return {
        rank: dict(zip(names, place, strict=True))
        for rank, place in zip(mesh.mesh.flatten().tolist(), rows, strict=True)
    }


def _copies(moment: Moment, held: Iterable[Holding]) -> list[Copy]:
    things = list(held)
    texts = digests([thing.tensor for thing in things])
    return [
        Copy(
            moment,
            thing.subject,
            f"{thing.name}.{thing.key}" if thing.key else thing.name,
            thing.part,
            kind(thing.tensor),
            digest,
        )
        for thing, digest in zip(things, texts, strict=True)
    ]


def _number(moment: Moment, subject: Subject, name: str, value: str) -> Copy:
    return Copy(moment, subject, name, "", "", value)


def _agrees_with_itself(table: Iterable[Copy]) -> bool:
    """Two stages of one rank may both have a tensor."""
    seen: dict[Identity, Copy] = {}
    return all(seen.setdefault(copy.identity, copy) == copy for copy in table)


def _all_agree(answers: Sequence[Mapping[str, Any]]) -> bool:
    if not all(answer["known"] for answer in answers):
        return False
    return all(
        answers[int(rank)]["classes"].get(ranks) == digest
        for answer in answers
        for ranks, digest in answer["classes"].items()
        for rank in ranks.split(",")
    )


def _stale(answers: Sequence[Mapping[str, Any]], moment: Moment, step: int) -> Iterator[Departure]:
    for rank, answer in enumerate(answers):
        for name, words in answer["stale"]:
            yield Departure(
                step=step,
                moment=moment,
                subject=Subject.PARAMETERS,
                name=name,
                rank=rank,
                between=(rank,),
                told=words,
            )


def _missing(
    before: Mapping[Identity, tuple[int, ...]], now: Mapping[Identity, tuple[int, ...]], step: int
) -> Iterator[Departure]:
    """What a rank had at an earlier check and has no more, and others still have."""
    for identity, ranks in now.items():
        moment, subject, name, _ = identity
        for rank in sorted({*before.get(identity, ())} - {*ranks}):
            yield Departure(
                step=step,
                moment=Moment(moment),
                subject=Subject(subject),
                name=name,
                rank=rank,
                way=Way.MISSING,
                between=tuple(sorted({*ranks, rank})),
                told="is gone",
            )
