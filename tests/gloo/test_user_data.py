"""User losses, steps and samples on ranks: bytes are exact, and values equal one device."""

from __future__ import annotations

from typing import Any

import pytest

from ptrain.algebra.legality import require_runnable
from ptrain.errors import SpecError
from ptrain.interpreter.program import interpret
from ptrain.runtime.world import World
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from tests.gloo.matrix import run_spec
from tests.gloo.test_exact import failed_checks
from tests.models_from_outside import NANO_PLAN
from tests.models_vision import VECTORS
from tests.ranks import Ranks

VISION = "tests.models_vision"
BY_LOSS: dict[str, Any] = {
    "data": {"target": f"{VISION}:images"},
    "loss": {"target": f"{VISION}:label_loss", "arguments": {"smoothing": 0.1}},
}
BY_STEP: dict[str, Any] = {
    "data": {"target": f"{VISION}:images", "arguments": {"named": True}},
    "step": {"target": f"{VISION}:step"},
}
AXES: dict[str, dict[str, Any]] = {
    "ddp": {"mesh": {"dp_replicate": 2}, "placement": "ddp"},
    "zero2": {"mesh": {"dp_shard": 2}, "placement": "zero2"},
    "zero3": {"mesh": {"dp_shard": 2}, "placement": "zero3"},
}


def vision_spec(axis: str, sections: dict[str, Any], **more: Any) -> Spec:
    written = {
        "name": "vision",
        "model": {"target": f"{VISION}:vit"},
        "batch": {"global": 8, "micro": 2},
        "precision": {"layout": "fp32", "compute": "fp64"},
        "optimizer": {"name": "adamw", "lr": 1e-2, "clip": 1.0},
        **AXES[axis],
        **sections,
        **more,
    }
    return require_runnable(load(written))


NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(
    ("axis", "sections"),
    [
        pytest.param("ddp", BY_LOSS, marks=NIGHTLY),
        pytest.param("zero2", BY_LOSS, marks=NIGHTLY),
        ("zero3", BY_LOSS),
        pytest.param("ddp", BY_STEP, marks=NIGHTLY),
        pytest.param("zero2", BY_STEP, marks=NIGHTLY),
        pytest.param("zero3", BY_STEP, marks=NIGHTLY),
    ],
)
def test_images_with_labels_train_like_on_one_device(ranks: Ranks, axis, sections):
    result = run_spec(ranks, vision_spec(axis, sections))
    assert not failed_checks((*result.checks, *result.against))


SHAPE = {"family": "llama", "layers": 2, "hidden": 16, "heads": 2, "ffn": 32, "vocab": 260}
CONFIG = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 260,
}
MODELS: dict[str, dict[str, Any]] = {
    "built in": SHAPE,
    "transformers": {"hf": "llama", "config": CONFIG},
}
AXES_OF_LOGITS: dict[str, dict[str, Any]] = AXES | {
    "tp": {"mesh": {"tp": 2}, "placement": "tp"},
    "pp": {"mesh": {"pp": 2}, "placement": {"pp": "S,S,S,R"}},
}


def z_loss_spec(model: str, axis: str, **more: Any) -> Spec:
    written = {
        "name": "z-loss",
        "model": MODELS[model],
        "batch": {"global": 8, "micro": 2, "sequence": 16},
        "precision": {"layout": "fp32", "compute": "fp64"},
        "optimizer": {"name": "adamw", "lr": 1e-2, "clip": 1.0},
        "loss": {"target": "tests.models_losses:z_loss"},
        **AXES_OF_LOGITS[axis],
        **more,
    }
    return require_runnable(load(written))


@pytest.mark.parametrize(
    ("section", "axis"),
    [
        ("step", "ddp"),
        pytest.param("step", "zero3", marks=NIGHTLY),
        pytest.param("step", "tp", marks=NIGHTLY),
        pytest.param("step", "pp", marks=NIGHTLY),
        pytest.param("loss", "zero3", marks=NIGHTLY),
        pytest.param("loss", "tp", marks=NIGHTLY),
        ("loss", "pp"),
    ],
)
def test_a_function_may_view_its_batch_at_the_predicted_cost(ranks: Ranks, section, axis):
    names = {"loss": "viewed", "step": "viewed_step"}
    without = {"loss": None} if section == "step" else {}
    function = {"target": f"tests.models_losses:{names[section]}"}
    result = run_spec(ranks, z_loss_spec("built in", axis, **without, **{section: function}))
    assert not failed_checks((*result.checks, *result.against))


@NIGHTLY
@pytest.mark.parametrize(
    ("model", "axis"),
    [(model, axis) for model in MODELS for axis in AXES_OF_LOGITS],
)
def test_a_users_loss_equals_one_device_on_every_axis(ranks: Ranks, model, axis):
    result = run_spec(ranks, z_loss_spec(model, axis))
    assert not failed_checks((*result.checks, *result.against))


@NIGHTLY
def test_a_loss_inside_the_model_receives_full_logits(ranks: Ranks):
    written = {
        "name": "own-loss",
        "model": {
            "target": "tests.models_from_outside:nano",
            "arguments": {"loss": True, "layers": 2},
        },
        "mesh": {"tp": 2},
        "placement": "tp",
        "batch": {"global": 8, "micro": 2, "sequence": 16},
        "precision": {"layout": "fp32", "compute": "fp64"},
        "optimizer": {"name": "adamw", "lr": 1e-2, "clip": 1.0},
        "tensor": {"plan": NANO_PLAN},
        "step": {"target": "tests.models_from_outside:loss_of"},
    }
    result = run_spec(ranks, require_runnable(load(written)))
    assert not failed_checks((*result.checks, *result.against))


@NIGHTLY
@pytest.mark.parametrize("sections", [BY_LOSS, BY_STEP], ids=["loss", "step"])
def test_images_train_with_sharded_operators(ranks: Ranks, sections):
    """Between the blocks a sample has nine patches and the class token."""
    axis = {"mesh": {"tp": 2}, "placement": "tp"}
    batch = {"global": 8, "micro": 2, "sequence": VECTORS}
    result = run_spec(ranks, vision_spec("zero2", sections | axis, batch=batch))
    assert not failed_checks((*result.checks, *result.against))


@pytest.mark.parametrize(
    ("sections", "shards"),
    [
        (BY_STEP, 1),
        pytest.param(BY_LOSS, 1, marks=NIGHTLY),
        pytest.param(BY_LOSS, 2, marks=NIGHTLY),
        pytest.param(BY_STEP, 2, marks=NIGHTLY),
    ],
    ids=["step", "loss", "loss-zero3", "step-zero3"],
)
def test_images_train_in_stages(ranks: Ranks, sections, shards):
    placement = {"pp": "S,S,S,R", "dp_shard": "zero3"}
    axis = {"mesh": {"pp": 2, "dp_shard": shards}, "placement": placement}
    result = run_spec(ranks, vision_spec("zero2", sections | axis))
    assert not failed_checks((*result.checks, *result.against))


def refusal_message(spec: Spec) -> str:
    """Return this rank's rejection message."""
    try:
        interpret(spec, world=World.join(spec.timeout), allow_import=True)
    except SpecError as error:
        return str(error)
    return ""


def test_samples_that_differ_by_process_are_rejected_on_every_rank(ranks: Ranks):
    items = {"target": "tests.models_losses:items", "arguments": {"how": "by process"}}
    first, *others = ranks.run(2, refusal_message, z_loss_spec("built in", "zero2", data=items))
    assert others == [first]
    assert "data.target: sample 39 has different values on rank 1 and rank 0" in first
