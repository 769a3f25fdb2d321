"""Slices of the tokens over cp, alone and with every other axis, compute what one device computes,
and cost what is predicted to the byte."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from itertools import product
from typing import Any

import pytest

from tests.gloo.context_cases import HYBRID, VARIANTS, spec_of
from tests.gloo.context_runs import MATRIX
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

nightly = partial(pytest.param, marks=pytest.mark.nightly)

# A model with fewer keys than queries, one with as many, and one with a tied head and learned
# positions; what a rank does depends on the number of ranks, so each kind of ring has four once.
ALONE = {("all-gather", "gqa", 2), ("ulysses", "gpt", 2), ("zigzag", "gqa", 4)}

STATES = ("R,S,R", "R,S,S", "S*,S,S")
DATA: tuple[dict[str, str], ...] = (
    {"dp_replicate": "ddp"},
    {"dp_shard": "zero1"},
    {"dp_shard": "zero2"},
    {"dp_shard": "zero3"},
)
OPERATORS: tuple[dict[str, str], ...] = ({"tp": "S,S,S,R"}, {"tp": "S,S,S,S"})
SCHEDULES = ("naive", "gpipe", "1f1b", "bfs", "interleaved", "zero-bubble", "zbv", "dualpipev")
KEPT: tuple[dict[str, Any], ...] = (
    {"activations": "M"},
    {"activations": "M", "recompute": "selective"},
    {"activations": "M", "recompute": "attention"},
    {"activations": "O"},
    {"loss": {"chunk": 4}},
)


def some(cases: list[Any], default: Collection[Any]) -> list[Any]:
    """Those that do not run by default run at night."""
    return [case if case in default else nightly(*case) for case in cases]


@pytest.mark.parametrize(
    ("attention", "model", "degree"),
    some([*product(VARIANTS, ("llama", "gqa", "gpt"), (2, 4))], ALONE),
)
def test_slices_alone_are_exact_and_equal_one_device(
    ranks: Ranks, attention: str, model: str, degree: int
) -> None:
    assert not MATRIX.differences(ranks, spec_of(attention, model, degree=degree))


@pytest.mark.parametrize("model", ["gqa", nightly("gpt")])
def test_a_ring_of_ulysses_groups_is_exact_and_equals_one_device(ranks: Ranks, model: str) -> None:
    assert not MATRIX.differences(ranks, spec_of(HYBRID, model, degree=4))


@pytest.mark.parametrize(
    ("attention", "states"),
    some([*product(VARIANTS, STATES)], {("zigzag", "S*,S,S")}),
)
def test_states_cut_over_cp(ranks: Ranks, attention: str, states: str) -> None:
    assert not MATRIX.differences(ranks, spec_of(attention, states=states))


@pytest.mark.parametrize(
    ("attention", "states", "data"),
    some(
        [*product(VARIANTS, ("R,R,R", "S*,S,S", "R,S,R"), DATA)],
        (
            ("ring", "S*,S,S", DATA[3]),  # fully_shard over both
            ("zigzag", "R,R,R", DATA[3]),  # copies over cp within shards
        ),
    ),
)
def test_with_data_ranks(ranks: Ranks, attention: str, states: str, data: dict[str, str]) -> None:
    assert not MATRIX.differences(ranks, spec_of(attention, states=states, other=data))


@pytest.mark.parametrize(
    ("attention", "model", "operators"),
    some(
        [*product(VARIANTS, ("gqa", "gpt"), OPERATORS)],
        (("zigzag", "gpt", OPERATORS[1]),),
    ),
)
def test_with_operators_cut(
    ranks: Ranks, attention: str, model: str, operators: dict[str, str]
) -> None:
    assert not MATRIX.differences(ranks, spec_of(attention, model, other=operators))


@pytest.mark.parametrize(
    ("attention", "schedule"),
    some([*product(VARIANTS, SCHEDULES)], {("zigzag", "1f1b")}),
)
def test_with_stages(ranks: Ranks, attention: str, schedule: str) -> None:
    spec = spec_of(
        attention,
        other={"pp": "S,S,S,R"},
        accumulate=4,
        shape={"layers": 4},
        pipeline={"schedule": schedule},
    )
    assert not MATRIX.differences(ranks, spec)


@pytest.mark.parametrize(
    ("attention", "kept"),
    some([*product(VARIANTS, KEPT)], (("zigzag", KEPT[0]),)),
)
def test_with_activations_kept_otherwise(
    ranks: Ranks, attention: str, kept: dict[str, Any]
) -> None:
    assert not MATRIX.differences(ranks, spec_of(attention, **kept))


@pytest.mark.parametrize(
    ("attention", "layout"),
    some([*product(VARIANTS, ("fp32", "bf16", "zero16"))], {("ring", "zero16")}),
)
def test_in_true_dtypes_bytes_are_exact(ranks: Ranks, attention: str, layout: str) -> None:
    assert not MATRIX.differences(ranks, spec_of(attention, precision={"layout": layout}))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "shape", [{"attention_soft_cap": 20.0}, {"window": 6}, {"dropout": 0.0}], ids=str
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_all_tokens_of_some_heads_take_whatever_one_device_takes(
    ranks: Ranks, shape: dict[str, Any], attention: str
) -> None:
    spec = spec_of("ulysses", "llama", shape=shape, attention=attention)
    assert not MATRIX.differences(ranks, spec)
