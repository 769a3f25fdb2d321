"""Find replicas that differ between ranks: which rank differs, along which mesh axis, and the fix.

This module is pure: replicas are descriptions and digests, not tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ptrain.report.finding import DifferenceKind, Mismatch, Moment, RootCause, Subject
from ptrain.units import grouped

Coordinates = Mapping[int, Mapping[str, int]]  # rank -> axis -> place

DIFFERS = "differs between replicas"
SHARED = "shared where it must differ"


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica of one value on one rank. Replicas of one value differ only in `kind` and `digest`.

    Attributes:
        part: The shard of a tensor, or the place of a generator; ranks that must agree have the
            same.
        kind: The dtype and shape, `float32[4, 8]`; empty for a number.
        digest: The digest of a tensor's values; for a number, its text.
    """

    moment: Moment
    subject: Subject
    name: str
    part: str
    kind: str
    digest: str

    @property
    def identity(self) -> tuple[int, str, str, str]:
        """The key that all replicas of one value share."""
        return self.moment.value, self.subject.value, self.name, self.part


def ranks_by_value(
    tables: Sequence[Sequence[Replica]],
) -> dict[tuple[int, str, str, str], tuple[int, ...]]:
    """Return the ranks that hold each value, ascending.

    A rank appears once for each replica that it holds.

    Args:
        tables: The replicas of every rank.
    """
    ranks_of = grouped((copy.identity, rank) for rank, table in enumerate(tables) for copy in table)
    return {identity: tuple(ranks) for identity, ranks in ranks_of.items()}


def find_differing_replicas(tables: Sequence[Sequence[Replica]], step: int) -> Iterator[Mismatch]:
    """Yield a mismatch for each rank whose replica differs from the most common one.

    If two replicas are equally common, every rank that holds the value has a mismatch. Mismatches
    are ordered by moment, then by the first rank that holds the value.

    Args:
        tables: The replicas of every rank.
        step: The number of the step, for the mismatches.
    """
    copies = grouped(
        (copy.identity, (rank, copy)) for rank, table in enumerate(tables) for copy in table
    )
    # sorted() is stable: within a moment, values keep the order of the first rank that holds them.
    for _, of_moment in groupby(
        sorted(copies.values(), key=lambda replicas: replicas[0][1].moment),
        key=lambda replicas: replicas[0][1].moment,
    ):
        for replicas in of_moment:
            yield from _replica_mismatches(replicas, step)


def _replica_mismatches(replicas: Sequence[tuple[int, Replica]], step: int) -> Iterator[Mismatch]:
    """Yield the mismatches of one value, given its replicas with their ranks."""
    counts = Counter((copy.kind, copy.digest) for _, copy in replicas)
    if len(counts) == 1:
        return
    # Two equally common replicas leave open which one is right, so every rank is reported.
    (usual, most), (_, next_most) = counts.most_common(2)
    has_majority = most > next_most
    between = tuple(sorted({rank for rank, _ in replicas}))
    for rank, copy in replicas:
        if has_majority and (copy.kind, copy.digest) == usual:
            continue
        other = usual if has_majority else next(c for c in counts if c != (copy.kind, copy.digest))
        yield Mismatch(
            step=step,
            moment=copy.moment,
            subject=copy.subject,
            name=copy.name,
            rank=rank,
            way=_kind_of_difference(copy.kind, other[0]),
            between=between,
            told=_difference_text(copy, other),
        )


def _kind_of_difference(text: str, other: str) -> DifferenceKind:
    """Return the kind of difference between two replicas, from their dtypes and shapes."""
    dtypes = text.partition("[")[0], other.partition("[")[0]
    if dtypes[0] != dtypes[1]:
        return DifferenceKind.DTYPE
    return DifferenceKind.SHAPE if text != other else DifferenceKind.VALUE


def _difference_text(copy: Replica, other: tuple[str, str]) -> str:
    """Return the difference in words: `bfloat16 for float32`, `7 for 8`, or the shard's name."""
    kind, digest = other
    match _kind_of_difference(copy.kind, kind):
        case DifferenceKind.DTYPE:
            return f"{copy.kind.partition('[')[0]} for {kind.partition('[')[0]}"
        case DifferenceKind.SHAPE:
            return f"{copy.kind} for {kind}"
        case _:
            return copy.part if copy.kind else f"{copy.digest} for {digest}"


def find_equal_generators(
    places: Sequence[tuple[str, str] | None], moment: Moment, step: int
) -> Iterator[Mismatch]:
    """Yield a mismatch for each rank whose generator equals one at a different place.

    Ranks at one place draw the same random numbers, and ranks at different places draw different
    ones. `find_differing_replicas` finds generators that differ within one place.

    Args:
        places: The place and the digest of each rank's generator; None for a rank without one.
        moment: When the digests were taken.
        step: The number of the step.
    """
    generators = (
        (rank, *place_and_digest)
        for rank, place_and_digest in enumerate(places)
        if place_and_digest is not None
    )
    by_digest = grouped((digest, (rank, place)) for rank, place, digest in generators)
    for group in by_digest.values():
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


