"""Ranks of tp folded into ep, each with full experts, compute the result of one device at exactly
the predicted cost; other meshes load their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from ptrain.spec.spec import Spec
from tests.gloo.expert_cases import expert_spec
from tests.gloo.expert_rank_runs import MATRIX
from tests.gloo.test_expert_parallel import (
    KEPT,
    REST,
    load_and_continue,
    nightly_except,
    train_and_save,
)
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

EIGHT = {"experts": 8, "expert_groups": 4}  # of `deep`, whose six no four ranks have
MODELS: Mapping[str, Mapping[str, Any]] = {
    "top-1": {},
    "top-2": {},
    "capacity-top-1": {},
    "balanced": {},
    "deep": EIGHT,
    "latent": {},
}
TP = ("S,S,S,R", "S,S,S,S", "S,S,S,S*")
BESIDE: tuple[dict[str, str], ...] = (
    {"dp_replicate": "ddp"},
    {"dp_shard": "zero1"},
    {"dp_shard": "zero3"},
    {"pp": "S,S,S,R"},
    {"cp": "S*,S,S,S"},
)


def folded_spec(
    model: str, rest: str, tp: str, beside: Mapping[str, str] = {}, **more: Any
) -> Spec:
    shape = {**MODELS[model], **more.pop("shape", {})}
    placement = {**beside, "ep": REST[rest], "tp": tp}
    return expert_spec(model, placement, shape=shape, tensor={"experts": "folded"}, **more)


@pytest.mark.parametrize(
    ("model", "rest", "tp"),
    nightly_except(
        [*product(MODELS, REST, TP)],
        (("deep", "zero3", "S,S,S,R"), ("capacity-top-1", "zero1", "S,S,S,S")),
    ),
)
def test_folded_ranks_are_exact_and_equal_one_device(
    ranks: Ranks, model: str, rest: str, tp: str
) -> None:
    assert not MATRIX.differences(ranks, folded_spec(model, rest, tp))


@pytest.mark.nightly
@pytest.mark.parametrize("tp", TP[:2])
@pytest.mark.parametrize("beside", BESIDE, ids=str)
@pytest.mark.parametrize("rest", ["zero1", "zero3"])
@pytest.mark.parametrize("model", ["top-2", "deep", "latent"])
def test_folded_ranks_with_another_axis_are_exact_and_equal_one_device(
    ranks: Ranks, model: str, rest: str, beside: dict[str, str], tp: str
) -> None:
    accumulate = 4 if "pp" in beside else 2
    assert not MATRIX.differences(
        ranks, folded_spec(model, rest, tp, beside, accumulate=accumulate)
    )


@pytest.mark.nightly
@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("model", ["top-2", "capacity-top-1", "balanced"])
def test_folded_ranks_with_every_activation_mode_are_exact_and_equal_one_device(
    ranks: Ranks, model: str, kept: dict[str, Any], tp: str
) -> None:
    assert not MATRIX.differences(ranks, folded_spec(model, "zero2", tp, **kept))


@pytest.mark.nightly
@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize("model", ["top-2", "capacity-top-1"])
def test_folded_ranks_with_shared_experts_are_exact_and_equal_one_device(
    ranks: Ranks, model: str, tp: str
) -> None:
    spec = folded_spec(model, "zero2", tp, overlap_shared_experts=True)
    assert not MATRIX.differences(ranks, spec)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["bf16", "zero16"])
@pytest.mark.parametrize("model", ["top-2", "capacity-top-1"])
def test_folded_ranks_in_true_dtypes_are_exact(ranks: Ranks, model: str, layout: str) -> None:
    spec = folded_spec(model, "zero3", "S,S,S,S", precision={"layout": layout})
    assert not MATRIX.differences(ranks, spec)


@pytest.mark.nightly
def test_an_expert_width_that_tp_does_not_divide_is_exact(ranks: Ranks) -> None:
    assert not MATRIX.differences(
        ranks, folded_spec("top-1", "ddp", "S,S,S,R", shape={"expert_ffn": 7})
    )


@pytest.mark.nightly
@pytest.mark.parametrize("tp", TP[:2])
def test_a_checkpoint_is_bitwise_the_same_on_ranks_with_other_experts(
    ranks: Ranks, tmp_path: Path, tp: str
) -> None:
    batch = {"global": 8, "micro": 1, "sequence": 16}
    first = folded_spec("deep", "zero3", tp, batch=batch)
    placement = {"dp_shard": "zero3", "ep": REST["zero2"]}
    then = expert_spec("deep", placement, shape=EIGHT, batch=batch)
    for number, (saved, resumed) in enumerate(((first, then), (then, first))):
        folder = tmp_path / str(number)
        before = ranks.run(saved.world_size, train_and_save, saved, str(folder))[0]
        after = ranks.run(resumed.world_size, load_and_continue, resumed, str(folder))[0]
        assert before[0].keys() == after[0].keys()
        for name, value in before[0].items():
            assert torch.equal(after[0][name], value), name
        assert after[1:] == pytest.approx(before[1:], rel=1e-12)
