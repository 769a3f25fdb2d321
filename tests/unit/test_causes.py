"""Causes that are told from values alone: slices, targets, masks."""

from __future__ import annotations

import pytest
import torch

from ptrain.report.copies import SHARED
from ptrain.spec.placement import Axis
from ptrain.steps.step import ContextParallel
from ptrain.verification.causes.context import (
    TokenLayout,
    _any_of,
    _hidden,
    order_of_slices,
    positions_text,
    under_other_strides,
)
from ptrain.verification.causes.rerun import _other
from ptrain.verification.preconditions import DIFFERENT, EVALUATES, UNLIKE, Seen, differing

WHOLE = torch.randn(8, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dim", [0, 1])
def test_the_order_of_slices_is_told_along_any_dimension(dim: int) -> None:
    first, second = WHOLE.chunk(2, dim)
    assert order_of_slices(torch.cat([second, first], dim), WHOLE, 2) == (1, 0)


def test_slices_in_their_order_or_others_are_nothing() -> None:
    assert order_of_slices(WHOLE, WHOLE, 2) is None
    assert order_of_slices(WHOLE * 2, WHOLE, 2) is None
    assert order_of_slices(WHOLE.roll(1, 1), WHOLE, 2) is None
    assert order_of_slices(WHOLE[:4], WHOLE, 2) is None


def test_of_four_slices_each_has_its_place() -> None:
    order = [2, 0, 3, 1]
    turned = torch.cat([WHOLE.chunk(4)[place] for place in order])
    assert order_of_slices(turned, WHOLE, 4) == tuple(order)


def _targets() -> dict[int, torch.Tensor]:
    drawn = torch.randint(0, 99, (2, 1, 40), generator=torch.Generator().manual_seed(0))
    return {0: drawn[0], 1: drawn[1]}


def test_targets_of_a_loss_are_told_by_shift_or_micro_batch() -> None:
    wanted = _targets()
    assert not list(_other(wanted[0], wanted, 0))
    assert list(_other(wanted[1], wanted, 0)) == ["targets of micro-batch 1 for 0"]
    assert list(_other(wanted[0].roll(-1, 1), wanted, 0)) == ["targets shifted 1 too far"]
    assert list(_other(wanted[0].roll(2, 1), wanted, 0)) == ["targets shifted 2 too little"]


def _told(*ranks: Seen, slices: int = 1) -> list[tuple[int, str]]:
    """Every `slices` neighbours have slices of the same tokens."""
    count = len(ranks)
    lines = [range(rank - rank % slices, rank - rank % slices + slices) for rank in range(count)]
    return [(its.rank, its.told) for its in differing(dict(enumerate(ranks)), lines)]


def test_ranks_draw_alike_where_they_are_given_the_same_and_apart_elsewhere() -> None:
    assert not _told(("x", "a", True), ("x", "a", True))
    assert not _told(("x", "a", True), ("y", "b", True))
    assert _told(("x", "a", True), ("x", "b", True)) == [(1, DIFFERENT)]
    assert _told(("x", "a", True), ("y", "a", True)) == [(1, SHARED)]
    assert not _told(("x", "a", False), ("y", "a", False))  # who evaluates draws nothing


def test_of_several_copies_the_one_that_draws_unlike_the_others_is_named() -> None:
    assert _told(("x", "b", True), ("x", "a", True), ("x", "a", True)) == [(0, DIFFERENT)]


def test_ranks_with_slices_of_the_same_samples_draw_alike() -> None:
    assert not _told(("x", "a", True), ("y", "a", True), slices=2)
    assert _told(("x", "a", True), ("y", "b", True), slices=2) == [(1, UNLIKE)]


def test_ranks_with_slices_are_compared_with_others_by_all_of_their_slices() -> None:
    samples = ("x", "a", True), ("y", "a", True)
    assert not _told(*samples, ("x", "b", True), ("z", "b", True), slices=2)
    others = ("x", "a", True), ("z", "a", True)
    assert _told(*samples, *others, slices=2) == [(2, SHARED), (3, SHARED)]
    copies = ("x", "b", True), ("y", "b", True)
    assert _told(*samples, *copies, slices=2) == [(2, DIFFERENT), (3, DIFFERENT)]
    assert _told(samples[0], copies[1], samples[0], copies[1], slices=2) == [
        (1, UNLIKE), (3, UNLIKE),
    ]  # fmt: skip


def test_the_rank_that_evaluates_alone_is_named() -> None:
    assert _told(("x", "a", True), ("y", "b", False)) == [(1, EVALUATES)]
    one_of_three = (("x", "a", False), ("y", "b", True), ("z", "c", True))
    assert _told(*one_of_three) == [(0, EVALUATES)]
    two_of_three = (("x", "a", False), ("y", "b", False), ("z", "c", True))
    assert _told(*two_of_three) == [(0, EVALUATES), (1, EVALUATES)]


TABLE = torch.arange(16, dtype=torch.float64)[:, None].sin()


def test_positions_are_read_off_the_rows_of_a_table() -> None:
    own = ((0, 4), (12, 16))
    rows = torch.cat([TABLE[:4], TABLE[12:]])
    assert positions_text(TABLE[:8], TABLE, own) == "positions 0-7 for 0-3, 12-15"
    assert positions_text(rows, TABLE, ((8, 16),)) == "positions 0-3, 12-15 for 8-15"
    assert positions_text(rows, TABLE, own) == ""
    assert positions_text(TABLE[:8] + 0.01, TABLE, own) == ""


def _layout(ulysses: int, ring: int, *, is_balanced: bool) -> TokenLayout:
    return TokenLayout.of(
        ContextParallel(
            axis=Axis.CP, ulysses=ulysses, ring=ring, sequence=8, is_balanced=is_balanced
        )
    )


def test_a_token_has_an_owner_and_an_index_there() -> None:
    layout = _layout(1, 2, is_balanced=True)
    assert layout.owners.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    assert layout.places.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    (contiguous,) = layout.otherwise()
    assert contiguous.tolist() == [0, 1, 4, 5, 6, 7, 2, 3]
    assert not list(_layout(2, 1, is_balanced=False).otherwise())


def test_members_of_a_place_of_the_ring_see_the_same_keys() -> None:
    place, rank = _layout(2, 2, is_balanced=True).rings()
    assert (place.degree, rank.degree) == (2, 4)
    assert list(_hidden(place)) == [(1,)]
    assert list(_hidden(rank)) == [(1,), (1, 2), (1, 2, 3), (2,), (3,)]
    assert not _any_of(place, (1,))[0, [0, 1, 6, 7]].any()
    assert _any_of(place, (1,))[0, 2:6].all()


def test_other_strides_are_of_heads_taken_for_tokens_and_of_the_reverse() -> None:
    right = WHOLE.reshape(2, 4, 6, 4)  # [samples, tokens, heads, features]
    of_heads, of_tokens = under_other_strides(right)
    memory = right.transpose(1, 2).contiguous().flatten()
    assert torch.equal(of_heads, memory.view(2, 4, 24))
    taken = right.contiguous().flatten().view(2, 6, 4, 4)
    assert torch.equal(of_tokens, taken.transpose(1, 2).reshape(2, 4, 24))
    assert not any(torch.equal(other, right.flatten(2)) for other in (of_heads, of_tokens))
