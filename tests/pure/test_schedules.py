"""Schedules as data: each executes one step, an invalid one is rejected with the action's rank, and
impossible requests are rejected; drawings."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptrain.axes.pipeline import cost
from ptrain.axes.pipeline.catalogue import SCHEDULES, ScheduleRow, make_schedule, schedule_faults
from ptrain.axes.pipeline.cost import ScheduleCost
from ptrain.axes.pipeline.schedule import Action, Pair, StageCost, Step
from ptrain.axes.pipeline.simulate import Costs, draw_schedule, simulate
from ptrain.errors import BrokenSchedule, SpecError
from ptrain.spec.pipeline import ScheduleName
from ptrain.timeline import Kind
from tests.pure.pipelines import BY_NAME, GRID, ONE_STAGE, VEES, costs_of, most_held, pipeline
from tests.source_tree import SourceTree

every_schedule = pytest.mark.parametrize("name", ScheduleName)


# -------- a step's work, once


@every_schedule
def test_every_microbatch_runs_forward_and_backward_once_on_every_stage(name):
    for size in BY_NAME[name]:
        made = make_schedule(name, size)
        chunks = {(s, m) for s in range(size.stages) for m in range(size.microbatches)}
        done: dict[Kind, list[tuple[int, int]]] = {kind: [] for kind in Kind}
        for rank, order in enumerate(made.orders):
            for part in (part for step in order for part in step.parts):
                done[part.kind].append((part.stage, part.microbatch))
                assert made.rank_of[part.stage] == rank
        assert sorted(done[Kind.FORWARD]) == sorted(chunks)
        assert sorted(done[Kind.BACKWARD] + done[Kind.INPUT]) == sorted(chunks)
        assert sorted(done[Kind.INPUT]) == sorted(done[Kind.WEIGHT])


@every_schedule
def test_no_action_starts_before_its_dependencies(name):
    for size in BY_NAME[name]:
        made = make_schedule(name, size)
        timeline = simulate(made, costs_of(made, StageCost(), communication=2)).timeline
        ended = {part: s.end for spans in timeline for s in spans for part in s.step.parts}
        for rank, spans in enumerate(timeline):
            for before, after in pairwise(spans):
                assert before.end <= after.start
            for span in spans:
                for part in span.step.parts:
                    for need in needs(part, made.stages):
                        if need in ended:
                            delay = 2 * (made.rank_of[need.stage] != rank)
                            assert ended[need] + delay <= span.start


def needs(action: Action, stages: int) -> list[Action]:
    """Return the actions that an action depends on, for every form of a backward pass, written
    independently."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        return [Action(Kind.FORWARD, stage - 1, microbatch)]
    if action.kind is Kind.WEIGHT:
        return [Action(Kind.INPUT, stage, microbatch)]
    after = [Action(kind, stage + 1, microbatch) for kind in (Kind.BACKWARD, Kind.INPUT)]
    return [Action(Kind.FORWARD, stage, microbatch), *after]


@given(data=st.data())
def test_every_schedule_ends_whatever_its_stages_cost(data):
    name, size = data.draw(st.sampled_from(GRID))
    made = make_schedule(name, size)
    seconds = st.integers(0, 9)
    cost = st.builds(StageCost, forward=seconds, input=seconds, weight=seconds)
    stages = data.draw(st.lists(cost, min_size=made.stages, max_size=made.stages))
    costs = Costs(stages=tuple(stages), communication=data.draw(seconds))
    result = simulate(made, costs)
    work = sum(size.microbatches * (c.forward + c.input + c.weight) for c in stages)
    assert sum(result.busy_times) == work
    assert all(wait >= 0 for wait in result.idle_times)
    slowest = work + 2 * made.stages * size.microbatches * costs.communication
    assert max(result.busy_times) <= result.makespan <= slowest  # all of it one after the other


# -------- refusals


@pytest.mark.parametrize("name", ONE_STAGE)
def test_schedules_of_one_stage_a_rank_reject_two(name):
    with pytest.raises(SpecError) as caught:
        make_schedule(name, pipeline(4, 2, 8))
    (fault,) = caught.value.faults
    assert fault.place == "pipeline.stages"
    assert fault.finding == f"{name} needs 1 stage per rank, but 8 stages over pp=4 are 2 per rank"
    assert fault.remedy.startswith(
        "Use `pipeline.stages=4`, or a schedule with any number of stages per rank: bfs, "
    )


@pytest.mark.parametrize("name", VEES)
@pytest.mark.parametrize("per_rank", [1, 3])
def test_a_v_rejects_any_number_of_stages_but_two_a_rank(name, per_rank):
    found = list(schedule_faults(name, pipeline(2, per_rank, 12)))
    assert [fault.place for fault in found] == ["pipeline.stages"]
    assert "2 stages per rank" in found[0].finding and found[0].remedy.startswith(
        "Use `pipeline.stages=4`"
    )


