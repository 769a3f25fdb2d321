"""Products with fp8 factors against an arithmetic without torch's casts and products of fp8."""

from __future__ import annotations

import copy
import re
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ptrain.cli.main import main
from ptrain.errors import SpecError
from ptrain.facts.float8 import products_of
from ptrain.interpreter.execute import OF_PIECES
from ptrain.models.initialize import build_model
from ptrain.models.products import Float8Linear, require_fp8_device, use_float8
from ptrain.plan.lower import lower
from ptrain.spec.load import load
from ptrain.spec.model import ModelShape
from ptrain.spec.precision import Matmul
from ptrain.steps.step import Quantize

RECIPES = (Matmul.TENSORWISE, Matmul.ROWWISE)
TOKENS, INPUTS, OUTPUTS = 32, 48, 16


def numbers(mantissa: int, lowest: int, largest: float) -> Tensor:
    """Return all numbers of an fp8 format, by its definition: mantissa bits, the exponent of the
    smallest normal number, the largest number."""
    steps = 2**mantissa
    small = [step / steps * 2.0**lowest for step in range(steps)]
    normal = [
        (1 + step / steps) * 2.0**exponent
        for exponent, step in product(range(lowest, 17), range(steps))
    ]
    positive = [value for value in (*small, *normal) if value <= largest]
    return torch.tensor(sorted({-value for value in positive} | {*positive}), dtype=torch.float64)


E4M3, E5M2 = numbers(3, -6, 448.0), numbers(2, -14, 57344.0)


