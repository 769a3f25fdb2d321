"""Dropout outside attention over cp depends on a token's position in the full sequence, so slices
compute the result of one rank with all tokens at exactly the predicted cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from ptrain.axes.context.attention import context_of, spans_at
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from ptrain.verification.reference import Trajectory
from tests.gloo.context_cases import ATTENTIONS, HYBRID, VARIANTS, context_spec
from tests.gloo.context_runs import MATRIX, STEPS
from tests.gloo.runs import train_on_rank
from tests.gloo.test_context import (
    DATA,
    IN_SLICES,
    KEPT,
    MODELS,
    SHARDED,
    STAGES,
    STATES,
    nightly_except,
)
from tests.gloo.test_exact import failed_checks
from tests.gloo.test_own_context import GPT2
from tests.gloo.test_tensor_dropout import STEPS as DROPPED_STEPS
from tests.gloo.test_tensor_dropout import MaskRecorder, train_and_keep_masks
from tests.ranks import Ranks
from tests.trajectories import FP64, compare, one_device

pytestmark = pytest.mark.gloo

SEQUENCE = 16
Spans = Sequence[tuple[int, int]]
OUTSIDE: dict[str, Any] = {"dropout": 0.1, "attention_dropout": 0.0}


OPT: dict[str, Any] = {
    "hidden_size": 32,
    "ffn_dim": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 260,
    "word_embed_proj_dim": 32,
}


def dropout_spec(attention: str, model: str = "gqa", **sections: Any) -> Spec:
    return context_spec(attention, model, shape=OUTSIDE, **sections)


OWN: dict[str, dict[str, Any]] = {
    "gpt2": {"hf": "gpt2", "config": GPT2 | {"attn_pdrop": 0.0}},  # after embedding, sub-blocks
    "opt": {"hf": "opt", "config": OPT},  # of all samples' tokens in one dimension
    "module": {"target": "tests.models_sliced:dropping"},
    "flat": {"target": "tests.models_sliced:dropping", "arguments": {"kind": "flat"}},
    "samples": {"target": "tests.models_sliced:dropping", "arguments": {"kind": "samples"}},
    "places": {"target": "tests.models_sliced:dropping", "arguments": {"kind": "places"}},
}


def user_dropout_spec(attention: str, model: str, **sections: Any) -> Spec:
    """Return a spec of a user's model with dropout and two samples per micro-batch."""
    if "hf" in OWN[model]:
        pytest.importorskip("transformers")
    count = 2 * sections.get("accumulate", 1)
    batch = {"global": count, "micro": 2, "sequence": 16}
    return context_spec(attention, f"own-{model}", own=OWN[model], batch=batch, **sections)


def train_without_cp(ranks: Ranks, spec: Spec) -> Trajectory:
    """Return the trajectory of the spec's other axes without cp; each rank draws its masks as
    before."""
    others = tuple(factor for factor in spec.factors if factor.axis is not Axis.CP)
    alone = replace(spec, factors=others, context=None)
    trajectory: Trajectory | None = ranks.run(alone.world_size, train_on_rank, alone, STEPS)[
        0
    ].trajectory
    assert trajectory is not None
    return trajectory


@pytest.mark.parametrize(
    ("attention", "model", "degree"),
    nightly_except(
        [*product(VARIANTS, MODELS, (2, 4)), *product((HYBRID,), MODELS, (4,))],
        {("zigzag", "gpt", 2)},
    ),
)
def test_slices_draw_the_masks_of_one_device(
    ranks: Ranks, attention: str, model: str, degree: int
) -> None:
    assert not MATRIX.differences(ranks, dropout_spec(attention, model, degree=degree))


@pytest.mark.nightly
@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_states_sharded_over_cp_draw_the_masks_of_one_device(
    ranks: Ranks, attention: str, states: str
) -> None:
    assert not MATRIX.differences(ranks, dropout_spec(attention, states=states))


@pytest.mark.parametrize(
    ("attention", "data"),
    nightly_except([*product(("ring", "zigzag"), DATA)], [("zigzag", DATA[-1])]),
)
def test_each_data_rank_draws_different_masks(
    ranks: Ranks, attention: str, data: dict[str, str]
) -> None:
    """Compare with one device that draws the masks of all ranks in turn."""
    assert not MATRIX.differences(ranks, dropout_spec(attention, states=SHARDED, other=data))


