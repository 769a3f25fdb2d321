"""Operators sharded over tp, alone and with every data placement, compute the result of one device
at exactly the predicted cost."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest

from tests.gloo.tensor_cases import ACTIVATIONS, MODELS, factorizations, tensor_spec
from tests.gloo.tensor_runs import MATRIX
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

nightly = partial(pytest.param, marks=pytest.mark.nightly)
NAIVE, GATHERED = {"plan": "naive"}, {"loss_parallel": False}
LAYOUTS: list[Any] = [
    nightly("gqa", "fp16", "S*", {}),
    ("gqa", "fsdp-mixed", "S", {"dp_shard": "zero3"}),
    nightly("gpt", "zero16", "R", {"dp_shard": "O,O,S,R"}),
    nightly("gpt", "bf16", "R", {"dp_shard": "zero3"}),
    nightly("gqa", "fp32", "R", {}),
    nightly("gpt", "zero16", "S", {}),
    nightly("gpt", "fp16", "S", {"dp_shard": "zero2"}),
    nightly("gqa", "zero16", "R", {"dp_replicate": "ddp"}),
]


def models() -> list[Any]:
    """Yield the cases. By default every model except gpt-untied runs once, on either degree, with
    every activation mode: gqa on as many ranks as it has keys, llama with R together with
    ZeRO-1."""
    default = {("llama", 2, "S"), ("gqa", 2, "R"), ("gpt", 2, "R")}
    default |= {("gqa", 4, "S*")}
    cases = [*product(MODELS, [2], ACTIVATIONS), *product(["gqa", "gpt-untied"], [4], ACTIVATIONS)]
    return [case if case in default else nightly(*case) for case in cases]


@pytest.mark.parametrize(("model", "degree", "activations"), models())
def test_a_tensor_parallel_model_is_exact_and_equals_one_device(
    ranks: Ranks, model: str, degree: int, activations: str
) -> None:
    accumulate = 2 if degree == 2 else 1  # four ranks share two cores
    spec = tensor_spec(model, activations=activations, degree=degree, accumulate=accumulate)
    assert not MATRIX.differences(ranks, spec)


@pytest.mark.parametrize(
    ("model", "tensor"),
    [
        ("llama", NAIVE),
        ("gpt", GATHERED),
        nightly("gpt", NAIVE | GATHERED),
        *(nightly(*case) for case in (("gpt", NAIVE), ("llama", GATHERED))),
    ],
    ids=str,
)
def test_other_plans_are_exact_and_equal_one_device(
    ranks: Ranks, model: str, tensor: dict[str, Any]
) -> None:
    assert not MATRIX.differences(ranks, tensor_spec(model, tensor=tensor, shape={"vocab": 260}))


@pytest.mark.parametrize("activations", ["S", nightly("S*")])
@pytest.mark.parametrize("data", [nightly("ddp"), nightly("zero1"), nightly("zero2"), "zero3"])
def test_slices_of_tokens_within_data_ranks_are_exact_and_equal_one_device(
    ranks: Ranks, data: str, activations: str
) -> None:
    axis = "dp_replicate" if data == "ddp" else "dp_shard"
    assert not MATRIX.differences(
        ranks, tensor_spec("gpt", activations=activations, data={axis: data})
    )


@pytest.mark.parametrize(
    ("degree", "activations", "shape", "data"),
    [
        (4, "S", {"kv_heads": 2}, {}),
        nightly(2, "R", {"kv_heads": 1}, {}),
        nightly(4, "S*", {"kv_heads": 1}, {}),
        nightly(2, "S", {"kv_heads": 1, "qk_norm": True, "bias": "qkv"}, {"dp_shard": "zero3"}),
        nightly(2, "R", {"kv_heads": 1}, {"cp": "R,R,R,S"}),
    ],
    ids=str,
)
def test_ranks_that_share_a_key_value_head_are_exact_and_equal_one_device(
    ranks: Ranks, degree: int, activations: str, shape: dict[str, Any], data: dict[str, Any]
) -> None:
    spec = tensor_spec(
        "gqa", activations=activations, degree=degree, data=data, accumulate=1, shape=shape
    )
    assert not MATRIX.differences(ranks, spec)


# ZeRO-3 runs by default above, of gpt with slices of tokens; tp alone in the first test.
@pytest.mark.parametrize(
    ("degrees", "data"),
    [
        case if case[0]["tp"] > 1 and case[1].get("dp_shard") == "zero1" else nightly(*case)
        for case in factorizations(4)
    ],
    ids=str,
)
def test_every_factorization_of_four_ranks_with_tp_is_exact_and_equals_one_device(
    ranks: Ranks, degrees: dict[str, int], data: dict[str, str]
) -> None:
    assert not MATRIX.differences(
        ranks, tensor_spec(data=data, degrees=degrees, degree=degrees["tp"])
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("degrees", "data", "activations"),
    [
        (*case, activations)
        for case in factorizations(8)
        for activations in ("R", "S")
        if activations == "R" or case[0]["tp"] > 1  # without tp nothing is cut
    ],
    ids=str,
)
def test_every_factorization_of_eight_ranks_with_tp_is_exact_and_equals_one_device(
    ranks: Ranks, degrees: dict[str, int], data: dict[str, str], activations: str
) -> None:
    cut = {"activations": activations, "degrees": degrees, "degree": degrees["tp"]}
    shape = {"heads": 8, "kv_heads": 8, "vocab": 260}
    assert not MATRIX.differences(ranks, tensor_spec(data=data, accumulate=1, shape=shape, **cut))


@pytest.mark.parametrize(("model", "layout", "activations", "data"), LAYOUTS, ids=str)
def test_in_true_dtypes_bytes_are_exact_and_losses_within_their_band(
    ranks: Ranks, model: str, layout: str, activations: str, data: dict[str, str]
) -> None:
    batch = {"global": 8 if data else 4, "micro": 2, "sequence": 16}
    precision = {"layout": layout}
    spec = tensor_spec(model, activations=activations, data=data, precision=precision, batch=batch)
    assert not MATRIX.differences(ranks, spec)
