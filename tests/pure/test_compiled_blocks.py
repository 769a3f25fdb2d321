"""Compiled blocks and losses: the steps of the plan, rejections with a fix, and the reasons for
bytes that are not predicted."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from ptrain.algebra.legality import check, find_unsupported
from ptrain.derivation import estimate
from ptrain.derivation.estimate import derive, facts_from_shape
from ptrain.derivation.kernels import takes_peak_of
from ptrain.errors import SpecError
from ptrain.plan.lower import built_in_facts, lower
from ptrain.plan.show import format_plan
from ptrain.selection.job import searched_job
from ptrain.selection.recompute import resolve_auto
from ptrain.spec.dials import Compiled
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.steps.step import Compile, CompiledLoss, Keep

REFUSED = [
    ("cp-ring", ["activations=M"], "activations", "of which a half is compiled"),
    ("ep", ["activations=M"], "activations", "of which a half is compiled"),
    ("cp-ring", ["model.experts=4"], "context.attention", "no half to compile"),
    ("cp-ulysses", ["model.dropout=0.1", "model.attention_dropout=0"], "model.dropout", "masks"),
    ("zero3", ["unit=sub-block"], "unit", "hooks"),
    ("zero3", ["activations=O"], "activations", "offloaded"),
    ("zero3", ["activations=M", "recompute=attention"], "recompute", "every layer"),
    ("pp-zero-bubble", [], "pipeline.schedule", "splits the backward pass"),
    ("tp-saved", [], "placement.tp.activations", "saved as shards"),
    ("tp", ["model.dropout=0.1"], "model.dropout", "generators"),
    ("tp", ["activations=M"], "activations", "recomputed blocks over tp"),
]


REFUSED_LOSSES = [
    ("ddp", ["loss=chunked"], "loss", "in chunks", "Use `loss=cross-entropy`"),
    ("ddp", ["loss=fused"], "loss", "in chunks", "Use `loss=cross-entropy`"),
    ("ddp", ["loss.target=package:function"], "loss.target", "your code", "Remove `loss`"),
    ("tp", [], "mesh.tp", "over tp", "Use `mesh.tp=1`"),
]


@pytest.mark.parametrize(("name", "overrides", "place", "finding", "remedy"), REFUSED_LOSSES)
def test_losses_that_cannot_be_compiled_are_rejected_by_name(
    name, overrides, place, finding, remedy
):
    for word, rest in (("loss", "none"), ("all", "block")):
        spec = load(name, [*overrides, f"compile={word}"]).spec
        (fault,) = find_unsupported(spec)
        assert fault.place == place and finding in fault.finding
        assert fault.finding.startswith(f"not supported yet with compile={word}: ")
        assert fault.remedy == f"{remedy}, or use `compile={rest}`."
        assert not find_unsupported(load(name, [*overrides, f"compile={rest}"]).spec)


def test_a_loss_is_compiled_without_blocks():
    for name in ("cp-ring", "ep"):
        assert not find_unsupported(load(name, ["compile=loss"]).spec)
    (fault,) = find_unsupported(load("zero3", ["compile=all", "unit=sub-block"]).spec)
    assert fault.remedy.endswith("or use `compile=loss`.")
    faults = find_unsupported(load("zero3", ["compile=all", "unit=sub-block", "loss=fused"]).spec)
    assert [fault.place for fault in faults] == ["unit", "loss"]
    assert all(fault.remedy.endswith("or use `compile=none`.") for fault in faults)
    for word in ("loss", "all"):
        (fault,) = find_unsupported(load("pp-zero-bubble", [f"compile={word}"]).spec)
        assert fault.place == "pipeline.schedule" and fault.remedy.endswith("`compile=none`.")


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("cp-ulysses", ["model.dropout=0.1", "model.attention_dropout=0"]),
        ("ep", ["activations=O"]),
        ("cp-ring", ["activations=M", "recompute=attention"]),
        ("zero3", ["unit=sub-block"]),
    ],
)
def test_the_loss_alone_is_a_fix_for_blocks_that_cannot_be_compiled(name, overrides):
    (fault,) = find_unsupported(load(name, [*overrides, "compile=all"]).spec)
    assert fault.remedy.endswith("or use `compile=loss`.") and "M`" not in fault.remedy
    assert not find_unsupported(load(name, [*overrides, "compile=loss"]).spec)


def test_reasons_that_forbid_a_ranking_are_not_hidden_by_programs():
    drops = ["cluster.preset=a100-8", "model.dropout=0.1"]
    for name, overrides in (("ddp", drops), ("ddp", ["cluster.preset=h100-8", "activations=O"])):
        for word in ("none", "loss"):
            facts = built_in_facts(load(name, overrides).spec)
            assert not takes_peak_of(load(name, [*overrides, f"compile={word}"]).spec, facts)


def compiled_spec(name: str, *overrides: str) -> Spec:
    return load(name, [*overrides, "compile=block"]).spec


@pytest.mark.parametrize(("name", "overrides", "place", "finding"), REFUSED)
def test_what_is_not_compiled_yet_is_rejected_by_name(name, overrides, place, finding):
    spec = compiled_spec(name, *overrides)
    assert not check(spec)
    (fault,) = find_unsupported(spec)
    assert fault.place == place and finding in fault.finding
    assert fault.finding.startswith("not supported yet with compile=block: ")
    assert fault.remedy is not None and fault.remedy.endswith("or use `compile=none`.")
    assert not find_unsupported(load(name, [*overrides, "compile=none"]).spec)


def test_a_search_scores_compiled_blocks_as_eager_ones():
    job = searched_job("llama3-8b", ["compile=block", "cluster.preset=h100-8"])
    assert job.base.compile is Compiled.BLOCK and job.stand_in == job.base.model
    assert job.scored == replace(job.base, compile=Compiled.NONE)


def test_a_micro_batch_is_not_chosen_for_compiled_blocks():
    document = load("zero3", ["compile=block", "batch.micro=auto", "cluster.preset=h100-8"])
    with pytest.raises(SpecError, match=r"compile=block with batch\.micro=auto"):
        resolve_auto(document)


def test_without_a_compiler_the_peak_is_unknown_and_a_run_is_rejected(tmp_path):
    names = ["predict", "train"]
    one_rank = ["mesh={}", "placement={}"]  # starts no second process
    environment = {**os.environ, "PATH": "", "PTRAIN_CACHE": "off"}
    outputs = [
        subprocess.run(
            [sys.executable, "-m", "ptrain", name, "zero3", "compile=block", *one_rank],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        for name in names
    ]
    assert [output.returncode for output in outputs] == [0, 2]
    assert "needs a C++ compiler, such as g++, and there is none" in outputs[0].stdout
    assert outputs[1].stderr.startswith("error: compile: torch.compile needs a C++ compiler")
    assert "Traceback" not in outputs[1].stderr


def test_blocks_are_compiled_after_recomputation_and_before_they_are_wrapped():
    spec = compiled_spec("zero3", "activations=M")
    plan = lower(spec)
    kinds = [type(step) for step in plan.steps]
    assert kinds.index(Keep) + 1 == kinds.index(Compile) == kinds.index(type(plan.wrap)) - 1
    assert "compile the forward pass of blocks 0-3, one program per distinct block" in format_plan(
        spec, plan
    )
    assert lower(load("zero3").spec).compiled is None


def test_the_loss_is_compiled_after_the_head_is_wrapped():
    for word, has_blocks in (("loss", False), ("all", True)):
        spec = load("zero3", [f"compile={word}", "model.vocab_multiple=64"]).spec
        plan = lower(spec)
        kinds = [type(step) for step in plan.steps]
        assert kinds.index(CompiledLoss) == kinds.index(type(plan.wrap)) + 1
        assert (Compile in kinds) == has_blocks and plan.has_programs
        assert plan.loss == CompiledLoss(padding=spec.vocab_padding)
        assert "compile the logits and the cross entropy of all tokens" in format_plan(spec, plan)
    assert lower(load("zero3", ["compile=block"]).spec).loss is None


@pytest.mark.parametrize(
    ("name", "overrides", "part"),
    [
        ("ep", (), "attention of blocks 0-3"),
        ("ep", ("model.dense_layers=1",), "block 0; attention of blocks 1-3"),
        ("cp-ring", (), "mlp of blocks 0-3"),
        ("cp-all-gather", (), "mlp of blocks 0-3"),
        ("cp-ulysses", (), "blocks 0-3"),
    ],
)
def test_experts_and_rings_stay_outside_of_programs(name, overrides, part):
    spec = compiled_spec(name, *overrides)
    assert not check(spec) and not find_unsupported(spec)
    assert f"compile the forward pass of {part}, one program" in format_plan(spec, lower(spec))


def test_states_and_traffic_are_predicted_where_the_bytes_of_programs_are_not(monkeypatch):
    monkeypatch.setattr(estimate, "torch_minor", lambda: "2.12")
    spec = compiled_spec("tp", "device=cuda", "cluster.preset=h100-8")
    facts = facts_from_shape(spec)
    assert facts is not None
    exact = derive(spec, facts).exact
    plain = derive(load("tp", ["device=cuda", "cluster.preset=h100-8"]).spec).exact
    assert {"activations", "peak", "step_seconds"} <= exact.undefined.keys()
    assert "2.12" in exact.undefined["peak"]
    assert not exact.peak and exact.traffic == plain.traffic
    on_cpus = facts_from_shape(compiled_spec("ddp"))
    assert on_cpus is not None
    assert "2.12" in derive(compiled_spec("ddp"), on_cpus).exact.undefined["peak"]
    states = {row.state: row for row in plain.memory if not row.rank}
    assert all(states[row.state] == row for row in exact.memory if not row.rank)
