"""Layers of experts over data ranks, stages, slices of the tokens and cut operators compute what
one device computes, and cost what is predicted to the byte: no size depends on where tokens go."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from itertools import product
from typing import Any

import pytest

from tests.gloo.expert_cases import MODELS, expert_spec
from tests.gloo.expert_runs import MATRIX
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

nightly = partial(pytest.param, marks=pytest.mark.nightly)

DATA: tuple[dict[str, str], ...] = (
    {"dp_replicate": "ddp"},
    {"dp_shard": "zero1"},
    {"dp_shard": "zero2"},
    {"dp_shard": "zero3"},
    {"dp_replicate": "ddp", "dp_shard": "zero3"},
)
STAGES = {"pp": "S,S,S,R"}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev")
KEPT: tuple[dict[str, Any], ...] = (
    {"activations": "M"},
    {"activations": "M", "recompute": "selective"},
    {"activations": "O"},
    {"loss": {"chunk": 4}},
    {"unit": "sub-block"},
    {"batch": {"global": 8, "micro": 4, "sequence": 16}},
)
BESIDE = [STAGES | DATA[3], {"cp": "S*,S,S,S"} | DATA[3], {"tp": "S,S,S,S"} | DATA[3]]
ATTENTIONS = ("ring", "zigzag", "all-gather", "ulysses")


def some(cases: list[Any], default: Collection[Any]) -> list[Any]:
    """Those that do not run by default run at night."""
    return [case if case in default else nightly(*case) for case in cases]


@pytest.mark.parametrize(
    ("model", "data"),
    some([*product(MODELS, DATA)], (("balanced", DATA[3]), ("capacity", DATA[1]))),
)
def test_with_data_ranks(ranks: Ranks, model: str, data: dict[str, str]) -> None:
    assert not MATRIX.differences(ranks, expert_spec(model, data))


@pytest.mark.parametrize(
    ("model", "schedule"), some([*product(MODELS, SCHEDULES)], (("deep", "1f1b"),))
)
def test_with_stages(ranks: Ranks, model: str, schedule: str) -> None:
    spec = expert_spec(model, STAGES, accumulate=4, pipeline={"schedule": schedule})
    assert not MATRIX.differences(ranks, spec)


@pytest.mark.parametrize(
    ("model", "activations"),
    some([*product(MODELS, ("R", "S", "S*"))], (("latent", "S"), ("balanced", "R"))),
)
def test_with_operators_cut(ranks: Ranks, model: str, activations: str) -> None:
    assert not MATRIX.differences(ranks, expert_spec(model, {"tp": f"S,S,S,{activations}"}))


@pytest.mark.parametrize(
    ("model", "attention"),
    some([*product(MODELS, ATTENTIONS)], (("capacity", "zigzag"), ("balanced", "all-gather"))),
)
def test_with_slices_of_the_tokens(ranks: Ranks, model: str, attention: str) -> None:
    activations = "S*" if attention == "all-gather" else "S"
    states = {"cp": f"S*,S,S,{activations}"}
    assert not MATRIX.differences(
        ranks, expert_spec(model, states, context={"attention": attention})
    )


@pytest.mark.nightly
@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_with_activations_kept_otherwise(ranks: Ranks, model: str, kept: dict[str, Any]) -> None:
    assert not MATRIX.differences(ranks, expert_spec(model, **kept))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "placement"),
    [*product(("top-1", "top-2", "capacity", "balanced", "deep"), BESIDE)],
    ids=str,
)
def test_on_two_axes(ranks: Ranks, model: str, placement: dict[str, str]) -> None:
    assert not MATRIX.differences(ranks, expert_spec(model, placement))


@pytest.mark.parametrize(
    ("model", "layout"),
    some([*product(MODELS, ("fp32", "bf16", "zero16"))], (("top-1", "bf16"),)),
)
def test_in_true_dtypes_bytes_are_exact(ranks: Ranks, model: str, layout: str) -> None:
    assert not MATRIX.differences(ranks, expert_spec(model, precision={"layout": layout}))


# Fewer experts than ranks: sharded on a later dimension, which dominates the peaks at these widths.
FEW = {"experts": 2, "ffn": 512}
ODD = FEW | {"ffn": 301}  # a width that no number of ranks divides
EP = {"dp_shard": "zero3", "ep": "zero3"}
FEW_CASES: tuple[tuple[dict[str, Any], dict[str, str], dict[str, Any]], ...] = (
    (FEW, EP, {"precision": {"layout": "zero16"}}),
    (ODD, EP, {}),
    (FEW, EP, {}),
    (FEW, EP, {"precision": {"layout": "fsdp-mixed"}}),
    (FEW, {"dp_shard": "zero3"}, {"degrees": {"dp_shard": 4}}),
    (ODD, {"dp_shard": "zero3"}, {"degrees": {"dp_shard": 4}, "sync": {"gradients": "last"}}),
    (
        FEW,
        {"dp_shard": "zero3"},
        {"degrees": {"dp_shard": 4}, "sync": {"reshard_after_forward": 2}},
    ),
    (FEW | {"experts": 1}, {"dp_replicate": "ddp", "dp_shard": "zero3"}, {}),
    (FEW | {"experts": 1}, {"dp_shard": "zero3", "tp": "S,S,S,S"}, {}),
    (FEW | {"experts": 1}, {"pp": "S,S,S,R", "dp_shard": "zero3"}, {"unit": "sub-block"}),
)


@pytest.mark.parametrize(
    ("shape", "placement", "more"), some([*FEW_CASES], FEW_CASES[:2]), ids=lambda _: ""
)
def test_fewer_experts_than_ranks(
    ranks: Ranks, shape: dict[str, Any], placement: dict[str, str], more: dict[str, Any]
) -> None:
    assert not MATRIX.differences(ranks, expert_spec("top-1", placement, shape=shape, **more))
