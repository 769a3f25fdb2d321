"""Samples of several documents: each is computed as if it stood alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from ptrain.algebra.legality import LocatedSpec, require_runnable
from ptrain.errors import SpecError
from ptrain.models.initialize import build_model, initialize
from ptrain.spec.load import load

START = 256
SHAPE = {"layers": 2, "hidden": 32, "ffn": 48, "vocab": 259, "heads": 4, "kv_heads": 2}


def spec_of(**options: Any) -> LocatedSpec:
    sections = {key: options.pop(key) for key in ("mesh", "placement", "context") if key in options}
    edge = {} if "document_end" in options else {"document_start": START}
    model = {"family": "llama", **SHAPE, **edge, **options}
    attention = {"attention": model.pop("attention")} if "attention" in model else {}
    return load(
        {"name": "a", "mesh": {"dp_shard": 2}, "placement": "zero2"}
        | {"model": model, "batch": {"sequence": 24, "micro": 2, "accumulate": 2}, **attention}
        | sections
    )


@pytest.mark.parametrize(
    "options", [{}, {"attention": "eager"}, {"window": 5}, {"document_end": START}], ids=str
)
def test_a_document_is_computed_as_if_it_stood_alone(options: dict[str, Any]) -> None:
    """Rotary positions are relative, so that it matters not where in the sample it stands."""
    spec = require_runnable(spec_of(**options))
    packed, alone = (build_model(spec.model, sequence=24, seed=0).double() for _ in range(2))
    for module in (packed, alone):
        initialize(module, 0)
        module.reset_buffers()
    alone.documents = None
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (2, 24))
    ends = "document_end" in options  # with the token before the next one's first
    begin = [[0, 7, 8, 19], [3, 12]]
    for row, places in enumerate(begin):
        tokens[row, [place - ends for place in places if place >= ends]] = START
    logits = packed(tokens)
    for row, places in enumerate(begin):
        edges = [*dict.fromkeys((0, *places)), 24]
        for first, behind in pairwise(edges):
            own = alone(tokens[row : row + 1, first:behind])
            torch.testing.assert_close(logits[row, first:behind], own[0], rtol=0, atol=1e-6)
    whole = alone(tokens)
    assert (whole - logits).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("options", "place", "remedy"),
    [
        ({"document_start": 259}, "model.document_start", "Use a token id below 259."),
        (
            {"attention": "flex"},
            "model.document_start",
            ("Use `attention=sdpa` or `attention=eager`."),
        ),
        ({"document_end": 259}, "model.document_end", "Use a token id below 259."),
        (
            {"document_start": 1, "document_end": 2},
            "model.document_start",
            "Remove one of the two.",
        ),
    ],
)
def test_who_cannot_is_named(options: dict[str, Any], place: str, remedy: str) -> None:
    with pytest.raises(SpecError) as caught:
        require_runnable(spec_of(**options))
    (fault,) = caught.value.faults
    assert (fault.place, fault.remedy) == (place, remedy)
