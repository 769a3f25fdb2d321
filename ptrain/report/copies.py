"""Find differences between ranks: replicas that differ, along which mesh axis, and the fix; and the
first collective that differs between ranks of a group.

This module is pure: replicas are descriptions and digests, not tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

from ptrain.report.finding import DifferenceKind, Mismatch, Moment, RootCause, Subject
from ptrain.units import group_by_key

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
    ranks_of = group_by_key(
        (copy.identity, rank) for rank, table in enumerate(tables) for copy in table
    )
    return {identity: tuple(ranks) for identity, ranks in ranks_of.items()}


def find_differing_replicas(tables: Sequence[Sequence[Replica]], step: int) -> Iterator[Mismatch]:
    """Yield a mismatch for each rank whose replica differs from the most common one.

    If two replicas are equally common, every rank that holds the value has a mismatch. Mismatches
    are ordered by moment, then by the first rank that holds the value.

    Args:
        tables: The replicas of every rank.
        step: The number of the step, for the mismatches.
    """
    copies = group_by_key(
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
    by_digest = group_by_key((digest, (rank, place)) for rank, place, digest in generators)
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
    key_of = attrgetter("order_key", "subject", "name")
    same = [mismatch for mismatch in mismatches if key_of(mismatch) == key_of(first)]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One collective as one rank issued it.

    Attributes:
        reduces: The reduction, SUM or MAX for example; empty if nothing is reduced.
        carries: The state and the tensors, as far as they are known.
        when: The place of the call in the step, in words.
        result: The digest of a result that all ranks of the group must share; empty if results
            differ by rank.
        moment: The moment of the step, for mismatches.
    """

    operator: str
    reduces: str = ""
    dtype: str = ""
    numel: int = 0
    carries: str = ""
    when: str = ""
    result: str = ""
    moment: Moment = Moment.START


# Compared in this order: a difference in an earlier field explains differences in later ones.
_FIELDS = (
    ("operator", DifferenceKind.VALUE),
    ("reduces", DifferenceKind.VALUE),
    ("dtype", DifferenceKind.DTYPE),
    ("numel", DifferenceKind.SHAPE),
    ("carries", DifferenceKind.VALUE),
    ("when", DifferenceKind.VALUE),
)
OVER = " over "
ANOTHER_RESULT = "another result of one call"


def find_differing_calls(
    axes: str, ledgers: Mapping[int, Sequence[Call]], step: int
) -> Iterator[Mismatch]:
    """Yield the mismatches of the first call that differs between ranks of one group.

    Ranks that agree with the most common call have no mismatch. If two calls are equally common,
    ranks that left a call out have one; if none did, all ranks have.

    Args:
        axes: The mesh axes of the group, for the name of the call.
        ledgers: The calls of each rank in order.
        step: The number of the step.
    """
    longest = max(ledgers.values(), key=len, default=())
    for index in range(len(longest)):
        calls = {rank: _call_at(ledger, index, longest) for rank, ledger in ledgers.items()}
        if len(counts := Counter(calls.values())) > 1:
            yield from _call_mismatches(f"#{index}{OVER}{axes}", index, calls, counts, step)
            return  # later calls differ as a consequence


def _call_at(ledger: Sequence[Call], index: int, longest: Sequence[Call]) -> Call | None:
    """Return the call of a rank at an index of the longest ledger; None if the rank left it out.

    A rank left a call out if its ledger has ended, or if it has the next call of the longest
    ledger.

    Args:
        ledger: The calls of the rank.
        index: The index in both ledgers, which are equal before it.
        longest: The calls of the rank with the most calls.
    """
    if index >= len(ledger):
        return None
    # A rank that already issues the next call of the longest ledger has skipped the current one.
    # This is reported as a missing call, not as another operator.
    following = longest[index + 1 : index + 2]
    is_ahead = len(ledger) < len(longest) and ledger[index] != longest[index]
    return None if is_ahead and _is_equal_call(ledger[index], *following) else ledger[index]


def _is_equal_call(one: Call, other: Call) -> bool:
    """Return True if two calls are equal, results aside."""
    return replace(one, result="") == replace(other, result="")


def _call_mismatches(
    place: str,
    index: int,
    calls: Mapping[int, Call | None],
    counts: Counter[Call | None],
    step: int,
) -> Iterator[Mismatch]:
    """Yield a mismatch for each rank that differs from the most common call at one index.

    Args:
        place: The index and the axes, for the name of the call.
        index: The position in the sequence of collectives.
        calls: The call of each rank; None if the rank left it out.
        counts: The number of ranks of each call.
        step: The number of the step.
    """
    (usual, most), (_, next_most) = counts.most_common(2)
    has_majority = most > next_most
    # With as many ranks that issue a call as ranks that do not, the call counts as the usual case.
    if not has_majority and None in counts:
        usual = next(call for call in counts if call is not None)
        has_majority = True
    for rank, call in calls.items():
        if has_majority and call == usual:
            continue
        other = usual if has_majority else next(counted for counted in counts if counted != call)
        call_or_other = call or other
        assert call_or_other is not None
        way, difference = _compare_calls(call, other)
        carried = f" ({call_or_other.carries})" if call_or_other.carries else ""
        yield Mismatch(
            step=step,
            moment=call_or_other.moment,
            subject=Subject.COLLECTIVE,
            name=f"{call_or_other.operator} {place}{carried}",
            rank=rank,
            way=way,
            index=index,
            between=tuple(sorted(calls)),
            told=difference,
        )


def _compare_calls(call: Call | None, other: Call | None) -> tuple[DifferenceKind, str]:
    """Return the kind of difference between two calls, and the first different field in words."""
    if call is None or other is None:
        return DifferenceKind.MISSING, "is not called" if call is None else "is called here alone"
    for field, way in _FIELDS:
        value, other_value = getattr(call, field), getattr(other, field)
        if value != other_value:
            return way, f"{_field_text(value, field)} for {_field_text(other_value, field)}"
    return DifferenceKind.VALUE, ANOTHER_RESULT


def _field_text(value: object, field: str) -> str:
    """Return the value of a field in words."""
    if field == "numel":
        return f"{value} elements"
    return str(value) or "nothing known"


def explain_call_mismatches(mismatches: Sequence[Mismatch]) -> RootCause | None:
    """Return the root cause of the first call that differs; None without mismatches.

    Args:
        mismatches: The mismatches of `differing`, of one group or several, the earliest first.
    """
    if not mismatches:
        return None
    first = mismatches[0]
    same = [
        mismatch
        for mismatch in mismatches
        if (mismatch.index, mismatch.between) == (first.index, first.between)
    ]
    ranks = tuple(sorted({mismatch.rank for mismatch in same}))
    others = tuple(rank for rank in first.between if rank not in ranks)
    against = f"{format_ranks(others)} agree" if others else "no majority of the ranks agrees"
    return RootCause(
        state=Subject.COLLECTIVE,
        axis=first.name.partition(OVER)[2].partition(" ")[0],
        factor=first.told,
        place=first.name,
        step=first.step,
        ranks=ranks,
        sentence=f"{first.name} of {format_ranks(ranks)}: {first.told} ({against}).",
        fix=_fix_for(first),
    )


def _fix_for(first: Mismatch) -> str:
    """Return the fix for a call that differs."""
    if first.told == ANOTHER_RESULT:
        return (
            "All called alike and got different numbers: the backend, the link or the memory of "
            "that rank is at fault, or something wrote to the buffer before all had it"
        )
    return (
        "Every rank of a group must issue the same collectives on it, in the same order: look for "
        "a branch on the rank, a hook that is missing there or an order that follows a set"
    )
