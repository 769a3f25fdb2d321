"""Keys for stages and schedules, and legal products with pp; each rejection names a fix."""

from __future__ import annotations

from itertools import product

import pytest

from ptrain.algebra.legality import check, find_unsupported
from ptrain.axes.data.form import form_of
from ptrain.axes.pipeline.catalogue import pipeline_of, takes_any_stages
from ptrain.axes.pipeline.rules import PIPELINE
from ptrain.derivation.estimate import derive
from ptrain.errors import SpecError
from ptrain.plan.lower import lower
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.load import load
from ptrain.spec.pipeline import PipelineSpec, ScheduleName, SplitBy
from ptrain.spec.placement import MODES, Placement
from ptrain.steps.wraps import FlatUnits, Form
from tests.pure.pipeline_specs import FULLY, SHAPE, spec
from tests.pure.pipelines import VEES

ADAMW = OptimizerSpec()
STATES = ("parameters", "optimizer", "gradients", "activations")
TUPLES = [Placement(**dict(zip(STATES, modes, strict=True))) for modes in product(MODES, repeat=4)]


def faults(*arguments, **sections) -> list[tuple[str, str, str]]:
    found = check(spec(*arguments, **sections))
    return [(fault.place, fault.finding, fault.remedy) for fault in found]


def test_by_default_a_spec_has_1f1b_and_one_stage_per_rank_split_by_parameters():
    assert spec({"pp": 4}).pipeline == PipelineSpec()
    said = spec({"pp": 4}).pipeline
    assert (said.schedule, said.split) == (ScheduleName.ONE_F_ONE_B, SplitBy.PARAMETERS)
    assert said.stages_over(4) == 4


@pytest.mark.parametrize("name", ScheduleName)
def test_a_schedule_made_for_two_stages_a_rank_has_two(name):
    made = spec({"pp": 2}, {"schedule": str(name)})
    two = name in (*VEES, ScheduleName.BFS, ScheduleName.INTERLEAVED)
    size = pipeline_of(made)
    assert size is not None
    assert (size.ranks, size.stages_per_rank, size.microbatches) == (2, 1 + two, 8)
    assert not check(made)


def test_a_list_determines_the_number_of_stages():
    made = spec({"pp": 2}, {"schedule": "interleaved", "split": [1, 3, 2, 2]})
    assert made.pipeline == PipelineSpec(
        schedule=ScheduleName.INTERLEAVED, stages=None, split=(1, 3, 2, 2)
    )
    assert not check(made)


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"schedule": "gpipe"},
        {"schedule": "zero-bubble", "stages": 4},
        {"split": "layers"},
        {"split": "time"},
        {"split": [1, 7]},
    ],
    ids=str,
)
def test_a_resolved_spec_loads_to_the_same_spec(said):
    made = spec({"pp": 2, "dp_shard": 2}, said)
    assert load(made.resolved).spec == made
    written = made.resolved["pipeline"]
    assert isinstance(written, dict)
    assert ("stages" in written) is ("stages" in said)  # what follows would hinder another mesh


def test_a_spec_without_pp_does_not_mention_it():
    assert "pipeline" not in spec({"dp_shard": 2}).resolved


@pytest.mark.parametrize(
    ("mesh", "tuple_", "keeps"),
    [
        ({"pp": 2, "dp_shard": 2}, FULLY, True),
        ({"pp": 2, "dp_shard": 2}, "R,S,S,R", False),
        ({"dp_shard": 2}, FULLY, False),
    ],
)
def test_unsharded_units_in_a_pipeline_stay_so_until_the_last_backward(mesh, tuple_, keeps):
    placement = {"pp": "S,S,S,R", "dp_shard": tuple_}
    made = spec(mesh, placement={axis: placement[axis] for axis in mesh})
    assert made.sync.reshard_after_forward is not keeps
    assert made.sync.reshard_after_backward is not keeps
    assert not check(made)


def test_the_other_policy_can_be_written_and_is_legal():
    sync = {"reshard_after_forward": True, "reshard_after_backward": True}
    made = spec({"pp": 2, "dp_shard": 2}, sync=sync)
    assert made.sync.reshard_after_forward is True and made.sync.reshard_after_backward is True
    assert not check(made)


