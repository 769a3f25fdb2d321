"""Frozen parameters have neither gradients nor optimizer state: what is held and sent is predicted,
simulated and measured to the byte, and what is trained becomes what one device makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ptrain
from ptrain.errors import SpecError
from ptrain.optimizers.update import MASTER
from ptrain.rooms.world import World
from ptrain.spec.spec import Spec
from ptrain.verification.reference import ReferenceTraining
from tests import jobs
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo
nightly = pytest.mark.nightly

STEPS = 3
STRATEGIES = ["ddp", "zero3", "pp-1f1b", "tp"]
OTHERS = ["hsdp", "fsdp-mixed", "ddp-zero-redundancy", "pp-zero3", "tp-zero3", "checkpoint-full"]


BATCH = "batch={global: 8, micro: 1, sequence: 16}"
ADAPTED = {"up": "column", "widen": "column", "down": "row"}
QUERIES_AND_VALUES = {
    f"self_attn.{operator}.{part}": "column"
    for operator in ("q_proj", "v_proj")
    for part in ("base_layer", "lora_B.default")
}
REST_OF_LLAMA = {
    **dict.fromkeys(("self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj"), "column"),
    **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), "row"),
}
PLANS = {  # over tp, by model: where its layers are, and their operators
    "adapted": ("layers.*", ADAPTED),
    "lora": ("model.model.layers.*", QUERIES_AND_VALUES | REST_OF_LLAMA),
}


def spec_of(strategy: str, model: str) -> Spec:
    words = [f"model={{target: tests.models_frozen:{model}}}", BATCH]
    if strategy.startswith("tp"):
        layers, roles = PLANS[model]
        plan = {f"{layers}.{name}": role for name, role in roles.items()}
        words.append(f"tensor.plan={json.dumps(plan)}")
    return ptrain.load(strategy, words).spec


def _trained(strategy: str, model: str) -> dict[str, Any]:
    spec = spec_of(strategy, model)
    facts = ptrain.read_facts(spec, allow_import=True)
    program = ptrain.interpret(spec, world=World.join(spec.timeout), allow_import=True)
    for step in range(STEPS):
        with ptrain.measure(program) as measurement:
            program.forward_backward(program.samples(step))
            program.step(spec.optimizer.lr)
    comparison = ptrain.compare(spec, measurement, facts)
    state = program.state_dict()
    whole = {name: _whole(tensor) for name, tensor in state["model"].items()}
    return {
        "failing": [str(check) for check in comparison if not check.holds],
        "checks": len(comparison),
        "model": whole,
        "with state": {
            name.rpartition(".")[0]
            for name in state["optimizer"]
            if not name.endswith(MASTER)  # which a parameter that is made of it has, frozen or not
        },
    }


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "full_tensor", lambda: tensor)().detach().clone()


@pytest.mark.parametrize("model", ["adapted", pytest.param("lora", marks=nightly)])
@pytest.mark.parametrize(
    "strategy", [*STRATEGIES, *(pytest.param(name, marks=nightly) for name in OTHERS)]
)
def test_what_is_frozen_costs_its_parameters_alone(ranks: Ranks, strategy: str, model: str) -> None:
    if model == "lora":
        pytest.importorskip("peft")
    spec = spec_of(strategy, model)
    device = ReferenceTraining(spec)
    initial = {name: tensor.clone() for name, tensor in device.parameters.items()}
    trained = {name for name, tensor in device.module.named_parameters() if tensor.requires_grad}
    for step in range(STEPS):
        device.updater.update(device.accumulate(step).sums, spec.optimizer.lr)
    for report in ranks.run(spec.world_size, _trained, strategy, model):
        assert not report["failing"] and report["checks"] >= 9
        assert report["with state"] <= trained
        for name, tensor in report["model"].items():
            if tensor.dtype is torch.float32:  # coarser ones round what two ranks sum otherwise
                torch.testing.assert_close(tensor, device.parameters[name])
            assert torch.equal(tensor, initial[name].to(tensor.dtype)) is (name not in trained)


@pytest.mark.parametrize(
    ("strategy", "where"), [("zero1", "in a flat unit"), ("tp-sp", "where tp slices the tokens")]
)
def test_what_takes_no_frozen_parameters_yet_says_so(strategy: str, where: str) -> None:
    spec = spec_of(strategy, "adapted")
    facts = ptrain.read_facts(spec, allow_import=True)
    with pytest.raises(SpecError, match=rf"frozen parameters {where}: layers\.0\.norm\.weight"):
        ptrain.derive(spec, facts)


def test_a_checkpoint_has_them_too_and_another_placement_continues_it(tmp_path: Path) -> None:
    words = [
        "model={target: tests.models_frozen:adapted}",
        "batch={global: 8, micro: 1, sequence: 16}",
    ]
    words += ["--allow-import", "train.steps=4", "eval.every=0"]
    code, job = jobs.run(
        ["train", "zero3", *words, "checkpoint.at_end=true", "--run-dir", "first"], cwd=tmp_path
    )
    assert code == 0, job.error
    words[-2] = "train.steps=6"
    code, job = jobs.run(
        ["train", "ddp", *words, "--resume", "first", "--run-dir", "second"], cwd=tmp_path
    )
    assert code == 0 and "step 6/6" in job.output, job.error
