"""Ranks that draw a model's initial values tensor by tensor start with the values of ranks that
build the full model."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from ptrain.interpreter import look
from ptrain.interpreter.program import interpret
from ptrain.models.meta import NeedsValuesError
from ptrain.runtime.world import World
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

SIZES = (
    "hidden_size: 32, intermediate_size: 48, num_hidden_layers: 4, num_attention_heads: 4, "
    "num_key_value_heads: 4, vocab_size: 264, max_position_embeddings: 64"
)
LLAMA = f"model={{hf: llama, config: {{{SIZES}, tie_word_embeddings: true}}}}"
MIXTRAL = f"model={{hf: mixtral, config: {{{SIZES}, num_local_experts: 4}}}}"
TITAN = "model={target: 'tests.models_on_meta:LikeTitan'}"
BATCH = "batch={global: 8, micro: 1, sequence: 16}"


def initialize_both_ways(spec: Spec) -> tuple[str, str, list[str]]:
    """Return the reason why the full model was built in each case, and the local tensors that
    differ."""
    world = World.join(spec.timeout)
    drawn = interpret(spec, world=world, allow_import=True)
    held = _local_tensors(drawn.state_dict()["model"])
    with mock.patch.object(look, "build_module_on_meta", side_effect=NeedsValuesError("as a test")):
        whole = interpret(spec, world=world, allow_import=True)
    expected = _local_tensors(whole.state_dict()["model"])
    assert held.keys() == expected.keys()
    differing = [name for name, tensor in held.items() if not torch.equal(tensor, expected[name])]
    return drawn.whole_because, whole.whole_because, differing


def _local_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    local = {name: getattr(tensor, "_local_tensor", tensor) for name, tensor in tensors.items()}
    return {name: tensor.clone() for name, tensor in local.items()}


@pytest.mark.parametrize(
    ("model", "placement", "changes"),
    [
        (LLAMA, "zero3", ()),
        (TITAN, "zero1", ("precision.layout=fsdp-mixed",)),
        *(
            pytest.param(model, placement, (), marks=pytest.mark.nightly)
            for model, placement in (
                (LLAMA, "ddp"),
                (LLAMA, "tp"),
                (LLAMA, "tp-zero3"),
                (LLAMA, "pp-1f1b"),
                (LLAMA, "zero2"),
                (LLAMA, "zero-offload"),
                (LLAMA, "hsdp"),
                (MIXTRAL, "zero3"),
                (MIXTRAL, "ep"),
                (MIXTRAL, "ep-zero3"),
                (TITAN, "zero3"),
            )
        ),
    ],
)
def test_ranks_begin_with_the_values_of_the_constructor(
    ranks: Ranks, model: str, placement: str, changes: tuple[str, ...]
) -> None:
    if "hf:" in model:
        pytest.importorskip("transformers")
    spec = load(placement, (model, BATCH, *changes)).spec
    for drawn, whole, differing in ranks.run(spec.world_size, initialize_both_ways, spec):
        assert (drawn, whole) == ("", "as a test")
        assert not differing
