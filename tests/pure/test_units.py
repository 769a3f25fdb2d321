"""Units of every size as formulas: what belongs to which, and where in a pass each begins."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ptrain.algebra.legality import require_runnable
from ptrain.derivation.layers import all_represented
from ptrain.errors import SpecError
from ptrain.facts.parameters import facts
from ptrain.spec.dials import UnitKind, UnitSize
from ptrain.spec.load import load
from ptrain.spec.model import Family, ModelShape
from ptrain.timeline import Boundary, Complete, Item, Mark, Run, Timeline
from tests.pure.build import ODD_SHAPE, setting
from tests.timelines import model_timeline

GPT = ModelShape(
    family=Family.GPT, layers=5, hidden=64, heads=4, kv_heads=4, ffn=256, vocab=97, tied=True
)
SHAPES = [ODD_SHAPE, replace(ODD_SHAPE, tied=True, layers=5), GPT, replace(GPT, tied=False)]
SIZES = [
    UnitSize(),
    UnitSize(kind=UnitKind.SUB_BLOCK),
    UnitSize(kind=UnitKind.BLOCKS, count=2),
    UnitSize(kind=UnitKind.BLOCKS, count=7),
    UnitSize(kind=UnitKind.MODEL),
]
ENDS = UnitSize(kind=UnitKind.ENDS)


def text(shape: ModelShape) -> str:
    return f"{shape.family}-{'tied' if shape.tied else 'untied'}-{shape.layers}"


def timeline(shape: ModelShape, size: UnitSize) -> Timeline:
    played = all_represented(facts(shape, 8, size).units, shape.layers)
    return model_timeline(setting(shape), played)


@pytest.mark.parametrize("size", [*SIZES, ENDS], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=text)
def test_every_tensor_belongs_to_one_unit_and_stays_the_same(shape, size):
    by_block, stated = facts(shape, 8), facts(shape, 8, size)
    assert len({tensor.name for tensor in stated.tensors}) == len(stated.tensors)
    assert set(stated.tensors) == set(by_block.tensors)
    assert stated.numel == by_block.numel
    assert (stated.buffers, stated.gradient_order) == (by_block.buffers, by_block.gradient_order)


@pytest.mark.parametrize("size", [*SIZES, ENDS], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=text)
def test_a_tensors_name_begins_with_that_of_a_module_of_its_unit(shape, size):
    *inner, root = facts(shape, 8, size).units
    assert root.modules == ("",)
    for unit in inner:
        assert unit.tensors
        for tensor in unit.tensors:
            assert tensor.name.startswith(tuple(f"{name}." for name in unit.modules))


@pytest.mark.parametrize("shape", SHAPES, ids=text)
def test_attention_and_mlp_come_before_the_block_that_keeps_the_norms(shape):
    first, second, block, *_ = facts(shape, 8, UnitSize(kind=UnitKind.SUB_BLOCK)).units
    assert [unit.name for unit in (first, second, block)] == [
        "blocks.0.attention",
        "blocks.0.mlp",
        "blocks.0",
    ]
    assert all("norm" in tensor.name for tensor in block.tensors)


def test_neighbouring_blocks_make_a_unit_and_the_last_one_may_be_smaller():
    stated = facts(GPT, 8, UnitSize(kind=UnitKind.BLOCKS, count=2))
    assert [unit.name for unit in stated.units] == [
        "blocks.0 … blocks.1",
        "blocks.2 … blocks.3",
        "blocks.4",
        "",
    ]
    assert stated.units[0].numel == stated.units[1].numel == 2 * stated.units[2].numel


def test_one_block_is_the_default_and_more_blocks_than_there_are_make_one_unit():
    assert facts(GPT, 8) == facts(GPT, 8, UnitSize(kind=UnitKind.BLOCKS, count=1))
    assert len(facts(GPT, 8, UnitSize(kind=UnitKind.BLOCKS, count=7)).units) == 2
    assert len(facts(GPT, 8, UnitSize(kind=UnitKind.MODEL)).units) == 1


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=text)
def test_each_unit_begins_and_ends_once_and_holds_its_gradients(shape, size):
    stated, played = facts(shape, 8, size), timeline(shape, size)
    unit_of = {tensor.name: i for i, unit in enumerate(stated.units) for tensor in unit.tensors}
    for items, start, end in (
        (played.forward, Mark.ENTER, Mark.LEAVE),
        (played.backward, Mark.PRE_BACKWARD, Mark.POST_BACKWARD),
    ):
        inside: list[int] = []
        begun: list[int] = []
        for item in items:
            if isinstance(item, Complete):
                assert unit_of[item.parameter] in inside
            elif isinstance(item, Boundary) and item.mark is start:
                inside.append(item.unit)
                begun.append(item.unit)
            elif isinstance(item, Boundary):
                assert item.mark is end
                assert inside.pop() == item.unit  # units nest, and neighbours do not overlap
        assert not inside
        assert sorted(begun) == list(range(len(stated.units)))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=text)
def test_the_size_of_units_changes_nothing_that_the_model_allocates(shape, size):
    played, by_block = timeline(shape, size), timeline(shape, UnitSize())
    assert without_boundaries(played.forward) == without_boundaries(by_block.forward)
    assert without_boundaries(played.backward) == without_boundaries(by_block.backward)


def without_boundaries(items: tuple[Item, ...]) -> list[Item]:
    kept: list[Item] = []
    for item in items:
        if isinstance(item, Run) and kept and isinstance(last := kept[-1], Run):
            kept[-1] = last.followed_by(item)
        elif not isinstance(item, Boundary):
            kept.append(item)
    return kept


def test_ends_are_the_embedding_and_the_last_norm_with_the_head():
    first, *blocks, last, root = facts(ODD_SHAPE, 8, ENDS).units
    assert [tensor.name for tensor in first.tensors] == ["embed.weight"]
    assert last.modules == ("norm", "head")
    assert [tensor.name for tensor in last.tensors] == ["norm.weight", "head.weight"]
    assert len(blocks) == ODD_SHAPE.layers
    assert not root.tensors and [unit.stays_by_default for unit in (first, last)] == [False, True]
    positions = facts(replace(GPT, tied=False), 8, ENDS).units[-1]
    assert [tensor.name for tensor in positions.tensors] == ["positions.weight"]


@pytest.mark.parametrize(
    ("words", "finding"),
    [
        (["model.tied=true"], "but the model ties them"),
        (["mesh.tp=2", "placement.tp=tp"], "not supported yet: ends with mesh.tp"),
        (["loss.chunk=64"], "not supported yet: ends with a loss in chunks"),
        (["compile=block"], "not supported yet: ends with compile=block"),
        (["optimizer.name=muon"], "not supported yet: ends with optimizer.name=muon"),
        (["placement=zero2"], "not supported yet: ends with a placement that fully_shard"),
    ],
)
def test_ends_are_rejected_where_they_are_not_separate_units(words, finding):
    with pytest.raises(SpecError) as caught:
        require_runnable(load("zero3", ["unit=ends", *words]))
    assert any(fault.place == "unit" and finding in fault.finding for fault in caught.value.faults)
