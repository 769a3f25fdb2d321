"""Presets of specs/models count what their authors publish: a file says what the page of a model's
weights states; a paper's counts are rounded as it prints them."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from ptrain.errors import SpecError
from ptrain.facts.parameters import facts
from ptrain.spec.block import BlockOptions
from ptrain.spec.load import load
from ptrain.spec.model import Family, ModelShape
from ptrain.spec.names import listing

# Radford et al. 2019 and their code; Brown et al. 2020, table 2.1: names are counts, rounded.
OF_PAPERS = {
    "gpt2-124m": (1024, 124.4e6),
    "gpt2-355m": (1024, 354.8e6),
    "gpt2-774m": (1024, 774.0e6),
    "gpt2-1558m": (1024, 1557.6e6),
    "gpt3-125m": (2048, 125e6),
    "gpt3-350m": (2048, 356e6),
    "gpt3-760m": (2048, 760e6),
    "gpt3-1.3b": (2048, 1.3e9),
    "gpt3-2.7b": (2048, 2.7e9),
    "gpt3-6.7b": (2048, 6.7e9),
    "gpt3-13b": (2048, 13.0e9),
    "gpt3-175b": (2048, 175.0e9),
}
ROUNDING = 0.02  # the paper's 2.7B are 2.65


def shape_of(preset: str, *beside: str) -> ModelShape:
    overrides = [f"model.{override}" for override in (f"preset={preset}", *beside)]
    model = load("zero3", overrides).spec.model
    assert isinstance(model, ModelShape)
    return model


def published() -> dict[str, int]:
    """Return the counts that files say, by preset."""
    texts = {name: path.read_text(encoding="utf-8") for name, path in listing("models").items()}
    said = {name: re.search(r"^# ([\d,]+) parameters: ", texts[name], re.M) for name in texts}
    return {name: int(match[1].replace(",", "")) for name, match in said.items() if match}


@pytest.mark.parametrize(("preset", "count"), published().items())
def test_a_preset_counts_what_it_says(preset, count):
    assert facts(shape_of(preset), 1).numel == count


def test_most_presets_say_what_is_published():
    assert len(published()) >= 33


@pytest.mark.parametrize("preset", OF_PAPERS)
def test_a_preset_counts_what_its_paper_rounds(preset):
    sequence, published = OF_PAPERS[preset]
    assert facts(shape_of(preset), sequence).numel == pytest.approx(published, rel=ROUNDING)


@pytest.mark.parametrize(
    ("preset", "family"),
    [
        ("llama3.1-405b", Family.LLAMA),
        ("gpt3-175b", Family.GPT),
        ("qwen3-8b", None),
        ("gemma2-2b", None),
        ("megatron-7b", None),
    ],
)
def test_tables_tell_of_presets_whose_operators_are_a_familys(preset, family):
    assert shape_of(preset).tabulated is family


@pytest.mark.parametrize(
    ("preset", "override", "without"),
    [
        ("mistral-7b", "window=null", {"window"}),
        ("gemma2-2b", "attention_soft_cap=null", {"attention_soft_cap"}),
        ("gemma3-12b", "window=null", {"window", "global_every", "window_rope_base"}),
        ("gemma3-1b", "head_dim=null", {"own_head_dim"}),
        ("llama3.1-8b", "rope_scaling=none", {"rope_scaling", "rope_factor"}),
        ("phi-2", "tied=true", {"head_bias"}),
        ("qwen3-0.6b", "positions=learned", {"rope_base"}),
        (
            "gemma3-27b",
            "positions=none",
            {"rope_base", "window_rope_base", "rope_scaling", "rope_factor"},
        ),
        ("qwen3-0.6b", "family=gpt", {"rope_base"}),
    ],
)
def test_an_override_takes_from_a_preset_what_it_makes_void_and_nothing_else(
    preset, override, without
):
    usual = {option.name: option.default for option in fields(BlockOptions)}
    before, after = shape_of(preset), shape_of(preset, override)
    gone = {
        name
        for name, default in usual.items()
        if getattr(before, name) != default and getattr(after, name) == default
    }
    assert (gone, after.preset) == (without, "")


@pytest.mark.parametrize(
    ("preset", "beside", "place", "remedy"),
    [
        ("mistral-7b", ["window=null", "global_every=2"], "global_every", "remove global_every"),
        ("llama3.2-1b", ["head_bias=true"], "head_bias", "or write tied: false"),
        ("llama3.1-8b", ["rope_scaling=none", "rope_factor=4"], "rope_factor", "remove rope_fact"),
        ("llama3-8b", ["rope_scaling=linear"], "rope_scaling", "write a larger rope_factor"),
        ("mistral-7b", ["norm_eps=null"], "norm_eps", ""),
        ("mistral-7b", ["window=none"], "window", "write null"),
        ("gemma2-2b", ["global_every=1"], "global_every", ""),
    ],
)
def test_what_is_written_beside_a_preset_is_refused_where_it_is_void(preset, beside, place, remedy):
    with pytest.raises(SpecError) as refusal:
        shape_of(preset, *beside)
    (fault,) = refusal.value.faults
    assert fault.place == f"model.{place}" and remedy in fault.remedy


def test_a_presets_own_void_option_is_refused_whatever_stands_beside_it(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("{layers: 1, hidden: 8, heads: 2, ffn: 8, vocab: 259, rope_factor: 2}")
    with pytest.raises(SpecError, match="remove rope_factor"):
        shape_of(str(mine), "layers=2")
    assert shape_of(str(mine), "rope_scaling=linear").rope_factor == 2.0