def test_too_few_microbatches_are_rejected_with_how_many_are_needed():
    name = ScheduleName.DUALPIPEV
    (fault,) = schedule_faults(name, pipeline(4, 2, 7))
    assert f"{name} needs at least 8 micro-batches per step" in fault.finding
    assert "to get 8, or use `pipeline.schedule=" in fault.remedy
    instead = ScheduleName(fault.remedy.rpartition("=")[2].removesuffix("`."))
    assert not list(schedule_faults(instead, pipeline(4, 2, 7)))
    assert not list(schedule_faults(name, pipeline(4, 2, 8)))


def test_1f1b_with_fewer_microbatches_than_stages_alternates_on_the_last_ranks_only():
    fewer = make_schedule(ScheduleName.ONE_F_ONE_B, pipeline(4, 1, 2))
    assert fewer.orders[:2] == make_schedule(ScheduleName.GPIPE, pipeline(4, 1, 2)).orders[:2]
    assert [most_held(fewer, rank) for rank in range(4)] == [2, 2, 2, 1]
    assert simulate(fewer).bubble_ratio == 3 / 2


@pytest.mark.parametrize("name", [ScheduleName.INTERLEAVED, ScheduleName.ZERO_BUBBLE])
def test_unequal_rounds_are_rejected_with_the_next_equal_number(name):
    for ranks in range(1, 7):
        for microbatches in range(1, 40):
            size = pipeline(ranks, 2, microbatches)
            for fault in schedule_faults(name, size):
                numbers = [
                    int(word.strip(",")) for word in fault.remedy.split() if word[0].isdigit()
                ]
                fewer, more = numbers
                assert fewer < microbatches < more <= microbatches + ranks
                for other in range(fewer, more + 1):
                    is_legal = not list(schedule_faults(name, replace(size, microbatches=other)))
                    assert is_legal is (other in numbers)
    (fault,) = schedule_faults(name, pipeline(4, 2, 9))
    assert fault.remedy.startswith("Change `batch.global` or `batch.micro` to get 8 or 10")


# -------- broken schedules


def message_for_orders(edit: dict[int, list[Step]]) -> BrokenSchedule:
    """Return the message for a 1f1b schedule of 2 ranks and 2 micro-batches with these ranks'
    orders replaced."""
    made = make_schedule(ScheduleName.ONE_F_ONE_B, pipeline(2, 1, 2))
    orders = tuple(tuple(edit.get(rank, order)) for rank, order in enumerate(made.orders))
    with pytest.raises(BrokenSchedule) as caught:
        simulate(replace(made, orders=orders))
    return caught.value


def steps(text: str) -> list[Step]:
    """`"0F0 0B0"` -> two actions of stage 0."""
    return [Action(Kind(word[1]), int(word[0]), int(word[2:])) for word in text.split()]


@pytest.mark.parametrize(
    ("rank", "order", "action", "reason"),
    [
        (0, "0F0 0F1 0B0", "0B1", "missing"),
        (0, "0F0 0F1 0B0 0I1", "0W1", "missing"),
        (1, "1F0 1B0 1B1", "1F1", "missing"),
        (0, "0F0 0F0 0F1 0B0 0B1", "0F0", "twice"),
        (0, "0F0 0F1 0B0 0B1 0W1 0I1", "0B1", "full pass and a second half"),
        (0, "0F0 1F0 0F1 0B0 0B1", "1F0", "stage 1 belongs to rank 1"),
        (0, "0F0 0F1 0F2 0B0 0B1", "0F2", "there are 2 micro-batches, counted from 0"),
        (0, "0F0 0F1 2F0 0B0 0B1", "2F0", "there are 2 stages, counted from 0"),
    ],
)
def test_an_invalid_schedule_names_the_rank_of_the_wrong_action(rank, order, action, reason):
    error = message_for_orders({rank: steps(order)})
    assert (error.rank, str(error.action)) == (rank, action)
    assert str(error) == f"pipeline.schedule: rank {rank}, {action}: {reason}"


def test_weight_passes_before_input_passes_deadlock():
    error = message_for_orders({0: steps("0F0 0F1 0W0 0I0 0B1")})
    assert (error.rank, str(error.action)) == (0, "0W0")
    assert "rank 0 waits at 0W0 for 0I0 of rank 0" in str(error)


def test_a_deadlock_names_who_waits_for_whom():
    error = message_for_orders({0: steps("0F0 0B1 0F1 0B0"), 1: steps("1F0 1F1 1B0 1B1")})
    assert (error.rank, str(error.action)) == (0, "0B1")
    assert "rank 0 waits at 0B1 for 0F1 of rank 0" in str(error)
    error = message_for_orders({0: steps("0F0 0B0 0F1 0B1"), 1: steps("1F0 1F1 1B0 1B1")})
    assert str(error).endswith(
        "deadlock: rank 0 waits at 0B0 for 1B0 of rank 1, rank 1 waits at 1F1 for 0F1 of rank 0"
    )


