"""Fused projections over tp: exact, equal to one device, and in the model's order in state
dicts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from ptrain.interpreter.look import build_module
from ptrain.interpreter.program import interpret
from ptrain.runtime.world import World
from ptrain.spec.spec import Spec
from tests.gloo.tensor_cases import tensor_spec
from tests.gloo.tensor_runs import MATRIX
from tests.models_from_outside import NANO_PLAN
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo
NIGHTLY = pytest.mark.nightly

GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 260}
STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "grouped": {"target": "tests.models_fused:grouped"},
    "nano": {"target": "tests.models_from_outside:nano", "arguments": {"layers": 2}},
    "gpt2": {"hf": "gpt2", "config": GPT2 | STILL},
}


def fused_spec(model: str, activations: str = "R", data: str = "") -> Spec:
    if "hf" in MODELS[model]:
        pytest.importorskip("transformers")
    placed = {"dp_shard": data} if data else None
    plan = {"tensor": {"plan": NANO_PLAN}} if model == "nano" else {}
    return tensor_spec(
        activations=activations, data=placed, own=MODELS[model], name=f"fused-{model}", **plan
    )


@pytest.mark.parametrize(
    ("model", "activations", "data"),
    [
        ("grouped", "S", ""),
        *(
            pytest.param(*case, marks=NIGHTLY)
            for case in (
                ("grouped", "R", "zero3"),
                ("grouped", "S*", ""),
                ("nano", "R", ""),
                ("nano", "S", "zero3"),
                ("gpt2", "R", "zero1"),
                ("gpt2", "S", "zero3"),
                ("gpt2", "S*", "zero2"),
            )
        ),
    ],
)
def test_fused_projections_are_exact_and_equal_one_device(
    ranks: Ranks, model: str, activations: str, data: str
) -> None:
    assert not MATRIX.differences(ranks, fused_spec(model, activations, data))


def round_trip_state_dict(spec: Spec) -> tuple[list[str], list[str]]:
    """Return the parameters of a program's state dict that differ from the model's, and those that
    changed after loading the model's state dict."""
    program = interpret(spec, world=World.join(spec.timeout), allow_import=True)
    truth = dict(build_module(spec, allow_import=True).named_parameters())
    state = {
        kind: {name: value.clone() for name, value in named.items()}
        for kind, named in program.state_dict().items()
    }
    other = [
        name for name, value in _full_tensor(state["model"]).items() if not value.equal(truth[name])
    ]
    held = [parameter.detach().clone() for parameter in program.model.parameters()]
    for parameter in program.model.parameters():
        parameter.detach().zero_()
    program.load_state_dict(state)
    names = [name for name, _ in program.model.named_parameters()]
    back = [
        name
        for name, parameter, before in zip(names, program.model.parameters(), held, strict=True)
        if not torch.equal(_local(parameter), _local(before))
    ]
    return other, back


def _full_tensor(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in named.items()
    }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize(
    ("model", "data"),
    [
        ("grouped", ""),
        *(pytest.param(*case, marks=NIGHTLY) for case in (("grouped", "zero3"), ("gpt2", ""))),
    ],
)
def test_a_state_dict_has_fused_projections_in_the_models_order(
    ranks: Ranks, model: str, data: str
) -> None:
    spec = fused_spec(model, data=data)
    assert ranks.run(spec.world_size, round_trip_state_dict, spec) == [([], [])] * spec.world_size
