"""A block has one program for each shape of a micro-batch, whatever their order."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from ptrain.models import compiled
from ptrain.models.initialize import build_model
from ptrain.spec.load import load

TINY = "model={layers: 2, hidden: 16, heads: 2, kv_heads: 2, ffn: 32, vocab: 32}"
FULL, SHORT, SHORTER = (4, 8), (3, 8), (4, 5)  # samples, and tokens of each


@pytest.fixture
def model():
    spec = load("ddp", [TINY, "batch={global: 8, micro: 4, sequence: 8}"]).spec
    torch._dynamo.reset()
    counters.clear()
    built = build_model(spec.model, sequence=8)
    with mock.patch.object(compiled, "BACKEND", "eager"):
        compiled.compile_blocks(built, ("blocks.0", "blocks.1"))
    yield built
    torch._dynamo.reset()


def train_step(model: nn.Module, shape: tuple[int, int]) -> None:
    model(torch.zeros(shape, dtype=torch.int64)).sum().backward()


def programs() -> int:
    number: int = counters["stats"]["unique_graphs"]
    return number


def test_each_shape_of_a_micro_batch_is_compiled_once(model):
    for number, shape in enumerate((FULL, SHORT, SHORTER), 1):
        train_step(model, shape)
        assert programs() == number
    for shape in (SHORT, FULL, SHORTER, FULL):
        train_step(model, shape)
    assert programs() == 3
    assert not counters["graph_break"]


def test_an_evaluation_with_another_shape_compiles_nothing(model):
    train_step(model, FULL)
    with torch.no_grad():
        model(torch.zeros(SHORT, dtype=torch.int64))
    assert programs() == 1
    train_step(model, FULL)
    assert programs() == 1
