"""Dropout outside attention over cp: what becomes of a token follows from its place in the whole
sequence, so that slices compute what all tokens on one rank compute, and cost what is predicted."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from ptrain.spec.axis import Axis
from ptrain.spec.spec import Spec
from ptrain.verification.reference import Trajectory
from tests.gloo.context_cases import ATTENTIONS, HYBRID, VARIANTS, spec_of
from tests.gloo.context_runs import MATRIX, STEPS
from tests.gloo.runs import train
from tests.gloo.test_context import DATA, KEPT, MODELS, SHARDED, STAGES, STATES, some
from tests.gloo.test_own_context import GPT2
from tests.ranks import Ranks

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("forked_traces")]

OUTSIDE: dict[str, Any] = {"dropout": 0.1, "attention_dropout": 0.0}


OPT: dict[str, Any] = {
    "hidden_size": 32,
    "ffn_dim": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 260,
    "word_embed_proj_dim": 32,
}


def dropping(attention: str, model: str = "gqa", **sections: Any) -> Spec:
    return spec_of(attention, model, shape=OUTSIDE, **sections)


OWN: dict[str, dict[str, Any]] = {
    "gpt2": {"hf": "gpt2", "config": GPT2 | {"attn_pdrop": 0.0}},  # behind embedding, sub-blocks
    "opt": {"hf": "opt", "config": OPT},  # of all samples' tokens in one dimension
    "module": {"target": "tests.models_sliced:dropping"},
    "flat": {"target": "tests.models_sliced:dropping", "arguments": {"kind": "flat"}},
    "samples": {"target": "tests.models_sliced:dropping", "arguments": {"kind": "samples"}},
    "places": {"target": "tests.models_sliced:dropping", "arguments": {"kind": "places"}},
}


def own_dropping(attention: str, model: str, **sections: Any) -> Spec:
    """Two samples a micro-batch."""
    if "hf" in OWN[model]:
        pytest.importorskip("transformers")
    count = 2 * sections.get("accumulate", 1)
    batch = {"global": count, "micro": 2, "sequence": 16}
    return spec_of(attention, f"own-{model}", own=OWN[model], batch=batch, **sections)


def with_whole_samples(ranks: Ranks, spec: Spec) -> Trajectory:
    """What the spec's other axes compute without cp: each draws as it does."""
    others = tuple(factor for factor in spec.factors if factor.axis is not Axis.CP)
    alone = replace(spec, factors=others, context=None)
    trajectory: Trajectory | None = ranks.run(alone.world_size, train, alone, STEPS)[0].trajectory
    assert trajectory is not None
    return trajectory


@pytest.mark.parametrize(
    ("attention", "model", "degree"),
    some(
        [*product(VARIANTS, MODELS, (2, 4)), *product((HYBRID,), MODELS, (4,))],
        {("zigzag", "gpt", 2), ("ring", "gqa", 2), ("ulysses", "llama", 2)},
    ),
)
def test_slices_draw_the_masks_of_one_device(
    ranks: Ranks, attention: str, model: str, degree: int
) -> None:
    assert not MATRIX.differences(ranks, dropping(attention, model, degree=degree))


@pytest.mark.nightly
@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_states_cut_over_cp(ranks: Ranks, attention: str, states: str) -> None:
    assert not MATRIX.differences(ranks, dropping(attention, states=states))


@pytest.mark.parametrize(
    ("attention", "data"), some([*product(("ring", "zigzag"), DATA)], [("zigzag", DATA[-1])])
)
def test_each_data_rank_draws_its_own(ranks: Ranks, attention: str, data: dict[str, str]) -> None:
    """One device that draws rank after rank as these do."""
    assert not MATRIX.differences(ranks, dropping(attention, states=SHARDED, other=data))


@pytest.mark.parametrize(
    ("attention", "kept"), some([*product(("ring", "zigzag"), KEPT)], [("zigzag", KEPT[0])])
)
def test_what_is_computed_again_draws_again(
    ranks: Ranks, attention: str, kept: dict[str, Any]
) -> None:
    assert not MATRIX.differences(ranks, dropping(attention, **kept))


@pytest.mark.nightly
@pytest.mark.parametrize("other", [{"tp": "S,S,S,R"}, STAGES], ids=str)
@pytest.mark.parametrize("model", ["gqa", "gpt"])
@pytest.mark.parametrize("attention", ["ring", "zigzag", "ulysses"])
def test_with_an_axis_that_draws_its_own_it_is_that_axis_alone(
    ranks: Ranks, attention: str, model: str, other: dict[str, str]
) -> None:
    spec = dropping(attention, model, other=other, accumulate=2)
    assert not MATRIX.differences(ranks, spec, with_whole_samples(ranks, spec))


@pytest.mark.parametrize(
    ("attention", "model"),
    some(
        [*product(("ring", "zigzag", "ulysses"), OWN)],
        [("zigzag", "gpt2"), ("ring", "flat")],
    ),
)
def test_models_that_are_not_built_in_drop_as_one_device_does(
    ranks: Ranks, attention: str, model: str
) -> None:
    assert not MATRIX.differences(ranks, own_dropping(attention, model))


@pytest.mark.nightly
@pytest.mark.parametrize("other", [{"tp": "S,S,S,R"}, STAGES], ids=str)
def test_so_do_they_beside_an_axis_that_draws_its_own(ranks: Ranks, other: dict[str, str]) -> None:
    spec = own_dropping("zigzag", "gpt2", other=other, accumulate=2)
    assert not MATRIX.differences(ranks, spec, with_whole_samples(ranks, spec))
