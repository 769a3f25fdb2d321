"""The plan of a spec with pp: stages by rank, the schedule drawing, and the conditions of Theorem
7."""

from __future__ import annotations

import pytest

from ptrain.axes.data.cost import GatherCounts, count_gathers
from ptrain.axes.pipeline.catalogue import make_schedule
from ptrain.axes.pipeline.stage_facts import stage_gathers
from ptrain.derivation.estimate import derive
from ptrain.plan.composition import are_consecutive, are_within, have_one_of_each, theorem_7
from ptrain.plan.show import format_plan
from ptrain.spec.dials import SyncPolicy
from ptrain.spec.pipeline import ScheduleName
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from ptrain.steps.step import CreateMesh, Parallelize, Pipeline, Plan
from ptrain.steps.wraps import FullyShard
from tests.pure.pipeline_specs import SHAPE, legal
from tests.pure.pipelines import BY_NAME, pipeline

POLICIES = [
    SyncPolicy(reshard_after_forward=forward, reshard_after_backward=backward)
    for forward in (False, True)
    for backward in (False, True)
]
SLICED = {"batch": {"sequence": 30, "accumulate": 8}}


def plan_spec(spec: Spec) -> Plan:
    return derive(spec).plan


def step_of(spec: Spec) -> Pipeline:
    found = plan_spec(spec).pipeline
    assert found is not None
    return found


def test_a_model_is_cut_before_operators_are_and_units_are_wrapped():
    plan = plan_spec(legal({"pp": 2, "dp_shard": 2, "tp": 3}))
    kinds = [type(step) for step in plan.steps[:4]]
    assert kinds == [CreateMesh, Pipeline, Parallelize, FullyShard]


def test_a_spec_without_pp_has_no_stages():
    plan = plan_spec(legal({"dp_shard": 2}))
    assert plan.pipeline is None
    assert not any(isinstance(step, Pipeline) for step in plan.steps)


