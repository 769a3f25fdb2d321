"""The values and defaults of the sections of a spec."""

from __future__ import annotations

import pytest

from ptrain.errors import SpecError
from ptrain.spec.cluster import Cluster
from ptrain.spec.job import (
    CheckpointSpec,
    DataSpec,
    EvalSpec,
    KeepSpec,
    LogSpec,
    OptimizerSpec,
    ScheduleSpec,
    Timeout,
    TrainSpec,
)
from ptrain.spec.load import load
from ptrain.spec.routing import Bound
from ptrain.spec.write import to_yaml
from tests.pure.changes import BASE, load_changed


def test_a_preset_keeps_its_name_if_the_shape_is_unchanged():
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
    assert load_changed(model=model).model.vocabulary == vocabulary


def test_a_cluster_defaults_to_one_node_with_usual_latencies():
    given = {"devices": 4, "device_memory": "80 GiB", "intra_node_bandwidth": "450 GB/s"}
    assert load_changed(cluster=given).cluster == Cluster(
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
    assert load_changed(timeout={"init": 7, "step": 9}).timeout == Timeout(init=7.0, step=9.0)
    assert load_changed(timeout=9).timeout.step == 9.0


@pytest.mark.parametrize(
    ("overrides", "is_written"),
    [([], False), (["offload={update: device}"], True), (["placement.dp_shard=S*,O,S,R"], True)],
)
def test_default_sections_are_not_written(overrides, is_written):
    assert ("offload" in load("zero3", overrides).spec.resolved) is is_written


@pytest.mark.parametrize(
    ("written", "bucket"), [("size", 25 * 2**20), ("per-tensor", 1), ("1 MiB", 2**20), (1024, 1024)]
)
def test_a_bucket_has_words_for_three_sizes(written, bucket):
    assert load_changed(bucket=written).bucket_bytes == bucket


@pytest.mark.parametrize(
    ("tuple_", "axis"),
    [("R,R,R,R", "dp_replicate"), ("R,R,R,M", "dp_replicate"), ("R,R,S,R", "dp_shard")],
)
def test_dp_is_the_axis_that_its_tuple_needs_whatever_is_kept_of_activations(tuple_, axis):
    (factor,) = load_changed(mesh={"dp": 2}, placement={"dp": tuple_}).factors
    assert (factor.axis, factor.degree) == (axis, 2)


def test_dp_takes_the_one_axis_that_the_placement_names():
    (factor,) = load_changed(mesh={"dp": 2}).factors
    assert (factor.axis, factor.degree) == ("dp_shard", 2)


def test_a_mesh_may_have_as_many_ranks_as_an_axis():
    assert load_changed(mesh={"dp_shard": 131072}, batch={"sequence": 8}).world_size == 131072


EVERY_KEY = {
    "name": "other",
    "optimizer": {
        "name": "sgd", "lr": 0.5, "betas": [0.25, 0.125], "eps": 0.75, "weight_decay": 0.375,
        "momentum": 0.625, "clip": 2, "schedule": {"warmup": 3, "decay_steps": 7,
                                                   "min_lr_ratio": 0.5},
    },
    "precision": {
        "layout": "zero16", "parameters": "fp16", "gradients": "fp32", "reduced": "bf16",
        "master": "fp32", "moments": "bf16", "compute": "fp64",
    },
    "data": {"corpus": "synthetic", "tokenizer": "bytes"},
    "train": {"steps": 11, "seed": 13},
    "eval": {"every": 17, "batches": 19},
    "checkpoint": {
        "at_end": True, "every": 23, "background": True, "keep": {"last": 2, "every": 46}
    },
    "timeout": {"init": 29, "step": 31},
    "log": {"every": 37, "trackers": ["mlflow", "wandb"]},
    "profile": [2, 3],
    "deterministic": True,
    "device": "cpu",
    "backend": "gloo",
    "consistency_every": 41,
    "verify_every": 43,
    "overlap_shared_experts": True,
    "routing": "worst",
    "reduce_scatter": "all_to_all",
    "bucket": 4096,
    "unit": "3 blocks",
    "overlap": "none",
    "prefetch": 2,
    "gather_after_update": "next-forward",
    "offload": {"path": "/x", "update": "device"},
    "sync": {"gradients": "last", "reshard_after_forward": False, "reshard_after_backward": False},
    "tensor": {"loss_parallel": False, "plan": "naive"},
    "pipeline": {"schedule": "zbv", "stages": 4, "split": [1, 1, 1, 1]},
    "loss": {"kind": "fused", "chunk": 64},
    "attention": "eager",
}  # fmt: skip


def test_every_key_is_taken_as_it_is_written():
    spec = load_changed(**EVERY_KEY)
    assert spec.optimizer == OptimizerSpec(
        name="sgd", lr=0.5, betas=(0.25, 0.125), eps=0.75, weight_decay=0.375, momentum=0.625,
        schedule=ScheduleSpec(warmup=3, decay_steps=7, min_lr_ratio=0.5), clip=2.0,
    )  # fmt: skip
    layout = spec.precision.layout
    dtypes = layout.parameters, layout.gradients, layout.reduced, layout.master, layout.moments
    assert [str(dtype) for dtype in dtypes] == ["fp16", "fp32", "bf16", "fp32", "bf16"]
    assert (spec.precision.compute_fp64, layout.scales_loss, layout.name) == (True, True, "custom")
    assert spec.data == DataSpec(corpus="synthetic", path=None, tokenizer="bytes")
    assert (spec.name, spec.train) == ("other", TrainSpec(steps=11, seed=13))
    assert (spec.eval, spec.timeout) == (EvalSpec(every=17, batches=19), Timeout(init=29, step=31))
    assert spec.checkpoint == CheckpointSpec(
        at_end=True, every=23, background=True, keep=KeepSpec(last=2, every=46)
    )
    assert spec.log == LogSpec(every=37, trackers=("mlflow", "wandb"))
    assert (spec.log_every, spec.profile, spec.consistency_every) == (37, (2, 3), 41)
    assert spec.verify_every == 43
    assert (spec.routing, spec.overlap_shared_experts) == (Bound.WORST, True)
    assert (spec.deterministic, spec.device, spec.backend) == (True, "cpu", "gloo")
    assert (spec.reduce_scatter, spec.bucket_bytes, spec.prefetch) == ("all_to_all", 4096, 2)
    assert (str(spec.unit), spec.overlap, spec.gather_after_update) == (
        "3 blocks", "none", "next-forward"
    )  # fmt: skip
    assert (spec.offload.path, spec.offload.update) == ("/x", "device")
    sync = spec.sync
    assert (sync.gradients, sync.reshard_after_forward) == ("last", False)
    assert sync.reshard_after_backward is False
    assert (spec.tensor.loss_parallel, spec.tensor.is_naive, spec.tensor.roles) == (False, True, ())
    pipeline = spec.pipeline
    assert (pipeline.schedule, pipeline.stages, pipeline.split) == ("zbv", 4, (1, 1, 1, 1))
    assert (spec.loss.chunk, spec.loss.fused, spec.model.attention) == (64, True, "eager")
    assert load(spec.resolved).spec == spec


@pytest.mark.parametrize(
    ("written", "chunk", "fused"),
    [
        ("chunked", 1024, False),
        ("fused", 1024, True),
        ({"kind": "fused", "fused": True}, 1024, True),
        ({"kind": "chunked", "chunk": 32}, 32, False),
        ({"kind": "chunked", "fused": True}, 1024, True),
        ("cross-entropy", None, False),
    ],
)
def test_a_loss_is_whole_or_in_chunks_of_which_the_last_may_be_fused(written, chunk, fused):
    loss = load_changed(loss=written).loss
    assert (loss.chunk, loss.fused) == (chunk, fused)


def test_a_file_may_end_in_yml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yml").write_text(to_yaml(load_changed().resolved))
    assert load("mine.yml").spec == load_changed()


def test_dp_of_an_override_replaces_the_files_dp():
    (factor,) = load(BASE | {"mesh": {"dp": 2}}, ["mesh.dp=4"]).spec.factors
    assert (factor.axis, factor.degree) == ("dp_shard", 4)
    (factor,) = load(BASE, ["mesh.dp=4"]).spec.factors
    assert (factor.axis, factor.degree) == ("dp_shard", 4)


def test_two_words_for_one_policy_must_agree():
    both = {"reshard": 2, "sync": {"reshard_after_forward": False}}
    with pytest.raises(SpecError, match=r"reshard: alias of sync\.reshard_after_forward, which is"):
        load_changed(**both)
