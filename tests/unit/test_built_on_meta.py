"""A model built on the meta device initializes itself, or is rejected with one message."""

from __future__ import annotations

import json

import pytest
import torch

from ptrain.errors import SpecError
from ptrain.models.initialize import build_model
from ptrain.spec.model import ExternalModel
from tests.models_on_meta import KINDS

SOUND = ("plain", "titan", "nanochat", "nanogpt")
WORDS = ("batch={global: 4, micro: 2, sequence: 8}", "mesh={dp_shard: 2}", "--allow-import")


def target(kind: str) -> str:
    return f"model={{target: 'tests.models_on_meta:build', arguments: {{kind: {kind}}}}}"


def build_spec_model(kind: str, seed: int = 0) -> torch.nn.Module:
    model = ExternalModel(target="tests.models_on_meta:build", arguments={"kind": kind})
    return build_model(model, sequence=8, allow_import=True, seed=seed)


@pytest.mark.parametrize("kind", SOUND)
def test_it_has_the_values_of_its_initialization(kind: str) -> None:
    """They depend on the seed only, and torch's generator is unchanged."""
    before = torch.get_rng_state()
    module, again, other = (
        build_spec_model(kind),
        build_spec_model(kind),
        build_spec_model(kind, seed=1),
    )
    assert torch.equal(before, torch.get_rng_state())
    assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert not torch.equal(module.embed.weight, other.embed.weight)
    assert torch.equal(module.norm.weight, torch.ones(16)) and not module.norm.bias.any()
    if kind in ("titan", "nanochat"):
        assert torch.equal(module.turns, KINDS["titan"]().turns)
    if kind in ("nanochat", "nanogpt"):
        assert 0.015 < module.blocks[0].weight.std() < 0.025
    assert (module.head.weight is module.embed.weight) is (kind == "nanochat")


@pytest.mark.parametrize("kind", SOUND)
def test_a_prediction_is_the_one_of_the_model_with_values(kind: str, ptrain) -> None:
    record = json.loads(ptrain("predict", "zero3", target(kind), *WORDS, "--json"))
    direct = f"model={{target: 'tests.models_on_meta:{KINDS[kind].__name__}'}}"
    other = json.loads(ptrain("predict", "zero3", direct, *WORDS, "--json"))
    assert record["fit"]["peak_bytes"] == other["fit"]["peak_bytes"] > 0


@pytest.mark.parametrize(
    ("kind", "finding"),
    [
        ("scaled", "neither init_weights() nor reset_parameters() sets values for scale"),
        ("forgetful", "its init_weights() sets no values for blocks.0.weight and 2 more"),
        ("raising", "while its model on the meta device initialized itself, raised ValueError"),
    ],
)
def test_values_that_are_missing_end_in_one_message(kind: str, finding: str, capsys) -> None:
    with pytest.raises(SpecError) as caught:
        build_spec_model(kind)
    assert finding in str(caught.value) and "model.target" in str(caught.value)
    from ptrain.cli.main import main

    assert main(["predict", "zero3", target(kind), *WORDS]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error and finding in error