@pytest.mark.parametrize(
    ("name", "stages", "rank_of"),
    [
        ("1f1b", None, (0, 1)),
        ("interleaved", None, (0, 1, 0, 1)),
        ("zero-bubble", 4, (0, 1, 0, 1)),
        ("zbv", None, (0, 1, 1, 0)),
        ("dualpipev", 4, (0, 1, 1, 0)),
    ],
)
def test_each_stage_is_listed_with_its_rank_and_layers(name, stages, rank_of):
    said = {"schedule": name} | ({"stages": stages} if stages else {})
    step = step_of(legal({"pp": 2}, said | {"split": "layers"}))
    each = 8 // len(rank_of)
    assert step.rank_of == rank_of
    assert step.layers == tuple(
        tuple(f"blocks.{index}" for index in range(stage * each, (stage + 1) * each))
        for stage in range(len(rank_of))
    )
    for rank in (0, 1):
        assert [rank_of[stage] for stage in step.stages_of(rank)] == [rank] * (len(rank_of) // 2)


def test_layers_are_cut_as_the_spec_lists_them():
    assert [len(layers) for layers in step_of(legal({"pp": 2}, {"split": [1, 7]})).layers] == [1, 7]


def test_stages_with_embedding_or_head_have_fewer_layers_by_default():
    model = SHAPE | {"vocab": 2000}
    layers = step_of(legal({"pp": 4}, model=model)).layers
    assert [len(each) for each in layers] == [1, 3, 3, 1]


def test_a_tied_tensor_is_named_where_two_stages_have_it():
    tied = step_of(legal({"pp": 2}, model=SHAPE | {"tied": True}))
    assert tied.shared == (("embed.weight", "head.weight"),)
    assert step_of(legal({"pp": 2})).shared == ()


@pytest.mark.parametrize("mesh", [{"pp": 2}, {"dp_shard": 2, "pp": 2}])
def test_the_norm_is_summed_over_stages(mesh):
    clip = plan_spec(legal(mesh)).clip
    assert clip is not None
    assert set(clip.axes) == set(mesh)


def test_overflows_of_a_scaled_loss_are_looked_for_on_every_stage():
    assert Axis.PP in plan_spec(legal({"pp": 2}, precision={"layout": "fp16"})).update.scale_axes


@pytest.mark.parametrize("size", BY_NAME[ScheduleName.NAIVE], ids=str)
@pytest.mark.parametrize("sync", POLICIES, ids=str)
def test_one_micro_batch_after_the_other_is_gathered_as_without_stages(size, sync):
    made = make_schedule(ScheduleName.NAIVE, size)
    expected = count_gathers(sync, size.microbatches)
    assert all(stage_gathers(made, stage, sync) == expected for stage in range(size.stages))


@pytest.mark.parametrize("name", ScheduleName)
def test_units_that_are_kept_are_gathered_once_and_others_by_every_micro_batch(name):
    kept, given_back = POLICIES[0], POLICIES[-1]
    for size in BY_NAME[name]:
        made, m = make_schedule(name, size), size.microbatches
        for stage in range(size.stages):
            assert stage_gathers(made, stage, kept) == GatherCounts(1, 0)
            assert stage_gathers(made, stage, given_back) == GatherCounts(m, m)


@pytest.mark.parametrize(
    ("name", "after_forward", "expected"),
    [
        ("gpipe", True, [GatherCounts(4, 1)] * 2),  # FFFFBBBB
        ("gpipe", False, [GatherCounts(1, 3)] * 2),
        ("1f1b", True, [GatherCounts(2, 3), GatherCounts(1, 4)]),  # FFBFBFBB and FBFBFBFB
        ("1f1b", False, [GatherCounts(3, 1), GatherCounts(4, 0)]),
    ],
)
def test_a_policy_for_one_pass_costs_as_the_schedule_requires(name, after_forward, expected):
    made = make_schedule(ScheduleName(name), pipeline(2, 1, 4))
    sync = SyncPolicy(reshard_after_forward=after_forward, reshard_after_backward=not after_forward)
    assert [stage_gathers(made, stage, sync) for stage in (0, 1)] == expected


def test_the_plan_is_shown_with_its_stages_and_the_drawn_schedule():
    spec = legal({"pp": 2, "dp_shard": 2}, {"schedule": "gpipe", "split": [1, 7]})
    lines = format_plan(spec, plan_spec(spec)).splitlines()
    assert any("split the model over pp into 2 stages, 1 per rank" in line for line in lines)
    in_flight = "up to 8 micro-batches in flight"
    assert f"stage    0 on pp 0: input modules, blocks.0; {in_flight}" in lines
    assert f"stage    1 on pp 1: blocks.1 … blocks.7, output modules; {in_flight}" in lines
    assert "accumulate 8 micro-batches" in " ".join(lines)
    at = lines.index("")
    drawn = lines[len(lines) - 3 :]
    assert at and drawn[0].startswith("rank 0  F0 F1 F2") and drawn[1].startswith("rank 1  .")
    assert drawn[2].startswith("F forward · B backward")


@pytest.mark.parametrize(
    ("microbatches", "bubble"), [(32, "17.9% of the step, 21.9%"), (4, "63.6% of the step, 175.0%")]
)
def test_the_bubble_is_shown_in_both_conventions(microbatches, bubble):
    batch = {"sequence": 32, "accumulate": microbatches}
    spec = legal({"pp": 8}, {"schedule": "gpipe"}, batch=batch)
    assert f"bubble   {bubble} of the ideal time" in format_plan(spec, plan_spec(spec))


def test_later_stages_hold_fewer_micro_batches():
    spec = legal({"pp": 4})
    flying = [
        line for line in format_plan(spec, plan_spec(spec)).splitlines() if "in flight" in line
    ]
    assert [int(line.split("up to ")[1].split()[0]) for line in flying] == [4, 3, 2, 1]


def test_a_plan_without_pp_draws_nothing():
    spec = legal({"dp_shard": 2})
    text = format_plan(spec, plan_spec(spec))
    assert "rank 0" not in text and "bubble" not in text


@pytest.mark.parametrize(
    ("axes", "first"),
    [
        (("pp", "dp_shard"), "Theorem 7.1"),
        (("dp_shard", "pp"), "Remark 4"),
        (("pp", "dp_replicate", "dp_shard"), "Theorem 7.1"),
        (("dp_replicate", "pp", "dp_shard"), "Remark 4"),
    ],
)
@pytest.mark.parametrize("tp", [1, 3])
def test_both_orders_are_legal_and_the_plan_names_the_order(axes, first, tp):
    mesh = dict.fromkeys(axes, 2) | ({"tp": tp} if tp > 1 else {})
    spec = legal(mesh, **(SLICED if tp > 1 else {}))
    found = theorem_7(spec, plan_spec(spec))
    assert [(each.name, each.holds) for each in found] == [
        (first, True),
        ("Theorem 7.2", True),
        ("Theorem 7.3", True),
    ]
    assert f"composed {first} holds" in format_plan(spec, plan_spec(spec))


def test_without_a_data_axis_pp_has_no_conditions():
    for mesh in ({"pp": 2}, {"dp_shard": 2}, {"pp": 2, "tp": 3}):
        spec = legal(mesh)
        assert theorem_7(spec, plan_spec(spec)) == ()


def test_groups_that_violate_a_condition_are_listed_separately():
    stages = [(0, 1), (2, 3)]
    assert are_consecutive(stages) and not are_consecutive([(0, 2), (1, 3)])
    assert are_within([(0, 1), (2, 3)], stages) and not are_within([(0, 2)], stages)
    assert have_one_of_each([(0, 2), (1, 3)], stages) and not have_one_of_each([(0, 1)], stages)
