"""Things that several ranks hold, and which rank's differs: who differs from whom, along which axis
of the mesh, and what to do about it. Pure: what was found are words and digests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ptrain.report.finding import Mismatch, Moment, RootCause, Subject, Way
from ptrain.units import grouped

Coordinates = Mapping[int, Mapping[str, int]]  # rank -> axis -> place

DIFFERS = "differs between replicas"
SHARED = "shared where it must differ"


@dataclass(frozen=True, slots=True)
class Copy:
    """What a rank holds. Copies of one thing have all but `kind` and `digest` in common. `kind` is
    dtype and shape, `float32[4, 8]`, or "" for a number, which `digest` then is in words."""

    moment: Moment
    subject: Subject
    name: str
    part: str
    kind: str
    digest: str

    @property
    def identity(self) -> tuple[int, str, str, str]:
        return self.moment.value, self.subject.value, self.name, self.part


def holders(tables: Sequence[Sequence[Copy]]) -> dict[tuple[int, str, str, str], tuple[int, ...]]:
    """The ranks that hold each thing, ascending, a rank as often as it holds it. `tables`: of every
    rank."""
    ranks_of = grouped((copy.identity, rank) for rank, table in enumerate(tables) for copy in table)
    return {identity: tuple(ranks) for identity, ranks in ranks_of.items()}


def differing(tables: Sequence[Sequence[Copy]], step: int) -> Iterator[Mismatch]:
    """One for each rank whose copy is not that of the most; where no such majority is, for each
    rank that has one. In the order of time, then of the first rank that holds it."""
    copies = grouped(
        (copy.identity, (rank, copy)) for rank, table in enumerate(tables) for copy in table
    )
    for _, of_moment in groupby(
        sorted(copies.values(), key=lambda held: held[0][1].moment),
        key=lambda held: held[0][1].moment,
    ):
        for held in of_moment:
            yield from _differing(held, step)


def _differing(held: Sequence[tuple[int, Copy]], step: int) -> Iterator[Mismatch]:
    counts = Counter((copy.kind, copy.digest) for _, copy in held)
    if len(counts) == 1:
        return
    (usual, most), (_, next_most) = counts.most_common(2)
    has_majority = most > next_most
    between = tuple(sorted({rank for rank, _ in held}))
    for rank, copy in held:
        if has_majority and (copy.kind, copy.digest) == usual:
            continue
        other = usual if has_majority else next(c for c in counts if c != (copy.kind, copy.digest))
        yield Mismatch(
            step=step,
            moment=copy.moment,
            subject=copy.subject,
            name=copy.name,
            rank=rank,
            way=_way(copy.kind, other[0]),
            between=between,
            told=_difference(copy, other),
        )


def _way(text: str, other: str) -> Way:
    dtypes = text.partition("[")[0], other.partition("[")[0]
    if dtypes[0] != dtypes[1]:
        return Way.DTYPE
    return Way.SHAPE if text != other else Way.VALUE


def _difference(copy: Copy, other: tuple[str, str]) -> str:
    """What differs, in a few words: `bfloat16 for float32`, `7 for 8`; of values which part."""
    kind, digest = other
    match _way(copy.kind, kind):
        case Way.DTYPE:
            return f"{copy.kind.partition('[')[0]} for {kind.partition('[')[0]}"
        case Way.SHAPE:
            return f"{copy.kind} for {kind}"
        case _:
            return copy.part if copy.kind else f"{copy.digest} for {digest}"


def alike_apart(
    places: Sequence[tuple[str, str] | None], moment: Moment, step: int
) -> Iterator[Mismatch]:
    """Yield what two places share of things that ranks at one place have alike and at different
    places have not (`places`: of every rank its place and its digest, or None where it has none).
    Which ranks of one place differ is said by `differing`."""
    held = ((rank, *its) for rank, its in enumerate(places) if its is not None)
    alike = grouped((digest, (rank, place)) for rank, place, digest in held)
    for group in alike.values():
        for rank, place in group:
            if place != group[0][1]:
                yield Mismatch(
                    step=step,
                    moment=moment,
                    subject=Subject.RANDOM,
                    name="generator",
                    rank=rank,
                    between=tuple(other for other, _ in group),
                    told=SHARED,
                )


def root_cause(
    mismatches: Sequence[Mismatch], coordinates: Coordinates, last_good: int | None = None
) -> RootCause | None:
    """Return the root cause of the first thing that differs: all of its ranks, and the axes along
    which they differ from the others. `last_good`: the step after which the ranks agreed; None
    where that is not known."""
    if not mismatches:
        return None
    first = min(mismatches, key=lambda mismatch: mismatch.when)
    same = [d for d in mismatches if (d.when, d.subject, d.name) == (*_thing(first),)]
    ranks = tuple(sorted({mismatch.rank for mismatch in same}))
    between = tuple(sorted({rank for mismatch in same for rank in mismatch.between}))
    return RootCause(
        state=first.subject,
        axis="" if _is_alone(first) else axes_between(ranks, between, coordinates),
        factor=_factor(first),
        place="" if first.subject in _WITHOUT_PLACE else first.name,
        step=first.step,
        ranks=ranks,
        sentence=_sentence(first, ranks, between, last_good),
        fix=_OF_COPIES if _is_alone(first) else _REMEDIES.get(first.subject, _FLIPPED),
    )


def _is_alone(mismatch: Mismatch) -> bool:
    """Whether the rank itself has two things that must be the same."""
    return mismatch.between == (mismatch.rank,)


def _thing(mismatch: Mismatch) -> tuple[tuple[int, int], Subject, str]:
    return mismatch.when, mismatch.subject, mismatch.name


_WITHOUT_PLACE = (Subject.RANDOM, Subject.NORM)


def axes_between(odd: Sequence[int], ranks: Sequence[int], coordinates: Coordinates) -> str:
    """The axes along which an odd rank has a neighbour that is not odd, `dp_shard+tp`; where all
    are odd, those along which they are spread."""
    others = [rank for rank in ranks if rank not in odd] or list(ranks)
    axes: dict[str, None] = {}
    spread: dict[str, None] = {}
    for one in odd:
        for other in others:
            here, there = coordinates.get(one, {}), coordinates.get(other, {})
            apart = [axis for axis in here if here[axis] != there.get(axis)]
            spread.update(dict.fromkeys(apart))
            if len(apart) == 1:
                axes[apart[0]] = None
    return "+".join(axes or spread)


def _factor(first: Mismatch) -> str:
    is_told = first.subject in _NUMBERS or first.told == SHARED or _is_alone(first)
    if first.way is not Way.VALUE or is_told:
        return first.told
    return "differs where it must be shared" if first.subject is Subject.RANDOM else DIFFERS


_NUMBERS = (Subject.COUNTER, Subject.LEARNING_RATE, Subject.NORM)


def _sentence(
    first: Mismatch, ranks: tuple[int, ...], between: tuple[int, ...], last_good: int | None
) -> str:
    if _is_alone(first):
        return f"{first.subject} {first.name} of {listed(ranks)} {first.told}."
    others = tuple(rank for rank in between if rank not in ranks)
    against = f"{listed(others)} agree" if others else "no two of them agree, or as many as not"
    who = f"{first.subject} {first.name} of {listed(ranks)}: {first.told or DIFFERS} ({against}"
    known = "" if last_good is None else f"; all agreed after step {last_good}"
    return f"{who}{known})."


def listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


_OF_COPIES = "Every update must write its result to the copy that forward reads"
_FLIPPED = (
    "Where only this rank ever has it, its memory or its device is at fault; else an update, a "
    "gather or a broadcast does not reach all ranks, or something writes to it on some alone"
)
_REMEDIES = {
    Subject.GRADIENTS: "What reduces this gradient does not reach all ranks that hold it, runs with"
    " another operator or before the last micro-batch, or a hook changes it on some ranks alone",
    Subject.NORM: "Sum the squares over all axes that cut gradients before clipping",
    Subject.COUNTER: "A rank has skipped an update or made one too many: every rank must call step "
    "as often, and resume from the same checkpoint",
    Subject.LEARNING_RATE: "Give every rank the schedule of the same step",
    Subject.RANDOM: "Seed by (seed, step, place): alike where activations are copies, apart where "
    "they are not",
    Subject.BUFFERS: "Compute it from what all ranks have, or broadcast it after every change",
    Subject.BATCH: "Every rank must be at the same step",
}
