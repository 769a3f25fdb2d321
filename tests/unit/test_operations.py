"""The predicted operations of a step equal torch's counter: forward, backward, and
recomputation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import pytest
import torch

from ptrain.algebra.legality import require_runnable
from ptrain.cost import Phase
from ptrain.data.sampler import LocalBatch, blank_batch
from ptrain.derivation.estimate import derive
from ptrain.derivation.work import rank_operations
from ptrain.interpreter.program import interpret
from ptrain.models.objective import can_fuse
from ptrain.plan.lower import built_in_facts, lower
from ptrain.runtime.world import World, fake_world
from ptrain.simulation.execute import simulate
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from tests.flops import count_step

MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"family": "llama", "kv_heads": 2},
    "llama-mha": {"family": "llama", "kv_heads": 4, "tied": True},
    "gpt": {"family": "gpt"},
    "gpt-dropout": {"family": "gpt", "dropout": 0.1, "tied": True},
}
KEPT: Mapping[str, Mapping[str, Any]] = {
    "R": {},
    "O": {"activations": "O"},
    "full": {"activations": "M"},
    "full-offload": {"activations": "M@host"},
    "selective": {"activations": "M", "recompute": "selective"},
    "attention": {"activations": "M", "recompute": "attention"},
    "every-2": {"activations": "M", "recompute": {"every": 2}},
    "mixture": {"activations": {"0": "M", "1": "O", "2-": "R"}},
    "chunk": {"loss": {"chunk": 5}},
    "chunk-full": {"activations": "M", "loss": {"chunk": 5}},
    "fused": {"loss": {"chunk": 5, "fused": True}},
}
DEFAULT = {
    ("llama", "sdpa", "full"),
    ("llama", "eager", "attention"),
    ("gpt", "eager", "selective"),
    ("gpt", "sdpa", "every-2"),
    ("gpt-dropout", "eager", "chunk-full"),
}


def spec_of(model: str, attention: str, kept: str, **over: Any) -> Spec:
    shape = {"layers": 3, "hidden": 32, "heads": 4, "ffn": 48, "vocab": 260}
    mapping = {
        "name": f"{model}-{attention}-{kept}",
        "model": shape | MODELS[model],
        "attention": attention,
        "mesh": {"dp_replicate": 1},
        "precision": {"layout": "fp32"},
        "batch": {"accumulate": 2, "micro": 2, "sequence": 12},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "data": {"corpus": "synthetic", "tokenizer": "bytes"},
    }
    return require_runnable(load(mapping | KEPT[kept] | over))


def cases() -> Iterator[Any]:
    for case in product(MODELS, ("sdpa", "eager"), KEPT):
        marks = [] if case in DEFAULT else [pytest.mark.nightly]
        if case[-1] == "fused" and not can_fuse():
            marks.append(pytest.mark.skip(reason="torch has no linear_cross_entropy"))
        yield pytest.param(*case, marks=marks, id="-".join(case))


@pytest.mark.parametrize(("model", "attention", "kept"), list(cases()))
def test_operations_are_those_that_are_predicted(model, attention, kept):
    spec = spec_of(model, attention, kept)
    tokens = torch.zeros(spec.batch.micro * 2, spec.batch.sequence + 1, dtype=torch.int64)
    batch = LocalBatch(tokens=tokens, global_tokens=spec.batch.tokens, sample_ids=())
    found = count_step(interpret(spec, world=World()), batch)
    (predicted,) = derive(spec).exact.operations
    assert found[Phase.FORWARD] == predicted.forward
    assert found[Phase.BACKWARD] == predicted.backward + predicted.again
    assert found[Phase.UPDATE] == 0


VARIANTS: Mapping[str, tuple[Any, int]] = {
    "ring": ("ring", 3),
    "zigzag": ("zigzag", 3),
    "all-gather": ("all-gather", 3),
    "ulysses": ("ulysses", 2),
    "hybrid": ({"ulysses": 2, "ring": 2}, 4),
}
SLICED = {("ring", "R"), ("zigzag", "full"), ("all-gather", "attention"), ("hybrid", "R")}


def sliced_cases() -> Iterator[Any]:
    kinds = ("R", "full", "selective", "attention", "mixture", "chunk")
    for case in product(VARIANTS, kinds):
        marks = [] if case in SLICED else [pytest.mark.nightly]
        yield pytest.param(*case, marks=marks, id="-".join(case))


@pytest.mark.parametrize(("variant", "kept"), list(sliced_cases()))
def test_operations_of_ranks_with_slices_of_the_tokens_are_those_that_are_predicted(variant, kept):
    attention, degree = VARIANTS[variant]
    slices = "S*" if variant == "all-gather" else "S"
    spec = spec_of(
        "llama",
        "sdpa",
        kept,
        mesh={"cp": degree},
        placement={"cp": f"R,R,R,{slices}"},
        context={"attention": attention},
        batch={"accumulate": 2, "micro": 2, "sequence": 24},
    )
    facts = built_in_facts(spec)
    rows = rank_operations(spec, lower(spec, facts))
    for predicted in (rows[0], rows[degree - 1]):
        world = fake_world(predicted.rank, degree)
        try:
            program = interpret(spec, world=world)
            found = count_step(program, program.own_tokens(blank_batch(spec)))
        finally:
            world.close()
        assert found[Phase.FORWARD] == predicted.forward
        assert found[Phase.BACKWARD] == predicted.backward + predicted.again


@pytest.mark.parametrize("attention", ["zigzag", "all-gather"])
def test_a_simulation_counts_attention_over_cp_that_runs_again(attention):
    """It runs in a function with a backward pass of its own, where nothing records a graph."""
    spec = spec_of(
        "llama",
        "sdpa",
        "attention",
        mesh={"cp": 2},
        placement={"cp": f"R,R,R,{'S*' if attention == 'all-gather' else 'S'}"},
        context={"attention": attention},
        batch={"accumulate": 1, "micro": 1, "sequence": 24},
    )
    facts = built_in_facts(spec)
    rows = rank_operations(spec, lower(spec, facts))
    assert rows[1].again
    assert simulate(spec, 1).estimate.operations == (rows[1],)


def test_only_matrix_products_that_backward_needs_run_again():
    """All of a block but its last product, whose result nothing but the next block needs."""
    shape, tokens = spec_of("gpt", "eager", "full").model, 4 * 12
    (found,) = derive(spec_of("gpt", "eager", "full")).exact.operations
    head, last = 2 * tokens * 32 * 260, 2 * tokens * 48 * 32
    assert found.again == found.forward - head - shape.layers * last
    (plain,) = derive(spec_of("gpt", "eager", "R")).exact.operations
    assert (found.forward, found.backward) == (plain.forward, plain.backward)