@pytest.mark.parametrize("word", ["pipedream", "PipeDream", "async", "pipedream-2BW"])
def test_an_asynchronous_pipeline_is_rejected_with_the_reason(word):
    with pytest.raises(SpecError) as raised:
        spec({"pp": 2}, {"schedule": word})
    (fault,) = raised.value.faults
    assert fault.place == "pipeline.schedule"
    assert "do not equal a single device [Theorem 3]" in fault.remedy
    assert fault.remedy.endswith("Use `1f1b`, the same schedule with a flush after each step.")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("afab", "gpipe"),
        ("ScheduleInterleaved1F1B", "interleaved"),
        ("ZBVZeroBubble", "zbv"),
        ("zero_bubble", "zero-bubble"),
        ("1f1", "1f1b"),
    ],
)
def test_another_word_for_a_schedule_is_understood(word, meant):
    with pytest.raises(SpecError, match=f"Did you mean '{meant}'"):
        spec({"pp": 2}, {"schedule": word})


def test_one_of_625_tuples_is_legal():
    legal = [str(each) for each in TUPLES if not list(PIPELINE.broken_rules(each, ADAMW))]
    assert legal == ["S,S,S,R"]
    assert {str(PIPELINE.nearest_legal(each, ADAMW)) for each in TUPLES} == set(legal)


@pytest.mark.parametrize(
    ("modes", "theorem"),
    [("R,S,S,R", "Theorem 4"), ("S,S,R,R", "Theorem 7.2"), ("S,S,S,M", "Definition 2")],
)
def test_another_tuple_breaks_a_theorem(modes, theorem):
    ((place, finding, remedy),) = faults({"pp": 2}, placement={"pp": modes})
    assert place == "placement.pp" and f"[{theorem}" in finding
    assert remedy.endswith("Use `placement.pp=S,S,S,R`.")


@pytest.mark.parametrize(
    ("degree", "said", "found"),
    [
        (
            2,
            {"schedule": "bfs", "stages": 3},
            (
                "pipeline.stages",
                "3 stages, not a multiple of pp=2 ranks",
                "Use `pipeline.stages=2` or `pipeline.stages=4`.",
            ),
        ),
        (
            4,
            {"stages": 1},
            (
                "pipeline.stages",
                "1 stage, not a multiple of pp=4 ranks",
                "Use `pipeline.stages=4`.",
            ),
        ),
        (
            2,
            {"schedule": "bfs", "split": [3, 3, 2]},
            ("pipeline.split", "[3, 3, 2] has 3 stages, not a multiple", "List 2 or 4 numbers."),
        ),
        (
            2,
            {"split": [4]},
            ("pipeline.split", "[4] has 1 stage, not a multiple", "List 2 numbers."),
        ),
        (
            2,
            {"stages": 2, "split": [3, 3, 1, 1]},
            (
                "pipeline.split",
                "[3, 3, 1, 1] has 4 stages, but pipeline.stages",
                "Remove `pipeline.stages`",
            ),
        ),
        (
            2,
            {"split": [4, 5]},
            (
                "pipeline.split",
                "[4, 5] has 9 layers, but the model has 8",
                ("8: `pipeline.split=[4,4]`."),
            ),
        ),
        (
            2,
            {"schedule": "gpipe", "stages": 4},
            ("pipeline.stages", "1 stage per rank", "Use `pipeline.stages=2`,"),
        ),
        (
            2,
            {"schedule": "zbv", "stages": 2},
            ("pipeline.stages", "2 stages per rank", "Use `pipeline.stages=4`,"),
        ),
    ],
)
def test_stages_that_the_ranks_or_the_model_do_not_have_are_rejected(degree, said, found):
    ((place, finding, remedy),) = faults({"pp": degree}, said)
    assert place == found[0] and found[1] in finding and found[2] in remedy


