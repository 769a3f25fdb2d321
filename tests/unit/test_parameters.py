"""The formulas of facts/parameters.py against the modules they describe."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ptrain.facts.parameters import facts
from ptrain.models.cross_entropy import token_loss_sum
from ptrain.models.initialize import build_model, cast_module, initialize
from ptrain.models.units import unit_modules
from ptrain.spec.model import ModelShape
from tests.pure.build import ODD_SHAPE
from tests.unit.shapes import COMPOSED, SHAPES, SMALL_GPT

SEQUENCE = 12


@pytest.mark.parametrize("shape", [*SHAPES, *COMPOSED])
def test_units_names_and_shapes_are_those_of_the_module(shape):
    with torch.device("meta"):
        module = build_model(shape, sequence=SEQUENCE)
    names = [unit for (unit,) in unit_modules(module)]
    expected = []
    for unit in names:
        owned = [
            (name, tuple(parameter.shape))
            for name, parameter in module.named_parameters()
            if unit_of(name, names) == unit
        ]
        expected.append((unit, owned))
    stated = [
        (unit.name, [(tensor.name, tensor.shape) for tensor in unit.tensors])
        for unit in facts(shape, SEQUENCE).units
    ]
    assert stated == expected


def unit_of(parameter: str, units: tuple[str, ...]) -> str:
    return next(unit for unit in units if parameter.startswith(f"{unit}.") or not unit)


@pytest.mark.parametrize("shape", [*SHAPES, *COMPOSED])
def test_buffers_are_those_of_the_module(shape):
    with torch.device("meta"):
        module = build_model(shape, sequence=SEQUENCE)
    assert list(facts(shape, SEQUENCE).buffers) == [
        (name, buffer.nbytes) for name, buffer in module.named_buffers()
    ]


@pytest.mark.parametrize("shape", [*SHAPES, *COMPOSED])
def test_buffers_of_reals_take_twice_the_bytes_under_fp64(shape):
    with torch.device("meta"):
        module = build_model(shape, sequence=SEQUENCE)
    cast_module(module, torch.float64)
    assert [size for _, size in facts(shape, SEQUENCE).buffers] == [
        buffer.nbytes // (2 if buffer.is_floating_point() else 1) for buffer in module.buffers()
    ]


@pytest.mark.parametrize("shape", [*SHAPES, *COMPOSED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_are_complete_in_the_stated_order(shape, dtype):
    assert gradient_order(shape, dtype) == list(facts(shape, SEQUENCE).gradient_order)


@pytest.mark.parametrize("shape", [ODD_SHAPE, SMALL_GPT])
@pytest.mark.parametrize(("samples", "tokens"), [(1, 1), (1, 12), (5, 7)])
def test_the_order_of_gradients_does_not_depend_on_the_batch(shape, samples, tokens):
    order = gradient_order(shape, torch.float32, samples=samples, tokens=tokens)
    assert order == list(facts(shape, SEQUENCE).gradient_order)


def test_the_order_of_gradients_does_not_depend_on_dropout():
    shape = replace(SMALL_GPT, dropout=0.1)
    assert gradient_order(shape, torch.float32) == list(facts(shape, SEQUENCE).gradient_order)


def gradient_order(
    shape: ModelShape, dtype: torch.dtype, *, samples: int = 2, tokens: int = 8
) -> list[str]:
    """By experiment: the names in the order in which autograd finishes their gradients."""
    module = build_model(shape, sequence=SEQUENCE)
    cast_module(module, dtype)
    initialize(module, seed=0)
    order: list[str] = []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    rows = torch.arange(samples * (tokens + 1)).view(samples, tokens + 1) % shape.vocab
    token_loss_sum(module(rows[:, :-1]), rows[:, 1:]).backward()
    return order
