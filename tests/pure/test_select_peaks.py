"""A peak in closed form beside sums that are written out by hand."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from ptrain.derivation.tables import Place
from ptrain.selection.peaks import RankPeaks
from ptrain.selection.profile import Activity, EndsActivity, Sizes
from ptrain.selection.rows import OF_MEMORY
from ptrain.selection.score import FlowMoments, MomentParameters, RankMoments

BLOCK, HEAD, FRONT = 1000, 300, 200
SAVED, RISE, EMBEDS = 10, 70, 5000
_PLACES = (Place.ALONE, Place.FIRST, Place.MIDDLE, Place.LAST)


def _activity() -> Activity:
    ends = EndsActivity(saved=0, forward_rise=0, backward_rise=0, begun=0, end_rise=0)
    first = EndsActivity(saved=0, forward_rise=0, backward_rise=0, begun=0, end_rise=EMBEDS)
    return Activity(
        block=SAVED,
        forward_rise=SAVED,
        backward_rise=RISE,
        half=0,
        half_rise=0,
        moved=0,
        hidden=0,
        least=0,
        ends={place: first if place is Place.FIRST else ends for place in _PLACES},
    )


def _moment(place: Place, own: int, **said: Any) -> RankMoments:
    """A backward pass that begins on a stage of so many layers, which is all that a rank has, of
    the one micro-batch that is there, and not of the first."""
    on = [float(place is other) for other in _PLACES]
    values: dict[str, Any] = {spot.name: 0 for spot in fields(RankMoments)}
    ends = {"front": place is Place.FIRST, "behind": place is Place.LAST}
    values |= {"layers": own, "own": own, "whole": own, "is_staged": True, "on": on}
    values |= {"chunks": on, "waiting": [0.0] * len(on), "graded_layers": own, **ends}
    values |= {f"graded_{name}": value for name, value in ends.items()} | said
    return RankMoments(**{name: np.array([value], float) for name, value in values.items()})


_SIZES = Sizes(
    block=BLOCK, largest_part=BLOCK, front=FRONT, behind=HEAD, copied=0, tensors=(BLOCK,)
)


def _ranks(*moments: RankMoments) -> RankPeaks:
    """Of flows of one moment each."""
    columns = {
        spot.name: np.concatenate([getattr(at, spot.name) for at in moments])
        for spot in fields(RankMoments)
    }
    at, number = RankMoments(**columns), len(moments)
    flows = FlowMoments(at=at, starts=np.arange(number), lengths=np.ones(number, dtype=int))
    parts = MomentParameters.of(at, _SIZES)
    return RankPeaks(moments=flows, act=_activity(), parts=parts, block=BLOCK, is_many=True)


def _peak(at: RankMoments, **said: float) -> float:
    row = dict.fromkeys(OF_MEMORY, 0.0) | {"unit": float(BLOCK)} | said
    columns = {name: np.full(1, value) for name, value in row.items()}
    first = np.zeros(1, dtype=int)
    return float(_ranks(at).of(columns, first, first)[0])


@pytest.mark.parametrize("flat", [0.0, 1.0])
def test_what_waits_for_its_reduction_is_reduced_where_it_is(flat):
    """Nothing has to be there besides: what is done has gone before the next one is."""
    late = {"is_late": 1.0, "unreduced": 2.0, "opened": 2.0, "flying": 2.0, "adds_first": flat}
    waiting = 2 * 2 * BLOCK
    assert _peak(_moment(Place.MIDDLE, 2), **late) == waiting + 2 * SAVED + RISE


def test_in_the_only_block_of_a_stage_nothing_is_reduced_yet():
    every = {"opened": 2.0, "flying": 2.0}
    alone = _peak(_moment(Place.MIDDLE, 1), **every)
    assert alone == 2 * BLOCK + SAVED + RISE
    # the second block finds what the first one left to be reduced
    assert _peak(_moment(Place.MIDDLE, 2), **every) == 4 * BLOCK + SAVED + RISE


def test_a_flat_head_is_done_before_the_blocks_and_a_flat_embedding_is_open_all_along():
    flat = {"opened": 2.0, "adds_first": 1.0}
    blocks = 2 * BLOCK + 2 * SAVED + RISE
    assert _peak(_moment(Place.LAST, 2), **flat) == blocks
    first = 2 * FRONT + EMBEDS
    assert _peak(_moment(Place.FIRST, 2), **flat) == max(first, blocks + 2 * FRONT)


def test_a_tensor_of_the_embedding_has_no_gradient_before_the_blocks_are_done():
    fsdp2 = {"opened": 2.0}
    assert _peak(_moment(Place.FIRST, 1), **fsdp2) == EMBEDS


def test_what_copies_have_summed_stays_until_all_blocks_are_done():
    of_copies = {"outputs": 4.0}
    first_time = _peak(_moment(Place.MIDDLE, 3, is_new=True, graded_layers=0), **of_copies)
    assert first_time == 3 * SAVED + RISE
    assert _peak(_moment(Place.MIDDLE, 3), **of_copies) == 3 * 4 * BLOCK


def test_what_was_kept_from_forward_is_given_back_block_by_block():
    kept = {"whole": 2.0, "keeps_forward": 1.0, "outputs": 4.0}
    stays = _peak(_moment(Place.MIDDLE, 3), **kept, keeps_backward=1.0)
    goes = _peak(_moment(Place.MIDDLE, 3), **kept)
    assert (stays, goes) == (18 * BLOCK, 12 * BLOCK)


def test_gradients_that_wait_are_not_all_there_at_the_update():
    """On a rank whose other stages are over."""
    over = _moment(Place.MIDDLE, 1, layers=9, graded_layers=1, over_layers=8)
    waiting = _peak(over, is_late=1.0, unreduced=2.0)
    assert waiting == 2 * BLOCK + SAVED + RISE


def test_the_embedding_of_another_stage_of_a_rank_is_given_back():
    """Two stages of a rank, the first and one in the middle, whose pass it is."""
    at = _moment(Place.MIDDLE, 2, layers=4, front=True)
    # the forward pass before it has the embedding, and the backward pass has not
    assert _peak(at, whole=2.0) == 2 * (BLOCK + FRONT) + 2 * SAVED
    assert _peak(at, whole=2.0, keeps_forward=1.0, keeps_backward=1.0) == (
        2 * (4 * BLOCK + FRONT) + 2 * SAVED + RISE
    )


def test_no_peak_is_below_what_a_search_leaves_candidates_out_by():
    """Of choices that are drawn: else one would be lost that fits."""
    draw, number = np.random.default_rng(0), 64
    columns = {name: draw.integers(0, 3, number).astype(float) for name in OF_MEMORY}
    for name in ("is_cast", "is_late", "adds_first", "keeps_forward", "keeps_backward"):
        columns[name] = (columns[name] > 1).astype(float)
    ranks = _ranks(*(_moment(place, 2) for place in (Place.FIRST, Place.MIDDLE, Place.LAST)))
    at, flows = np.nonzero(np.ones((number, 3), dtype=bool))
    peaks = ranks.of(columns, at, flows).reshape(number, 3)
    assert (ranks.at_least(columns) <= peaks).all()
    alone = [_ranks(_moment(place, 2)) for place in (Place.FIRST, Place.MIDDLE, Place.LAST)]
    rows, only = np.arange(number), np.zeros(number, dtype=int)
    assert (peaks == np.stack([ranks.of(columns, rows, only) for ranks in alone], axis=1)).all()


def test_of_a_flow_the_fullest_moment_decides():
    first, last = _moment(Place.FIRST, 1), _moment(Place.FIRST, 4)
    columns = {name: np.ones(1) for name in OF_MEMORY}
    both = _ranks(first, last)
    as_one = replace(both.moments, starts=np.zeros(1, dtype=int), lengths=np.full(1, 2))
    at = np.zeros(1, dtype=int)
    apart = both.of(columns, np.zeros(2, dtype=int), np.arange(2))
    assert replace(both, moments=as_one).of(columns, at, at)[0] == apart.max() > apart.min()
