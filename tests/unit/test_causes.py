"""The ranks that share an RNG stream, and those that do not."""

from __future__ import annotations

from ptrain.report.copies import SHARED
from ptrain.verification.preconditions import (
    DIFFERENT,
    EVALUATES,
    UNLIKE,
    Seen,
    find_mask_mismatches,
)


def _stream_names(*ranks: Seen, slices: int = 1) -> list[tuple[int, str]]:
    """Every `slices` neighbours have slices of the same tokens."""
    count = len(ranks)
    starts = {rank: rank - rank % slices for rank in range(count)}
    lines = {rank: range(start, start + slices) for rank, start in starts.items()}
    return [(its.rank, its.told) for its in find_mask_mismatches(dict(enumerate(ranks)), lines)]


def test_ranks_share_a_stream_if_they_have_the_same_samples() -> None:
    assert not _stream_names(("x", "a", True), ("x", "a", True))
    assert not _stream_names(("x", "a", True), ("y", "b", True))
    assert _stream_names(("x", "a", True), ("x", "b", True)) == [(1, DIFFERENT)]
    assert _stream_names(("x", "a", True), ("y", "a", True)) == [(1, SHARED)]
    assert not _stream_names(("x", "a", False), ("y", "a", False))  # who evaluates draws nothing


def test_of_several_copies_the_one_that_draws_unlike_the_others_is_named() -> None:
    assert _stream_names(("x", "b", True), ("x", "a", True), ("x", "a", True)) == [(0, DIFFERENT)]


def test_ranks_with_slices_of_the_same_samples_share_a_stream() -> None:
    assert not _stream_names(("x", "a", True), ("y", "a", True), slices=2)
    assert _stream_names(("x", "a", True), ("y", "b", True), slices=2) == [(1, UNLIKE)]


def test_ranks_with_slices_are_compared_with_others_by_all_of_their_slices() -> None:
    samples = ("x", "a", True), ("y", "a", True)
    assert not _stream_names(*samples, ("x", "b", True), ("z", "b", True), slices=2)
    others = ("x", "a", True), ("z", "a", True)
    assert _stream_names(*samples, *others, slices=2) == [(2, SHARED), (3, SHARED)]
    copies = ("x", "b", True), ("y", "b", True)
    assert _stream_names(*samples, *copies, slices=2) == [(2, DIFFERENT), (3, DIFFERENT)]
    assert _stream_names(samples[0], copies[1], samples[0], copies[1], slices=2) == [
        (1, UNLIKE), (3, UNLIKE),
    ]  # fmt: skip


def test_the_rank_that_evaluates_alone_is_named() -> None:
    assert _stream_names(("x", "a", True), ("y", "b", False)) == [(1, EVALUATES)]
    one_of_three = (("x", "a", False), ("y", "b", True), ("z", "c", True))
    assert _stream_names(*one_of_three) == [(0, EVALUATES)]
    two_of_three = (("x", "a", False), ("y", "b", False), ("z", "c", True))
    assert _stream_names(*two_of_three) == [(0, EVALUATES), (1, EVALUATES)]