def test_halves_of_a_pair_that_depend_on_each_other_deadlock():
    pair = Pair(*steps("1F1 1B1"))
    error = message_for_orders({1: [*steps("1F0 1B0"), pair]})
    assert (error.rank, str(error.action)) == (0, "0B1")
    assert "rank 1 waits at 1F1&1B1 for 1F1 of rank 1" in str(error)


@pytest.mark.parametrize(
    ("name", "halves"),
    [
        (ScheduleName.INTERLEAVED, [0, 0, 0, 0]),
        (ScheduleName.ZERO_BUBBLE, [4, 4, 4, 4]),  # of four micro-batches all
        (ScheduleName.DUALPIPEV, [2, 1, 1, 1]),  # those that fill its end alone
    ],
)
def test_a_schedule_counts_the_backward_passes_of_a_stage_in_halves(name, halves):
    halved = make_schedule(name, pipeline(2, 2, 4))
    assert [halved.halves_of(stage) for stage in range(halved.stages)] == halves


# -------- drawings


@every_schedule
def test_a_drawing_has_a_line_per_rank_and_fits(name):
    for size in BY_NAME[name]:
        lines = draw_schedule(make_schedule(name, size)).splitlines()
        assert len(lines) == size.ranks + 1
        assert max(map(len, lines)) <= 160
        assert [line.split()[:2] for line in lines[:-1]] == [
            ["rank", str(r)] for r in range(size.ranks)
        ]


def test_1f1b_drawn():
    assert draw_schedule(
        make_schedule(ScheduleName.ONE_F_ONE_B, pipeline(2, 1, 3))
    ).splitlines() == [
        "rank 0  F0 F1 .  .  B0--- F2 B1--- .  B2---",
        "rank 1  .  F0 B0--- F1 B1--- F2 B2--- .  .",
        "F forward · B backward · each with its micro-batch · . idle",
    ]


def test_a_long_drawing_leaves_the_same_columns_out_of_every_line():
    lines = draw_schedule(
        make_schedule(ScheduleName.ONE_F_ONE_B, pipeline(2, 1, 3)), width=30
    ).splitlines()
    assert lines == [
        "rank 0  F0 F1 .  …  .  B2---",
        "rank 1  .  F0 B0-…  -- .  .",
        "F forward · B backward · each with its micro-batch · . idle · … 6 columns",
    ]


def test_a_drawing_of_several_stages_a_rank_names_them():
    lines = draw_schedule(make_schedule(ScheduleName.DUALPIPEV, pipeline(1, 2, 3))).splitlines()
    assert (
        lines[0]
        == "rank 0  0F0 1F0 0F1 1B0---- 1F1&0B0---- 0F2&1B1---- 1F2&0B1---- 1B2---- 0I2 0W2"
    )
    assert "stage first, then micro-batch · & side by side" in lines[1]


# -------- a schedule is a row


def test_a_row_is_all_that_a_schedule_needs(monkeypatch):
    def last_first(pipeline, rank):
        numbers = range(pipeline.microbatches)
        yield from (Action(Kind.FORWARD, rank, number) for number in numbers)
        yield from (Action(Kind.BACKWARD, rank, number) for number in reversed(numbers))

    row = ScheduleRow(
        order=last_first,
        stages=1,
        cost=ScheduleCost(bubble=cost.fill_and_drain, in_flight=cost.all_in_flight),
    )
    monkeypatch.setitem(SCHEDULES, ScheduleName.GPIPE, row)
    size = pipeline(4, 1, 8)
    order = make_schedule.__wrapped__(
        ScheduleName.GPIPE, size
    )  # behind the cache, which has another
    assert order.orders[0][8] == Action(Kind.BACKWARD, 0, 7)
    assert max(simulate(order).idle_times) == row.cost.bubble(size, StageCost(), 0).idle
    assert most_held(order, 0) == row.cost.in_flight(size, 0)
    (fault,) = schedule_faults(ScheduleName.GPIPE, pipeline(4, 2, 8))
    assert fault.place == "pipeline.stages"


def test_a_new_schedule_touches_its_two_rows_alone():
    rows = {"ptrain.spec.pipeline", "ptrain.axes.pipeline.catalogue"}
    tree = SourceTree(Path(__file__).parents[2])
    for module in sorted(tree.modules.keys() - rows):
        for node in ast.walk(tree.parsed(tree.modules[module])):
            if isinstance(node, ast.Compare | ast.MatchValue):
                named = re.search(r"\bScheduleName\.[A-Z]", ast.unparse(node))
                assert not named, f"{module}: {ast.unparse(node)}"
            keys = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", ())
            named = [key for key in keys if key and ast.unparse(key).startswith("ScheduleName.")]
            assert not named, f"{module}: {ast.unparse(node)}"
