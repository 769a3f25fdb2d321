"""Rows stored once for ranks with equal values equal the rows of every rank."""

from __future__ import annotations

from ptrain.by_rank import ByRank, distinct, largest, of_ranks, rows_by_rank, totals
from ptrain.cost import Column, Estimate, Footprint, State


def row(state: State, rank: int, size: int, host: int = 0) -> Footprint:
    return Footprint(state=state, rank=rank, device_bytes=size, host_bytes=host)


KEPT = ByRank(
    (
        [(row(State.PARAMETERS, 0, 5), row(State.OPTIMIZER, 0, 7)), (row(State.PARAMETERS, 0, 3),)],
        [1, 0, 1],
    )
).extend(rows_by_rank("aba", lambda key: [row(State.OTHER, 0, ord(key), host=1)]))
WRITTEN = (
    row(State.PARAMETERS, 0, 3),
    row(State.PARAMETERS, 1, 5), row(State.OPTIMIZER, 1, 7),
    row(State.PARAMETERS, 2, 3),
    row(State.OTHER, 0, 97, 1), row(State.OTHER, 1, 98, 1), row(State.OTHER, 2, 97, 1),
)  # fmt: skip


def test_rows_that_are_kept_once_are_those_of_every_rank_in_their_order():
    assert tuple(KEPT) == WRITTEN
    assert KEPT == WRITTEN and WRITTEN == KEPT and WRITTEN[:-1] != KEPT
    assert len(KEPT) == len(WRITTEN) and KEPT[-1] == WRITTEN[-1] and KEPT[:2] == WRITTEN[:2]


def test_some_ranks_have_the_same_rows_either_way():
    for ranks in ({1}, {0, 2}, set[int]()):
        assert of_ranks(KEPT, ranks) == of_ranks(WRITTEN, ranks)


def test_sums_by_rank_are_the_same_either_way():
    assert totals(KEPT, lambda row: row.device_bytes) == [100, 110, 100]
    assert totals(WRITTEN, lambda row: row.device_bytes) == [100, 110, 100]


def test_every_figure_is_among_the_distinct_rows():
    def figures(rows):
        return {(row.state, row.device_bytes, row.host_bytes) for row in rows}

    assert figures(distinct(KEPT)) == figures(WRITTEN)
    assert {*distinct(KEPT)} < {*WRITTEN}, "each is the row of a rank that has it"


def test_an_estimate_answers_the_same_either_way():
    kept, written = (
        Estimate(column=Column.EXACT, world_size=3, memory=rows) for rows in (KEPT, WRITTEN)
    )
    assert kept.bytes_of(State.PARAMETERS) == written.bytes_of(State.PARAMETERS) == 5
    assert kept.bytes_of(State.PARAMETERS, 2) == written.bytes_of(State.PARAMETERS, 2) == 3
    assert kept.of_ranks({1}) == written.of_ranks({1})


def test_the_most_that_a_rank_has_is_the_largest_of_all_ranks_totals():
    for size in (lambda r: r.device_bytes, lambda r: r.host_bytes, lambda r: -r.device_bytes):
        most = max(totals(WRITTEN, size))
        assert largest(KEPT, size) == largest(WRITTEN, size) == most
    assert totals(ByRank(), lambda r: r.rank) == totals((), lambda r: r.rank) == []
    assert largest((), lambda r: r.device_bytes) == largest(ByRank(), lambda r: r.host_bytes) == 0
