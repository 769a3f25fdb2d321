"""The bubbles of schedules in closed form, and the chunks that ranks hold, send and receive."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ptrain.axes.pipeline.catalogue import SCHEDULES, make_schedule
from ptrain.axes.pipeline.cost import Relation
from ptrain.axes.pipeline.schedule import StageCost
from ptrain.axes.pipeline.simulate import Costs, equal_stages, simulate
from ptrain.axes.pipeline.stage_facts import count_in_flight, list_transfers, most_held_of
from ptrain.cost import Collective, Phase
from ptrain.spec.pipeline import ScheduleName
from tests.pure.pipelines import BY_NAME, ONE_STAGE, costs_of, most_held, pipeline, stages_per_rank

COSTS = [(1, 1, 1), (2, 3, 1), (4, 5, 3), (1, 3, 2), (3, 1, 1), (1, 1, 2)]
every_schedule = pytest.mark.parametrize("name", ScheduleName)


# -------- bubbles


@every_schedule
@pytest.mark.parametrize("cost", COSTS, ids=str)
def test_the_wait_is_that_of_the_closed_form(name, cost):
    forward, inputs, weight = cost
    stage = StageCost(forward=forward, input=inputs, weight=weight)
    for size in BY_NAME[name]:
        expected = SCHEDULES[name].cost.bubble(size, stage, 0)
        if expected is None:
            continue
        made = make_schedule(name, size)
        result = simulate(made, equal_stages(made, stage))
        waited = max(result.idle_times)
        match expected.relation:
            case Relation.EQUAL:
                assert result.idle_times == (expected.idle,) * size.ranks
                fraction = expected.idle / (expected.idle + expected.ideal)
                assert result.bubble_fraction == pytest.approx(fraction, rel=1e-12)
                assert result.bubble_ratio == pytest.approx(expected.ratio, rel=1e-12)
            case Relation.AT_LEAST:
                assert waited >= expected.idle
            case Relation.AT_MOST:
                assert waited <= expected.idle


def test_closed_forms_are_exact_for_the_schedules_of_the_literature():
    unit, ranks = StageCost(), 4
    for name in (*ONE_STAGE, ScheduleName.BFS, ScheduleName.INTERLEAVED, ScheduleName.ZERO_BUBBLE):
        for per_rank in stages_per_rank(name):
            form = SCHEDULES[name].cost.bubble(pipeline(ranks, per_rank, 8), unit, 0)
            assert form and form.relation is Relation.EQUAL, name
    assert SCHEDULES[ScheduleName.ZBV].cost.bubble(pipeline(ranks, 2, 8), unit, 0) is None


@pytest.mark.parametrize(("microbatches", "percent"), [(32, "17.9"), (4, "63.6")])
def test_8_stages_wait_17_9_percent_of_32_microbatches_and_63_6_of_4(microbatches, percent):
    made = make_schedule(ScheduleName.GPIPE, pipeline(8, 1, microbatches))
    result = simulate(made)
    assert result.bubble_fraction == pytest.approx(7 / (microbatches + 7), rel=1e-15)
    assert f"{100 * result.bubble_fraction:.1f}" == percent


def test_1f1b_waits_as_long_as_gpipe_of_32_microbatches():
    size = pipeline(8, 1, 32)
    fractions = {
        simulate(make_schedule(name, size)).bubble_fraction
        for name in (ScheduleName.GPIPE, ScheduleName.ONE_F_ONE_B)
    }
    assert fractions == {7 / 39}


@pytest.mark.parametrize("name", [ScheduleName.BFS, ScheduleName.INTERLEAVED])
def test_v_stages_a_rank_wait_a_vth_of_the_ideal_time(name):
    for per_rank in (1, 2, 4):
        result = simulate(make_schedule(name, pipeline(4, per_rank, 8)))
        assert result.bubble_ratio == pytest.approx(3 / (8 * per_rank), rel=1e-15)


def test_dualpipevs_bound_holds_where_pairs_overlap():
    stage = StageCost(forward=4, input=5, weight=3)
    for size in BY_NAME[ScheduleName.DUALPIPEV]:
        made = make_schedule(ScheduleName.DUALPIPEV, size)
        for hidden in (0, 1, 4):
            bound = SCHEDULES[ScheduleName.DUALPIPEV].cost.bubble(size, stage, hidden)
            assert bound and bound.relation is Relation.AT_MOST
            assert (
                max(simulate(made, costs_of(made, stage, overlap=hidden)).idle_times) <= bound.idle
            )


def test_a_rank_of_zbv_never_waits_between_its_first_step_and_its_last():
    for size in BY_NAME[ScheduleName.ZBV]:
        if size.microbatches >= 2 * size.ranks - 1:
            result = simulate(make_schedule(ScheduleName.ZBV, size))
            assert result.idle_times == (size.ranks - 1,) * size.ranks
            for spans in result.timeline:
                gaps = [b.start - a.end for a, b in pairwise(spans)]
                assert not any(gaps)


def test_gpipes_communication_is_paid_where_it_fills_and_where_it_drains():
    for size in BY_NAME[ScheduleName.GPIPE]:
        made = make_schedule(ScheduleName.GPIPE, size)
        free, paid = (simulate(made, costs_of(made, StageCost(), communication=c)) for c in (0, 2))
        assert paid.makespan - free.makespan == 2 * 2 * (size.ranks - 1)


def test_transfers_within_a_rank_are_free():
    made = make_schedule(ScheduleName.ZBV, pipeline(1, 2, 3))
    free, paid = (simulate(made, costs_of(made, StageCost(), communication=c)) for c in (0, 9))
    assert free == paid


def test_the_slowest_stage_sets_the_pace():
    made = make_schedule(ScheduleName.ONE_F_ONE_B, pipeline(4, 1, 64))
    slow = StageCost(forward=2, input=2, weight=2)
    result = simulate(made, Costs(stages=(StageCost(), slow, StageCost(), StageCost())))
    assert result.busy_times == (192, 384, 192, 192)
    assert 384 < result.makespan < 384 + 3 * 6


# -------- chunks and messages


@pytest.mark.parametrize("name", [ScheduleName.GPIPE, ScheduleName.BFS])
def test_all_forward_first_holds_all_microbatches_of_every_stage(name):
    for size in BY_NAME[name]:
        made = make_schedule(name, size)
        for rank in range(size.ranks):
            assert most_held(made, rank) == size.microbatches * size.stages_per_rank
        assert {most_held_of(made, s) for s in range(size.stages)} == {size.microbatches}


@every_schedule
def test_held_chunks_start_at_one_and_end_at_zero(name):
    for size in BY_NAME[name]:
        made = make_schedule(name, size)
        for rank in range(size.ranks):
            counts = [sum(each.values()) for each in count_in_flight(made, rank)]
            assert counts[0] == counts[-1] == 1
            assert all(abs(b - a) <= 2 for a, b in pairwise(counts))


def test_held_chunks_are_weighted_by_stage():
    made = make_schedule(ScheduleName.BFS, pipeline(2, 2, 3))
    assert most_held(made, 0, {0: 10, 2: 1}) == 33
    assert most_held(made, 1, {1: 1, 3: 100}) == 303


@every_schedule
def test_a_boundary_between_ranks_carries_every_microbatch_once_each_way(name):
    for size in BY_NAME[name]:
        made = make_schedule(name, size)
        rows = list_transfers(made)
        crossed = [b for b in range(size.stages - 1) if made.is_crossed(b)]
        assert sorted({row.boundary for row in rows}) == crossed
        assert len(rows) == 4 * len(crossed)
        assert {row.calls for row in rows} <= {size.microbatches}
        for row in rows:
            is_first = row.rank == made.rank_of[row.boundary]
            assert row.rank in (made.rank_of[row.boundary + d] for d in (0, 1))
            is_send = row.collective is Collective.SEND
            assert is_send is (is_first is (row.phase is Phase.FORWARD))


def test_a_v_turns_within_its_last_rank():
    made = make_schedule(ScheduleName.ZBV, pipeline(4, 2, 8))
    assert made.rank_of == (0, 1, 2, 3, 3, 2, 1, 0)
    assert made.stages_of(1) == (1, 6)
    assert not made.is_crossed(3)
    assert {row.boundary for row in list_transfers(made)} == {0, 1, 2, 4, 5, 6}
    ends = sum(row.calls for row in list_transfers(made) if row.rank == 3)
    inner = sum(row.calls for row in list_transfers(made) if row.rank == 1)
    assert (ends, inner) == (4 * 8, 8 * 8)


def test_loops_go_round_and_round():
    made = make_schedule(ScheduleName.INTERLEAVED, pipeline(2, 3, 4))
    assert made.rank_of == (0, 1, 0, 1, 0, 1)
    assert all(made.is_crossed(boundary) for boundary in range(5))
