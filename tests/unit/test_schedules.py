"""Our schedules against torch's, which run nothing of ours and so are an independent reference: the
order that each of its schedule objects executes, recorded on stages that compute and send nothing;
and its own table, where it has one that is right."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules as theirs

from ptrain.axes.pipeline.catalogue import make_schedule, schedule_faults
from ptrain.axes.pipeline.schedule import Action, PipelineShape, Schedule
from ptrain.errors import SpecError
from ptrain.spec.pipeline import ScheduleName
from ptrain.timeline import Kind

CLASSES = {name: getattr(theirs, name.torch) for name in ScheduleName if name.torch}
VEES = (ScheduleName.ZBV, ScheduleName.DUALPIPEV)
SINGLE = (ScheduleName.GPIPE, ScheduleName.ONE_F_ONE_B)
GRID = [
    (name, PipelineShape(ranks=ranks, stages_per_rank=per_rank, microbatches=microbatches))
    for name in CLASSES
    for per_rank in ((1,) if name in SINGLE else (2,) if name in VEES else (1, 2, 3))
    for ranks in (1, 2, 3, 4)
    for microbatches in (1, 2, 3, 4, 5, 6, 7, 8, 12)
]
LEGAL = {
    name: [size for other, size in GRID if other is name and not list(schedule_faults(name, size))]
    for name in CLASSES
}
every_schedule = pytest.mark.parametrize("name", CLASSES)


class Recorder:
    """A stage in the eyes of torch's schedules: writes down what it is asked to compute."""

    def __init__(self, index: int, rank: int, size: PipelineShape, log: list[Action]) -> None:
        self.stage_index, self.num_stages = index, size.stages
        self.group_rank, self.group_size = rank, size.ranks
        self.is_first, self.is_last = index == 0, index == size.stages - 1
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.submod = torch.nn.Identity()
        self.log = log
        self.received: list[tuple[Kind, int]] = []
        self.sent: list[tuple[Kind, int]] = []
        self.last: list[int] = []

    def forward_one_chunk(self, microbatch: int, *args: Any, **options: Any) -> torch.Tensor:
        self.log.append(Action(Kind.FORWARD, self.stage_index, microbatch))
        return torch.zeros(())

    def backward_one_chunk(
        self, microbatch: int, *, loss: Any, full_backward: bool = True, last_backward: bool
    ) -> None:
        assert (loss is not None) is self.is_last
        self.log.append(
            Action(Kind.BACKWARD if full_backward else Kind.INPUT, self.stage_index, microbatch)
        )
        self.last += [microbatch] if last_backward else []

    def backward_weight_one_chunk(self, microbatch: int, *, last_backward: bool) -> None:
        self.log.append(Action(Kind.WEIGHT, self.stage_index, microbatch))
        self.last += [microbatch] if last_backward else []

    def get_fwd_recv_ops(self, microbatch: int) -> list[Any]:
        self.received.append((Kind.FORWARD, microbatch))
        return []

    def get_bwd_recv_ops(self, microbatch: int) -> list[Any]:
        self.received.append((Kind.BACKWARD, microbatch))
        return []

    def get_fwd_send_ops(self, microbatch: int) -> list[Any]:
        self.sent.append((Kind.FORWARD, microbatch))
        return []

    def get_bwd_send_ops(self, microbatch: int) -> list[Any]:
        self.sent.append((Kind.BACKWARD, microbatch))
        return []

    def set_local_fwd_input(self, *args: Any) -> None: ...
    def set_local_bwd_input(self, *args: Any) -> None: ...
    def get_local_bwd_output(self, *args: Any) -> None: ...
    def release_fwd_send_outputs(self, *args: Any) -> None: ...  # from 2.15 on
    def clear_runtime_states(self) -> None: ...
    def perform_reduce_grad(self, *args: Any) -> None: ...


def stages_of(name: ScheduleName, size: PipelineShape, rank: int) -> Iterable[int]:
    if name in VEES:
        return (rank, size.stages - 1 - rank)
    return range(rank, size.stages, size.ranks)


def torchs(name: ScheduleName, size: PipelineShape, rank: int) -> tuple[Any, list[Recorder]]:
    """torch's schedule object on one rank, over stages that record into one list."""
    log: list[Action] = []
    stages = [Recorder(index, rank, size, log) for index in stages_of(name, size, rank)]
    first: Any = stages[0] if name in SINGLE else stages
    # The constructor of torch's 1F1B rejects fewer micro-batches than stages; its loop runs them.
    is_1f1b = name is ScheduleName.ONE_F_ONE_B
    accepted = max(size.microbatches, size.stages) if is_1f1b else size.microbatches
    made = CLASSES[name](first, accepted, loss_fn=lambda output, target: output, scale_grads=False)
    made._n_microbatches = size.microbatches
    # there is nothing to be prepared: no buffers, no group
    made._initialize_stage = made._initialize_stages = lambda *args, **options: None
    return made, stages


