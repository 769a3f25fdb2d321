"""What a section of a spec becomes, and what follows where it says nothing."""

from __future__ import annotations

import pytest

from ptrain.spec.cluster import Cluster
from ptrain.spec.load import load
from ptrain.spec.spec import Spec, Timeout

BASE = {
    "model": {"layers": 2, "hidden": 42, "heads": 3, "kv_heads": 1, "ffn": 101, "vocab": 259},
    "mesh": {"dp_shard": 2},
    "placement": {"dp_shard": "S*,S,S,R"},
    "batch": {"global": 16, "micro": 2, "sequence": 32},
}


def loaded(**changes: object) -> Spec:
    return load(BASE | changes).spec


def test_a_preset_keeps_its_name_while_the_shape_is_its_own():
    assert load("zero3", ["model={preset: llama-tiny}"]).spec.model.preset == "llama-tiny"
    spec = load("zero3", ["model={preset: llama-tiny, layers: 3}"]).spec
    assert (spec.model.preset, spec.model.layers) == ("", 3)
    assert "preset" not in spec.resolved["model"]


@pytest.mark.parametrize(
    ("model", "vocabulary"),
    [
        (BASE["model"], (259, "model.vocab")),
        ({"target": "a.b:c"}, (None, "model.arguments")),
        ({"hf": "A", "config": {"vocab_size": 300}}, (300, "model.config.vocab_size")),
        ({"hf": "A", "config": {"vocab_size": "x"}}, (None, "model.config.vocab_size")),
    ],
)
def test_a_vocabulary_has_a_size_and_a_place_where_it_is_known(model, vocabulary):
    assert loaded(model=model).model.vocabulary == vocabulary


def test_what_a_cluster_does_not_say_is_that_of_one_node_with_usual_latencies():
    given = {"devices": 4, "device_memory": "80 GiB", "intra_node_bandwidth": "450 GB/s"}
    assert loaded(cluster=given).cluster == Cluster(
        name="cluster",
        devices=4,
        devices_per_node=4,
        device_memory=80 * 2**30,
        intra_node_bandwidth=450e9,
        inter_node_bandwidth=450e9,
        intra_node_latency=5e-6,
        inter_node_latency=10e-6,
        flops=0.0,
        host_memory=None,
    )


def test_timeouts_are_those_of_the_start_and_of_a_step():
    assert loaded(timeout={"init": 7, "step": 9}).timeout == Timeout(init=7.0, step=9.0)
    assert loaded(timeout=9).timeout.step == 9.0


@pytest.mark.parametrize(
    ("overrides", "is_written"),
    [([], False), (["offload={update: device}"], True), (["placement.dp_shard=S*,O,S,R"], True)],
)
def test_sections_that_say_nothing_are_not_written(overrides, is_written):
    assert ("offload" in load("zero3", overrides).spec.resolved) is is_written


@pytest.mark.parametrize(
    ("written", "bucket"), [("size", 25 * 2**20), ("per-tensor", 1), ("1 MiB", 2**20), (1024, 1024)]
)
def test_a_bucket_has_words_for_three_sizes(written, bucket):
    assert loaded(bucket=written).bucket_bytes == bucket


@pytest.mark.parametrize(
    ("tuple_", "axis"),
    [("R,R,R,R", "dp_replicate"), ("R,R,R,M", "dp_replicate"), ("R,R,S,R", "dp_shard")],
)
def test_dp_is_the_axis_that_its_tuple_needs_whatever_is_kept_of_activations(tuple_, axis):
    (factor,) = loaded(mesh={"dp": 2}, placement={"dp": tuple_}).factors
    assert (factor.axis, factor.degree) == (axis, 2)


def test_dp_takes_the_one_axis_that_the_placement_names():
    (factor,) = loaded(mesh={"dp": 2}).factors
    assert (factor.axis, factor.degree) == ("dp_shard", 2)


def test_a_mesh_may_have_as_many_ranks_as_an_axis():
    assert loaded(mesh={"dp_shard": 131072}, batch={"sequence": 8}).world_size == 131072
