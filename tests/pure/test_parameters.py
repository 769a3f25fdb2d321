"""The built-in families' tensors as formulas, against published counts and the paper's formulas.
tests/unit/test_parameters.py compares them with the modules."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import FrameType

import pytest

from ptrain.facts.model import UnitFacts
from ptrain.facts.parameters import facts
from ptrain.spec.model import Family, ModelShape
from tests.oracles.parameters import remainder, unit_remainder
from tests.pure.build import ODD_SHAPE


def llama_3(layers: int, hidden: int, heads: int, ffn: int) -> ModelShape:
    return ModelShape(
        family=Family.LLAMA,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=8,
        ffn=ffn,
        vocab=128256,
    )


def gpt(layers: int, hidden: int, heads: int, *, tied: bool = True) -> ModelShape:
    return ModelShape(
        family=Family.GPT,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn=4 * hidden,
        vocab=50257,
        tied=tied,
    )


LLAMA_3 = {
    8_030_261_248: llama_3(32, 4096, 32, 14336),
    70_553_706_496: llama_3(80, 8192, 64, 28672),
    405_853_388_800: llama_3(126, 16384, 128, 53248),
}
GPTS = [gpt(12, 768, 12), gpt(2, 36, 3), gpt(48, 1600, 25, tied=False), gpt(96, 12288, 96)]
FAMILIES = [ODD_SHAPE, replace(ODD_SHAPE, tied=True), *GPTS]


@pytest.mark.parametrize("published", LLAMA_3)
def test_llama_3_has_as_many_parameters_as_meta_counts(published):
    assert facts(LLAMA_3[published], 8192).numel == published


def test_gpt_2_small_has_124_million_parameters():
    assert facts(gpt(12, 768, 12), 1024).numel == 124_439_808


@pytest.mark.parametrize("shape", GPTS)
def test_a_gpt_has_12_l_h_squared_parameters_and_a_remainder_with_names(shape):
    terms = remainder(shape, 1024)
    assert set(terms) == {"biases", "norms", "embeddings", "positions", "head"}
    matrices = 12 * shape.layers * shape.hidden**2
    assert facts(shape, 1024).numel == matrices + sum(terms.values())


@pytest.mark.parametrize("shape", GPTS)
@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_a_gpts_unit_takes_12_h_squared_e_bytes_and_a_remainder_with_names(shape, itemsize):
    terms = unit_remainder(shape)
    assert set(terms) == {"biases", "norms"}
    for block in facts(shape, 1024).units[:-1]:
        unit_bytes = block.numel * itemsize
        assert unit_bytes == 12 * shape.hidden**2 * itemsize + sum(terms.values()) * itemsize


@pytest.mark.parametrize("family", ["biases", "norms", "embeddings", "positions", "head"])
def test_each_term_of_the_remainder_counts_the_tensors_of_its_name(family):
    shape = gpt(3, 24, 2, tied=False)
    assert remainder(shape, 16)[family] == sum(
        tensor.numel for tensor in facts(shape, 16).tensors if term_of(tensor.name) == family
    )


def term_of(name: str) -> str:
    """Return the term of the remainder that a tensor belongs to, by its name."""
    module, _, kind = name.rpartition(".")
    roots = {"embed": "embeddings", "positions": "positions", "head": "head"}
    if module.endswith("norm"):
        return "norms"
    return roots.get(module, "biases" if kind == "bias" else "matrices")


@pytest.mark.parametrize("shape", FAMILIES)
def test_the_gradient_order_names_every_tensor_once(shape):
    model = facts(shape, 32)
    assert sorted(model.gradient_order) == sorted(tensor.name for tensor in model.tensors)


@pytest.mark.parametrize("shape", FAMILIES)
def test_the_units_are_the_blocks_and_then_the_root(shape):
    names = [unit.name for unit in facts(shape, 32).units]
    assert names == [*(f"blocks.{i}" for i in range(shape.layers)), ""]


@pytest.mark.parametrize("shape", FAMILIES)
def test_a_unit_holds_the_tensors_of_its_prefix(shape):
    *blocks, root = facts(shape, 32).units
    assert all(owns(block) for block in blocks)
    assert not any(tensor.name.startswith("blocks.") for tensor in root.tensors)


def owns(unit: UnitFacts) -> bool:
    return all(tensor.name.startswith(f"{unit.name}.") for tensor in unit.tensors)


def test_a_tied_head_appears_once_as_the_embedding():
    untied, tied = facts(ODD_SHAPE, 32), facts(replace(ODD_SHAPE, tied=True), 32)
    assert untied.numel - tied.numel == ODD_SHAPE.vocab * ODD_SHAPE.hidden
    assert "head.weight" not in {tensor.name for tensor in tied.tensors}


def test_facts_of_a_layer_take_at_most_150_calls():
    """On every machine: a call takes some 0.2 microseconds, and 126 layers have to be no wait."""

    def calls(layers: int) -> int:
        number = 0

        def count(_frame: FrameType, event: str, _argument: object) -> None:
            nonlocal number
            number += event == "call"

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            facts(llama_3(layers, 8192, 64, 28672), 8192)
        finally:
            sys.setprofile(before)
        return number

    facts(llama_3(1, 8192, 64, 28672), 8192)  # what is kept of all models
    assert calls(80) - calls(40) <= 40 * 150


def test_a_llama_has_two_tables_of_turning_positions():
    """fp32: a cosine and a sine for each token and each pair of a head's dimensions."""
    pairs = ODD_SHAPE.hidden // ODD_SHAPE.heads // 2
    assert facts(ODD_SHAPE, 16).buffers == (("cos_TK", 16 * pairs * 4), ("sin_TK", 16 * pairs * 4))
    assert facts(gpt(2, 36, 3), 16).buffers == ()


def test_gradients_complete_from_the_loss_backwards():
    """A module's bias before its weight, which is transposed on the way; a norm's in order."""
    linear = ["mlp.down", "mlp.up"]
    attention = [f"attention.{part}" for part in ("output", "value", "key", "query")]

    def both(module):
        return [f"{module}.bias", f"{module}.weight"]

    block = [
        *(name for module in linear for name in both(module)),
        "mlp_norm.weight", "mlp_norm.bias",
        *(name for module in attention for name in both(module)),
        "attention_norm.weight", "attention_norm.bias",
    ]  # fmt: skip
    assert facts(gpt(2, 36, 3, tied=False), 16).gradient_order == (
        "head.weight", "norm.weight", "norm.bias",
        *(f"blocks.{index}.{name}" for index in (1, 0) for name in block),
        "positions.weight", "embed.weight",
    )  # fmt: skip
    assert facts(gpt(1, 36, 3), 16).gradient_order[0] == "norm.weight"
