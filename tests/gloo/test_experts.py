"""Layers of experts over data ranks, stages, token slices and sharded operators compute the result
of one device at exactly the predicted cost: no size depends on routing."""

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


def nightly_except(cases: list[Any], default: Collection[Any]) -> list[Any]:
    """Mark all cases that are not in the default run as nightly."""
    return [case if case in default else nightly(*case) for case in cases]


@pytest.mark.parametrize(
    ("model", "data"),
    nightly_except([*product(MODELS, DATA)], (("balanced", DATA[3]), ("capacity", DATA[1]))),
)
def test_experts_with_data_ranks_are_exact_and_equal_one_device(
    ranks: Ranks, model: str, data: dict[str, str]
) -> None:
    assert not MATRIX.differences(ranks, expert_spec(model, data))


@pytest.mark.parametrize(
    ("model", "schedule"), nightly_except([*product(MODELS, SCHEDULES)], (("deep", "1f1b"),))
)
def test_experts_with_pp_are_exact_and_equal_one_device(
    ranks: Ranks, model: str, schedule: str
) -> None:
    spec = expert_spec(model, STAGES, accumulate=4, pipeline={"schedule": schedule})
    assert not MATRIX.differences(ranks, spec)


@pytest.mark.parametrize(
    ("model", "activations"),
    nightly_except([*product(MODELS, ("R", "S", "S*"))], (("latent", "S"), ("balanced", "R"))),
)
def test_experts_with_tp_are_exact_and_equal_one_device(
    ranks: Ranks, model: str, activations: str
) -> None:
    assert not MATRIX.differences(ranks, expert_spec(model, {"tp": f"S,S,S,{activations}"}))


@pytest.mark.parametrize(
    ("model", "attention"),
    nightly_except(
        [*product(MODELS, ATTENTIONS)], (("capacity", "zigzag"), ("balanced", "all-gather"))
    ),
)
def test_experts_with_cp_are_exact_and_equal_one_device(
    ranks: Ranks, model: str, attention: str
) -> None:
    activations = "S*" if attention == "all-gather" else "S"
    states = {"cp": f"S*,S,S,{activations}"}
    assert not MATRIX.differences(
        ranks, expert_spec(model, states, context={"attention": attention})
    )


@pytest.mark.nightly
@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_experts_with_every_activation_mode_are_exact_and_equal_one_device(
    ranks: Ranks, model: str, kept: dict[str, Any]
) -> None:
    assert not MATRIX.differences(ranks, expert_spec(model, **kept))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "placement"),
    [*product(("top-1", "top-2", "capacity", "balanced", "deep"), BESIDE)],
    ids=str,
)
def test_experts_on_two_axes_are_exact_and_equal_one_device(
    ranks: Ranks, model: str, placement: dict[str, str]
) -> None:
    assert not MATRIX.differences(ranks, expert_spec(model, placement))


@pytest.mark.parametrize(
    ("model", "layout"),
    nightly_except([*product(MODELS, ("fp32", "bf16", "zero16"))], (("top-1", "bf16"),)),
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
    ("shape", "placement", "more"), nightly_except([*FEW_CASES], FEW_CASES[:2]), ids=lambda _: ""
)
def test_fewer_experts_than_ranks_are_exact_and_equal_one_device(
    ranks: Ranks, shape: dict[str, Any], placement: dict[str, str], more: dict[str, Any]
) -> None:
    assert not MATRIX.differences(ranks, expert_spec("top-1", placement, shape=shape, **more))
