"""`ptrain select` over the context axis: candidates, placements of states, and constraints."""

from __future__ import annotations

from functools import partial

import pytest

from ptrain.algebra.legality import is_sound
from ptrain.axes.context.attention import LEAST_TOKENS, SPACE
from ptrain.derivation.estimate import derive
from ptrain.errors import SpecError
from ptrain.selection.choose import select
from ptrain.selection.job import searched_job
from ptrain.selection.ranking import SLACK
from ptrain.selection.space import inner_products
from ptrain.spec.batch import ContextAttention, Hybrid
from ptrain.spec.load import load
from ptrain.spec.placement import Axis
from tests.pure.searches import without_known

LONG = ("batch.sequence=32768", "batch.global=16")


def ranking(*words, where=(), count=20):
    searched = partial(select, "llama-tiny", (*LONG, *words), cluster="h100-8", devices=8)
    return without_known(partial(searched, where=where, count=count))


def inner(sequence, devices=64):
    words = [f"batch.sequence={sequence}", "batch.global=64"]
    base = searched_job("llama3.1-8b", words, cluster="h100-64", devices=devices).base
    return {choice for _, choices in inner_products(base, devices) for choice in choices}


def test_a_rank_has_no_fewer_tokens_than_a_search_tries():
    assert all(choice.degree(Axis.CP) == 1 for choice in inner(LEAST_TOKENS))
    degrees = {choice.degree(Axis.CP) for choice in inner(8 * LEAST_TOKENS)}
    assert degrees == {1, 2, 4, 8}


def test_every_attention_that_is_legal_of_the_ranks_is_tried():
    tried = {
        choice.changes[0][1].attention for choice in inner(2**17) if choice.degree(Axis.CP) == 8
    }
    rings = {Hybrid(ulysses=2, ring=4), Hybrid(ulysses=4, ring=2)}
    others = {ContextAttention.ZIGZAG, ContextAttention.ALL_GATHER, ContextAttention.ULYSSES}
    assert tried == rings | others


@pytest.fixture(scope="module")
def over_context():
    return ranking(where=("cp=4",))


def test_states_go_over_cp_as_over_the_innermost_data_axis(over_context):
    for row in over_context.ranking:
        states = {
            factor.axis: (
                factor.placement.parameters, factor.placement.optimizer, factor.placement.gradients
            )
            for factor in row.spec.factors
        }  # fmt: skip
        data = [axis for axis in (Axis.DP_SHARD, Axis.DP_REPLICATE) if axis in states]
        assert row.spec.degree(Axis.CP) == 4
        assert not data or Axis.DP_REPLICATE in data or states[Axis.CP] == states[Axis.DP_SHARD]


def test_ranked_candidates_are_legal_and_equal_their_prediction(over_context):
    assert over_context.ranking
    for row in over_context.ranking:
        spec = load(row.spec.resolved).spec
        assert is_sound(spec)
        exact = derive(spec).exact
        assert (exact.peak_bytes(), exact.step.seconds) == (row.peak_bytes, row.seconds)
        assert row.closed.peak <= SLACK * row.peak_bytes


def test_attention_is_requested_by_its_keyword():
    rows = ranking(where=("cp>=2", "attention=all-gather"), count=3).ranking
    assert rows and all(row.spec.context.attention is ContextAttention.ALL_GATHER for row in rows)
    assert all(row.spec.degree(Axis.CP) <= 2 for row in ranking(where=("cp<=2",), count=3).ranking)


def test_a_degree_and_an_attention_that_are_written_stay():
    rows = ranking("mesh.cp=8", "context={attention: zigzag}", count=3).ranking
    assert rows and all(
        (row.spec.degree(Axis.CP), row.spec.context.attention) == (8, ContextAttention.ZIGZAG)
        for row in rows
    )


def test_an_attention_that_there_is_none_of_is_rejected():
    with pytest.raises(SpecError, match="ring, zigzag, all-gather, ulysses, hybrid"):
        ranking(where=("attention=flash",))
    assert SPACE.axes == (Axis.CP,)
