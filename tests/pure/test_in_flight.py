"""The effects of micro-batches in flight on every rank of a pipeline: peaks, offloaded activations,
and pending sends."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import pytest

from ptrain.cost import Phase, State
from ptrain.derivation import in_flight
from ptrain.derivation.estimate import derive
from ptrain.derivation.layers import all_represented, stage_passes
from ptrain.derivation.pipeline import split_stages
from ptrain.derivation.tables import RankCut
from ptrain.facts.model import Passes, net_bytes
from ptrain.plan.lower import built_in_facts
from ptrain.spec.load import load
from ptrain.spec.pipeline import ScheduleName
from ptrain.spec.spec import Spec
from ptrain.timeline import Complete, Kind
from tests.pure.pipeline_specs import FULLY, SHAPE, every_model, legal
from tests.pure.work import calls_of

every_layout = pytest.mark.parametrize("layout", ["fp32", "bf16"])


def stages_of(spec: Spec) -> list[Passes]:
    """Each stage's passes, first to last."""
    plan, facts = derive(spec).plan, built_in_facts(spec)
    all_facts = split_stages(spec, plan, facts)
    taken_apart = [all_facts[stage_facts.like] for stage_facts in all_facts]
    return [
        stage_passes(
            spec,
            apart.stage,
            len(all_facts),
            all_represented(apart.facts.units, len(apart.stage.layers)),
            RankCut(),
        )
        for apart in taken_apart
    ]


@every_model
@every_layout
def test_a_micro_batch_that_came_back_leaves_its_gradients_and_its_loss(model, layout):
    spec = legal({"pp": 4}, model=model, precision={"layout": layout})
    for place, stage in enumerate(stages_of(spec)):
        for backward in ([Kind.BACKWARD], [Kind.INPUT, Kind.WEIGHT]):
            items = [item for kind in (Kind.FORWARD, *backward) for item in stage.items[kind]]
            left = sum(map(net_bytes, items)) - stage.output - stage.hidden
            assert left == (4 if place == 3 else 0)


@every_model
def test_gradients_of_weights_are_complete_once_in_the_second_half_if_there_are_two(model):
    spec = legal({"pp": 4}, model=model)
    facts = built_in_facts(spec)
    found = split_stages(spec, derive(spec).plan, facts)
    for each, stage in zip(found, stages_of(spec), strict=True):
        names = Counter(tensor.name for tensor in each.facts.tensors)
        for kind, expected in (
            (Kind.BACKWARD, names),
            (Kind.INPUT, Counter[str]()),
            (Kind.WEIGHT, names),
        ):
            complete = (item for item in stage.items[kind] if isinstance(item, Complete))
            assert Counter(item.parameter for item in complete) == expected


@pytest.mark.parametrize("name", ScheduleName)
def test_more_micro_batches_raise_no_peak_but_where_all_are_in_flight(name):
    def peaks(microbatches: int) -> list[int]:
        batch = {"sequence": 32, "accumulate": microbatches}
        exact = derive(legal({"pp": 2}, {"schedule": str(name)}, batch=batch)).exact
        tokens = exact.bytes_of(State.OTHER)
        return [row.device_bytes - tokens for row in exact.peak if row.phase is Phase.BACKWARD]

    all_in_flight = name in (ScheduleName.GPIPE, ScheduleName.BFS)
    for few, many in zip(peaks(16), peaks(32), strict=True):
        assert many > 1.5 * few if all_in_flight else many == few


def test_of_one_micro_batch_gpipe_is_naive():
    batch = {"sequence": 32, "accumulate": 1}
    found = [derive(legal({"pp": 4}, {"schedule": each}, batch=batch)).exact for each in
             ("naive", "gpipe")]  # fmt: skip
    assert found[0].memory == found[1].memory
    assert found[0].peak == found[1].peak


@pytest.mark.parametrize("data", ["R,R,R,R", "R,S,R,R", "R,S,S,R", FULLY])
@pytest.mark.parametrize("name", ScheduleName)
def test_a_repeated_pass_equals_its_replay(name, data):
    """A pass that starts from the state of an equal one is not replayed again."""
    placement = {"pp": "S,S,S,R", "dp_shard": data}
    if data == "R,R,R,R":
        placement = {"pp": "S,S,S,R", "dp_replicate": data}
    mesh = dict.fromkeys(placement, 2)
    spec = legal(mesh, {"schedule": str(name)}, placement=placement)
    known = derive(spec).exact
    with patch("ptrain.derivation.in_flight.RankStep.recorded_pass", lambda *_: None):
        assert derive(spec).exact == known


def test_ranks_with_the_same_stages_and_slices_are_played_once():
    spec = legal({"pp": 2, "dp_shard": 2, "tp": 2}, model=SHAPE | {"vocab": 264, "kv_heads": 6})
    with patch.object(in_flight, "play_rank", wraps=in_flight.play_rank) as played:
        exact = derive(spec).exact
    assert played.call_count == 2
    assert len(exact.peak) == 8 * 3


def test_a_rank_more_of_each_kind_is_no_work_but_its_rows():
    """70B on 128 ranks, and on four times as many: what is alike is played once."""
    few = load("specs/paper/70b-3d.yaml").spec
    many = load("specs/paper/70b-3d.yaml", ["mesh={pp: 4, dp_shard: 16, tp: 8}"]).spec
    calls = [calls_of(lambda spec=spec: derive(spec)) for spec in (few, few, many)][1:]
    assert calls[0] <= 300_000
    assert calls[1] - calls[0] <= 60 * (many.world_size - few.world_size)


def test_70b_saves_more_on_the_first_stage():
    exact = derive(load("specs/paper/70b-3d.yaml").spec).exact
    assert exact.undefined.keys() <= {"step_seconds"}
    first, *_, last = (exact.bytes_of(State.ACTIVATIONS, rank) for rank in (0, 32, 64, 96))
    assert 3 * last < first < 4 * last
