"""Presets of specs/models have the published parameter counts: exact counts from files, rounded
counts from papers."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from ptrain.errors import SpecError
from ptrain.facts.parameters import facts
from ptrain.spec.block import BlockOptions
from ptrain.spec.load import load
from ptrain.spec.model import Family, ModelShape
from ptrain.spec.names import list_files

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


def published_counts() -> dict[str, int]:
    """Return the documented counts by preset."""
    texts = {name: path.read_text(encoding="utf-8") for name, path in list_files("models").items()}
    said = {name: re.search(r"^# ([\d,]+) parameters: ", texts[name], re.M) for name in texts}
    return {name: int(match[1].replace(",", "")) for name, match in said.items() if match}


@pytest.mark.parametrize(("preset", "count"), published_counts().items())
def test_a_preset_has_its_documented_count(preset, count):
    assert facts(shape_of(preset), 1).numel == count


def test_most_presets_document_a_published_count():
    assert len(published_counts()) >= 33


@pytest.mark.parametrize("preset", OF_PAPERS)
def test_a_preset_rounds_to_the_count_of_its_paper(preset):
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
def test_presets_with_operators_of_a_family_have_tables(preset, family):
    assert shape_of(preset).tabulated is family


# What the configs that authors publish beside weights say, where it is not an option's default.
LLAMA = {"norm": "rms", "activation": "swiglu", "bias": "none", "positions": "rope"}
LLAMA3 = LLAMA | {"rope_base": 500_000.0}
LLAMA31 = LLAMA3 | {"rope_scaling": "llama3", "rope_factor": 8.0}
LLAMA32 = LLAMA31 | {"rope_factor": 32.0, "tied": True}
QWEN2 = LLAMA | {"bias": "qkv", "norm_eps": 1e-6, "rope_base": 1e6}
QWEN3 = LLAMA | {"qk_norm": True, "norm_eps": 1e-6, "rope_base": 1e6}
GEMMA = LLAMA | {
    "norm": "rms-plus-one", "norm_eps": 1e-6, "activation": "geglu", "post_norm": True,
    "tied": True,
}  # fmt: skip
GEMMA2 = GEMMA | {
    "window": 4096, "global_every": 2, "attention_soft_cap": 50.0, "logit_soft_cap": 30.0,
}  # fmt: skip
GEMMA3_1B = GEMMA | {
    "window": 512, "global_every": 6, "rope_base": 1e6, "window_rope_base": 10_000.0,
    "qk_norm": True,
}  # fmt: skip
GEMMA3 = GEMMA3_1B | {"window": 1024, "rope_scaling": "linear", "rope_factor": 8.0}
GPT2 = {"norm": "layer", "activation": "gelu-tanh", "bias": "all", "positions": "learned"}
PHI = GPT2 | {"positions": "rope", "parallel": True, "head_bias": True}
STARCODER2 = GPT2 | {"positions": "rope", "window": 4096}
OF_CONFIGS = {
    "llama2-7b": LLAMA,
    "llama2-70b": LLAMA,
    "llama3-8b": LLAMA3,
    "llama3-70b": LLAMA3,
    "llama3.1-8b": LLAMA31,
    "llama3.1-70b": LLAMA31,
    "llama3.1-405b": LLAMA31,
    "llama3.2-1b": LLAMA32,
    "llama3.2-3b": LLAMA32,
    "mistral-7b": LLAMA | {"window": 4096},
    "qwen2-0.5b": QWEN2 | {"tied": True},
    "qwen2-7b": QWEN2,
    "qwen2.5-0.5b": QWEN2 | {"tied": True},
    "qwen2.5-7b": QWEN2,
    "qwen3-0.6b": QWEN3 | {"tied": True},
    "qwen3-8b": QWEN3,
    "gemma2-2b": GEMMA2,
    "gemma2-9b": GEMMA2,
    "gemma2-27b": GEMMA2,
    "gemma3-1b": GEMMA3_1B,
    "gemma3-4b": GEMMA3,
    "gemma3-12b": GEMMA3,
    "gemma3-27b": GEMMA3,
    "phi-1.5": PHI | {"rotary": 0.5},
    "phi-2": PHI | {"rotary": 0.4},
    "phi-3-mini": LLAMA | {"window": 2047},
    "starcoder2-3b": STARCODER2 | {"rope_base": 999_999.4420358813, "tied": True},
    "starcoder2-7b": STARCODER2 | {"rope_base": 1e6, "tied": True},
    "starcoder2-15b": STARCODER2 | {"rope_base": 100_000.0},
    "gpt2-124m": GPT2 | {"tied": True},
}
OF_SCALES = ("own_head_dim", "attention_scale", "embedding_scale")
# query_pre_attn_scalar: attention's scores are multiplied by its -0.5th power.
SCALARS = {
    "gemma2-2b": 256, "gemma2-9b": 256, "gemma2-27b": 144,
    "gemma3-1b": 256, "gemma3-4b": 256, "gemma3-12b": 256, "gemma3-27b": 168,
}  # fmt: skip


@pytest.mark.parametrize("preset", OF_CONFIGS)
def test_a_preset_has_the_values_that_its_authors_publish(preset):
    shape = shape_of(preset)
    options = {option.name: option.default for option in fields(BlockOptions)}
    said = {
        name: getattr(shape, name)
        for name, default in options.items()
        if name not in OF_SCALES and getattr(shape, name) != default
    }
    assert said == OF_CONFIGS[preset]


def test_the_unwritten_factors_of_llama3_equal_the_published_ones():
    shape = shape_of("llama3.1-8b")
    assert (shape.rope_low_factor, shape.rope_high_factor, shape.rope_original) == (1.0, 4.0, 8192)
    assert {shape_of(name).norm_eps for name in ("llama3.1-8b", "mistral-7b", "phi-2")} == {1e-5}


@pytest.mark.parametrize("preset", SCALARS)
def test_a_gemma_scales_its_embedding_by_the_root_of_its_width_and_its_scores_as_published(preset):
    shape = shape_of(preset)
    assert shape.embedding_scale == shape.hidden**0.5
    assert (shape.attention_scale or shape.head_dim**-0.5) == SCALARS[preset] ** -0.5


@pytest.mark.parametrize("preset", sorted(OF_CONFIGS.keys() - SCALARS.keys()))
def test_no_other_preset_scales(preset):
    assert (shape_of(preset).embedding_scale, shape_of(preset).attention_scale) == (None, None)


def test_every_gemma_llama_3_and_mistral_has_a_published_count():
    compared = ("gemma", "llama3.1", "llama3.2", "mistral")
    assert {name for name in list_files("models") if name.startswith(compared)} <= OF_CONFIGS.keys()


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
def test_an_override_removes_only_the_preset_options_it_makes_void(preset, override, without):
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
        (
            "mistral-7b",
            ["window=null", "global_every=2"],
            "global_every",
            ("Remove `model.global_every`"),
        ),
        ("llama3.2-1b", ["head_bias=true"], "head_bias", "or set `model.tied=false`."),
        (
            "llama3.1-8b",
            ["rope_scaling=none", "rope_factor=4"],
            "rope_factor",
            ("Remove `model.rope_factor`"),
        ),
        ("llama3-8b", ["rope_scaling=linear"], "rope_scaling", "Use a larger `model.rope_factor`"),
        ("mistral-7b", ["norm_eps=null"], "norm_eps", ""),
        ("mistral-7b", ["window=none"], "window", "Use `null`."),
        ("gemma2-2b", ["global_every=1"], "global_every", ""),
    ],
)
def test_a_void_option_written_with_a_preset_is_rejected(preset, beside, place, remedy):
    with pytest.raises(SpecError) as refusal:
        shape_of(preset, *beside)
    (fault,) = refusal.value.faults
    assert fault.place == f"model.{place}" and remedy in fault.remedy


def test_a_void_option_of_a_preset_is_rejected(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("{layers: 1, hidden: 8, heads: 2, ffn: 8, vocab: 259, rope_factor: 2}")
    with pytest.raises(SpecError, match=r"Remove `model\.rope_factor`"):
        shape_of(str(mine), "layers=2")
    assert shape_of(str(mine), "rope_scaling=linear").rope_factor == 2.0
