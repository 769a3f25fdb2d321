"""Parameters that a constructor draws are drawn again one by one, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ptrain.errors import SpecError
from ptrain.models import drawn
from ptrain.models.boundary import boundary
from ptrain.models.build import build
from ptrain.models.drawn import LookedWeights, build_drawn
from ptrain.models.external import raised
from ptrain.models.hollow import NeedsValues
from ptrain.models.window import narrowed, whole
from ptrain.spec.function import UserFunction
from ptrain.spec.model import ExternalModel, HuggingFaceModel, ModelSpec

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 261,
}
CLASSES: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "tie_word_embeddings": True},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 261},
    "mixtral": {**SIZES, "num_local_experts": 4},
    "qwen3_moe": SIZES,
    "gpt_oss": {**SIZES, "num_local_experts": 4, "head_dim": 8},
    "mamba": {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 261},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 261},
}
OWN = {
    "tests.models_external:necks": {},
    "tests.models_from_folder:build_in_half": {},
    "tests.models_on_meta:LikeTitan": {},
    **{f"tests.models_on_meta:build {kind}": {"kind": kind} for kind in ("titan", "nanochat")},
    "tests.unit.test_drawn:Odd": {},
}
FUNCTION = UserFunction(section="model", target="tests.unit.test_drawn:Odd")


class Odd(nn.Module):
    """Initializes parameters in ways of its own."""

    def __init__(self, change: Callable[[Odd], None] = lambda odd: None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.embed = nn.Embedding(300, 16, padding_idx=3)
        self.drawn_before = nn.Parameter(torch.randn(16) / 4)
        self.linear = nn.Linear(16, 16)
        nn.init.trunc_normal_(self.linear.weight, std=0.5, a=-0.1, b=0.1, generator=generator)
        self.rows = nn.Parameter(torch.empty(6, 16))
        with torch.no_grad():
            for row in self.rows:
                row.uniform_(-1.0, 1.0)
            self.rows[2:4, ::2].normal_()
            self.rows.mul_(0.5).add_(self.linear.bias)
            self.linear.bias.copy_(torch.arange(16.0))
        self.linear.weight.data = self.linear.weight.data * 2
        self.head = nn.Linear(16, 300)
        nn.init.eye_(self.head.weight)
        self.register_buffer("noise", torch.rand(4))
        change(self)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.linear(self.embed(tokens) + self.rows[0]) * self.drawn_before)


def building(model: ModelSpec) -> Callable[[int], nn.Module]:
    return lambda more: build(model, sequence=8, allow_import=True, seed=5 + more)


def model_of(name: str) -> ModelSpec:
    if name in CLASSES:
        pytest.importorskip("transformers")
        return HuggingFaceModel(hf=name, config=CLASSES[name])
    return ExternalModel(target=name.partition(" ")[0], arguments=OWN[name])


@pytest.mark.parametrize("name", [*CLASSES, *OWN])
def test_each_parameter_is_the_one_of_the_constructor(name: str) -> None:
    build_it = building(model_of(name))
    expected = build_it(0)
    before = torch.get_rng_state()
    module, weights = build_drawn(build_it)
    names = dict(expected.named_parameters(remove_duplicate=False))
    assert names.keys() == dict(module.named_parameters(remove_duplicate=False)).keys()
    for name, parameter in reversed(names.items()):
        assert module.get_parameter(name).is_meta
        part = torch.empty_like(parameter.detach())
        weights.read_window(name, part.shape, whole(part.shape), part, part.dtype)
        assert torch.equal(part, parameter), name
    for name, buffer in expected.named_buffers():
        assert torch.equal(module.get_buffer(name), buffer), name
    assert torch.equal(before, torch.get_rng_state())


def test_a_window_of_a_parameter_is_rounded_to_the_dtype_that_is_stored() -> None:
    _, weights = build_drawn(lambda more: Odd())
    part, window = torch.empty(3, 2, dtype=torch.bfloat16), ((4, 3), (1, 2))
    with torch.no_grad():
        weights.read_window("embed.weight", (300, 16), window, part, torch.bfloat16)
        full = torch.empty(300, 16)
        weights.read_window("embed.weight", full.shape, whole(full.shape), full, full.dtype)
    assert torch.equal(part, narrowed(full, window).bfloat16())


def test_a_look_draws_small_parameters_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawn, "_FEW", 1000)
    _, weights = build_drawn(lambda more: Odd())
    monkeypatch.setattr(weights, "_views", {"linear.bias": weights._views["linear.bias"]})
    looked = LookedWeights(weights)
    for name, shape in (("embed.weight", (300, 16)), ("linear.bias", (16,))):
        part = torch.zeros(shape)
        looked.read_window(name, shape, whole(shape), part, torch.float32)
        assert part.count_nonzero() > 10


def orthogonal(odd: Odd) -> None:
    nn.init.orthogonal_(odd.linear.weight)


def read(odd: Odd) -> None:
    odd.scale = odd.linear.weight.sum().item()


def assigned(odd: Odd) -> None:
    odd.more = [odd.linear.bias]


def large_from_elsewhere(odd: Odd) -> None:
    odd.table = nn.Parameter(torch.ones(2**20, 17))


@pytest.mark.parametrize("draws", [True, False])
@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (orthogonal, "without values its constructor ends|runs"),
        (read, "without values its constructor ends"),
        (assigned, "makes more of a parameter"),
        (large_from_elsewhere, "has values of parameters before they are parameters"),
    ],
)
def test_what_cannot_be_drawn_one_by_one_is_built_whole(
    change: Callable[[Odd], None], finding: str, draws: bool
) -> None:
    """A constructor that is not run with draws is found out too: a prediction does not draw."""

    def build_it(more: int) -> nn.Module:
        with boundary(partial(raised, FUNCTION)):
            return Odd(change)

    with torch.random.fork_rng(devices=[]), pytest.raises(NeedsValues, match=finding):
        build_drawn(build_it, draws=draws)


def test_a_mistake_of_the_constructor_is_the_users_to_read() -> None:
    with pytest.raises(NeedsValues, match="no such init"):
        build_drawn(building(ExternalModel(target=TARGET, arguments={"kind": "raising"})))
    with pytest.raises(SpecError, match="no such init"):
        building(ExternalModel(target=TARGET, arguments={"kind": "raising"}))(0)


TARGET = "tests.models_on_meta:build"
