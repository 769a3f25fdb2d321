"""Find the first collective that differs between ranks of a group. This module is pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ptrain.report.copies import format_ranks
from ptrain.report.finding import DifferenceKind, Mismatch, Moment, RootCause, Subject


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
