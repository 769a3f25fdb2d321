"""Which shapes with experts can be built, and where experts run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ptrain.algebra.legality import check
from ptrain.derivation.throughput import token_operations
from ptrain.errors import Fault, SpecError
from ptrain.facts.parameters import facts
from ptrain.spec.block import Bias
from ptrain.spec.load import load
from tests.gloo.expert_cases import spec_of
from tests.pure.build import ODD_SHAPE, make_spec


@pytest.mark.parametrize(
    ("changes", "place", "finding", "remedy"),
    [
        ({"experts": 2, "experts_per_token": 3}, "model.experts_per_token",
         "a token goes to 3 experts, of which a block has 2", "write 2 or fewer"),
        ({"experts": 2, "dense_layers": 3}, "model.dense_layers",
         "the first 3 layers have no experts, and there are 3",
         "write one below 3, or remove experts"),
        ({"experts": 2, "bias": Bias.ALL}, "model.bias",
         "not yet: experts with biases, of which a grouped product knows nothing",
         "write bias: none or qkv"),
        ({"capacity_factor": 1.0}, "model.capacity_factor", "a block has no experts",
         "remove capacity_factor, or write experts"),
    ],
)  # fmt: skip
def test_experts_that_cannot_be_are_refused(changes, place, finding, remedy):
    spec = make_spec({}, model=replace(ODD_SHAPE, **changes))
    assert check(spec) == (Fault(place=place, finding=finding, remedy=remedy),)


@pytest.mark.parametrize(
    ("model", "placement", "place", "finding"),
    [
        ("capacity", {"cp": "R,R,R,S"}, "model.capacity_factor",
         "not yet: 1 over cp, where a rank has some of a sample's tokens"),
        ("balanced", {"cp": "R,R,R,S"}, "model.aux_loss",
         "not yet: 0.5 over cp, where a rank has some of a sample's tokens"),
    ],
)  # fmt: skip
def test_experts_wait_where_nothing_cuts_them(model, placement, place, finding):
    with pytest.raises(SpecError) as refused:
        spec_of(model, placement)
    fault = refused.value.faults[0]
    assert fault.place == place and finding in fault.finding


@pytest.mark.parametrize(
    ("factor", "tokens", "places"), [(1.0, 16, 8), (1.25, 16, 10), (1.0, 15, 8), (9.0, 16, 16)]
)
def test_an_expert_takes_its_share_of_a_samples_tokens(factor, tokens, places):
    shape = replace(ODD_SHAPE, experts=4, experts_per_token=2, capacity_factor=factor)
    assert shape.capacity(tokens) == places


def test_a_token_is_multiplied_with_the_experts_it_goes_to():
    """Qwen3-30B-A3B: of 30.5 billion parameters 3.3 are activated, by its authors' count, which has
    the embedding; 0.31 of them are looked up."""
    spec = load("zero3", ["model.preset=qwen3-30b-a3b"]).spec
    shape, known = spec.model, facts(spec.model, 1)
    per_token = token_operations(shape, known, 1, is_causal=True) / 6
    looked_up = shape.vocab * shape.hidden
    assert (per_token + looked_up) / 1e9 == pytest.approx(3.3, abs=0.06)


def test_a_router_does_not_know_the_scale_of_a_loss():
    with pytest.raises(SpecError) as refused:
        spec_of("balanced", precision={"layout": "fp16"})
    assert [fault.place for fault in refused.value.faults] == ["model.aux_loss", "model.z_loss"]


def test_muon_waits_for_matrices_that_share_a_tensor():
    with pytest.raises(SpecError) as refused:
        spec_of("top-1", {"dp_shard": "muon"}, optimizer={"name": "muon", "lr": 1e-3})
    fault = refused.value.faults[0]
    assert fault.place == "optimizer.name" and "muon for experts" in fault.finding