@pytest.mark.parametrize(
    ("layers", "degree", "schedule", "place", "remedy"),
    [
        (3, 4, "gpipe", "mesh.pp", "Use `mesh.pp=3` or less, or use a model with more layers."),
        (3, 2, "zbv", "mesh.pp", "Remove `mesh.pp`, or use a model with more layers."),
        (7, 4, "zbv", "mesh.pp", "Use `mesh.pp=3` or less, or use a model with more layers."),
        (
            6,
            4,
            "interleaved",
            "mesh.pp",
            (
                "Use `pipeline.stages=4`, or use `mesh.pp=3` or less, or use a model with more "
                "layers."
            ),
        ),
    ],
)
def test_more_stages_than_layers_are_rejected_with_ways_out(
    layers, degree, schedule, place, remedy
):
    model = {"model": SHAPE | {"layers": layers}}
    ((found, finding, way),) = faults({"pp": degree}, {"schedule": schedule}, **model)
    assert (found, way) == (place, remedy)
    assert finding.endswith(f"need at least one layer each; the model has {layers}")
    if takes_any_stages(ScheduleName(schedule)):
        stages = {"schedule": schedule, "stages": degree}
        assert not faults({"pp": degree}, stages, **model)


@pytest.mark.parametrize(
    ("name", "microbatches", "is_enough"),
    [
        ("1f1b", 1, True),
        ("gpipe", 1, True),
        ("dualpipev", 7, False),
        ("dualpipev", 8, True),
        ("interleaved", 6, True),
        ("interleaved", 9, False),
        ("zbv", 1, True),
        ("naive", 1, True),
    ],
)
def test_a_schedule_that_lacks_micro_batches_is_rejected(name, microbatches, is_enough):
    batch = {"sequence": 32, "accumulate": microbatches}
    found = faults({"pp": 4}, {"schedule": name}, batch=batch)
    assert [place for place, _, _ in found] == ([] if is_enough else ["pipeline.schedule"])
    assert all("batch.global" in remedy for _, _, remedy in found)


@pytest.mark.parametrize("axes", [("pp", "dp_shard"), ("dp_shard", "pp")])
@pytest.mark.parametrize("tuple_", ["R,R,R,R", "R,S,R,R", "R,S,S,R", FULLY, "R,O,O,R"])
def test_every_zero_stage_is_legal_within_a_pipeline_in_both_orders(axes, tuple_):
    tuples = {"pp": "S,S,S,R", "dp_shard": tuple_}
    assert not check(spec(dict.fromkeys(axes, 2), placement=tuples))


def test_tp_outside_pp_is_legal_with_a_warning_about_its_cost():
    assert not derive(spec({"dp_replicate": 2, "pp": 2, "tp": 3})).exact.warnings
    assert not faults({"tp": 3, "pp": 2})
    (warning,) = derive(spec({"tp": 3, "pp": 2})).exact.warnings
    assert "ranks 0 2 4 share operators" in warning and "mesh: {pp: 2, tp: 3}" in warning


@pytest.mark.parametrize(
    ("key", "value"), [("schedule", "gpipe"), ("stages", 4), ("split", [4, 4]), ("split", "layers")]
)
def test_a_dial_of_pp_is_rejected_where_nothing_is_cut_into_stages(key, value):
    ((place, finding, _),) = faults({"dp_shard": 2}, {key: value})
    assert place == f"pipeline.{key}" and finding.startswith("has no effect")
    assert not faults({}, {key: value})


@pytest.mark.parametrize(("unit", "runs"), [("block", 1), ("sub-block", 1), ("2 blocks", 0)])
def test_units_that_span_stages_wait(unit, runs):
    waiting = [fault.place for fault in find_unsupported(spec({"pp": 2, "dp_shard": 2}, unit=unit))]
    assert waiting == ["unit"] * (not runs)


def test_an_optimizer_of_full_matrices_is_not_supported_on_stages():
    (fault,) = find_unsupported(spec({"pp": 2}, optimizer={"name": "muon"}))
    assert fault.place == "optimizer.name"
    assert fault.finding.startswith("not supported yet: muon with pp")
    assert fault.remedy == "Use `optimizer.name=adamw`, or remove `mesh.pp`."


