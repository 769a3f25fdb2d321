"""Presets of specs/models count what their authors publish: a file says what the page of a model's
weights states; a paper's counts are rounded as it prints them."""

from __future__ import annotations

import re

import pytest

from ptrain.facts.parameters import facts
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


def shape_of(preset: str) -> ModelShape:
    model = load("zero3", [f"model.preset={preset}"]).spec.model
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
