"""The pipeline axis rejects models that draw random numbers outside of their layers, or train
differently than they evaluate, if their stages would differ from the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ptrain.interpreter.construction import stages_of_module
from ptrain.models.facts import untraced_facts
from ptrain.spec.spec import Spec
from tests.unit.test_chain import OTHERS, build_model_of, rejection_of, spec_of


def drawing(kind: str) -> Spec:
    return spec_of(
        {"target": "tests.models_with_random_draws:drawing", "arguments": {"kind": kind}}
    )


REFUSED = {
    "trainsalong": "layers pass more than hidden states to each other (tensors without gradients)",
    "trainsalongdropping": "layers pass more than hidden states to each other (tensors without",
    "masked": "the input of h.0 depends on earlier random numbers",
    "locked": "depends on earlier random numbers, and random numbers are drawn outside",
    "lockedbymodule": "the output of the model depends on earlier random numbers",
    "maskedbetween": "depends on earlier random numbers, and random numbers are drawn",
    "dropsbetween": "the forward pass draws random numbers between its layers",
    "dropslayers": "the forward pass draws random numbers between its layers",
}
SOUND: dict[str, dict[str, Any]] = {
    "modules at the ends and between": {
        "target": "tests.models_with_random_draws:drawing", "arguments": {"kind": "dropsatends"},
    },
    "nanoGPT": {"target": "tests.models_from_outside:nano", "arguments": {"dropout": 0.1}},
    "dropping": {"target": "tests.models_from_outside:dropping"},
    "by a function": {"target": "tests.models_staged:staged", "arguments": {"kind": "dropping"}},
    "gpt2": OTHERS["gpt2"],
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_stages_that_would_draw_or_train_differently_are_rejected_by_name(kind):
    assert REFUSED[kind] in rejection_of(drawing(kind))[1]


@pytest.mark.parametrize("model", SOUND)
def test_dropout_of_hidden_states_alone_is_on_stages(model):
    spec = spec_of(SOUND[model])
    module = build_model_of(spec)
    assert stages_of_module(spec, module, untraced_facts(module, spec)) is not None


def test_layers_that_are_skipped_at_random_are_rejected_whatever_the_seed():
    spec, findings = drawing("dropslayersatonce"), []
    for seed in range(5):
        torch.manual_seed(seed)
        findings.append(rejection_of(spec, build_model_of(spec))[1])
    known = "does not call the layers", "skips some layers at random"
    assert all(any(words in finding for words in known) for finding in findings)
    assert any(known[1] in finding for finding in findings)


def test_a_step_that_draws_before_and_after_the_model_is_rejected():
    model = {"target": "tests.models_staged:staged", "arguments": {"kind": "plain"}}
    spec = spec_of(model, step={"target": "tests.models_with_random_draws:noisy"})
    assert (
        "the output of the model depends on earlier random numbers"
        in rejection_of(spec, build_model_of(spec))[1]
    )


def test_inspecting_a_model_does_not_advance_the_generator():
    spec = drawing("dropsatends")
    module = build_model_of(spec).eval()
    state = torch.get_rng_state()
    stages_of_module(spec, module, untraced_facts(module, spec))
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(part.training for part in module.modules())
    assert module.drop.p == 0.1
