"""Parameters that a constructor draws are drawn again one by one, to the bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from ptrain.errors import SpecError
from ptrain.interpreter.look import build_and_inspect
from ptrain.models import drawn
from ptrain.models.boundary import convert_exceptions
from ptrain.models.drawn import InspectionWeights, build_drawn
from ptrain.models.external import target_fault
from ptrain.models.initialize import build_model
from ptrain.models.meta import NeedsValuesError
from ptrain.models.window import full_window, narrow_to_window
from ptrain.spec.load import load
from ptrain.spec.model import ExternalModel, HuggingFaceModel, ModelSpec, UserFunction
from ptrain.traces.facts import read_facts

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
    return lambda more: build_model(model, sequence=8, allow_import=True, seed=5 + more)


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
        weights.read_window(name, part.shape, full_window(part.shape), part, part.dtype)
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
        weights.read_window("embed.weight", full.shape, full_window(full.shape), full, full.dtype)
    assert torch.equal(part, narrow_to_window(full, window).bfloat16())


def test_a_look_draws_small_parameters_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawn, "_FEW", 1000)
    _, weights = build_drawn(lambda more: Odd())
    monkeypatch.setattr(weights, "_views", {"linear.bias": weights._views["linear.bias"]})
    looked = InspectionWeights(weights)
    for name, shape in (("embed.weight", (300, 16)), ("linear.bias", (16,))):
        part = torch.zeros(shape)
        looked.read_window(name, shape, full_window(shape), part, torch.float32)
        assert part.count_nonzero() > 10


def orthogonal(odd: Odd) -> None:
    nn.init.orthogonal_(odd.linear.weight)


def read(odd: Odd) -> None:
    odd.scale = odd.linear.weight.sum().item()


def assign_parameter(odd: Odd) -> None:
    odd.more = [odd.linear.bias]


def large_from_elsewhere(odd: Odd) -> None:
    odd.table = nn.Parameter(torch.ones(2**20, 17))


@pytest.mark.parametrize("draws", [True, False])
@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (orthogonal, "its constructor fails on the meta device|runs"),
        (read, "its constructor fails on the meta device"),
        (assign_parameter, "computes more from a parameter"),
        (large_from_elsewhere, "computes values before it makes them parameters"),
    ],
)
def test_models_that_cannot_be_drawn_one_by_one_are_built_in_full(
    change: Callable[[Odd], None], finding: str, draws: bool
) -> None:
    """This includes a constructor that was not run with draws: a prediction does not draw."""

    def build_it(more: int) -> nn.Module:
        with convert_exceptions(partial(target_fault, FUNCTION)):
            return Odd(change)

    with torch.random.fork_rng(devices=[]), pytest.raises(NeedsValuesError, match=finding):
        build_drawn(build_it, draws=draws)


def assign_at_indices(odd: Odd) -> None:
    odd.embed.weight.data[torch.arange(0, 250)] = 0


def assign_at_mask(odd: Odd) -> None:
    odd.linear.weight.data[torch.ones(16, 16).triu().bool()] = 0


def multiply_by_mask(odd: Odd) -> None:
    mask = torch.zeros_like(odd.linear.weight)
    mask[[1, 2]] = 1
    odd.linear.weight.data *= mask


def assign_columns(odd: Odd) -> None:
    odd.linear.weight.data[:, 2:5] = 1.5


def assign_tensor(odd: Odd) -> None:
    odd.linear.weight.data[[1, 2]] = torch.arange(16.0)


def assign_row_of_large(odd: Odd) -> None:
    odd.large = nn.Embedding(40000, 32)
    odd.large.weight.data[0] = 0


def assign_rows_of_large(odd: Odd) -> None:
    odd.large = nn.Embedding(40000, 32)
    odd.large.weight.data[[0, 5]] = 0


def init_sparse(odd: Odd) -> None:
    nn.init.sparse_(odd.linear.weight, sparsity=0.5)


def init_dirac(odd: Odd) -> None:
    odd.convolution = nn.Conv1d(4, 4, 3)
    nn.init.dirac_(odd.convolution.weight)


def init_eye(odd: Odd) -> None:
    nn.init.eye_(odd.linear.weight)


def fill_by_numpy(odd: Odd) -> None:
    values = torch.empty(16, 16)
    values.numpy()[:] = 3.0
    odd.filled = nn.Parameter(values)
    odd.filled.data.mul_(2.0)


def fill_by_numpy_and_torch(odd: Odd) -> None:
    values = torch.empty(16, 16)
    numpy.asarray(values)[:] = 3.0
    odd.filled = nn.Parameter(values)
    odd.filled.data[0].zero_()


def fill_by_numpy_afterwards(odd: Odd) -> None:
    values = torch.zeros(16, 16)
    memory = values.numpy()
    odd.filled = nn.Parameter(values)
    memory[:] = 3.0


def fill_new_tensor(odd: Odd) -> None:
    odd.linear.weight.data = odd.linear.weight.new_full((16, 16), 0.25)


@pytest.mark.parametrize(
    "change",
    [
        assign_at_indices,
        assign_at_mask,
        multiply_by_mask,
        assign_columns,
        assign_tensor,
        assign_row_of_large,
        assign_rows_of_large,
        init_sparse,
        init_dirac,
        init_eye,
        fill_by_numpy,
        fill_by_numpy_and_torch,
        fill_by_numpy_afterwards,
        fill_new_tensor,
    ],
)
def test_assigned_values_are_the_constructors_or_are_rejected(
    change: Callable[[Odd], None],
) -> None:
    """A prediction, which does not draw, refuses the same constructors."""

    def build_it(more: int) -> nn.Module:
        torch.manual_seed(5 + more)
        with convert_exceptions(partial(target_fault, FUNCTION)):
            return Odd(change)

    with torch.random.fork_rng(devices=[]):
        expected = build_it(0)
        try:
            _, weights = build_drawn(build_it)
        except NeedsValuesError as error:
            with pytest.raises(NeedsValuesError, match=re.escape(str(error))):
                build_drawn(build_it, draws=False)
            return
        build_drawn(build_it, draws=False)
    for name, parameter in expected.named_parameters():
        part = torch.full_like(parameter.detach(), torch.nan)
        weights.read_window(name, part.shape, full_window(part.shape), part, part.dtype)
        assert torch.equal(part, parameter), name


class Block(nn.Sequential):
    """A block that needs a contiguous weight in its forward pass, if it `clamps`."""

    def __init__(self, clamps: bool) -> None:
        super().__init__(nn.Linear(16, 16), nn.GELU())
        self.clamps = clamps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.clamps:
            self[0].weight.data.view(-1).clamp_(-3.0, 3.0)
        return super().forward(hidden)


class Chain(nn.Module):
    """A model that a look without its weights refuses, if its blocks clamp their weights."""

    def __init__(self, clamps: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 16)
        self.blocks = nn.ModuleList(Block(clamps) for _ in range(2))
        self.head = nn.Linear(16, 300)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


@pytest.mark.parametrize("clamps", [True, False])
def test_a_prediction_and_a_run_build_the_same_models_whole(clamps: bool) -> None:
    model = (
        f"{{target: 'tests.unit.test_drawn:Chain', arguments: {{clamps: {str(clamps).lower()}}}}}"
    )
    overrides = [f"model={model}", "mesh={pp: 2}", "placement=pp-1f1b"]
    spec = load(None, [*overrides, "batch={global: 8, micro: 1, sequence: 16}"]).spec
    looked = build_and_inspect(spec, torch.device("cpu"), allow_import=True)
    assert bool(looked.whole_because) is clamps
    assert "remedy" not in looked.whole_because and "error:" not in looked.whole_because
    assert read_facts(spec, allow_import=True).built_whole == looked.whole_because


def test_a_mistake_of_the_constructor_is_the_users_to_read() -> None:
    with pytest.raises(NeedsValuesError, match="no such init"):
        build_drawn(building(ExternalModel(target=TARGET, arguments={"kind": "raising"})))
    with pytest.raises(SpecError, match="no such init"):
        building(ExternalModel(target=TARGET, arguments={"kind": "raising"}))(0)


TARGET = "tests.models_on_meta:build"
