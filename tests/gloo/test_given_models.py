"""A module that the user built, in a ptrain program and the user's loop, costs what is predicted on
every axis."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import ptrain
from ptrain.data.sampler import batch_positions
from ptrain.errors import SpecError
from ptrain.runtime.world import World
from ptrain.spec.spec import Spec
from tests.models_external import pairs
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo
nightly = pytest.mark.nightly

SIZES = ("batch.sequence=16", "batch.global=8", "optimizer.clip=null")


def transformers_model() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 260}
    return transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-any-return]
        transformers.LlamaConfig(**sizes, num_attention_heads=4)
    )


BUILT = {"own": pairs, "transformers": transformers_model}


def given_model_spec(strategy: str) -> Spec:
    return ptrain.load(strategy, SIZES).spec


def _train_and_compare(model: str, strategy: str) -> dict[str, Any]:
    spec = given_model_spec(strategy)
    torch.manual_seed(0)
    module = BUILT[model]()
    facts = ptrain.read_facts(spec, module)
    program = ptrain.interpret(spec, module, World.join(spec.timeout))
    for step in range(3):
        with ptrain.measure(program) if step == 2 else nullcontext() as measurement:
            program.forward_backward(program.samples(step))
            program.step(1e-3)
    comparison = ptrain.compare(spec, measurement, facts)
    failing = [str(check) for check in comparison if not check.holds]
    return {"failing": failing, "checks": len(comparison), "text": str(comparison)}


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        ("own", "pp-1f1b"),
        pytest.param("transformers", "zero3", marks=nightly),
        pytest.param("own", "tp", marks=nightly),
        pytest.param("own", "ddp", marks=nightly),
        pytest.param("transformers", "tp", marks=nightly),
        pytest.param("transformers", "pp-1f1b", marks=nightly),
    ],
)
def test_a_given_module_holds(ranks: Ranks, model: str, strategy: str) -> None:
    for told in ranks.run(2, _train_and_compare, model, strategy):
        assert not told["failing"] and told["checks"] >= 9
        assert "verdict: holds" in told["text"]


def _matches_sampler() -> bool:
    """Return True if the rank's part of a global batch matches the sampler's."""
    spec = given_model_spec("zero3")
    program = ptrain.interpret(spec, world=World.join(spec.timeout))
    local = program.samples(0)
    whole = torch.zeros(spec.batch.global_samples, spec.batch.sequence + 1, dtype=torch.int64)
    places = batch_positions(spec, data_index=program.data_index, data_degree=spec.data_degree)
    whole[list(places)] = local.tensors[0]
    shared = program.share(whole)
    with pytest.raises(SpecError, match="the full global batch"):
        program.share(whole[:-1])
    return torch.equal(shared.tensors[0], local.tensors[0])


def test_a_rank_takes_its_samples_from_a_users_batch(ranks: Ranks) -> None:
    assert all(ranks.run(2, _matches_sampler))


def _failed_with_kept_batch(is_born_inside: bool) -> list[str]:
    """Return the failed checks of a loop that keeps its global batch through the measured step."""
    spec = ptrain.load("zero2", SIZES).spec
    program = ptrain.interpret(spec, world=World.join(spec.timeout))
    shape = spec.batch.global_samples, spec.batch.sequence + 1
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 259, shape, generator=generator)
        with ptrain.measure(program) if step == 2 else nullcontext() as measurement:
            if is_born_inside:
                tokens = torch.randint(0, 259, shape, generator=generator)
            program.forward_backward(program.share(tokens))
            program.step(1e-3)
    comparison = ptrain.compare(spec, measurement)
    assert len(comparison) >= 9
    return [str(check) for check in comparison if not check.holds]


@pytest.mark.parametrize("is_born_inside", [False, True])
def test_a_global_batch_that_outlives_the_step_is_not_memory_of_the_program(
    ranks: Ranks, is_born_inside: bool
) -> None:
    assert ranks.run(2, _failed_with_kept_batch, is_born_inside) == [[], []]


def _refusal_of_different_weights() -> str:
    spec = given_model_spec("ddp")
    world = World.join(spec.timeout)
    torch.manual_seed(world.rank)
    with pytest.raises(SpecError) as caught:
        ptrain.interpret(spec, pairs(), world)
    return str(caught.value)


def test_weights_that_differ_between_ranks_are_reported_on_every_rank(ranks: Ranks) -> None:
    for message in ranks.run(2, _refusal_of_different_weights):
        assert "rank 1 and rank 0 have different values" in message
        assert "torch.manual_seed" in message
