"""The presets of specs/models count what their authors publish. The counts of the hub are those that
a model's page states of its safetensors; a paper's are rounded as it prints them."""

from __future__ import annotations

import pytest

from ptrain.facts.parameters import facts
from ptrain.spec.load import load
from ptrain.spec.model import Family, ModelShape

# Of huggingface.co's pages, exactly: meta-llama, Qwen, mistralai, google, microsoft, bigcode.
ON_THE_HUB = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "qwen2-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mistral-7b": 7_241_732_096,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,
    "phi-1.5": 1_418_270_720,
    "phi-2": 2_779_683_840,
    "phi-3-mini": 3_821_079_552,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
}
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


@pytest.mark.parametrize("preset", ON_THE_HUB)
def test_a_preset_counts_what_the_page_of_its_weights_states(preset):
    assert facts(shape_of(preset), 1).numel == ON_THE_HUB[preset]


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
