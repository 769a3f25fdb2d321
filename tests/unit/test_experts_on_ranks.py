"""The exchange of the expert axis on a single rank: memory and traffic of a trip compared with the
closed form, overlapped computation, and assumed even loads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ptrain.axes.expert.run.apply import JourneyFactory, JourneyOverRanks
from ptrain.models.moe import MoE
from ptrain.models.trace import Recording, StorageAllocated, StorageFreed
from ptrain.models.work import OperatorSizes, RecordedCollective
from ptrain.runtime.world import fake_world
from ptrain.spec.cluster import OperatorKind
from ptrain.spec.model import ModelShape
from ptrain.traces.record import Recorder
from tests.oracles.expert import rows_bytes, trip_bytes
from tests.pure.test_closed_forms_of_experts import SHAPE, spec_of

EXPERTS, RANKS = 12, 3


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    world = fake_world(1, RANKS)
    try:
        yield dist.new_group(list(range(RANKS)), group_desc="mesh_ep")
    finally:
        world.close()


class _There(nn.Module):
    """A trip there alone: with a capacity the places of all experts, without one sorted rows."""

    def __init__(self, group: dist.ProcessGroup, shape: ModelShape) -> None:
        super().__init__()
        self.group, self.shape = group, shape

    def forward(self, x: Tensor) -> Tensor:
        journey = JourneyOverRanks(self.group)
        if self.shape.capacity_factor is not None:
            return journey.send_places(x)
        ends_E = torch.arange(1, EXPERTS + 1, dtype=torch.int32) * (len(x) // EXPERTS)
        return journey.send_rows(x, ends_E)[0]


def _record_pass(module: nn.Module, x: Tensor) -> Recording:
    with Recorder(module, [x]) as recorder:
        y = module(x)
        recorder.end("forward")
        del y
        recorder.end("backward")
        return recorder.recording()


def _most(recording: Recording, large: int) -> int:
    """Bytes at most, of storages that are as large as rows are."""
    live = most = 0
    for event in recording.forward:
        match event:
            case StorageAllocated(size=size):
                live += size * (size >= large)
            case StorageFreed(number):
                live -= recording.sizes[number] * (recording.sizes[number] >= large)
            case _:
                continue
        most = max(most, live)
    return most


@pytest.mark.parametrize("factor", [None, 1.5])
def test_a_trip_has_the_memory_and_traffic_of_its_closed_form(group, factor):
    shape = replace(SHAPE, capacity_factor=factor, experts=EXPERTS)
    spec = spec_of(shape, RANKS, sequence=18)
    rows = rows_bytes(spec, shape)
    num_rows = rows // shape.hidden // torch.float32.itemsize
    x = torch.ones(num_rows, shape.hidden)
    if factor is not None:
        x = x.unflatten(0, (EXPERTS, -1))
    recording = _record_pass(_There(group, shape), x)
    # what sets out is the caller's, so that it is no birth of these; what arrives is put in order
    assert _most(recording, rows) == trip_bytes(spec, shape)
    sent = [
        work.record
        for _, work in recording.works["forward"]
        if isinstance(work.record, RecordedCollective)
    ]
    assert [(what.axis, what.ranks) for what in sent] == [("ep", RANKS)] * len(sent)
    assert max(what.payload for what in sent) == rows


class _OnRanks(nn.Module):
    """A layer with all experts' matrices of its rank, and two that all tokens go to."""

    def __init__(self, group: dist.ProcessGroup, shape: ModelShape, *, overlaps: bool) -> None:
        super().__init__()
        self.layer = MoE(shape)
        self.layer.journey = JourneyFactory(group, overlaps)
        for projection in self.layer.experts.children():
            assert isinstance(projection.weight, nn.Parameter)
            own = projection.weight[: EXPERTS // RANKS].detach().normal_()
            projection.weight = nn.Parameter(own)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize("factor", [None, 1.5])
@pytest.mark.parametrize("overlaps", [False, True])
def test_shared_experts_compute_while_rows_travel_where_they_are_to(group, factor, overlaps):
    shape = replace(SHAPE, capacity_factor=factor, experts=EXPERTS, shared_experts=2)
    module, x = _OnRanks(group, shape, overlaps=overlaps), torch.randn(1, 18, shape.hidden)
    with Recorder(module, [x.requires_grad_()]) as recorder:
        y = module(x)
        recorder.end("forward")
        y.sum().backward()
        recorder.end("backward")
        works = recorder.recording().works
    for phase, products in (("forward", 3), ("backward", 6)):  # of gate, up and down
        done = [work.record for _, work in works[phase]]
        beside = [
            [
                what.kind
                for what in done[place + 1 :][: sent.beside]
                if isinstance(what, OperatorSizes)
            ]
            for place, sent in enumerate(done)
            if isinstance(sent, RecordedCollective)
        ]
        numbers = [kinds.count(OperatorKind.PRODUCT) for kinds in beside]
        assert sorted(numbers)[-1] == (products if overlaps else 0)
        assert sum(numbers) == max(numbers), "one exchange has something beside it"


def test_without_an_answer_every_expert_gets_as_many_rows(group):
    x = torch.ones(25, 4)
    counts = torch.tensor([25] + [0] * (EXPERTS - 1), dtype=torch.int32)  # all go to one
    journey = JourneyOverRanks(group)
    arrived, ends = journey.send_rows(x, counts.cumsum(0, dtype=torch.int32))
    # each rank gives each of 12 experts 2 of 25 rows, and the one that is left its own first expert
    assert ends.tolist() == [7, 13, 19, 25]
    assert len(arrived) == 25
    assert len(journey.return_rows(arrived)) == 25