def round_to_format(x: Tensor, known: Tensor) -> Tensor:
    """Return the nearest numbers of a format; of two equally near ones the one with even bits."""
    above = torch.searchsorted(known, x.contiguous()).clamp(1, len(known) - 1)
    high, low = known[above], known[above - 1]
    is_even = (above - len(known) // 2) % 2 == 0  # zero is in the middle, and even
    to_high = torch.where(high - x == x - low, is_even, high - x < x - low)
    return torch.where(to_high, high, low)


def quantize(x: Tensor, known: Tensor, dim: int | None) -> Tensor:
    """Return the values of a matrix that survive fp8, in fp64. `dim` is the summed dimension, where
    the other one has a scale for each index."""
    x = x.double()
    largest = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = known[-1] / largest
    scale = scale.float().double() if dim is None else 2.0 ** scale.log2().floor()
    return round_to_format((x * scale).float().double(), known) / scale


def expected_product(x: Tensor, weight: Tensor, g: Tensor, recipe: Matmul) -> tuple[Tensor, ...]:
    """Return output, gradient of x and gradient of the weight, summed in fp64."""
    along = recipe is Matmul.ROWWISE
    of_g = E4M3 if along else E5M2

    def times(left: Tensor, right: Tensor, left_known: Tensor = of_g) -> Tensor:
        dims = (1, 0) if along else (None, None)
        return quantize(left, left_known, dims[0]) @ quantize(right, E4M3, dims[1])

    return times(x, weight.t(), E4M3), times(g, weight), times(g.t(), x)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-7), (torch.float32, 1e-6), (torch.bfloat16, 2**-8), (torch.float16, 2**-9)],
)
def test_the_three_products_are_those_of_rounded_factors(recipe, dtype, tolerance):
    torch.manual_seed(0)
    linear = nn.Linear(INPUTS, OUTPUTS, bias=False).to(dtype)
    use_float8(linear := nn.Sequential(linear), ["0"], recipe)
    x = torch.randn(2, TOKENS // 2, INPUTS, dtype=dtype, requires_grad=True)
    g = torch.randn(2, TOKENS // 2, OUTPUTS, dtype=dtype) * 1e-3
    y = linear(x)
    y.backward(g)
    weight = linear[0].weight
    plain = x.detach().flatten(0, 1), weight.detach(), g.flatten(0, 1)
    own = y.detach().flatten(0, 1), x.grad.flatten(0, 1), weight.grad
    for got, wanted in zip(own, expected_product(*plain, recipe), strict=True):
        assert got.dtype is dtype and got.is_contiguous()
        assert (got.double() - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_overflow_stays_visible_and_zeros_stay_zero(recipe):
    linear = nn.Sequential(nn.Linear(16, 16, bias=False))
    use_float8(linear, ["0"], recipe)
    x = torch.ones(16, 16)
    assert not linear(x * 0.0).any()
    x[3, 5] = float("inf")
    assert not linear(x).isfinite().all()


def test_a_bias_is_added_in_the_dtype_of_the_output():
    torch.manual_seed(0)
    linear = nn.Sequential(nn.Linear(16, 16))
    without = copy.deepcopy(linear)
    use_float8(linear, ["0"], Matmul.ROWWISE)
    use_float8(without, ["0"], Matmul.ROWWISE)
    nn.init.zeros_(without[0].bias)
    x = torch.randn(16, 16)
    assert torch.equal(linear(x), without(x) + linear[0].bias)


@pytest.mark.parametrize(
    "name",
    ["zero1", "ep", "gpt2-124m"],
)
def test_all_linear_layers_of_blocks_except_the_listed_ones_use_fp8(name):
    words = ("zero1", ["model.preset=gpt2-124m"]) if name == "gpt2-124m" else (name, [])
    shape = load(*words).spec.model
    assert isinstance(shape, ModelShape)
    products = products_of(shape)
    with torch.device("meta"):
        module = build_model(shape, sequence=16)
    use_float8(module, products.scaled, Matmul.TENSORWISE)
    scaled = {name for name, child in module.named_modules() if isinstance(child, Float8Linear)}
    left = {name for names in products.left_out.values() for name in names}
    matrices = {
        name.rpartition(".")[0] for name, value in module.named_parameters() if value.dim() > 1
    }
    assert scaled == set(products.scaled) and scaled | left == matrices and not scaled & left


def test_a_simulation_counts_the_operations_of_fp8_products(capsys):
    words = ["zero1", "model.layers=2", "precision.matmul=fp8-tensorwise"]
    assert main(["simulate", *words]) == 0
    shown = capsys.readouterr().out
    assert "operations backward" in shown
    (equal,) = re.findall(r"(\d+) of (\d+) figures are equal", shown)
    assert equal[0] == equal[1]


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card")
    monkeypatch.setattr(torch.version, "hip", hip)


GPU, BF16 = torch.device("cuda", 0), torch.bfloat16


@pytest.mark.parametrize(
    ("capability", "hip", "recipe", "dtype", "finding", "remedy"),
    [
        ((8, 0), None, RECIPES[0], BF16, "Card has 8.0", "precision.matmul=none"),
        ((8, 6), None, RECIPES[1], BF16, "Card has 8.6", "precision.matmul=none"),
        ((9, 4), "6.3", RECIPES[0], BF16, "on AMD GPUs", "precision.matmul=none"),
        ((9, 0), None, RECIPES[1], torch.float32, "return bfloat16", "precision.parameters=bf16"),
    ],
)
def test_a_gpu_without_these_products_is_an_error(
    monkeypatch, capability, hip, recipe, dtype, finding, remedy
):
    pretend_gpu(monkeypatch, capability, hip)
    with pytest.raises(SpecError) as caught:
        require_fp8_device(GPU, dtype, recipe)
    (fault,) = caught.value.faults
    assert fault.place == "precision.matmul" and finding in fault.finding
    assert fault.remedy is not None and remedy in fault.remedy


@pytest.mark.parametrize("recipe", RECIPES)
def test_capable_gpus_cpus_and_the_emulation_are_accepted(monkeypatch, recipe):
    pretend_gpu(monkeypatch, (8, 0), None)
    require_fp8_device(GPU, torch.float64, recipe)
    require_fp8_device(torch.device("cpu"), BF16, recipe)
    for capability in ((8, 9), (9, 0), (10, 0)):
        pretend_gpu(monkeypatch, capability, None)
        require_fp8_device(GPU, BF16, recipe)


def test_ranks_check_their_gpu_before_they_change_the_model(monkeypatch):
    pretend_gpu(monkeypatch, (8, 0), None)
    spec = load("zero1", ["precision.layout=zero16", "precision.matmul=fp8-tensorwise"]).spec
    assert isinstance(spec.model, ModelShape)
    module = build_model(spec.model, sequence=16)
    rank: Any = SimpleNamespace(world=SimpleNamespace(device=GPU), spec=spec)
    step = lower(spec).quantize
    assert step is not None
    with pytest.raises(SpecError, match=r"compute capability 8\.9"):
        OF_PIECES[Quantize](step, SimpleNamespace(module=module, wrapped=None), rank)
    assert not any(isinstance(child, Float8Linear) for child in module.modules())
