"""Legal products, and the messages of rejections."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from ptrain.algebra.legality import RULES, check, find_unsupported, require_runnable
from ptrain.axes.data.rules import DATA
from ptrain.errors import Fault, SpecError
from ptrain.spec.block import Positions, RopeScaling
from ptrain.spec.cluster import Cluster
from ptrain.spec.dials import GradientSync, SyncPolicy, UnitKind, UnitSize
from ptrain.spec.job import DataSpec, OptimizerSpec
from ptrain.spec.load import load
from ptrain.spec.model import UserFunction
from ptrain.spec.placement import MODES, Axis, Placement
from ptrain.spec.precision import LAYOUTS, ZERO16
from ptrain.spec.spec import LossSpec
from tests.pure.build import GATHERED, ODD_SHAPE, WHOLE, ZERO_1, ZERO_2, make_spec, tuple_of

ADAMW = OptimizerSpec(name="adamw")
STATELESS = OptimizerSpec(name="sgd")
MUON = OptimizerSpec(name="muon", momentum=0.95)
ALL_TUPLES = [
    Placement(parameters=a, optimizer=b, gradients=c, activations=d)
    for a, b, c, d in product(MODES, repeat=4)
]


def findings(spec):
    return [(fault.place, fault.finding) for fault in check(spec)]


def legal_tuples(optimizer: OptimizerSpec) -> list[Placement]:
    return [
        placement for placement in ALL_TUPLES if not any(DATA.broken_rules(placement, optimizer))
    ]


def test_285_of_625_tuples_are_legal_on_a_data_axis():
    assert len(ALL_TUPLES) == 625
    assert len(legal_tuples(STATELESS)) == 285


@pytest.mark.parametrize("optimizer", [ADAMW, OptimizerSpec(name="sgd", momentum=0.9)])
def test_240_are_legal_with_an_optimizer_that_keeps_state(optimizer):
    assert len(legal_tuples(optimizer)) == 240


def test_72_are_legal_with_an_optimizer_that_needs_whole_matrices():
    assert len(legal_tuples(MUON)) == 72


@pytest.mark.parametrize("optimizer", [ADAMW, STATELESS, MUON])
def test_the_nearest_tuple_is_legal_and_a_legal_tuple_is_its_nearest(optimizer):
    legal = set(legal_tuples(optimizer))
    for placement in ALL_TUPLES:
        nearest = DATA.nearest_legal(placement, optimizer)
        assert not list(DATA.broken_rules(nearest, optimizer))
        assert (nearest == placement) is (placement in legal)


@pytest.mark.parametrize("rule", DATA.tuples, ids=lambda rule: rule.name)
def test_every_rule_about_tuples_rejects_some_tuple_alone(rule):
    for optimizer in (ADAMW, STATELESS, MUON):
        alone = [p for p in ALL_TUPLES if [*DATA.broken_rules(p, optimizer)] == [rule]]
        if alone:
            return
    pytest.fail(f"{rule.name} never decides")


def test_every_rule_has_a_unique_name_and_a_theorem():
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.theorem for rule in RULES)


def test_sharded_parameters_on_a_data_axis_are_rejected_with_the_nearest_tuple():
    (fault,) = check(make_spec({Axis.DP_SHARD: (2, tuple_of("S,S,S"))}))
    assert fault.place == "placement.dp_shard"
    assert "parameters cannot be S on a data axis" in fault.finding and "Theorem 3" in fault.finding
    assert fault.remedy == "Use `placement.dp_shard=S*,S,S,R`."


def test_all_faults_of_all_axes_come_at_once():
    mesh = {
        Axis.DP_REPLICATE: (2, tuple_of("S,S,R,S")),
        Axis.DP_SHARD: (2, tuple_of("M,M,S,R")),
    }
    places = [fault.place for fault in check(make_spec(mesh))]
    assert places == ["placement.dp_replicate"] * 2 + ["placement.dp_shard"] * 3


def test_reducing_a_replicated_gradient_after_every_micro_batch_is_rejected():
    every = SyncPolicy(gradients=GradientSync.EVERY)
    spec = make_spec({Axis.DP_SHARD: (2, ZERO_1)}, accumulate=4, sync=every)
    ((place, finding),) = findings(spec)
    assert place == "sync.gradients" and "reduced again with each of" in finding
    assert not check(make_spec({Axis.DP_SHARD: (2, ZERO_1)}, accumulate=1, sync=every))
    assert not check(make_spec({Axis.DP_SHARD: (2, ZERO_2)}, accumulate=4, sync=every))


@pytest.mark.parametrize(
    ("accumulate", "clip", "layout", "words"),
    [
        (1, None, "fp32", []),
        (4, None, "fp32", ["accumulates 4 micro-batches"]),
        (1, 1.0, "fp32", ["norm of all"]),
        (4, 1.0, "fp32", ["accumulates 4 micro-batches", "norm of all"]),
        (1, None, "fp16", ["any gradient overflows"]),
        (1, None, "zero16", []),
    ],
)
def test_gradients_are_consumed_at_once_if_no_other_step_needs_them(
    accumulate, clip, layout, words
):
    mesh = {Axis.DP_REPLICATE: (2, tuple_of("R,R,M"))}
    spec = make_spec(mesh, accumulate=accumulate, clip=clip, layout=LAYOUTS[layout])
    found = check(spec)
    assert len(found) == len(words)
    for fault, text in zip(found, words, strict=True):
        assert fault.place == "placement.dp_replicate"
        assert text in fault.finding and ".gradients=S" in fault.remedy


def test_materialized_parameters_need_a_master_copy():
    mesh = {Axis.DP_SHARD: (2, tuple_of("M,S,S"))}
    assert check(make_spec(mesh)) and not check(make_spec(mesh, layout=ZERO16))


@pytest.mark.parametrize("optimizer", ["S", "O", "S*", "R@host", "S@file"])
def test_the_master_copy_may_lie_anywhere(optimizer):
    mesh = {Axis.DP_SHARD: (2, tuple_of(f"M,{optimizer},S"))}
    assert not check(make_spec(mesh, layout=ZERO16))
    (fault,) = check(make_spec(mesh))
    assert (
        "master weights in the optimizer state" in fault.finding
        and "master weights" in fault.remedy
    )


def test_a_sum_with_addends_is_sharded_in_every_micro_batch():
    late, both = SyncPolicy(gradients=GradientSync.LAST), LAYOUTS["zero20"]
    cut = {Axis.DP_SHARD: (2, ZERO_2)}
    (fault,) = check(make_spec(cut, accumulate=2, sync=late, layout=both))
    assert fault.place == "sync.gradients" and "every" in fault.remedy
    assert not check(make_spec(cut, accumulate=2, layout=both))
    assert not check(make_spec(cut, accumulate=1, sync=late, layout=both))
    assert not check(make_spec(cut, accumulate=2, sync=late, layout=LAYOUTS["megatron18"]))
    assert not check(make_spec({Axis.DP_SHARD: (2, ZERO_1)}, accumulate=2, layout=both))


@pytest.mark.parametrize("name", ["muon", "adafactor"])
@pytest.mark.parametrize(
    ("placement", "nearest"),
    [
        ("S*,S,S", "Use `placement.dp_shard=S*,S*,S*,R`."),
        ("R,O,R", "Use `placement.dp_shard=R,S*@host,R,R`."),
        ("R,R,S@file", "Use `placement.dp_shard=R,R,S*@file,R`."),
    ],
)
def test_an_update_of_full_tensors_takes_no_slices(placement, nearest, name):
    (fault,) = check(make_spec({Axis.DP_SHARD: (2, tuple_of(placement))}, optimizer=name))
    assert fault.place == "placement.dp_shard"
    assert nearest in fault.remedy and name in fault.finding


def test_muon_needs_units_that_are_not_the_root():
    mesh = {Axis.DP_SHARD: (2, tuple_of("S*,S*,S*"))}
    spec = make_spec(mesh, optimizer="muon")
    assert not check(spec)
    (fault,) = check(replace(spec, unit=UnitSize(kind=UnitKind.MODEL)))
    assert fault.place == "unit" and "unit=block" in fault.remedy


def test_whole_gradients_on_the_host_are_reduced_once_too():
    every = SyncPolicy(gradients=GradientSync.EVERY)
    mesh = {Axis.DP_SHARD: (2, tuple_of("R,S,R@host"))}
    ((place, _),) = findings(make_spec(mesh, accumulate=2, sync=every))
    assert place == "sync.gradients"


def test_a_master_copy_is_not_materialized():
    mesh = {Axis.DP_SHARD: (2, tuple_of("R,M,S"))}
    assert not check(make_spec(mesh, optimizer="sgd"))
    assert check(make_spec(mesh, optimizer="sgd", layout=ZERO16))


def test_activations_are_given_once():
    mesh = {
        Axis.DP_REPLICATE: (2, tuple_of("R,R,R,M")),
        Axis.DP_SHARD: (2, tuple_of("S*,S,S,O")),
    }
    assert ["activations belong to the rank" in text for _, text in findings(make_spec(mesh))]


@pytest.mark.parametrize(
    ("changes", "place", "finding", "remedy"),
    [
        ({"heads": 4}, "model.heads", "heads=4 does not divide hidden=42",
         "Use one of 1, 3, 7, 21."),
        ({"hidden": 45}, "model.heads",
         "hidden / heads = 15 is odd; rotary embeddings need an even number",
         "Make hidden / heads even."),
        ({"own_head_dim": 9}, "model.head_dim",
         "head_dim = 9 is odd; rotary embeddings need an even number", "Make it even."),
        ({"rotary": 0.25}, "model.rotary",
         "0.25 of a head of dimension 14 is 3 dimensions; rotary embeddings need an even number",
         "Use a fraction that gives an even number, 2 or more."),
        ({"kv_heads": 2}, "model.kv_heads", "kv_heads=2 does not divide heads=3",
         "Use one of 1, 3."),
        ({"global_every": 2}, "model.global_every", ("no layer has a sliding window (window "
                                                    "is not set)"),
         "Remove `model.global_every`, or set `model.window`."),
        ({"tied": True, "head_bias": True}, "model.head_bias",
         "a tied head uses the embedding, which has no bias",
         "Remove `model.head_bias`, or set `model.tied=false`."),
        ({"rope_factor": 2.0}, "model.rope_factor",
         "rope_scaling: none does not scale frequencies",
         "Remove `model.rope_factor`, or set `model.rope_scaling=linear`."),
        ({"rope_original": 99}, "model.rope_original",
         "rope_scaling: none does not use this key",
         "Remove `model.rope_original`, or set `model.rope_scaling=llama3`."),
        ({"rope_scaling": RopeScaling.LINEAR}, "model.rope_scaling",
         "linear has no effect with rope_factor: 1",
         "Use a larger `model.rope_factor`, or `model.rope_scaling=none`."),
        ({"rope_scaling": RopeScaling.LLAMA3, "rope_factor": 8.0, "rope_low_factor": 4.0},
         "model.rope_high_factor", "4 must be greater than rope_low_factor: 4",
         "Use a larger value."),
        ({"positions": Positions.NONE, "rope_base": 5.0}, "model.rope_base",
         "positions: none has no rotary embeddings", ("Remove `model.rope_base`, or set "
                                                "`model.positions=rope`.")),
        ({"vocab": 256}, "model.vocab", "256 is smaller than the vocabulary of the byte tokenizer",
         "Use `model.vocab=259` or more."),
    ],
)  # fmt: skip
def test_an_impossible_shape_is_rejected(changes, place, finding, remedy):
    spec = make_spec({}, model=replace(ODD_SHAPE, **changes))
    assert check(spec) == (Fault(place=place, finding=finding, remedy=remedy),)


def test_a_fused_loss_bounds_no_logits():
    shape = replace(ODD_SHAPE, logit_soft_cap=30.0)
    faults = check(replace(make_spec({}, model=shape), loss=LossSpec(chunk=8, fused=True)))
    assert [(fault.place, "logit_soft_cap: 30" in fault.finding) for fault in faults] == [
        ("loss.fused", True)
    ]


ONE_RANK = {"model": {"preset": "llama-tiny", "kv_heads": 4}, "batch": {"global": 2, "sequence": 8}}


@pytest.mark.parametrize(
    ("axis", "illegal", "theorem"),
    [
        ("dp_shard", "S,S,S,R", "Theorem 3"),
        ("dp_shard", "M,M,S,R", "Theorem 4"),
        ("dp_replicate", "R,R,R,S", "Theorem 3"),
        ("tp", "R,R,R,R", "Theorem 4"),
        ("tp", "S,S,S,M", "Definition 2"),
        ("pp", "S,S,S,S", "Definition 2"),
        ("pp", "R,R,R,R", "Theorem 4"),
    ],
)
@pytest.mark.parametrize("beside", [{}, {"dp_shard": 2}, {"tp": 2}], ids=str)
def test_a_tuple_that_is_illegal_at_every_degree_is_rejected_at_degree_one(
    axis, illegal, theorem, beside
):
    tuples = {"dp_shard": "S*,S,S,R", "tp": "S,S,S,R"}
    beside = {other: degree for other, degree in beside.items() if other != axis}
    spec = {
        **ONE_RANK,
        "mesh": {**beside, axis: 1},
        "placement": {**{other: tuples[other] for other in beside}, axis: illegal},
    }
    found = check(load(spec).spec)
    assert found and {fault.place for fault in found} == {f"placement.{axis}"}
    assert any(theorem in fault.finding for fault in found)
    assert found[0].remedy.startswith(f"Use `placement.{axis}=")


def test_a_legal_tuple_at_degree_one_is_free_and_is_gone_when_the_spec_is_written():
    mesh = {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "tp": 1}
    tuples = {"pp": "S,S,S,R", "dp_replicate": "R,O,R,R", "dp_shard": "S*,S,S,R", "tp": "S,S,S,S*"}
    spec = load({**ONE_RANK, "mesh": mesh, "placement": tuples}).spec
    assert not check(spec) and not find_unsupported(spec)
    assert spec == load({**ONE_RANK, "mesh": {"dp_shard": 2}, "placement": "zero3"}).spec
    assert load(spec.resolved).spec == spec


def test_a_tuple_that_some_optimizer_takes_may_be_tried_with_any_on_one_rank():
    for optimizer, tuple_ in (("muon", "R,S,S,R"), ("adamw", "S*,M,S,R")):
        spec = {**ONE_RANK, "optimizer": {"name": optimizer}, "placement": {"dp_shard": tuple_}}
        assert not check(load({**spec, "mesh": {"dp_shard": 1}}).spec)
        assert check(load({**spec, "mesh": {"dp_shard": 2}}).spec)


def test_a_batch_that_does_not_multiply_out_is_rejected_with_the_product():
    spec = make_spec({Axis.DP_SHARD: (2, ZERO_2)})
    wrong = replace(spec, batch=replace(spec.batch, global_samples=7))
    (fault,) = check(wrong)
    assert fault == Fault(
        place="batch.global",
        finding="global=7 is not micro=2 x accumulate=1 x data degree=2 = 4",
        remedy="Use `batch.global=4`, or remove `batch.accumulate`.",
    )


def test_means_over_unequally_many_targets_are_rejected_by_the_function_that_gives_them():
    function = UserFunction(section="loss", target="a:c", arguments={})
    spec = replace(make_spec({Axis.DP_SHARD: (2, ZERO_2)}), loss=LossSpec(function=function))
    (fault,) = check(replace(spec, data=DataSpec(ignored=(0,))))
    assert not check(spec)
    assert fault == Fault(
        place="data.ignored",
        finding=(
            "a:c returns the mean over a micro-batch, but micro-batches have different "
            "numbers of targets: the mean of these means is not the mean over the global "
            "batch"
        ),
        remedy="Remove `loss` to use the built-in cross entropy, or remove `ignored`.",
    )


def test_ids_of_no_token_are_rejected_among_those_that_are_no_targets():
    spec = make_spec({Axis.DP_SHARD: (2, ZERO_2)})
    size, _ = spec.model.vocabulary
    (fault,) = check(replace(spec, data=DataSpec(ignored=(0, size, 99999))))
    assert not check(replace(spec, data=DataSpec(ignored=(0, size - 1))))
    assert fault == Fault(
        place="data.ignored",
        finding=f"token ids {size} and 99999 are outside the vocabulary of {size} tokens",
        remedy=f"Use ids below {size}.",
    )


def test_more_ranks_than_devices_are_rejected():
    cluster = Cluster(
        name="laptop",
        devices=2,
        devices_per_node=2,
        device_memory=2**34,
        intra_node_bandwidth=1e10,
        inter_node_bandwidth=1e9,
    )
    (fault,) = check(make_spec({Axis.DP_SHARD: (4, ZERO_2)}, cluster=cluster))
    assert fault == Fault(
        place="mesh",
        finding="the mesh has 4 ranks, but the cluster laptop has 2 devices",
        remedy="Use a mesh with at most 2 ranks, or `cluster.devices=4`.",
    )
    assert not check(make_spec({Axis.DP_SHARD: (2, ZERO_2)}, cluster=cluster))


def test_a_unit_over_several_stages_is_not_executed_yet():
    spec = make_spec({Axis.PP: (2, tuple_of("S,S,S"))})
    assert not find_unsupported(spec)
    (fault,) = find_unsupported(replace(spec, unit=UnitSize(kind=UnitKind.MODEL)))
    assert fault.place == "unit"


def test_replicas_inside_shards_are_not_executed_yet():
    mesh = {Axis.DP_SHARD: (2, GATHERED), Axis.DP_REPLICATE: (2, WHOLE)}
    (fault,) = find_unsupported(make_spec(mesh))
    assert "before dp_shard" in fault.remedy


@pytest.mark.parametrize("optimizer", [ADAMW, STATELESS, MUON])
def test_every_legal_tuple_runs(optimizer):
    for placement in legal_tuples(optimizer):
        spec = replace(make_spec({Axis.DP_SHARD: (2, placement)}), optimizer=optimizer)
        assert not find_unsupported(spec)


class Document:
    def __init__(self, spec):
        self.spec = spec

    def locate(self, fault):
        return fault._replace(source="mine.yaml", line=3, column=5)


def test_require_gives_the_spec_or_every_located_fault():
    good = make_spec({Axis.DP_SHARD: (2, ZERO_2)})
    assert require_runnable(Document(good)) is good
    with pytest.raises(SpecError) as raised:
        mesh = {Axis.DP_SHARD: (2, tuple_of("S,O,S,S")), Axis.DP_REPLICATE: (2, WHOLE)}
        require_runnable(Document(make_spec(mesh)))
    assert len(raised.value.faults) == 3
    assert all(fault.line == 3 for fault in raised.value.faults)


def test_the_fix_for_used_up_gradients_is_a_whole_change():
    with pytest.raises(SpecError) as caught:
        require_runnable(load("optimizer-in-backward", ["batch.micro=2"]))
    (fault,) = caught.value.faults
    assert "Use `batch.micro=8` with `batch.accumulate=1`, or" in fault.remedy
    changes = ["batch.micro=2", "batch.micro=8", "batch.accumulate=1"]
    assert require_runnable(load("optimizer-in-backward", changes)).batch.global_samples == 16
