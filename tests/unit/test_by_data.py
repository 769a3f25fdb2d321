"""A model with data-dependent sizes is recognized, and its allocations lie within the bounds of its
facts for any data; other models are not marked."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from ptrain.algebra.legality import require_runnable
from ptrain.codec import decode, encode
from ptrain.derivation.estimate import derive
from ptrain.errors import SpecError
from ptrain.facts.model import ModelFacts
from ptrain.models.cross_entropy import token_loss_sum
from ptrain.models.initialize import build_model
from ptrain.models.trace import to_timeline
from ptrain.models.units import unit_modules
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.timeline import Run, Timeline
from ptrain.traces.facts import facts_of
from ptrain.traces.record import record
from tests.saved_tensors import saved_bytes

VOCAB = 260


def spec_of(model: dict[str, Any], **sections: Any) -> Spec:
    written = {
        "name": "by-data",
        "model": model,
        "mesh": {"dp_shard": 2},
        "placement": "zero3",
        "batch": {"global": 4, "micro": 2, "sequence": 8},
        "precision": {"layout": "fp32"},
        **sections,
    }
    return require_runnable(load(written))


def user_model(function: str, **arguments: Any) -> dict[str, Any]:
    return {"target": f"tests.models_routing:{function}", "arguments": arguments}


def mixtral(**config: Any) -> dict[str, Any]:
    sizes = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": VOCAB,
        "max_position_embeddings": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    return {"hf": "mixtral", "config": sizes | config}


def rise(timeline: Timeline) -> int:
    """The most that is alive above what was before, gradients apart."""
    level = most = 0
    for item in (*timeline.forward, *timeline.backward):
        if isinstance(item, Run):
            most = max(most, level + item.rise)
            level += item.net
    return most


def measure_micro_batch(spec: Spec, seed: int) -> Timeline:
    """A micro-batch of drawn tokens, by weights of another seed."""
    model = build_model(spec.model, sequence=8, allow_import=True, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (2, 9), generator=generator)
    units = unit_modules(model, spec.unit)

    def forward() -> Tensor:
        return token_loss_sum(model(tokens[:, :-1]), tokens[:, 1:])

    return to_timeline(record(model, units, forward, tokens))


MODELS = {
    "experts in a list": user_model("moe"),
    "a mask that indexes": user_model("moe", by="mask"),
    "masked_select": user_model("moe", by="masked_select"),
    "mixtral": mixtral(experts_implementation="eager"),
}


@pytest.mark.parametrize("name", MODELS)
def test_routed_sizes_lie_within_the_bounds(name):
    if "hf" in MODELS[name]:
        pytest.importorskip("transformers")
    spec = spec_of(MODELS[name])
    facts = facts_of(spec)
    assert "by data" in facts.by_data and len(facts.others) == 1
    (least,), most = facts.others, facts
    for seed in range(4):
        seen = measure_micro_batch(spec, seed)
        assert saved_bytes(least.timeline) <= saved_bytes(seen) <= saved_bytes(most.timeline)
        assert rise(least.timeline) <= rise(seen) <= rise(most.timeline)


def test_bounds_differ_where_sizes_depend_on_data_alone():
    exact = derive(spec := spec_of(MODELS["experts in a list"]), facts_of(spec)).exact
    assert set(exact.by_data) == {"activations", "peak"}
    bounded = {row.state for row in exact.memory if row.lower_bytes is not None}
    assert bounded == {"activations"}
    assert any(row.lower_bytes is not None for row in exact.peak)
    assert all(row.lower_bytes is None for row in exact.peak if row.phase == "update")


STILL = {
    "a padded embedding": user_model("padded"),
    "a mask by comparison": user_model("padded", masks=True),
    "a mask of positions": user_model("padded", positions=True),
    "a grouped product": mixtral(),
    "a batched product": mixtral(experts_implementation="batched_mm"),
}


@pytest.mark.parametrize("name", STILL)
def test_a_model_with_data_independent_sizes_is_not_marked(name):
    if "hf" in STILL[name]:
        pytest.importorskip("transformers")
    facts = facts_of(spec_of(STILL[name]))
    assert not facts.by_data and not facts.others and not facts.untraced


def test_unbounded_sizes_are_unknown_with_a_reason():
    spec = spec_of(user_model("moe", by="unique"))
    exact = derive(spec, facts_of(spec)).exact
    assert not exact.peak
    assert (
        "unique" in exact.undefined["peak"] and "without a known bound" in exact.undefined["peak"]
    )


LOSS = {"loss": {"target": "tests.models_losses:plain"}}


def trimming(*, alike: bool = False, **arguments: Any) -> dict[str, Any]:
    """A step and a dataset of one's own."""
    return {
        "data": user_model("sentences", alike=alike),
        "step": user_model("trimming", **arguments),
    }


