"""The instructions of every schedule: each boundary tensor is sent, received and released once, no
backend deadlocks, and no wait adds time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import pytest

from ptrain.axes.pipeline.catalogue import make_schedule
from ptrain.axes.pipeline.schedule import Action, PipelineShape, Schedule, loop_ranks, v_shaped
from ptrain.axes.pipeline.simulate import simulate
from ptrain.axes.pipeline.stage_facts import (
    Instruction,
    Message,
    Receive,
    Release,
    Send,
    evaluation_instructions,
    input_message,
    list_transfers,
    output_message,
    training_instructions,
)
from ptrain.cost import Collective, Phase
from ptrain.spec.pipeline import ScheduleName
from ptrain.timeline import Kind
from tests.pure.pipelines import BY_NAME, GRID, VEES, pipeline
from tests.pure.work import calls_of

Lists = Sequence[Sequence[Instruction]]
every_schedule = pytest.mark.parametrize("name", ScheduleName)
PASSES = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUT: 1.0, Kind.WEIGHT: 1.0}
EVALUATIONS = [
    (rank_of(pipeline(ranks, 2, 1)), count)
    for rank_of in (loop_ranks, v_shaped)
    for ranks in (1, 2, 3, 4)
    for count in (1, 2, 5)
]


def every_size(check: Callable[[str, PipelineShape], None]) -> Callable[[str], None]:
    """One test for each schedule, of all sizes: a test for each size would be 471, whose reports
    take longer than they do."""

    @pytest.mark.parametrize("name", dict.fromkeys(name for name, _ in GRID))
    def test(name: str) -> None:
        for size in (size for other, size in GRID if other == name):
            try:
                check(name, size)
            except AssertionError as error:
                raise AssertionError(f"{size}: {error}") from error

    return test


def of_kind(instructions: Sequence[Instruction], kind: type) -> list[Message]:
    return [each.message for each in instructions if isinstance(each, kind)]


@every_size
def test_a_rank_executes_its_order_and_moves_each_boundary_tensor_once(name, size):
    made = make_schedule(name, size)
    calls = Counter(
        (row.rank, row.phase, row.collective)
        for row in list_transfers(made)
        for _ in range(row.calls)
    )
    for rank, instructions in enumerate(training_instructions(made)):
        assert [each for each in instructions if isinstance(each, Action)] == [
            part for step in made.orders[rank] for part in step.parts
        ]
        received, sent = of_kind(instructions, Receive), of_kind(instructions, Send)
        assert sorted(of_kind(instructions, Release)) == sorted(sent)
        for messages, collective in ((received, Collective.RECV), (sent, Collective.SEND)):
            assert len(set(messages)) == len(messages)
            for phase in (Phase.FORWARD, Phase.BACKWARD):
                number = sum(message.phase is phase for message in messages)
                assert number == calls[rank, phase, collective]


@every_size
def test_a_pass_has_received_its_inputs_and_sends_follow_their_passes(name, size):
    made = make_schedule(name, size)
    for rank, instructions in enumerate(training_instructions(made)):
        there: set[Message] = set()  # received, or made on the rank
        for each in instructions:
            match each:
                case Receive(message):
                    there.add(message)
                case Send(message):
                    assert message in there and made.rank_of[message.target] != rank
                case Action():
                    needed, gives = (
                        input_message(each, made.stages),
                        output_message(each, made.stages),
                    )
                    assert needed is None or needed in there
                    there |= {gives} - {None}


# -------- ranks that wait


def ends_in_rendezvous(lists: Lists, rank_of: Sequence[int]) -> bool:
    """Return True if all ranks finish with synchronous sends and receives, the strictest backend;
    `Release` then never waits."""
    at = [0] * len(lists)

    def head(rank: int) -> Instruction | None:
        return lists[rank][at[rank]] if at[rank] < len(lists[rank]) else None

    has_moved = True
    while has_moved:
        has_moved = False
        for rank in range(len(lists)):
            match head(rank):
                case Action() | Release():
                    at[rank] += 1
                    has_moved = True
                case Send(message) if head(peer := rank_of[message.target]) == Receive(message):
                    at[rank] += 1
                    at[peer] += 1
                    has_moved = True
    return all(head(rank) is None for rank in range(len(lists)))


@every_size
def test_no_backend_makes_two_ranks_wait_for_each_other(name, size):
    made = make_schedule(name, size)
    lists = training_instructions(made)
    assert ends_in_rendezvous(lists, made.rank_of)


@pytest.mark.parametrize(("rank_of", "count"), EVALUATIONS, ids=str)
def test_an_evaluation_is_forwards_alone_and_ends(rank_of, count):
    lists = evaluation_instructions(rank_of, count)
    assert ends_in_rendezvous(lists, rank_of)
    stages = range(len(rank_of))
    for rank, instructions in enumerate(lists):
        passes = [each for each in instructions if isinstance(each, Action)]
        own = [stage for stage in stages if rank_of[stage] == rank]
        assert passes == [Action(Kind.FORWARD, s, m) for m in range(count) for s in own]
        crossing = [s for s in own if s + 1 in stages and rank_of[s + 1] != rank]
        messages = [Message(Phase.FORWARD, s, m) for m in range(count) for s in crossing]
        assert sorted(of_kind(instructions, Send)) == sorted(messages)
        assert sorted(of_kind(instructions, Release)) == sorted(messages)


def test_a_receive_in_another_order_than_its_send_would_not_end():
    """The check can fail: two sends of a rank, received the other way round."""
    made = make_schedule(ScheduleName.GPIPE, pipeline(2, 1, 2))
    first, second = map(list, training_instructions(made))
    receives = [place for place, each in enumerate(second) if isinstance(each, Receive)]
    a, b, *_ = receives
    second[a], second[b] = second[b], second[a]
    assert not ends_in_rendezvous((first, second), made.rank_of)


# -------- memory


@every_size
def test_of_gradients_that_were_sent_a_rank_holds_one_for_each_peer(name, size):
    made = make_schedule(name, size)
    for instructions in training_instructions(made):
        held: defaultdict[int, int] = defaultdict(int)
        for each in instructions:
            match each:
                case Send(message) if message.phase is Phase.BACKWARD:
                    held[made.rank_of[message.target]] += 1
                case Release(message) if message.phase is Phase.BACKWARD:
                    held[made.rank_of[message.target]] -= 1
            assert all(0 <= number <= 1 for number in held.values())
        assert not any(held.values())


@every_size
def test_an_output_is_released_before_its_backward_pass(name, size):
    made = make_schedule(name, size)
    for instructions in training_instructions(made):
        sent: set[Message] = set()
        for each in instructions:
            match each:
                case Send(message):
                    sent.add(message)
                case Release(message):
                    sent.remove(message)
                case Action(Kind.BACKWARD | Kind.INPUT, stage, microbatch):
                    assert Message(Phase.FORWARD, stage, microbatch) not in sent


def makespan(lists: Lists, made: Schedule) -> float:
    """Return the total time of ranks that execute instructions in order: a message arrives once
    both ends are posted, a pass waits for its inputs, and a release for its send."""
    at, clock = [0] * len(lists), [0.0] * len(lists)
    posted: defaultdict[Message, list[float]] = defaultdict(list)
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, instructions in enumerate(lists):
            while at[rank] < len(instructions):
                each = instructions[at[rank]]
                needed: Message | None = None
                match each:
                    case Receive(message) | Send(message):
                        posted[message].append(clock[rank])
                    case Release(message):
                        needed = message
                    case Action():
                        needed = input_message(each, made.stages)
                        if needed and made.rank_of[needed.source] == rank:
                            needed = None
                if needed is not None:
                    if len(posted[needed]) < 2:
                        break
                    clock[rank] = max(clock[rank], *posted[needed])
                if isinstance(each, Action):
                    clock[rank] += PASSES[each.kind]
                at[rank] += 1
                has_moved = True
    assert at == list(map(len, lists))
    return max(clock)


@every_schedule
def test_neither_early_receives_nor_waits_for_sends_cost_time(name):
    for size in BY_NAME[name]:
        made = make_schedule(name, size)
        assert makespan(training_instructions(made), made) == simulate(made).makespan, size


# -------- how much work a list is


@every_schedule
def test_making_and_proving_a_list_takes_as_many_steps_as_it_has_actions(name):
    """A fixed number of calls for each: 32 ranks and 128 micro-batches take seconds otherwise."""
    for ranks, microbatches in ((8, 32), (16, 64)):
        size = pipeline(ranks, 2 if name in (*VEES, "bfs", "interleaved") else 1, microbatches)
        actions = sum(map(len, make_schedule(name, size).orders))
        make_schedule.cache_clear()
        calls = calls_of(lambda size=size: training_instructions(make_schedule(name, size)))
        assert calls <= 120 * actions, size
