"""Compiled blocks: the step of the plan, rejections with a fix, and notes about bytes that are not
predicted."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ptrain.algebra.legality import check, find_unsupported
from ptrain.derivation import estimate
from ptrain.derivation.estimate import derive, facts_from_shape
from ptrain.errors import SpecError
from ptrain.plan.lower import lower
from ptrain.plan.show import format_plan
from ptrain.selection.job import searched_job
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.steps.step import Compile, Keep

REFUSED = [
    ("cp-ring", [], "context.attention", "whose passes along the ring"),
    ("cp-all-gather", [], "context.attention", "whose passes along the ring"),
    ("cp-ulysses", ["model.dropout=0.1", "model.attention_dropout=0"], "model.dropout", "masks"),
    ("ep", [], "model.experts", "routers"),
    ("zero3", ["unit=sub-block"], "unit", "hooks"),
    ("zero3", ["activations=O"], "activations", "offloaded"),
    ("zero3", ["activations=M", "recompute=attention"], "recompute", "every layer"),
    ("pp-zero-bubble", [], "pipeline.schedule", "splits the backward pass"),
    ("tp-saved", [], "placement.tp.activations", "saved as shards"),
    ("tp", ["model.dropout=0.1"], "model.dropout", "generators"),
    ("tp", ["activations=M"], "activations", "recomputed blocks over tp"),
]


def compiled_spec(name: str, *overrides: str) -> Spec:
    return load(name, [*overrides, "compile=block"]).spec


@pytest.mark.parametrize(("name", "overrides", "place", "finding"), REFUSED)
def test_unsupported_compilation_is_rejected_by_name(name, overrides, place, finding):
    spec = compiled_spec(name, *overrides)
    assert not check(spec)
    (fault,) = find_unsupported(spec)
    assert fault.place == place and finding in fault.finding
    assert fault.finding.startswith("not supported yet with compile=block: ")
    assert fault.remedy is not None and fault.remedy.endswith("or use `compile=none`.")
    assert not find_unsupported(load(name, [*overrides, "compile=none"]).spec)


def test_commands_for_eager_blocks_report_compiled_ones():
    with pytest.raises(SpecError, match="ptrain select with compile=block"):
        searched_job("zero3", ["compile=block", "mesh=auto"])


def test_without_a_compiler_the_peak_is_unknown_and_a_run_is_rejected(tmp_path):
    names = ["predict", "train"]
    environment = {**os.environ, "PATH": "", "PTRAIN_CACHE": "off"}
    outputs = [
        subprocess.run(
            [sys.executable, "-m", "ptrain", name, "zero3", "compile=block"],
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


def test_states_and_traffic_are_predicted_where_the_bytes_of_programs_are_not(monkeypatch):
    spec = compiled_spec("tp", "device=cuda")
    facts = facts_from_shape(spec)
    assert facts is not None
    exact, plain = derive(spec, facts).exact, derive(load("tp", ["device=cuda"]).spec).exact
    assert {"activations", "peak"} <= exact.undefined.keys()
    assert "GPUs are not predicted yet" in exact.undefined["peak"]
    assert not exact.peak and exact.traffic == plain.traffic
    states = {row.state: row for row in plain.memory if not row.rank}
    assert all(states[row.state] == row for row in exact.memory if not row.rank)
    monkeypatch.setattr(estimate, "torch_minor", lambda: "2.12")
    unproven = facts_from_shape(compiled_spec("ddp"))
    assert unproven is not None
    assert "2.12" in derive(compiled_spec("ddp"), unproven).exact.undefined["peak"]