@cache
def torch_order(
    name: ScheduleName, size: PipelineShape, rank: int
) -> tuple[list[Action], list[Recorder]]:
    made, stages = torchs(name, size, rank)
    batch = torch.zeros(size.microbatches, 1)
    made.step(batch, target=batch, return_outputs=False)
    return stages[0].log, stages


def parts_of_order(made: Schedule, rank: int) -> list[Action]:
    return [part for step in made.orders[rank] for part in step.parts]


@every_schedule
def test_torch_executes_our_order_action_by_action(name):
    for size in LEGAL[name]:
        made = make_schedule(name, size)
        for rank in range(size.ranks):
            log, _ = torch_order(name, size, rank)
            assert log == parts_of_order(made, rank), f"{size}, rank {rank}"


def test_a_naive_pipeline_is_gpipes_of_one_microbatch_one_after_the_other():
    alone = PipelineShape(ranks=4, microbatches=1)
    made = make_schedule(ScheduleName.NAIVE, PipelineShape(ranks=4, microbatches=3))
    for rank in range(4):
        log, _ = torch_order(ScheduleName.GPIPE, alone, rank)
        steps = [Action(each.kind, each.stage, number) for number in range(3) for each in log]
        assert steps == parts_of_order(made, rank)


@every_schedule
def test_torch_sends_and_receives_the_boundary_tensors(name):
    """A stage asks only its neighbours on other ranks, once per micro-batch and direction."""
    for size in LEGAL[name]:
        made = make_schedule(name, size)
        for rank in range(size.ranks):
            for stage in torch_order(name, size, rank)[1]:
                before = stage.stage_index > 0 and made.is_crossed(stage.stage_index - 1)
                after = not stage.is_last and made.is_crossed(stage.stage_index)
                # the schedules of one stage a rank ask at both ends too, and get nothing to send
                asks_all = name in SINGLE
                for asked, towards in (
                    (stage.received, {Kind.FORWARD: before, Kind.BACKWARD: after}),
                    (stage.sent, {Kind.FORWARD: after, Kind.BACKWARD: before}),
                ):
                    kinds = [kind for kind, crosses in towards.items() if crosses or asks_all]
                    wanted = {(kind, m) for kind in kinds for m in range(size.microbatches)}
                    assert sorted(asked) == sorted(wanted)


@every_schedule
def test_gradients_are_reduced_after_the_last_backward_of_each_stage(name):
    for size in LEGAL[name]:
        made = make_schedule(name, size)
        for rank in range(size.ranks):
            for stage in torch_order(name, size, rank)[1]:
                ends = [
                    action.microbatch
                    for action in parts_of_order(made, rank)
                    if action.stage == stage.stage_index
                    and action.kind in (Kind.BACKWARD, Kind.WEIGHT)
                ]
                assert stage.last == ends[-1:]


@pytest.mark.parametrize("name", [name for name in CLASSES if name not in SINGLE])
def test_torchs_table_has_our_steps_pairs_included_and_our_ranks(name):
    for size in LEGAL[name]:
        made = make_schedule(name, size)
        table, _ = torchs(name, size, 0)
        assert table.stage_index_to_group_rank == dict(enumerate(made.rank_of))
        for rank, order in enumerate(made.orders):
            listed = [action for action in table.pipeline_order[rank] if action is not None]
            parts = [tuple(map(str, action.sub_actions or (action,))) for action in listed]
            assert parts == [tuple(map(str, step.parts)) for step in order]


def test_torchs_table_of_1f1b_is_still_wrong_on_the_last_rank():
    """Why the tables of gpipe and 1f1b are held against nothing: it has F1 to F4 of 4."""
    table, _ = torchs(ScheduleName.ONE_F_ONE_B, PipelineShape(ranks=2, microbatches=4), 0)
    forwards = [
        action.microbatch_index
        for action in table.pipeline_order[1]
        if action is not None and action.computation_type is theirs.FORWARD
    ]
    assert forwards == [1, 2, 3, 4]


@every_schedule
def test_the_schedules_that_torch_rejects_are_rejected(name):
    for other, size in GRID:
        if other is not name:
            continue
        try:
            torchs(name, size, 0)
        except ValueError:
            with pytest.raises(SpecError):
                make_schedule(name, size)
        else:
            make_schedule(name, size)


@pytest.mark.parametrize("name", VEES)
def test_torch_too_takes_a_v_of_two_stages_a_rank_only(name):
    size = PipelineShape(ranks=2, stages_per_rank=3, microbatches=12)
    log: list[Action] = []
    stages: Any = [Recorder(index, 0, size, log) for index in (0, 3, 4)]
    with pytest.raises(ValueError, match="exactly 2 stages per rank"):
        CLASSES[name](stages, size.microbatches, loss_fn=lambda output, target: output)
