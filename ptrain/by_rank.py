"""The rows of every rank, kept once for all ranks that have the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Sequence
from typing import Protocol, Self, TypeVar, overload

from ptrain.units import summed


class OfRank(Protocol):
    """A row names the rank that it is of."""

    @property
    def rank(self) -> int: ...
    def of_rank(self, rank: int) -> Self: ...


RowT = TypeVar("RowT", bound=OfRank)
KeyT = TypeVar("KeyT", bound=Hashable)


class ByRank(Sequence[RowT]):
    """The rows of every rank, rank by rank, kept once for all ranks that have the same: a job of
    thousands of ranks has a handful of kinds. `kinds` are the rows of each kind, whatever rank
    they name; `kind_of` has for each rank the index of its kind; there may be several `parts`, one
    behind the other. Rows are read by going through them: each is made then."""

    def __init__(self, *parts: tuple[Sequence[Sequence[RowT]], Sequence[int]]) -> None:
        self.parts = parts

    def __repr__(self) -> str:
        return repr(tuple(self))

    def and_then(self, other: ByRank[RowT]) -> ByRank[RowT]:
        """Return these rows of all ranks, and behind them the other's."""
        return ByRank(*self.parts, *other.parts)

    def __iter__(self) -> Iterator[RowT]:
        for kinds, kind_of in self.parts:
            for rank, kind in enumerate(kind_of):
                for row in kinds[kind]:
                    yield row.of_rank(rank)

    def __len__(self) -> int:
        return sum(len(kinds[kind]) for kinds, kind_of in self.parts for kind in kind_of)

    @overload
    def __getitem__(self, place: int) -> RowT: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[RowT]: ...
    def __getitem__(self, place: int | slice) -> RowT | Sequence[RowT]:
        return tuple(self)[place]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def distinct(self) -> Iterator[RowT]:
        """Yield the rows of each kind that a rank has, as those of the first such rank."""
        for kinds, kind_of in self.parts:
            ranks = dict[int, int]()
            for rank, kind in enumerate(kind_of):
                ranks.setdefault(kind, rank)
            for kind, rank in ranks.items():
                for row in kinds[kind]:
                    yield row.of_rank(rank)

    def unranked(self, ranks: Iterable[int] | None = None) -> Iterator[RowT]:
        """Yield the rows of each kind that a rank has, or one of some ranks, whatever rank they
        name."""
        ranks = None if ranks is None else [*ranks]
        for kinds, kind_of in self.parts:
            held = kind_of if ranks is None else map(kind_of.__getitem__, ranks)
            for kind in dict.fromkeys(held):
                yield from kinds[kind]

    def kinds_of(self, rank: int) -> tuple[int, ...]:
        """Return the kind of a rank in each part."""
        return tuple(kind_of[rank] for _, kind_of in self.parts)

    def of_kinds(self, numbers: Sequence[int]) -> list[RowT]:
        """Return the rows of a rank that is of this kind in each part, whatever rank they name."""
        parts = zip(self.parts, numbers, strict=True)
        return [row for (kinds, _), number in parts for row in kinds[number]]

    def of_ranks(self, ranks: Container[int]) -> Iterator[RowT]:
        """Yield the rows of some ranks."""
        for kinds, kind_of in self.parts:
            for rank, kind in enumerate(kind_of):
                if rank in ranks:
                    for row in kinds[kind]:
                        yield row.of_rank(rank)

    def totals(self, size: Callable[[RowT], int]) -> list[int]:
        """Return by rank the sum of the sizes of its rows."""
        sums = [[sum(map(size, rows)) for rows in kinds] for kinds, _ in self.parts]
        of_part = [
            [of_kind[kind] for kind in kind_of]
            for of_kind, (_, kind_of) in zip(sums, self.parts, strict=True)
        ]
        return of_part[0] if len(of_part) == 1 else list(map(sum, zip(*of_part, strict=True)))

    def largest(self, size: Callable[[RowT], int]) -> int:
        """Return the largest of these sums, of ranks that differ."""
        sums = [[sum(map(size, rows)) for rows in kinds] for kinds, _ in self.parts]
        unlike = {*zip(*(kind_of for _, kind_of in self.parts), strict=True)}
        return max(
            (sum(of_kind[k] for of_kind, k in zip(sums, kinds, strict=True)) for kinds in unlike),
            default=0,
        )


def rows_by_rank(keys: Iterable[KeyT], rows: Callable[[KeyT], Sequence[RowT]]) -> ByRank[RowT]:
    """The rows of every rank, made once for all ranks with the same of the `keys`, one a rank."""
    keys = [*keys]
    kinds = {key: kind for kind, key in enumerate(dict.fromkeys(keys))}
    return ByRank(([rows(key) for key in kinds], [*map(kinds.__getitem__, keys)]))


def distinct(rows: Sequence[RowT]) -> Iterable[RowT]:
    """Rows among which is every figure that a rank has, where ranks are kept by kind those of the
    first rank of each kind."""
    return rows.distinct() if isinstance(rows, ByRank) else rows


def unranked(rows: Sequence[RowT], ranks: Collection[int] | None = None) -> Iterable[RowT]:
    """Rows among which is every figure that a rank has, or one of some ranks, whatever rank they
    name."""
    if isinstance(rows, ByRank):
        return rows.unranked(ranks)
    return rows if ranks is None else (row for row in rows if row.rank in ranks)


def of_ranks(rows: Sequence[RowT], ranks: Container[int]) -> tuple[RowT, ...]:
    """The rows of some ranks, in their order."""
    if isinstance(rows, ByRank):
        return tuple(rows.of_ranks(ranks))
    return tuple(row for row in rows if row.rank in ranks)


def largest(rows: Sequence[RowT], size: Callable[[RowT], int]) -> int:
    """The most that the sizes of a rank's rows sum up to; 0 where there are none."""
    return rows.largest(size) if isinstance(rows, ByRank) else max(totals(rows, size), default=0)


def totals(rows: Sequence[RowT], size: Callable[[RowT], int]) -> list[int]:
    """The sum of the sizes of a rank's rows, of each rank that has any."""
    if isinstance(rows, ByRank):
        return rows.totals(size)
    return list(summed((row.rank, size(row)) for row in rows).values())
