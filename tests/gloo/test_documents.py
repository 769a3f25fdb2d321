"""Samples with several documents over cp and pp: a token attends to its document only, whose other
tokens may be on other ranks, and only the first stage embeds tokens."""

from __future__ import annotations

from functools import partial
from itertools import cycle
from typing import Any

import pytest

from tests.gloo import context_cases, pipeline_cases, tensor_cases
from tests.gloo.context_runs import MATRIX
from tests.gloo.pipeline_cases import SCHEDULES, layer_count
from tests.gloo.pipeline_runs import MATRIX as STAGES
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

nightly = partial(pytest.param, marks=pytest.mark.nightly)

SHAPE = {"document_start": 32}  # a document per word of text, so that slices cut some
OTHERS: tuple[dict[str, Any], ...] = (
    {"other": {"dp_shard": "zero3"}, "states": "S*,S,S"},
    {"other": {"tp": "S,S,S,S"}},
    {"activations": "M"},
    {"activations": "O"},
    {"loss": {"chunk": 4}, "data": {"ignored": [32]}},
    {"precision": {"layout": "bf16"}},
    {"batch": {"global": 2, "micro": 2, "sequence": 13, "pad": True}},
    {"other": {"pp": pipeline_cases.STAGE}},
)
STAGED: tuple[tuple[str, dict[str, Any]], ...] = (
    *((schedule, {"mesh": {"pp": 2}}) for schedule in SCHEDULES),
    ("1f1b", {"mesh": {"pp": 4}, "batch": {"micro": 2}}),
    ("zero-bubble", {"mesh": {"pp": 2, "dp_shard": 2}}),
    ("1f1b", {"mesh": {"pp": 2, "tp": 2}, "activations": "S"}),
    ("interleaved", {"mesh": {"pp": 2}, "attention": "eager"}),
    ("gpipe", {"mesh": {"pp": 2}, "precision": {"layout": "bf16"}}),
    ("1f1b", {"mesh": {"pp": 2}, "shape": {**SHAPE, "window": 5, "global_every": 2}}),
)


@pytest.mark.parametrize(
    ("variant", "model", "degree"),
    [
        ("all-gather", "gqa", 2),
        ("zigzag", "gqa", 2),
        nightly("ring", "gqa", 2),
        nightly("ring", "gpt", 4),
        nightly("zigzag", "llama", 4),
        nightly("hybrid", "gqa", 4),
        nightly("all-gather", "llama", 4),
        nightly("all-gather", "gpt", 2),
        nightly("ulysses", "gqa", 2),
        nightly("ulysses", "llama", 4),
        nightly({"ulysses": 2, "ring": 1}, "gqa", 2),
    ],
)
def test_documents_over_cp_are_exact_and_equal_one_device(
    ranks: Ranks, variant: Any, model: str, degree: int
) -> None:
    spec = context_cases.context_spec(variant, model, degree=degree, shape=SHAPE)
    assert not MATRIX.differences(ranks, spec)


@pytest.mark.nightly
@pytest.mark.parametrize("variant", ["all-gather", "ulysses", "zigzag"])
@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_documents_over_cp_with_other_axes_are_exact_and_equal_one_device(
    ranks: Ranks, variant: str, case: dict[str, Any]
) -> None:
    assert not MATRIX.differences(ranks, context_cases.context_spec(variant, shape=SHAPE, **case))


@pytest.mark.nightly
@pytest.mark.parametrize("variant", ["all-gather", "ulysses", "ring"])
def test_documents_with_end_tokens_over_cp_are_exact_and_equal_one_device(
    ranks: Ranks, variant: str
) -> None:
    spec = context_cases.context_spec(variant, "gqa", degree=2, shape={"document_end": 32})
    assert not MATRIX.differences(ranks, spec)


@pytest.mark.parametrize(
    ("model", "schedule", "case"),
    [
        ("gqa", "1f1b", {"mesh": {"pp": 2}, "shape": {"document_end": 32}}),
        *(
            nightly(model, schedule, {"shape": SHAPE, **case})
            for (schedule, case), model in zip(STAGED, cycle(pipeline_cases.MODELS), strict=False)
        ),
    ],
    ids=str,
)
def test_documents_over_pp_are_exact_and_equal_one_device(
    ranks: Ranks, model: str, schedule: str, case: dict[str, Any]
) -> None:
    layers = layer_count(case["mesh"]["pp"], schedule)
    given = {**case, "shape": {**case["shape"], "layers": layers}}
    assert not STAGES.differences(ranks, pipeline_cases.pipeline_spec(model, schedule, **given))


@pytest.mark.nightly
@pytest.mark.parametrize("case", [{}, {"attention": "eager"}], ids=str)
def test_documents_without_cp_are_exact_and_equal_one_device(
    ranks: Ranks, case: dict[str, Any]
) -> None:
    spec = tensor_cases.tensor_spec("gqa", data={"dp_shard": "zero3"}, shape=SHAPE, **case)
    assert not MATRIX.differences(ranks, spec)