@pytest.mark.parametrize(
    ("tied", "gradients", "runs"), [(True, "O", 0), (True, "S", 1), (False, "O", 1)]
)
def test_offloaded_gradients_of_a_tied_head_wait(tied, gradients, runs):
    model = SHAPE | {"tied": tied}
    placement = {"pp": "S,S,S,R", "dp_shard": f"R,O,{gradients},R"}
    asked = spec({"pp": 2, "dp_shard": 2}, model=model, placement=placement)
    assert not check(asked)
    waiting = [fault.place for fault in find_unsupported(asked)]
    assert waiting == ["placement.dp_shard.gradients"] * (not runs)


@pytest.mark.parametrize("activations", ["R", "S", "S*"])
@pytest.mark.parametrize("name", ScheduleName)
def test_slices_that_halves_of_a_backward_pass_gather_wait(name, activations):
    placement = {"pp": "S,S,S,R", "tp": f"S,S,S,{activations}"}
    asked = spec({"pp": 2, "tp": 3}, {"schedule": str(name)}, placement=placement)
    waiting = [fault.place for fault in find_unsupported(asked)]
    waits = activations == "S*" and asked.pipeline.is_in_halves
    assert waiting == ["placement.tp.activations"] * waits


@pytest.mark.parametrize("degree", [1, 2])
def test_a_spread_update_is_supported_on_full_models_only(degree):
    mesh = {"pp": degree, "dp_replicate": 2}
    tuples = {"pp": "S,S,S,R", "dp_replicate": "R,S,R,R"}
    asked = spec(mesh, placement={axis: tuples[axis] for axis in mesh})
    assert form_of(asked) is (Form.SPREAD_UPDATE if degree == 1 else Form.FLAT)
    assert not check(asked) and not find_unsupported(asked)


@pytest.mark.parametrize(
    ("after_forward", "after_backward", "runs"),
    [(False, False, 1), (True, True, 1), (True, False, 0), (False, True, 0)],
)
def test_flat_units_that_one_pass_gives_back_wait(after_forward, after_backward, runs):
    sync = {"reshard_after_forward": after_forward, "reshard_after_backward": after_backward}
    tuples = {"pp": "S,S,S,R", "dp_shard": "S*,O,S,R"}
    sections = {"sync": sync, "placement": tuples}
    waiting = [
        fault.place for fault in find_unsupported(spec({"pp": 2, "dp_shard": 2}, **sections))
    ]
    assert len(waiting) == 1 - runs
    assert not check(spec({"pp": 2, "dp_shard": 2}, **sections))


def test_flat_units_that_are_gathered_ahead_wait():
    tuples = {"pp": "S,S,S,R", "dp_shard": "S*,O,S,R"}
    ahead = spec({"pp": 2, "dp_shard": 2}, placement=tuples, prefetch=1)
    assert [fault.place for fault in find_unsupported(ahead)] == ["prefetch"]
    by_default = spec({"pp": 2, "dp_shard": 2}, placement=tuples)
    assert not find_unsupported(by_default)
    wrap = lower(by_default).wrap
    assert isinstance(wrap, FlatUnits) and not wrap.prefetch
    assert not find_unsupported(spec({"pp": 2, "dp_shard": 2}, prefetch=1))  # FSDP2's own


def test_gradients_of_a_tied_head_that_the_backward_pass_uses_up_wait():
    sections = {
        "model": SHAPE | {"tied": True},
        "placement": {"pp": "S,S,S,R", "dp_shard": "R,R,M,R"},
        "batch": {"sequence": 32, "accumulate": 1},
        "optimizer": {"clip": None},
    }
    tied = spec({"pp": 2, "dp_shard": 2}, {"schedule": "naive"}, **sections)
    assert [fault.place for fault in find_unsupported(tied)] == ["placement.dp_shard.gradients"]
    untied = spec({"pp": 2, "dp_shard": 2}, {"schedule": "naive"}, **sections | {"model": SHAPE})
    assert not find_unsupported(untied)