def explain_replica_mismatches(
    mismatches: Sequence[Mismatch], coordinates: Coordinates, last_good: int | None = None
) -> RootCause | None:
    """Return the root cause of the earliest mismatch, with all of its ranks and the mesh axes.

    Args:
        mismatches: The mismatches of one step or several.
        coordinates: The place of each rank on each mesh axis.
        last_good: The last step after which the ranks agreed; None if that is not known.

    Returns:
        None if there are no mismatches.
    """
    if not mismatches:
        return None
    first = min(mismatches, key=lambda mismatch: mismatch.order_key)
    same = [d for d in mismatches if (d.order_key, d.subject, d.name) == (*_mismatch_key(first),)]
    ranks = tuple(sorted({mismatch.rank for mismatch in same}))
    between = tuple(sorted({rank for mismatch in same for rank in mismatch.between}))
    return RootCause(
        state=first.subject,
        axis="" if _is_on_one_rank(first) else axes_between(ranks, between, coordinates),
        factor=_factor_text(first),
        place="" if first.subject in _WITHOUT_PLACE else first.name,
        step=first.step,
        ranks=ranks,
        sentence=_root_cause_sentence(first, ranks, between, last_good),
        fix=_COPY_FIX if _is_on_one_rank(first) else _REMEDIES.get(first.subject, _DEFAULT_FIX),
    )


def _is_on_one_rank(mismatch: Mismatch) -> bool:
    """Return True if the two replicas that differ are both on the mismatch's rank."""
    return mismatch.between == (mismatch.rank,)


def _mismatch_key(mismatch: Mismatch) -> tuple[tuple[int, int], Subject, str]:
    """Return the key of the value that differs: its moment, subject and name."""
    return mismatch.order_key, mismatch.subject, mismatch.name


_WITHOUT_PLACE = (Subject.RANDOM, Subject.NORM)


def axes_between(odd: Sequence[int], ranks: Sequence[int], coordinates: Coordinates) -> str:
    """Return the axes along which a differing rank has a neighbour that agrees, `dp_shard+tp`.

    A neighbour is a rank at another place of exactly one axis. If no differing rank has such a
    neighbour, the result has all axes along which differing ranks are at other places.

    Args:
        odd: The ranks that differ.
        ranks: All ranks that hold the value.
        coordinates: The place of each rank on each mesh axis.
    """
    others = [rank for rank in ranks if rank not in odd] or list(ranks)
    axes: dict[str, None] = {}
    spread: dict[str, None] = {}
    for one in odd:
        for other in others:
            odd_place, other_place = (
                coordinates.get(one, {}),
                coordinates.get(other, {}),
            )
            differing_axes = [
                axis for axis in odd_place if odd_place[axis] != other_place.get(axis)
            ]
            spread.update(dict.fromkeys(differing_axes))
            # Only a neighbour along a single axis isolates the axis of the difference.
            if len(differing_axes) == 1:
                axes[differing_axes[0]] = None
    return "+".join(axes or spread)


def _factor_text(first: Mismatch) -> str:
    """Return the `factor` of a root cause: the mismatch in words, or a general statement."""
    is_told = first.subject in _NUMBERS or first.told == SHARED or _is_on_one_rank(first)
    if first.way is not DifferenceKind.VALUE or is_told:
        return first.told
    return "differs where it must be shared" if first.subject is Subject.RANDOM else DIFFERS


_NUMBERS = (Subject.COUNTER, Subject.LEARNING_RATE, Subject.NORM)


def _root_cause_sentence(
    first: Mismatch, ranks: tuple[int, ...], between: tuple[int, ...], last_good: int | None
) -> str:
    """Return the sentence of a root cause: the value, its ranks, and the ranks that agree.

    Args:
        first: The earliest mismatch.
        ranks: The ranks that differ.
        between: All ranks that hold the value.
        last_good: The last step after which all agreed; None if unknown.
    """
    if _is_on_one_rank(first):
        return f"{first.subject} {first.name} of {format_ranks(ranks)} {first.told}."
    others = tuple(rank for rank in between if rank not in ranks)
    against = (
        f"{format_ranks(others)} agree" if others else "no two of them agree, or as many as not"
    )
    subject = (
        f"{first.subject} {first.name} of {format_ranks(ranks)}: {first.told or DIFFERS} ({against}"
    )
    agreement = "" if last_good is None else f"; all agreed after step {last_good}"
    return f"{subject}{agreement})."


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text: `rank 3`, `ranks 0, 1`."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


_COPY_FIX = "Every update must write its result to the copy that forward reads"
_DEFAULT_FIX = (
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
