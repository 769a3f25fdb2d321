"""Conversion of specs to other tools' configs, and the way back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ptrain.cli.convert import _config_text, write_config
from ptrain.plan.lower import lower
from ptrain.plan.show import format_plan
from ptrain.spec.foreign import KeyEffect, load_hints
from ptrain.spec.foreign_files import iter_leaves
from ptrain.spec.load import load
from ptrain.spec.names import list_files
from tests.pure.test_convert import TINY, write

TOOLS = [name for name, row in load_hints()["tools"].items() if "form" in row]


JOBS: list[tuple[str, ...]] = [(name,) for name in list_files("strategies")]
JOBS += [
    ("zero3", "mesh.dp_shard=4"),
    ("pp-1f1b", "mesh.pp=4"),
    ("cp-zigzag", "mesh.cp=4"),
    ("zero3", "reshard=non-root"),
    ("zero3", "reshard=non-root", "activations=M"),
    ("zero3-keep", "activations=M"),
    ("fsdp-mixed", "reshard=non-root"),
    ("fsdp-mixed", "reshard=false", "precision.reduced=fp32"),
    ("hsdp", "reshard=non-root"),
    ("fsdp-offload", "reshard=non-root"),
    ("ddp", "activations=M"),
    ("ddp", "precision.matmul=bf16-autocast"),
    ("ddp", "optimizer.clip=null"),
    ("ddp", "optimizer.name=sgd", "optimizer.weight_decay=0"),
    ("ddp", "optimizer.schedule={warmup: 0, decay_steps: 50}"),
    ("ddp", "loss=fused"),
    ("zero2", "precision.layout=zero16"),
    ("zero3", "precision.layout=zero16", "mesh.dp_shard=4"),
]


def written_config(name: str, tool: str, folder: Path, *words: str) -> tuple[Path, set[str]]:
    """Return the file of a tool for a strategy, and the keys that have no equivalent."""
    config, rows = write_config(load(name, words).spec, tool)
    form = load_hints()["tools"][tool]["form"]
    suffix = {"arguments": "sh"}.get(form, form)
    lost = {row.key for row in rows if row.outcome is KeyEffect.UNSUPPORTED}
    return write(folder, f"{name}-{tool}.{suffix}", _config_text(config, form)), lost


def job(spec: Any) -> dict[str, object]:
    """Return each value of a spec by its key; what recomputes activations, and the model, whole."""
    values = {".".join(route): value for route, value in iter_leaves((), spec.resolved)}
    whole = ("activations", "recompute", "model", "name", "data", "cluster")
    unread = ("optimizer.betas",) if spec.optimizer.name == "sgd" else ()
    kept = {
        key: value
        for key, value in values.items()
        if key.split(".")[0] not in whole and not key.endswith(".activations") and key not in unread
    }
    return kept | {"activations": str(spec.activations), "model": spec.model}


@pytest.mark.parametrize("tool", TOOLS)
def test_a_spec_survives_the_way_to_a_tool_and_back(tool, tmp_path):
    """Every value that is another one on the way back is named as one without an equivalent."""
    equal = []
    for name, *words in JOBS:
        file, lost = written_config(name, tool, tmp_path, *words)
        if lost & {"placement", "precision.layout"}:
            continue
        there = load(name, words).spec
        batch = there.resolved["batch"]
        given = [f"devices={there.world_size}", f"name={name}", f"batch={json.dumps(batch)}"]
        given = given[: 3 if any("batch" in key for key in lost) else 2]
        given += [TINY] if "model" in lost else []
        back = load(file, given).spec
        before, after = job(there), job(back)
        differs = {key for key in {**before, **after} if before.get(key) != after.get(key)}
        named = {"sync.reshard_after_forward" if key == "reshard" else key for key in lost}
        if "optimizer.name" in lost:  # the keys of another optimizer
            named |= {key for key in differs if key.startswith("optimizer.")}
        assert differs <= named, (name, words, differs - named)
        unplanned = ("optimizer.lr", "optimizer.betas", "optimizer.eps", "optimizer.schedule")
        unplanned += ("train.", "log.", "timeout.")  # which no line of a plan shows
        if all(key.startswith(unplanned) for key in differs):
            assert format_plan(back, lower(back)) == format_plan(there, lower(there)), (name, words)
            equal.append((name, *words))
    assert len(equal) >= 10, equal


def test_what_has_no_equivalent_is_named(tmp_path):
    _, lost = written_config("pp-zbv", "deepspeed", tmp_path)
    assert {"placement", "batch.sequence", "model"} <= lost


@pytest.mark.parametrize(
    ("spec", "override", "tool", "is_lost"),
    [
        ("checkpoint-full", "recompute.every=2", "accelerate", True),
        ("checkpoint-full", "recompute.every=2", "trainer", True),
        ("checkpoint-full", "recompute.every=2", "torchtitan", False),
        ("pp-1f1b", "pipeline.stages=4", "torchtitan", True),
        ("pp-1f1b", "pipeline.schedule=gpipe", "torchtitan", False),
    ],
)
def test_an_option_that_no_row_writes_is_named(spec, override, tool, is_lost):
    _, rows = write_config(load(spec, [override]).spec, tool)
    lost = {row.key for row in rows if row.outcome is KeyEffect.UNSUPPORTED}
    assert (override.partition("=")[0] in lost) is is_lost


def test_a_model_is_written_with_the_flags_of_megatron_and_without_zeros(tmp_path):
    file, lost = written_config("zero3", "megatron", tmp_path)
    written = file.read_text(encoding="utf-8")
    flags = ("--swiglu", "--normalization rms", "--position-embedding-type rope")
    flags += ("--disable-bias-linear", "--untie-embeddings-and-output-weights")
    assert all(flag in written for flag in (*flags, "--num-query-groups 2"))
    assert not lost and "--moe" not in written and "--save-interval" not in written
    assert "--hidden-dropout 0.0" in written  # 0.1 is Megatron's default
    assert load(file).spec.model == load("zero3").spec.model
    spec = load("zero3", ["model={preset: gpt-tiny}", "model.window=64", "model.norm=rms"]).spec
    config, rows = write_config(spec, "megatron")
    assert "swiglu" not in config and config["normalization"] == "rmsnorm"
    assert [row.key for row in rows if row.outcome is KeyEffect.UNSUPPORTED] == ["model.window"]


def test_keys_of_earlier_versions_are_read_and_not_written():
    words = ("train.seed=3", "checkpoint.every=5", "optimizer.schedule.warmup=4")
    config, rows = write_config(load("zero3", words).spec, "torchtitan")
    assert config["debug"] == {"seed": 3} and config["lr_scheduler"]["warmup_steps"] == 4
    assert not {"seed", "checkpoint_interval", "warmup_steps"} & config["training"].keys()
    lost = [row.key for row in rows if row.outcome is KeyEffect.UNSUPPORTED]
    assert "checkpoint.every" in lost and "train.seed" not in lost
