"""Messages for unsupported expert models and for near misses."""

from __future__ import annotations

from pathlib import Path

import pytest

from ptrain.algebra.legality import check
from ptrain.errors import Fault, SpecError
from ptrain.spec.load import load
from ptrain.spec.slips import UNSUPPORTED

FILE = """
model: {family: llama, layers: 2, hidden: 32, heads: 4, ffn: 48, vocab: 259, experts: 4%s}
mesh: {dp_shard: 2}
placement: zero3
batch: {global: 8, micro: 2, sequence: 32}
"""


def fault_of(*overrides: str, source: str | Path = "zero3") -> Fault:
    with pytest.raises(SpecError) as refused:
        load(source, overrides)
    (fault,) = refused.value.faults
    return fault


@pytest.mark.parametrize("route", UNSUPPORTED, ids=".".join)
def test_unsupported_expert_features_are_reported_with_an_alternative(route):
    source = "ep-tp" if route[0] == "placement" else "zero3"  # whose mesh has the axis
    fault = fault_of(f"{'.'.join(route)}=1", source=source)
    waits, remedy = UNSUPPORTED[route]
    assert fault.finding == f"unknown key {route[-1]!r}; not supported yet: {waits}"
    assert fault.remedy == remedy


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("num_local_experts", "experts"),
        ("moe_router_topk", "experts_per_token"),
        ("moe_intermediate_size", "expert_ffn"),
        ("first_k_dense_replace", "dense_layers"),
        ("norm_topk_prob", "router_norm"),
        ("n_group", "expert_groups"),
        ("topk_group", "groups_per_token"),
        ("bias_update_speed", "bias_update_rate"),
        ("router_aux_loss_coef", "aux_loss"),
        ("moe_z_loss_coeff", "z_loss"),
    ],
)
def test_features_with_another_name_are_suggested(key, meant):
    assert fault_of(f"model.{key}=1").remedy == f"Did you mean {meant!r}?"


@pytest.mark.parametrize(
    "key",
    ["ep_size", "expert_parallel", "expert_model_parallel_size", "expert_parallel_degree"],
)
def test_ep_is_known_by_the_names_that_others_give_it(key):
    assert fault_of(f"mesh.{key}=2").remedy == "Did you mean 'ep'?"
    # a key that another tool has is answered with the setting
    remedies = "Did you mean 'mesh.ep'?", "Use `mesh.ep=2`."
    assert fault_of(f"{key}=2").remedy.startswith(remedies)


@pytest.mark.parametrize(
    ("width", "tp", "remedy"),
    [
        (97, 2, "Use one of 1 for `mesh.tp`, or `model.expert_ffn=96` or `model.expert_ffn=98`."),
        (
            90,
            4,
            ("Use one of 1, 2 for `mesh.tp`, or `model.expert_ffn=88` or `model.expert_ffn=92`."),
        ),
        (1, 2, "Use one of 1 for `mesh.tp`, or `model.expert_ffn=2`."),
    ],
)
def test_experts_that_tp_does_not_cut_are_rejected_with_other_widths(width, tp, remedy):
    overrides = ["model.preset=moe-tiny", "model.kv_heads=4", f"mesh={{tp: {tp}}}"]
    (fault,) = check(load("tp", [*overrides, f"model.expert_ffn={width}"]).spec)
    assert fault.finding == f"tp={tp} does not divide expert_ffn: {width}"
    assert fault.remedy == remedy


def test_an_option_that_a_family_gives_is_blamed_on_the_family(tmp_path):
    file = tmp_path / "spec.yaml"
    file.write_text(FILE % "")
    fault = fault_of("model.family=gpt", source=file)
    assert (fault.place, fault.source) == ("model.family", "command line: model.family=gpt")
    assert fault.finding.startswith(
        "the family gpt sets bias: all; not supported yet: experts with biases"
    )
    assert (
        fault.remedy == "Use `model.bias=none` or `model.bias=qkv`. Or use another `model.family`."
    )
    assert load(file, ["model.family=gpt", "model.bias=qkv"]).spec.model.experts == 4


def test_an_option_that_is_written_is_blamed_itself(tmp_path):
    file = tmp_path / "spec.yaml"
    file.write_text(FILE % ", bias: all")
    for overrides in ([], ["model.family=gpt"]):
        fault = fault_of(*overrides, source=file)
        assert (fault.place, fault.line) == ("model.bias", 2)
        assert fault.text[fault.column - 1 :].startswith("all}")


@pytest.mark.parametrize(
    "section", ["cluster", "data", "train", "optimizer", "sync", "eval", "loss"]
)
def test_a_section_that_is_null_is_one_that_is_not_written(section, tmp_path):
    file = tmp_path / "spec.yaml"
    file.write_text(FILE % "")
    spec = load(file).spec
    assert load(file, [f"{section}=null"]).spec == spec
    written = {"data": "data.corpus=synthetic", "train": "train.steps=3"}.get(section)
    if written:
        assert load(file, [written, f"{section}=null"]).spec == spec
        assert load(file, [f"{section}=null", written]).spec == load(file, [written]).spec


@pytest.mark.parametrize("section", ["model", "mesh", "batch"])
def test_a_section_that_every_spec_needs_is_not_null(section, tmp_path):
    file = tmp_path / "spec.yaml"
    file.write_text(FILE % "")
    assert fault_of(f"{section}=null", source=file).finding == "must be a mapping; got nothing"