@pytest.mark.parametrize(
    ("attention", "kept"),
    nightly_except([*product(("ring", "zigzag"), KEPT)], [("zigzag", KEPT[0])]),
)
def test_recomputation_draws_the_same_masks(
    ranks: Ranks, attention: str, kept: dict[str, Any]
) -> None:
    assert not MATRIX.differences(ranks, dropout_spec(attention, **kept))


@pytest.mark.nightly
@pytest.mark.parametrize("other", [{"tp": "S,S,S,R"}, STAGES], ids=str)
@pytest.mark.parametrize("model", ["gqa", "gpt"])
@pytest.mark.parametrize("attention", ["ring", "zigzag", "ulysses"])
def test_cp_draws_the_masks_of_the_same_spec_without_cp(
    ranks: Ranks, attention: str, model: str, other: dict[str, str]
) -> None:
    spec = dropout_spec(attention, model, other=other, accumulate=2)
    assert not MATRIX.differences(ranks, spec, train_without_cp(ranks, spec))


@pytest.mark.parametrize(
    ("attention", "model"),
    nightly_except(
        [*product(("ring", "zigzag", "ulysses"), OWN)],
        [("zigzag", "gpt2")],
    ),
)
def test_user_models_draw_the_masks_of_one_device(ranks: Ranks, attention: str, model: str) -> None:
    assert not MATRIX.differences(ranks, user_dropout_spec(attention, model))


@pytest.mark.nightly
@pytest.mark.parametrize("other", [{"tp": "S,S,S,R"}, STAGES], ids=str)
def test_user_models_draw_the_masks_of_the_same_spec_without_cp(
    ranks: Ranks, other: dict[str, str]
) -> None:
    spec = user_dropout_spec("zigzag", "gpt2", other=other, accumulate=2)
    assert not MATRIX.differences(ranks, spec, train_without_cp(ranks, spec))


def join_masks(masks: Sequence[torch.Tensor], spans: Sequence[Spans]) -> torch.Tensor:
    """Return the full mask from the parts that the ranks of cp × tp used. Parts of some of the
    tokens are joined over the tokens that each rank has."""
    whole = torch.empty(masks[0].shape[0], SEQUENCE, *masks[0].shape[2:], dtype=torch.bool)
    for own, mask in zip(spans, masks, strict=True):
        places = torch.cat([torch.arange(*span) for span in own])
        whole[:, places] = mask
    return whole


@pytest.mark.nightly
@pytest.mark.parametrize(("attention", "model"), [("zigzag", "gpt"), ("ring", "gqa")])
def test_sequence_parallel_slices_draw_different_masks_per_token(
    ranks: Ranks, attention: str, model: str
) -> None:
    """Compare with one device that uses the joined masks."""
    spec = dropout_spec(attention, model, other=IN_SLICES, accumulate=1)
    reports = ranks.run(spec.world_size, train_and_keep_masks, spec)
    step, half = context_of(spec), SEQUENCE // 4
    assert step is not None
    spans, kept = [], []
    for rank, (_, masks) in enumerate(reports):
        index, place = divmod(rank, 2)
        tokens = [token for span in spans_at(step, index) for token in range(*span)]
        own = tokens[place * half :][:half]
        spans.append(tuple((token, token + 1) for token in own))
        kept.append([mask[:, index * half :][:, :half] for mask in masks])
    replayed = [join_masks(masks, spans) for masks in zip(*kept, strict=True)]
    assert len({mask.numpy().tobytes() for masks in kept for mask in masks}) == 4 * len(kept[0])
    with MaskRecorder(mask.double() for mask in replayed) as drawn:
        reference = one_device(spec, DROPPED_STEPS)
    assert len(drawn.masks) == len(replayed)
    trajectory = reports[0][0].trajectory
    assert trajectory is not None
    assert not failed_checks(compare(reference, trajectory, FP64))


@pytest.mark.nightly
@pytest.mark.parametrize("attention", ["ring", "zigzag"])
def test_sequence_parallel_dropout_is_predicted_to_the_byte(ranks: Ranks, attention: str) -> None:
    """Check bytes of the run whose values the test before checks."""
    spec = dropout_spec(attention, "gpt", other=IN_SLICES)
    again = ranks.run(spec.world_size, train_on_rank, spec, STEPS)[0].trajectory
    assert not MATRIX.differences(ranks, spec, again)
