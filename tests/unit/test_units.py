"""Wrap units of every size on modules: formulas and modules have the same names, and tables the
same boundaries."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from ptrain.axes.data.run.flat import parameters_by_unit
from ptrain.derivation.layers import all_represented
from ptrain.errors import SpecError
from ptrain.facts.parameters import facts
from ptrain.models.initialize import build_model
from ptrain.models.units import blocks_of, unit_modules
from ptrain.spec.dials import UnitKind, UnitSize
from ptrain.spec.model import ModelShape
from ptrain.spec.precision import DType
from ptrain.traces.facts import module_facts
from tests.models_external import necks
from tests.pure.build import ODD_SHAPE, make_spec, setting
from tests.pure.test_units import SIZES
from tests.timelines import model_timeline
from tests.unit.shapes import SHAPES, SMALL_GPT, trace_shape

SUB_BLOCK = UnitSize(kind=UnitKind.SUB_BLOCK)
TORCH = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16}


def text(shape: ModelShape) -> str:
    return f"{shape.family}-{shape.layers}-{'tied' if shape.tied else 'untied'}"


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=text)
def test_the_formulas_name_the_modules_and_tensors_of_the_module(shape, size):
    with torch.device("meta"):
        module = build_model(shape, sequence=12)
    stated = facts(shape, 12, size)
    assert stated.unit_modules == unit_modules(module, size)
    assert [
        (unit.modules, [(tensor.name, tensor.shape) for tensor in unit.tensors])
        for unit in stated.units
    ] == [
        (modules, [(name, tuple(parameter.shape)) for name, parameter in named])
        for modules, named in parameters_by_unit(module, unit_modules(module, size))
    ]


@pytest.mark.parametrize("compute", TORCH, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    "shape", [replace(ODD_SHAPE, layers=5), replace(SMALL_GPT, dropout=0.1)], ids=text
)
def test_a_table_gives_the_trace_with_hooks_on_these_units_to_the_byte(shape, size, compute):
    seen = trace_shape(shape, TORCH[compute], size)
    played = all_represented(facts(shape, 16, size).units, shape.layers)
    derived = model_timeline(setting(shape, compute, sequence=16), played)
    assert derived.forward == seen.forward
    assert derived.backward == seen.backward


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_an_external_models_facts_have_the_units_of_the_spec(size):
    spec = replace(make_spec({}), unit=size)
    read = module_facts(necks(layers=3), spec)
    assert read.unit_modules == unit_modules(necks(layers=3), size)
    names = [tensor.name for tensor in read.tensors]
    assert sorted(names) == sorted(name for name, _ in necks(layers=3).named_parameters())


class Mixed(nn.Module):
    """A block whose children are a sequence, a list, a leaf, and a module without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.sequence = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.leaf = nn.Linear(4, 4)
        self.empty = nn.Sequential(nn.ReLU())


def test_a_sub_block_is_a_child_with_children_parameters_and_a_forward():
    model = nn.Module()
    model.layers = nn.ModuleList([Mixed(), Mixed()])
    assert unit_modules(model, SUB_BLOCK) == (
        ("layers.0.sequence",),
        ("layers.0",),
        ("layers.1.sequence",),
        ("layers.1",),
        ("",),
    )


def test_blocks_may_be_named():
    model = nn.Module()
    model.layers = nn.ModuleList([Mixed(), Mixed()])
    assert blocks_of(model, "layers.*.experts.*") == [
        f"layers.{block}.experts.{expert}" for block in (0, 1) for expert in (0, 1)
    ]
    assert unit_modules(model, UnitSize(), "layers.1") == (("layers.1",), ("",))


@pytest.mark.parametrize(
    ("pattern", "finding"),
    [
        ("blocks.*", "no module is named 'blocks.*'"),
        ("layers", "layers is ModuleList, which has no forward call"),
        ("layers.*.experts", "layers.0.experts is ModuleList, which has no forward call"),
    ],
)
def test_a_name_of_no_blocks_is_rejected(pattern, finding):
    model = nn.Module()
    model.layers = nn.ModuleList([Mixed(), Mixed()])
    with pytest.raises(SpecError) as caught:
        blocks_of(model, pattern)
    (fault,) = caught.value.faults
    assert (fault.place, fault.finding) == ("model.blocks", finding)
    assert (
        fault.remedy == "Use the names of its blocks, with * for a number: `model.blocks=layers.*`."
    )


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_model_without_blocks_is_one_unit_whatever_the_size(size):
    assert unit_modules(nn.Linear(2, 2), size) == (("",),)