READING: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "tokens": (user_model("reading"), {}, "allocates differently for each sample"),
    "tokens that are compared": (
        user_model("reading", by="equal"),
        {},
        "allocates differently for each sample",
    ),
    "tokens in a list": (
        user_model("reading", by="tolist"),
        {},
        "allocates differently for each sample",
    ),
    "tokens in numpy": (
        user_model("reading", by="numpy"),
        {},
        "allocates differently for each sample",
    ),
    "tokens as an array": (
        user_model("reading", by="asarray"),
        {},
        "allocates differently for each sample",
    ),
    "tokens, with a loss of one's own": (
        user_model("reading"),
        LOSS,
        "allocates differently for each sample",
    ),
    "tokens that nobody knows": (user_model("one_hot"), LOSS, "without an nn.Embedding"),
    "lengths in data of one's own": (
        user_model("padded"),
        trimming(),
        "allocates differently for each sample",
    ),
    "lengths that it refuses": (
        user_model("padded"),
        trimming(most=6),
        "fails on other samples: .* a sentence of 7 tokens",
    ),
}


@pytest.mark.parametrize("name", READING)
def test_code_that_branches_on_values_is_unknown(name):
    model, sections, why = READING[name]
    spec = spec_of(model, **sections)
    facts = facts_of(spec)
    assert facts.timeline is None and facts.untraced.startswith("its code reads values")
    assert re.search(why, facts.untraced)
    assert facts.gradient_order, "which buckets DDP makes is known"
    exact = derive(spec, facts).exact
    assert not exact.peak and facts.untraced in exact.undefined["peak"]


NOTING = {
    "tokens": (user_model("reading", logs=True), {}),
    "tokens, with a loss of one's own": (user_model("reading", logs=True), LOSS),
    "tokens of a model without an embedding": (user_model("one_hot"), {}),
    "lengths that are alike": (user_model("padded"), trimming(alike=True)),
}


@pytest.mark.parametrize("name", NOTING)
def test_code_that_reads_values_and_does_the_same_with_all_is_exact(name):
    model, sections = NOTING[name]
    spec = spec_of(model, **sections)
    facts = facts_of(spec)
    assert facts.timeline is not None and not facts.untraced
    assert derive(spec, facts).exact.peak


def test_experts_without_a_gradient_are_rejected_where_data_ranks_sum_gradients():
    model = user_model("moe", by="skipping")
    spec = spec_of(model)
    facts = facts_of(spec)
    assert {name.split(".")[3] for name in facts.unvisited} == {"experts"}
    with pytest.raises(SpecError, match="no gradient on ranks without tokens for it"):
        derive(spec, facts)
    alone = spec_of(model, mesh={"dp_shard": 1})
    assert derive(alone, facts_of(alone)).exact.peak


@pytest.mark.parametrize("name", MODELS)
def test_experts_that_run_on_no_rows_have_gradients(name):
    if "hf" in MODELS[name]:
        pytest.importorskip("transformers")
    assert not facts_of(spec_of(MODELS[name])).unvisited


def test_facts_with_bounds_are_kept_as_plain_data():
    facts = facts_of(spec_of(MODELS["experts in a list"]))
    assert decode(encode(facts, ModelFacts), ModelFacts) == facts


def logits(dtype: torch.dtype, **config: Any) -> Tensor:
    """What a model of transformers gives, with the weights of one seed."""
    model = build_model(spec_of(mixtral(**config)).model, sequence=8).to(dtype)
    tokens = torch.arange(16).view(2, 8)
    with torch.no_grad():
        output: Tensor = model(tokens)
    return output


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 0.0)], ids=str
)
def test_experts_compute_the_same_one_by_one_and_by_grouped_products(dtype, tolerance):
    """In fp64 nothing else than one by one."""
    pytest.importorskip("transformers")
    by_expert = logits(dtype, experts_implementation="eager")
    torch.testing.assert_close(logits(dtype), by_expert, rtol=tolerance, atol=tolerance)


def test_where_rows_are_not_aligned_experts_run_one_by_one_and_sizes_depend_on_data():
    pytest.importorskip("transformers")
    assert facts_of(spec_of(mixtral(intermediate_size=26))).by_data


def test_grouped_products_that_torch_lacks_are_rejected_by_name():
    pytest.importorskip("transformers")
    spec = spec_of(
        mixtral(experts_implementation="grouped_mm"),
        precision={"layout": "fp32", "compute": "fp64"},
    )
    with pytest.raises(SpecError, match="torch has no grouped matrix product in float64"):
        facts_of(spec)
