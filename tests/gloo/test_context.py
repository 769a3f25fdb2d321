"""Token slices over cp, alone and with every other axis, compute the result of one device at
exactly the predicted cost."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from itertools import product
from typing import Any

import pytest

from tests.gloo.context_cases import ATTENTIONS, HYBRID, VARIANTS, context_spec
from tests.gloo.context_runs import MATRIX
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

nightly = partial(pytest.param, marks=pytest.mark.nightly)

# As many keys as queries; fewer, and a tied head; a tied head and learned positions.
MODELS = ("llama", "gqa", "gpt")
# A rank's work depends on the number of ranks, so each kind of ring runs on four once.
ALONE = {
    ("all-gather", "gqa", 2), ("ulysses", "gpt", 2), ("zigzag", "gqa", 4), (HYBRID, "gqa", 4),
}  # fmt: skip

REPLICAS, SHARDED = "R,R,R", "S*,S,S"
STATES = ("R,S,R", "R,S,S", SHARDED)
ZERO3 = {"dp_shard": "zero3"}
DATA: tuple[dict[str, str], ...] = (
    {"dp_replicate": "ddp"},  # with Theta sharded over cp: HSDP
    {"dp_shard": "zero1"},
    {"dp_shard": "zero2"},
    ZERO3,
)
IN_SLICES = {"tp": "S,S,S,S"}
OPERATORS: tuple[dict[str, str], ...] = ({"tp": "S,S,S,R"}, IN_SLICES)
STAGES = {"pp": "S,S,S,R"}
SCHEDULES = ("naive", "gpipe", "1f1b", "bfs", "interleaved", "zero-bubble", "zbv", "dualpipev")
KEPT: tuple[dict[str, Any], ...] = (
    {"activations": "M"},
    {"activations": "M", "recompute": "selective"},
    {"activations": "M", "recompute": "attention"},
    {"activations": "M", "recompute": {"keep": ["matmul", "collective"]}},
    {"activations": "O"},
    {"loss": {"chunk": 4}},
)
# Two axes with cp, on eight ranks.
TWO_OTHERS: tuple[tuple[str, dict[str, str]], ...] = (
    (REPLICAS, {"dp_replicate": "ddp", **ZERO3}),
    (SHARDED, {"dp_replicate": "ddp", **ZERO3}),
    (SHARDED, {**ZERO3, **IN_SLICES}),
    (SHARDED, {**STAGES, **ZERO3}),
    (REPLICAS, {**STAGES, **IN_SLICES}),
)


def nightly_except(cases: list[Any], default: Collection[Any]) -> list[Any]:
    """Mark all cases that are not in the default run as nightly."""
    return [case if case in default else nightly(*case) for case in cases]


@pytest.mark.parametrize(
    ("attention", "model", "degree"),
    nightly_except([*product(VARIANTS, MODELS, (2, 4)), *product((HYBRID,), MODELS, (4,))], ALONE),
)
def test_slices_alone_are_exact_and_equal_one_device(
    ranks: Ranks, attention: str, model: str, degree: int
) -> None:
    assert not MATRIX.differences(ranks, context_spec(attention, model, degree=degree))


@pytest.mark.parametrize(
    ("attention", "kv_heads", "degree"),
    [("ulysses", 1, 2), nightly("ulysses", 2, 4), nightly("ulysses", 1, 4), nightly(HYBRID, 1, 4)],
)
def test_fewer_heads_of_keys_than_ranks_are_repeated(
    ranks: Ranks, attention: Any, kv_heads: int, degree: int
) -> None:
    spec = context_spec(attention, degree=degree, shape={"kv_heads": kv_heads})
    assert not MATRIX.differences(ranks, spec)


@pytest.mark.nightly
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_any_number_of_micro_batches_is_exact_and_equals_one_device(
    ranks: Ranks, attention: str, model: str, accumulate: int
) -> None:
    assert not MATRIX.differences(ranks, context_spec(attention, model, accumulate=accumulate))


@pytest.mark.parametrize(
    ("attention", "model", "states"),
    nightly_except([*product(ATTENTIONS, MODELS, STATES)], {("zigzag", "gqa", SHARDED)}),
)
def test_states_sharded_over_cp_are_exact_and_equal_one_device(
    ranks: Ranks, attention: str, model: str, states: str
) -> None:
    assert not MATRIX.differences(ranks, context_spec(attention, model, states=states))


@pytest.mark.parametrize(
    ("attention", "model", "states", "data"),
    nightly_except(
        [*product(ATTENTIONS, MODELS, (REPLICAS, SHARDED, "R,S,R"), DATA)],
        (
            ("ring", "gqa", SHARDED, ZERO3),  # fully_shard over both
            ("zigzag", "gqa", REPLICAS, ZERO3),  # copies over cp within shards
        ),
    ),
)
def test_cp_with_data_ranks_is_exact_and_equals_one_device(
    ranks: Ranks, attention: str, model: str, states: str, data: dict[str, str]
) -> None:
    assert not MATRIX.differences(ranks, context_spec(attention, model, states=states, other=data))


@pytest.mark.parametrize(
    ("attention", "model", "operators"),
    nightly_except([*product(ATTENTIONS, MODELS, OPERATORS)], (("zigzag", "gpt", IN_SLICES),)),
)
def test_cp_with_tp_is_exact_and_equals_one_device(
    ranks: Ranks, attention: str, model: str, operators: dict[str, str]
) -> None:
    assert not MATRIX.differences(ranks, context_spec(attention, model, other=operators))


@pytest.mark.parametrize(
    ("attention", "model", "schedule"),
    nightly_except([*product(ATTENTIONS, MODELS, SCHEDULES)], {("zigzag", "gqa", "1f1b")}),
)
def test_cp_with_pp_is_exact_and_equals_one_device(
    ranks: Ranks, attention: str, model: str, schedule: str
) -> None:
    spec = context_spec(
        attention,
        model,
        other=STAGES,
        accumulate=4,
        shape={"layers": 4},
        pipeline={"schedule": schedule},
    )
    assert not MATRIX.differences(ranks, spec)


@pytest.mark.parametrize(
    ("attention", "model", "kept"),
    nightly_except([*product(ATTENTIONS, MODELS, KEPT)], (("zigzag", "gqa", KEPT[0]),)),
)
def test_cp_with_every_activation_mode_is_exact_and_equals_one_device(
    ranks: Ranks, attention: str, model: str, kept: dict[str, Any]
) -> None:
    assert not MATRIX.differences(ranks, context_spec(attention, model, **kept))


@pytest.mark.nightly
@pytest.mark.parametrize(("states", "others"), TWO_OTHERS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("attention", VARIANTS)
def test_cp_with_two_other_axes_is_exact_and_equals_one_device(
    ranks: Ranks, attention: str, model: str, states: str, others: dict[str, str]
) -> None:
    spec = context_spec(attention, model, states=states, other=others, accumulate=2)
    assert not MATRIX.differences(ranks, spec)


@pytest.mark.nightly
def test_gradients_of_gathered_keys_are_exchanged_if_the_spec_requests_it(ranks: Ranks) -> None:
    assert not MATRIX.differences(ranks, context_spec("all-gather", reduce_scatter="all_to_all"))


@pytest.mark.parametrize(
    ("attention", "layout"),
    nightly_except([*product(ATTENTIONS, ("fp32", "bf16", "zero16"))], {("ring", "zero16")}),
)
def test_in_true_dtypes_bytes_are_exact(ranks: Ranks, attention: str, layout: str) -> None:
    assert not MATRIX.differences(ranks, context_spec(attention, precision={"layout": layout}))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "shape", [{"attention_soft_cap": 20.0}, {"window": 6}, {"dropout": 0.0}], ids=str
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_ulysses_supports_every_attention_of_one_device(
    ranks: Ranks, shape: dict[str, Any], attention: str
) -> None:
    spec = context_spec("ulysses", "llama", shape=shape, attention=attention)
    assert not MATRIX.differences(ranks, spec)
