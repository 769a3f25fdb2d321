"""What the ranks of a group called, in order, and where they first differ. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ptrain.report.copies import listed
from ptrain.report.finding import Mismatch, Moment, RootCause, Subject, Way


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One collective as one rank issued it. `reduces` by SUM, MAX …, "" where nothing is reduced;
    `carries`: state and tensors, as far as they are known; `when` in the step; `result`: a digest
    of what all ranks of the group must have got alike, "" where they do not."""

    operator: str
    reduces: str = ""
    dtype: str = ""
    numel: int = 0
    carries: str = ""
    when: str = ""
    result: str = ""
    moment: Moment = Moment.START


# Compared in this order: what comes first explains what comes after it.
_FIELDS = (
    ("operator", Way.VALUE),
    ("reduces", Way.VALUE),
    ("dtype", Way.DTYPE),
    ("numel", Way.SHAPE),
    ("carries", Way.VALUE),
    ("when", Way.VALUE),
)
OVER = " over "
ANOTHER_RESULT = "another result of one call"


def differing(axes: str, ledgers: Mapping[int, Sequence[Call]], step: int) -> Iterator[Mismatch]:
    """Yield where ranks that must call the same first differ, one mismatch for each rank that is
    not with the most; of as many, for each rank that leaves a call out, else for all."""
    longest = max(ledgers.values(), key=len, default=())
    for index in range(len(longest)):
        calls = {rank: _call(ledger, index, longest) for rank, ledger in ledgers.items()}
        if len(counts := Counter(calls.values())) > 1:
            yield from _at(f"#{index}{OVER}{axes}", index, calls, counts, step)
            return


def _call(ledger: Sequence[Call], index: int, longest: Sequence[Call]) -> Call | None:
    """None for one that is left out: another rank has it, and this one what comes after it."""
    if index >= len(ledger):
        return None
    following = longest[index + 1 : index + 2]
    is_ahead = len(ledger) < len(longest) and ledger[index] != longest[index]
    return None if is_ahead and _alike(ledger[index], *following) else ledger[index]


def _alike(one: Call, other: Call) -> bool:
    """As calls, whatever came of them."""
    return replace(one, result="") == replace(other, result="")


def _at(
    place: str,
    index: int,
    calls: Mapping[int, Call | None],
    counts: Counter[Call | None],
    step: int,
) -> Iterator[Mismatch]:
    (usual, most), (_, next_most) = counts.most_common(2)
    has_majority = most > next_most
    if not has_majority and None in counts:
        usual = next(call for call in counts if call is not None)
        has_majority = True
    for rank, call in calls.items():
        if has_majority and call == usual:
            continue
        other = usual if has_majority else next(counted for counted in counts if counted != call)
        known = call or other
        assert known is not None
        way, difference = _difference(call, other)
        carried = f" ({known.carries})" if known.carries else ""
        yield Mismatch(
            step=step,
            moment=known.moment,
            subject=Subject.COLLECTIVE,
            name=f"{known.operator} {place}{carried}",
            rank=rank,
            way=way,
            index=index,
            between=tuple(sorted(calls)),
            told=difference,
        )


def _difference(call: Call | None, other: Call | None) -> tuple[Way, str]:
    if call is None or other is None:
        return Way.MISSING, "is not called" if call is None else "is called here alone"
    for field, way in _FIELDS:
        mine, its = getattr(call, field), getattr(other, field)
        if mine != its:
            return way, f"{_word(mine, field)} for {_word(its, field)}"
    return Way.VALUE, ANOTHER_RESULT


def _word(value: object, field: str) -> str:
    if field == "numel":
        return f"{value} elements"
    return str(value) or "nothing known"


def root_cause(mismatches: Sequence[Mismatch]) -> RootCause | None:
    """Return the root cause of the first call that differs; None where none does."""
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
    against = f"{listed(others)} agree" if others else "no majority of the ranks agrees"
    return RootCause(
        state=Subject.COLLECTIVE,
        axis=first.name.partition(OVER)[2].partition(" ")[0],
        factor=first.told,
        place=first.name,
        step=first.step,
        ranks=ranks,
        sentence=f"{first.name} of {listed(ranks)}: {first.told} ({against}).",
        fix=_remedy(first),
    )


def _remedy(first: Mismatch) -> str:
    if first.told == ANOTHER_RESULT:
        return (
            "All called alike and got different numbers: the backend, the link or the memory of "
            "that rank is at fault, or something wrote to the buffer before all had it"
        )
    return (
        "Every rank of a group must issue the same collectives on it, in the same order: look for "
        "a branch on the rank, a hook that is missing there or an order that follows a set"
    )
