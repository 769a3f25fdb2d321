"""Per-rank rows (memory, peaks, operations), stored once for all ranks with identical rows.

A job of thousands of ranks has a handful of distinct ranks, so predictions build and keep the rows
of these only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Sequence
from typing import Protocol, Self, TypeVar, overload

from ptrain.units import sum_by_key


class OfRank(Protocol):
    """A row that names its rank and can be copied to another rank."""

    @property
    def rank(self) -> int: ...
    def of_rank(self, rank: int) -> Self: ...


RowT = TypeVar("RowT", bound=OfRank)
KeyT = TypeVar("KeyT", bound=Hashable)


class ByRank(Sequence[RowT]):
    """A sequence of the rows of all ranks, in rank order, stored once per kind of rank.

    Rows are created while the sequence is iterated. Indexing and comparison create all of them.

    Args:
        parts: Pairs `(kinds, kind_of)`. `kinds` holds the rows of each kind, under any rank number;
            `kind_of[rank]` is the index of a rank's kind. The sequence concatenates the parts.
    """

    def __init__(self, *parts: tuple[Sequence[Sequence[RowT]], Sequence[int]]) -> None:
        self.parts = parts

    def __repr__(self) -> str:
        return repr(tuple(self))

    def extend(self, other: ByRank[RowT]) -> ByRank[RowT]:
        """Return the rows of `self`, followed by the rows of `other`.

        Args:
            other: Rows of the same ranks.

        Returns:
            The rows of both, `self` first.
        """
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
        """Yield the rows of each kind once, under the number of the first rank of that kind."""
        for kinds, kind_of in self.parts:
            ranks = dict[int, int]()
            for rank, kind in enumerate(kind_of):
                ranks.setdefault(kind, rank)
            for kind, rank in ranks.items():
                for row in kinds[kind]:
                    yield row.of_rank(rank)

    def distinct_values(self, ranks: Iterable[int] | None = None) -> Iterator[RowT]:
        """Yield the rows of each kind once, under the rank number that they are stored with.

        Args:
            ranks: Only yield kinds that one of these ranks has. None: all ranks.
        """
        ranks = None if ranks is None else [*ranks]
        for kinds, kind_of in self.parts:
            held = kind_of if ranks is None else map(kind_of.__getitem__, ranks)
            for kind in dict.fromkeys(held):
                yield from kinds[kind]

    def kinds_of(self, rank: int) -> tuple[int, ...]:
        """Return the index of a rank's kind in each part."""
        return tuple(kind_of[rank] for _, kind_of in self.parts)

    def of_kinds(self, numbers: Sequence[int]) -> list[RowT]:
        """Return the rows of a rank with these kind indices, one per part, as stored."""
        parts = zip(self.parts, numbers, strict=True)
        return [row for (kinds, _), number in parts for row in kinds[number]]

    def of_ranks(self, ranks: Container[int]) -> Iterator[RowT]:
        """Yield the rows of these ranks.

        Args:
            ranks: Ranks from 0.

        Yields:
            Their rows, in the order of ranks.
        """
        for kinds, kind_of in self.parts:
            for rank, kind in enumerate(kind_of):
                if rank in ranks:
                    for row in kinds[kind]:
                        yield row.of_rank(rank)

    def totals(self, size: Callable[[RowT], int]) -> list[int]:
        """Return the sum of `size` over the rows of each rank, indexed by rank.

        Args:
            size: Returns the size of a row, for example its bytes.

        Returns:
            One sum per rank.
        """
        sums = [[sum(map(size, rows)) for rows in kinds] for kinds, _ in self.parts]
        of_part = [
            [of_kind[kind] for kind in kind_of]
            for of_kind, (_, kind_of) in zip(sums, self.parts, strict=True)
        ]
        return of_part[0] if len(of_part) == 1 else list(map(sum, zip(*of_part, strict=True)))

    def largest(self, size: Callable[[RowT], int]) -> int:
        """Return the largest sum of `size` over one rank's rows, computed once per kind.

        Args:
            size: Returns the size of a row, for example its bytes.

        Returns:
            The largest sum; 0 without rows.
        """
        sums = [[sum(map(size, rows)) for rows in kinds] for kinds, _ in self.parts]
        # Ranks with equal kinds in all parts have equal sums.
        unlike = {*zip(*(kind_of for _, kind_of in self.parts), strict=True)}
        return max(
            (sum(of_kind[k] for of_kind, k in zip(sums, kinds, strict=True)) for kinds in unlike),
            default=0,
        )


def rows_by_rank(keys: Iterable[KeyT], rows: Callable[[KeyT], Sequence[RowT]]) -> ByRank[RowT]:
    """Return the rows of all ranks, computed once per distinct key.

    Args:
        keys: One key per rank; ranks with equal keys have equal rows.
        rows: Returns the rows of a key, under any rank number.
    """
    keys = [*keys]
    kinds = {key: kind for kind, key in enumerate(dict.fromkeys(keys))}
    return ByRank(([rows(key) for key in kinds], [*map(kinds.__getitem__, keys)]))


def distinct(rows: Sequence[RowT]) -> Iterable[RowT]:
    """Return rows with every distinct figure: one rank per kind of a ByRank, else all rows."""
    return rows.distinct() if isinstance(rows, ByRank) else rows


def distinct_values(rows: Sequence[RowT], ranks: Collection[int] | None = None) -> Iterable[RowT]:
    """Like `distinct`, for figures that do not depend on the rank number.

    Args:
        rows: The rows of all ranks.
        ranks: Only return rows of these ranks, or of their kinds. None: all ranks.
    """
    if isinstance(rows, ByRank):
        return rows.distinct_values(ranks)
    return rows if ranks is None else (row for row in rows if row.rank in ranks)


def of_ranks(rows: Sequence[RowT], ranks: Container[int]) -> tuple[RowT, ...]:
    """Return the rows of these ranks, in their order.

    Args:
        rows: Rows that name their rank.
        ranks: Ranks from 0.

    Returns:
        The rows of these ranks.
    """
    if isinstance(rows, ByRank):
        return tuple(rows.of_ranks(ranks))
    return tuple(row for row in rows if row.rank in ranks)


def largest(rows: Sequence[RowT], size: Callable[[RowT], int]) -> int:
    """Return the largest sum of `size` over the rows of one rank; 0 without rows.

    Args:
        rows: Rows that name their rank.
        size: Returns the size of a row, for example its bytes.

    Returns:
        The largest sum over one rank.
    """
    return rows.largest(size) if isinstance(rows, ByRank) else max(totals(rows, size), default=0)


def totals(rows: Sequence[RowT], size: Callable[[RowT], int]) -> list[int]:
    """Return the sum of `size` over the rows of each rank, for ranks with rows.

    Args:
        rows: Rows that name their rank.
        size: Returns the size of a row, for example its bytes.

    Returns:
        One sum per rank with rows.
    """
    if isinstance(rows, ByRank):
        return rows.totals(size)
    return list(sum_by_key((row.rank, size(row)) for row in rows).values())
