"""`ptrain select` over the expert axis: candidates, placements of states, and the estimates of
expert-parallel ranks."""

from __future__ import annotations

import pytest

from ptrain.algebra.legality import is_sound
from ptrain.axes.expert.cost import rows_bytes
from ptrain.cost import Collective, State
from ptrain.derivation.estimate import derive
from ptrain.selection.bound import inside
from ptrain.selection.choose import Chooser
from ptrain.selection.job import block_size, dense, searched_job, stand_in
from ptrain.selection.profile import exchange_seconds
from ptrain.selection.search import Search
from ptrain.selection.space import Legality, inner_products, pipelines
from ptrain.spec.activations import FULL, PLAIN, ActivationMode
from ptrain.spec.load import load
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import Axis
from tests.pure.hand_made_paces import HandPace

TINY = ("batch={global: 8, micro: 1, sequence: 64}", "model.capacity_factor=1.5")


def search_of(*where: str, devices: int = 4) -> Search:
    job = searched_job("moe-tiny", TINY, cluster="h100-8", devices=devices, where=where)
    return Chooser(job).search


def degrees(model: str, devices: int, *words: str) -> set[int]:
    base = searched_job(model, words, cluster="h100-64", devices=devices).base
    return {
        choice.degree(Axis.EP) for _, choices in inner_products(base, devices) for choice in choices
    }


def test_degrees_are_tried_that_divide_experts_and_ranks():
    capacity = "model.capacity_factor=1.25"
    assert degrees("mixtral-8x7b", 16, capacity) == {1, 2, 4, 8}
    assert degrees("qwen3-30b-a3b", 24, capacity) == {1, 2, 4, 8}
    assert degrees("llama3-8b", 16) == {1}


def test_degrees_are_tried_if_routing_decides_the_fit():
    assert degrees("mixtral-8x7b", 16) == {1, 2, 4, 8}
    assert degrees("mixtral-8x7b", 16, "routing=worst") == {1, 2, 4, 8}


def test_a_pipeline_is_legal_with_routing_that_requires_expert_axes():
    """The axes within a block have ep; the pipeline is looked at without them."""
    base = searched_job("mixtral-8x7b", ["routing=best"], cluster="h100-64").base
    legal = Legality(base, base)
    staged = [choice for size, of in pipelines(base, 64) for choice in of if size == 32]
    assert staged and any(legal.pipeline(choice, 4) for choice in staged)


@pytest.fixture(scope="module")
def over_experts():
    search = search_of("ep>=2", "pp=1", "tp=1")
    base = search.job.sized
    best = search.run(search.job.where).best
    return [(closed, closed.candidate.spec(base)) for closed in best]


def test_scored_candidates_are_legal_with_states_as_on_the_innermost_data_axis(over_experts):
    assert {spec.degree(Axis.EP) for _, spec in over_experts} == {2, 4}
    for _, spec in over_experts[::20]:
        assert is_sound(load(spec.resolved).spec if spec.resolved else spec)
        *outer, expert = spec.factors
        assert expert.axis is Axis.EP
        is_sharded = any(factor.axis is Axis.DP_SHARD for factor in outer)
        assert not is_sharded or outer[-1].placement == expert.placement


def test_estimates_have_the_states_of_expert_parallel_ranks():
    """Parameters and optimizer state of every candidate of the data axes are exact except for
    padding and counters."""
    search = search_of("pp=1", "tp=1", "micro=1", "recompute=none")
    base, layers, compared = search.job.sized, 4, 0
    for block in search.blocks():
        sizes = block.cut.sizes
        others = sizes.front + sizes.behind + layers * (sizes.block - sizes.experts)
        for row in block.rows[::2]:
            other, own = row.memory.lives
            estimate = other * others + own * layers * sizes.experts
            spec = block.scored(row).candidate.spec(base)
            if not is_sound(spec):
                continue
            exact = derive(spec).exact
            held = exact.bytes_of(State.PARAMETERS) + exact.bytes_of(State.OPTIMIZER)
            assert estimate == pytest.approx(held, rel=0.01)
            compared += 1
    assert compared > 25


def test_experts_are_sharded_over_the_data_axes_without_those_ranks():
    assert inside((2, 8), 4) == (2, 2)
    assert inside((8,), 8) == (1,)
    assert inside((), 1) == ()


def test_the_substitute_for_experts_has_the_width_of_a_tokens_experts():
    shape = load("zero3", ["model={preset: mixtral-8x7b, capacity_factor: 1.25}"]).spec.model
    assert isinstance(shape, ModelShape)
    assert dense(shape).ffn == round(2 * 1.25 * 14336)
    assert block_size(stand_in(shape)) == pytest.approx(block_size(dense(shape)), rel=0.01)


def test_a_block_waits_for_two_trips_each_way_and_two_more_where_it_is_computed_again():
    words = ["mesh={ep: 2}", "placement={ep: zero3}", *TINY, "batch.global=16"]
    spec = load("ep", words).spec
    shape, pace = spec.model, HandPace(sent=1e-9)
    assert isinstance(shape, ModelShape)
    once = pace.collective_seconds(
        Collective.ALL_TO_ALL, ranks=2, nodes=1, payload=rows_bytes(spec, shape)
    )
    assert exchange_seconds(spec, pace, PLAIN) == (2 * once, 2 * once)
    assert exchange_seconds(spec, pace, ActivationMode(policy=FULL)) == (2 * once, 4 * once)
    alone = load("zero3", ["model.preset=moe-tiny"]).spec
    assert exchange_seconds(alone, pace, PLAIN) == (0.0, 0.0)
