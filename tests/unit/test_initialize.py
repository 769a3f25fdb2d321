"""Initial weights depend only on the seed and the names."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from ptrain.models.initialize import (
    build_model,
    cast_module,
    initial_parameter,
    initialize,
    keeps_its_weights,
)
from ptrain.models.units import unit_modules
from ptrain.spec.model import ExternalModel, ModelShape
from tests.pure.build import ODD_SHAPE
from tests.unit.shapes import SHAPES, SMALL_GPT

SEQUENCE = 12
NECKS = ExternalModel(target="tests.models_external:necks", arguments={"hidden": 6, "layers": 3})


def from_meta(shape: ModelShape, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    with torch.device("meta"):
        module = build_model(shape, sequence=SEQUENCE)
    cast_module(module, dtype)
    module.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.fill_(math.nan)  # whatever is not filled shows
    initialize(module, seed)
    return module


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_model_from_the_meta_device_equals_one_that_was_built_real(shape, dtype):
    torch.manual_seed(1234)  # the global generator has no say
    module = build_model(shape, sequence=SEQUENCE)
    cast_module(module, dtype)
    initialize(module, 0)
    other = from_meta(shape, dtype)
    tensors = (*module.named_parameters(), *module.named_buffers())
    others = dict((*other.named_parameters(), *other.named_buffers()))
    assert [name for name, _ in tensors] == list(others)
    for name, tensor in tensors:
        assert torch.equal(tensor, others[name]), name


@pytest.mark.parametrize("shape", SHAPES)
def test_one_tensor_alone_equals_the_same_tensor_of_the_whole_model(shape):
    whole = from_meta(shape, torch.float32, seed=7)
    with torch.device("meta"):
        module = build_model(shape, sequence=SEQUENCE)
    for name, parameter in reversed(list(whole.named_parameters())):
        assert torch.equal(initial_parameter(name, parameter.shape, 7, module), parameter), name


def test_another_seed_or_name_gives_other_weights():
    module = build_model(ODD_SHAPE, sequence=SEQUENCE)
    one = initial_parameter("blocks.0.mlp.up.weight", (101, 42), 0, module)
    assert not torch.equal(one, initial_parameter("blocks.0.mlp.up.weight", (101, 42), 1, module))
    assert not torch.equal(one, initial_parameter("blocks.1.mlp.up.weight", (101, 42), 0, module))


def test_the_weights_of_seed_0_are_these_forever():
    """A checkpoint or a recorded run can be compared with one of another version of ptrain."""
    drawn = initial_parameter("embed.weight", (2, 3), 0, build_model(ODD_SHAPE, sequence=SEQUENCE))
    expected = [[-0.01118324, -0.01227792, -0.02619945], [0.00559754, 0.00623638, -0.05030124]]
    torch.testing.assert_close(drawn, torch.tensor(expected), rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", [replace(ODD_SHAPE, hidden=126), replace(SMALL_GPT, hidden=120)])
def test_matrices_spread_by_002_and_those_that_add_to_the_residual_stream_by_less(shape):
    module = from_meta(shape, torch.float32)
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1:
            assert parameter.unique().tolist() == [0.0 if name.endswith("bias") else 1.0]
            continue
        adds = name.endswith(("attention.output.weight", "mlp.down.weight"))
        std = 0.02 / math.sqrt(2 * shape.layers) if adds else 0.02
        # five standard errors of an estimated deviation, 1 / sqrt(2 numel)
        assert parameter.std().item() == pytest.approx(
            std, rel=5 / math.sqrt(2 * parameter.numel())
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rotation_tables_stay_fp32_under_narrow_parameters(dtype):
    module = from_meta(ODD_SHAPE, dtype)
    assert {buffer.dtype for buffer in module.buffers()} == {torch.float32}


def test_rotation_tables_are_exact_under_fp64():
    module = from_meta(ODD_SHAPE, torch.float64)
    angle = 5 * 10000.0 ** (-3 / 7)
    assert module.get_buffer("cos_TK")[5, 3].item() == pytest.approx(math.cos(angle), abs=1e-15)
    assert module.get_buffer("sin_TK")[5, 3].item() == pytest.approx(math.sin(angle), abs=1e-15)


def test_buffers_are_in_no_checkpoint():
    assert not any(name.endswith("_TK") for name in build_model(ODD_SHAPE, sequence=4).state_dict())


def test_a_user_model_keeps_its_weights_on_every_rank():
    first = build_model(NECKS, sequence=SEQUENCE, allow_import=True, seed=5)
    before = {name: parameter.clone() for name, parameter in first.named_parameters()}
    initialize(first, 0)
    torch.manual_seed(99)
    second = build_model(NECKS, sequence=SEQUENCE, allow_import=True, seed=5)
    assert keeps_its_weights(first)
    for name, parameter in second.named_parameters():
        assert torch.equal(parameter, first.get_parameter(name))
        assert torch.equal(parameter, before[name])


def test_building_a_user_model_keeps_the_global_generator_state():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    build_model(NECKS, sequence=SEQUENCE, allow_import=True, seed=5)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_units_of_a_built_in_model_are_its_blocks_and_the_root(shape):
    units = unit_modules(build_model(shape, sequence=SEQUENCE))
    assert units == (*((f"blocks.{i}",) for i in range(shape.layers)), ("",))


def test_the_units_of_another_model_are_the_elements_of_its_largest_list():
    module = build_model(NECKS, sequence=SEQUENCE, allow_import=True)
    assert unit_modules(module) == (("layers.0",), ("layers.1",), ("layers.2",), ("",))


def test_a_list_inside_a_list_gives_no_units():
    model = nn.Module()
    model.small = nn.ModuleList([nn.Linear(2, 2)])
    model.stages = nn.ModuleList(
        nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(9, 9), nn.GELU()])}) for _ in range(2)
    )
    assert unit_modules(model) == (("stages.0",), ("stages.1",), ("",))


def test_a_model_without_a_list_is_one_unit():
    assert unit_modules(nn.Linear(2, 2)) == (("",),)
